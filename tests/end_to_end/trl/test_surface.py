"""What scripts for TRL ask of a trainer besides training, and what SFTTrainer learns of a row."""

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

from posttrain.trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from posttrain.trl.configs.recipe import run_length
from tests.support.refusals import mentions, refused
from tests.support.trl_trainers import ANSWERS, PROMPTS, length

SHORT: dict[str, Any] = {"max_completion_length": 4, "num_generations": 2, "per_device_train_batch_size": 4}


def grpo(model: Any, folder: Path, *, given: Any = None, **args: Any) -> GRPOTrainer:
    return GRPOTrainer(model, length, GRPOConfig(str(folder), **{**SHORT, **args}), PROMPTS, **(given or {}))


class Hub:
    """Stands in for the hub: keeps what it is given."""

    calls: ClassVar[list[tuple[str, tuple[Any, ...], dict[str, Any]]]] = []

    def __init__(self, **given: Any) -> None:
        self.calls.append(("HfApi", (), given))

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.calls.append((name, given, named))
            return type("Made", (), {"repo_id": "me/mine", "__str__": lambda self: "https://hub/me/mine"})()

        return call


def test_a_push_writes_what_scripts_give_into_the_card(model: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    made = grpo(model, tmp_path / "run", hub_model_id="me/mine")
    assert made.hub_model_id == "me/mine"
    where = made.push_to_hub(
        "Done", token="secret", revision="v1", private=True, dataset_name="me/rows", tags=["grpo", "sums"],
        finetuned_from="me/base", license="apache-2.0",
    )  # fmt: skip
    assert where == "https://hub/me/mine"
    by_name = {name: (given, named) for name, given, named in Hub.calls}
    assert by_name["HfApi"][1] == {"token": "secret"}
    assert by_name["create_repo"] == (("me/mine",), {"private": True, "exist_ok": True})
    assert by_name["create_branch"] == (("me/mine",), {"branch": "v1", "exist_ok": True})
    uploaded = by_name["upload_folder"][1]
    assert (uploaded["commit_message"], uploaded["revision"]) == ("Done", "v1")
    card = (Path(uploaded["folder_path"]) / "README.md").read_text(encoding="utf-8")
    mentions(card, "datasets: me/rows", "- sums", "base_model: me/base", "license: apache-2.0", "GRPOTrainer")
    made.create_model_card(model_name="Mine", tags="sums")
    assert "# Mine" in (tmp_path / "run" / "README.md").read_text(encoding="utf-8")


def test_training_arguments_of_transformers_become_a_config(model: str, tmp_path: Path) -> None:
    given = TrainingArguments(
        output_dir=str(tmp_path / "run"), use_cpu=True, max_steps=1, per_device_train_batch_size=4
    )
    made = SFTTrainer(model, given, train_dataset=ANSWERS)  # type: ignore[arg-type]
    assert type(made.args) is SFTConfig
    assert made.args.learning_rate == TrainingArguments.learning_rate, "transformers' default, as in TRL"
    assert (made.args.max_length, made.args.use_cpu, made.args.logging_steps) == (1024, True, 500)
    assert made.notes == ["args: TrainingArguments is read as SFTConfig."]
    assert made.train().global_step == 1
    assert GRPOTrainer(model, length, given, PROMPTS).args.max_steps == 1  # type: ignore[arg-type]


def test_arguments_answer_for_one_process(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = GRPOConfig(str(tmp_path / "run"), log_level="error", use_cpu=True, **SHORT)
    assert (args.get_process_log_level(), args.device, args.n_gpu) == (logging.ERROR, torch.device("cpu"), 0)
    assert (args.world_size, args.process_index, args.local_process_index, args.should_save) == (1, 0, 0, True)
    assert (args.train_batch_size, args.parallel_mode.value, args.get_warmup_steps(100)) == (4, "not_parallel", 0)  # type: ignore[attr-defined]
    with args.main_process_first(desc="rows"), args.distributed_state.main_process_first():
        args.distributed_state.wait_for_everyone()
    assert '"use_cpu": true' in args.to_json_string()
    secret = GRPOConfig(str(tmp_path / "run"), hub_token="hf_s3cret", **SHORT)
    assert secret.to_sanitized_dict()["hub_token"] == secret.to_dict()["hub_token"] == "<HUB_TOKEN>"  # as transformers
    assert "s3cret" not in secret.to_json_string() + repr(secret)
    made = GRPOTrainer(model, length, args, PROMPTS)
    made.accelerator.print("from the main process")
    assert "from the main process" in capsys.readouterr().out
    assert made.accelerator.unwrap_model(made.model) is made.model
    assert made.accelerator.on_main_process(function=len) is len
    assert (made.accelerator.is_main_process, made.accelerator.num_processes) == (True, 1)
    assert made.is_world_process_zero()
    assert made.is_local_process_zero()
    with refused("accelerator.backward is not here", error=AttributeError):
        print(made.accelerator.backward)  # type: ignore[attr-defined]
    assert len(made.get_train_dataloader()) == 2
    assert next(iter(made.get_train_dataloader())) == PROMPTS[:4]


def test_rows_show_their_labels(model: str, tmp_path: Path) -> None:
    made = SFTTrainer(model, SFTConfig(str(tmp_path)), train_dataset=ANSWERS)
    rows: Any = made.train_dataset
    row, tokenizer = rows[0], made.processing_class
    asked, stop = tokenizer.encode("1 + 1 =", add_special_tokens=False), tokenizer.eos_token_id
    answer = [label for label in row["labels"] if label != -100]
    assert row["input_ids"] == asked + answer
    assert row["labels"] == [-100] * len(asked) + answer
    assert (answer[-1], len(rows), rows["labels"][0], rows[-1:]) == (stop, 8, row["labels"], [rows[7]])
    text = SFTTrainer(model, SFTConfig(str(tmp_path)), train_dataset=[{"text": "one"}])
    whole: Any = text.train_dataset
    assert whole[0]["labels"] == whole[0]["input_ids"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"importance_sampling_level": "sequence"}, "loss_type = 'dapo' adds up tokens"),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, ""),
        ({"loss_type": "luspo"}, "is published with importance_sampling_level = 'sequence'"),
    ],
)
def test_a_ratio_of_sequences_with_a_sum_over_tokens_is_told(model: str, tmp_path: Path, args: Any, told: str) -> None:
    notes = grpo(model, tmp_path, **args).notes
    assert [told in note for note in notes] == [True] * bool(told)


def test_a_short_run_draws_no_picture(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.training.fit.draw_curves", lambda *given, **named: pytest.fail("drawn"))
    grpo(model, tmp_path / "run", max_steps=1).train()
    assert (tmp_path / "run" / "summary.json").is_file()


@pytest.mark.parametrize(("coefficient", "told"), [(None, ["router_aux_loss_coef = 0.001 of the model"]), (0.0, [])])
def test_a_mixture_says_that_its_router_has_no_loss(model: str, tmp_path: Path, coefficient: Any, told: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, num_local_experts=2, max_position_embeddings=64,
    )  # fmt: skip
    given = {"processing_class": tokenizer}
    made = grpo(MixtralForCausalLM(config), tmp_path, router_aux_loss_coef=coefficient, given=given)
    assert [note.split(":")[0] for note in made.notes] == told


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
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "other")
    made = trainer(model, tmp_path, CHATS, chat_template_path=str(tmp_path / "other"))
    assert made.processing_class.chat_template == tokenizer.chat_template
