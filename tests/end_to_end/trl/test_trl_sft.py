"""SFTTrainer over our supervised loop: what is learned of a row, how long a run is, and what comes back."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from posttrain.trl import SFTConfig, SFTTrainer
from posttrain.trl.configs.batch_arithmetic import run_length

PAIRS = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(1, 11)]
CHATS = [{"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1."}]}] * 4


def trainer(model: str, folder: Path, rows: Any = PAIRS, *, given: Any = None, **args: Any) -> SFTTrainer:
    config = SFTConfig(str(folder), **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **args})
    return SFTTrainer(model, config, train_dataset=rows, **(given or {}))


def test_a_run_learns_logs_evaluates_and_can_be_stopped(model: str, tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_training_stop = state.global_step == 4

    given = {"eval_dataset": PAIRS[:3], "callbacks": [Stops]}
    made = trainer(
        model,
        tmp_path / "run",
        learning_rate=1e-2,
        logging_steps=2,
        eval_strategy="epoch",
        num_train_epochs=9,
        given=given,
    )
    output = made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert output.global_step == 4
    assert losses[1] < losses[0]
    assert [entry["step"] for entry in made.state.log_history if "eval_loss" in entry] == [3]  # 10 rows, 4 an update
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("rows", "given", "part"),
    [
        (PAIRS, {}, "assistant"),
        (PAIRS, {"completion_only_loss": False}, "all"),
        (CHATS, {}, "all"),
        (CHATS, {"assistant_only_loss": True}, "assistant"),
        ([{"text": "a text"}], {}, "all"),
    ],
)
def test_what_is_learned_is_what_trl_learns(model: str, tmp_path: Path, rows: Any, given: Any, part: str) -> None:
    made = trainer(model, tmp_path / "run", rows, **given)
    config, _, _ = made.described()
    assert (config.sft.loss_on, config.sft.rows_per_batch, config.sft.learning_rate) == (part, 4, 2e-5)
    assert (config.sft.max_length, config.sft.long_rows) == (made.policy.max_positions, "cut")
    assert (config.sft.schedule, config.run.seed) == ("linear", 42)


def test_epochs_count_updates_as_trl_counts_them() -> None:
    args = SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=1.5)
    assert run_length(args, 10).updates == 5  # 5 batches, 3 updates an epoch
    assert run_length(SFTConfig(max_steps=7), 10).updates == 7


def test_text_may_have_a_column_or_a_function_of_its_own(model: str, tmp_path: Path) -> None:
    rows = [{"body": "one"}]
    assert trainer(model, tmp_path, rows, dataset_text_field="body").rows(rows, "rows") == [{"text": "one"}]
    alpaca = [{"instruction": "a", "output": "b", "text": "c"}]  # of which TRL learns the text
    assert trainer(model, tmp_path, alpaca).rows(alpaca, "rows") == [{"text": "c"}]
    made = trainer(model, tmp_path, rows, given={"formatting_func": lambda row: row["body"] + "!"})
    assert made.rows(rows, "rows") == [{"text": "one!"}]


def test_rows_of_tokens_are_learned_as_they_are(model: str, tmp_path: Path) -> None:
    ids = [5, 6, 7, 8]
    rows = [{"input_ids": ids, "completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 0, 0, 1], "text": "other"}]
    learned = {
        "by default": ({}, [-100, -100, 7, 8]),
        "assistant": ({"assistant_only_loss": True}, [-100, -100, -100, 8]),
        "whole": ({"completion_only_loss": False}, [-100, 6, 7, 8]),
    }
    for name, (args, labels) in learned.items():
        made = trainer(model, tmp_path / name, rows, dataset_kwargs={"skip_prepare_dataset": True}, **args)
        assert made.train_dataset[0] == {"input_ids": ids, "labels": labels}, name
    made.train()
    assert made.state.log_history[0]["num_tokens"] == 12, "3 epochs of one row"


def test_the_stop_token_and_the_template_are_those_of_the_arguments(model: str, tmp_path: Path) -> None:
    """As in TRL they are the tokenizer's from then on, and those of the saved model."""
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    other = next(token for token in tokenizer.get_vocab() if token != tokenizer.eos_token)
    made = trainer(model, tmp_path / "run", CHATS, chat_template_path=str(template), eos_token=other, max_steps=1)
    shown = made.train_dataset[0]["input_ids"]
    assert made.processing_class.decode(shown).startswith("user: 1?\nassistant: 1.")
    made.train()
    made.save_model(str(tmp_path / "saved"))
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (saved.eos_token, saved.chat_template) == (other, template.read_text())
    end = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").generation_config.eos_token_id
    assert end == tokenizer.convert_tokens_to_ids(other)
    folder = tmp_path / "other"
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    assert trainer(model, tmp_path, CHATS, chat_template_path=str(folder)).processing_class.chat_template == (
        "{{ messages[0].content }}"
    )
