"""Scripts for TRL over our loop: what they are told back, what their callbacks see, and what they leave behind."""

import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from posttrain.models.adapters.lora import lora_layers
from posttrain.models.model_outputs import is_recomputing
from posttrain.options.model import is_adapter_folder
from posttrain.trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config, get_quantization_config
from tests.support.reward_models import reward_folder
from tests.support.runs import rollout_rows
from tests.support.trl_trainers import length

ROWS = [{"prompt": f"{number} + {number} =", "answer": str(2 * number)} for number in range(1, 9)]
CHAT = [{"prompt": [{"role": "user", "content": "Say something."}]}] * 4
SMALL: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 3,
    "logging_steps": 1,
    "learning_rate": 1e-3,
}


def of_even_rows(answer: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [None if int(each) % 4 else float("a" in text) for each, text in zip(answer, completions, strict=True)]


def trainer(model: Any, folder: Path, rewards: Any = length, *, given: Any = None, **args: Any) -> GRPOTrainer:
    config = GRPOConfig(str(folder), **{**SMALL, **args})
    return GRPOTrainer(model, rewards, config, **{"train_dataset": ROWS, **(given or {})})


class Seen(TrainerCallback):
    """Keeps the events, and asks for things after some steps."""

    def __init__(self, *, stop_after: int = 99, save_after: int = 99) -> None:
        self.events: list[tuple[str, int]] = []
        self.stop_after, self.save_after = stop_after, save_after
        self.given: dict[str, Any] = {}

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **given: Any) -> None:
            self.events.append((name, state.global_step))
            self.given |= given
            if name == "on_step_end":
                control.should_training_stop |= state.global_step >= self.stop_after
                control.should_save |= state.global_step == self.save_after

        return note


def test_log_history_has_trls_names_and_what_its_source_computes(model: str, tmp_path: Path) -> None:
    made = trainer(model, tmp_path / "run", [length, of_even_rows], beta=0.04)
    output = made.train()
    first, second, _, last = made.state.log_history
    rows, more = rollout_rows(tmp_path / "run", 1), rollout_rows(tmp_path / "run", 2)
    lengths, rewards = [len(row["tokens"]) for row in rows], [row["reward"] for row in rows]
    scored = [row["score/of_even_rows"] for row in rows if row["score/of_even_rows"] is not None]
    assert first["reward"] == pytest.approx(fmean(rewards))
    assert first["reward_std"] == pytest.approx(stdev(rewards)), "over the batch, not within groups"
    assert first["rewards/length/mean"] == pytest.approx(fmean(row["score/length"] for row in rows))
    assert first["rewards/of_even_rows/mean"] == (pytest.approx(fmean(scored)) if scored else None)
    assert first["completions/mean_length"] == fmean(lengths)
    assert first["completions/clipped_ratio"] == fmean(row["finish"] == "length" for row in rows)
    assert second["num_tokens"] == sum(len(row["tokens"]) + len(row["prompt_tokens"]) for row in rows + more)
    assert [first["learning_rate"], second["learning_rate"]] == pytest.approx([1e-3, 1e-3 * 2 / 3])
    assert (first["epoch"], first["step"], second["step"]) == (1 / 4, 1, 2)
    assert first["kl"] == pytest.approx(0.0, abs=1e-12)
    assert second["kl"] > 0
    assert 0 < first["entropy"] <= math.log(made.model.config.vocab_size)
    assert {"loss", "grad_norm", "frac_reward_zero_std", "step_time", "clip_ratio/region_mean"} <= first.keys()
    assert (last["train_loss"], output.global_step) == (output.training_loss, 3)


def test_callbacks_see_a_run_in_transformers_order_and_can_stop_and_save_it(model: str, tmp_path: Path) -> None:
    seen = Seen(stop_after=2, save_after=1)
    made = trainer(
        model, tmp_path / "run", max_steps=9, eval_strategy="steps", eval_steps=2,
        given={"callbacks": [seen], "eval_dataset": ROWS[:2]},
    )  # fmt: skip
    assert made.train().global_step == 2
    assert seen.events == [
        ("on_init_end", 0),
        ("on_train_begin", 0),
        ("on_epoch_begin", 0),
        ("on_step_begin", 0),
        ("on_step_end", 1),
        ("on_log", 1),
        ("on_save", 1),
        ("on_step_begin", 1),
        ("on_step_end", 2),
        ("on_log", 2),
        ("on_log", 2),  # of the evaluation
        ("on_evaluate", 2),
        ("on_save", 2),  # a run that ends is saved
        ("on_log", 2),
        ("on_train_end", 2),
    ]
    assert seen.given["model"] is made.model
    assert isinstance(seen.given["optimizer"], torch.optim.AdamW)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file(), "a run that was told to stop is a whole one"


def test_an_evaluation_samples_its_rows_and_logs_by_its_prefix(model: str, tmp_path: Path) -> None:
    calls: list[int] = []

    def half(completions: list[str], **columns: Any) -> list[float]:
        calls.append(len(completions))
        return [0.5] * len(completions)

    given = {"eval_dataset": {"one": ROWS[:3]}}
    made = trainer(model, tmp_path / "run", half, num_generations_eval=2, given=given, beta=0.1)
    made.train_dataset = None  # an evaluation needs none
    numbers = made.evaluate()
    assert calls == [6]
    assert numbers["eval_one_reward"] == numbers["eval_one_rewards/half/mean"] == 0.5
    assert numbers["eval_one_loss"] == pytest.approx(0, abs=1e-12), "nobody has an advantage, nor is there a divergence"
    assert numbers["eval_one_kl"] == pytest.approx(0, abs=1e-12)
    assert 0 < numbers["eval_one_entropy"] <= math.log(made.model.config.vocab_size)
    assert numbers["eval_one_clip_ratio/region_mean"] == 0, "the sampler has the same weights"
    assert made.state.log_history[-1]["eval_one_completions/mean_length"] > 0


def test_rewards_get_text_as_trl_decodes_it_and_the_state_of_the_trainer(model: str, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def reward(prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, **columns: Any) -> list[float]:
        seen.append({**locals(), "step": trainer_state.global_step})
        columns["log_metric"]("shortest", min(map(len, completion_ids)))
        return [0.0] * len(prompts)

    made = trainer(model, tmp_path / "run", reward, steps_per_generation=2, max_steps=4, max_completion_length=40)
    made.train()
    assert [each["step"] for each in seen] == [0, 2], "updates, not steps"
    assert seen[0]["trainer_state"] is made.state
    assert seen[0]["columns"].keys() >= {"answer", "log_extra"}
    assert "prompt" not in seen[0]["columns"]
    ids = [each for call in seen for each in call["completion_ids"]]
    texts = [each for call in seen for each in call["completions"]]
    assert texts == made.processing_class.batch_decode(ids, skip_special_tokens=True)
    assert texts != made.processing_class.batch_decode(ids), "else nothing special was sampled, which proves nothing"
    assert made.state.log_history[0]["shortest"] == min(map(len, seen[0]["completion_ids"]))


def test_conversations_reach_rewards_as_messages_without_what_was_prefilled(model: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(completions: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    begun = [{"prompt": [*row["prompt"], {"role": "assistant", "content": "Well, "}]} for row in CHAT]
    trainer(model, tmp_path / "run", reward, max_steps=1, given={"train_dataset": begun}).train()
    assert all([*message[0]] == ["role", "content"] and message[0]["role"] == "assistant" for message in seen)
    assert not any(message[0]["content"].startswith("Well") for message in seen)


def test_a_function_beside_a_reward_model_and_one_of_its_name(model: str, tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "judge", chat=False)
    given = {"train_dataset": Dataset.from_list(ROWS)}
    made = trainer(model, tmp_path / "run", [length, str(folder), length], max_steps=1, given=given, num_generations=3,
                   per_device_train_batch_size=3, reward_weights=[1.0, 0.5, 0.0])  # fmt: skip
    made.train()
    (row, *_), entry = rollout_rows(tmp_path / "run", 1), made.state.log_history[0]
    assert row["reward"] == pytest.approx(row["score/length"] + 0.5 * row["score/judge"])
    assert {"rewards/length/mean", "rewards/judge/mean", "rewards/length_2/mean"} <= entry.keys()


@pytest.mark.parametrize(
    "config",
    [
        get_peft_config(ModelConfig(use_peft=True, lora_dropout=0.0)),
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True),
    ],
    ids=["an adapter of ours", "what only peft has"],
)
def test_an_adapter_is_trained_alone_at_the_rate_that_was_given(model: str, tmp_path: Path, config: Any) -> None:
    made = trainer(model, tmp_path / "run", given={"peft_config": config}, beta=0.1, max_steps=2)
    before = {name: each.clone() for name, each in made.model.named_parameters()}
    made.train()
    moved = [name for name, each in made.model.named_parameters() if not torch.equal(each, before[name])]
    assert moved
    assert all("lora" in name for name in moved)
    assert all("q_proj" in name or "v_proj" in name for name in moved), "peft's choice for the family"
    assert made.state.log_history[0]["learning_rate"] == 1e-3, "not ten times that"
    made.save_model(str(tmp_path / "saved"))
    assert peft.PeftConfig.from_pretrained(str(tmp_path / "saved")).peft_type == "LORA"


def test_a_model_in_4_bits_has_an_adapter_over_it(model: str, tmp_path: Path) -> None:
    config = ModelConfig(use_peft=True, load_in_4bit=True, lora_target_modules=["all-linear"])
    given = {"peft_config": get_peft_config(config), "quantization_config": get_quantization_config(config)}
    made = trainer(model, tmp_path / "run", given=given, max_steps=1, gradient_checkpointing=True)
    assert len(lora_layers(made.policy.model)) == 7
    assert is_recomputing(made.policy.model)
    made.train()
    ids = torch.tensor([[1, 2, 3]])
    expected = made.model(ids).logits
    torch.testing.assert_close(made.policy.model(ids).logits, expected)
    made.model.save_pretrained(str(tmp_path / "adapter"))
    assert is_adapter_folder(tmp_path / "adapter")
    made.model.merge_and_unload()
    torch.testing.assert_close(made.policy.model(ids).logits, expected)


def test_an_evaluation_of_fewer_groups_than_a_step_has_updates(model: str, tmp_path: Path) -> None:
    given = {"eval_dataset": ROWS[:1]}
    made = trainer(model, tmp_path / "run", steps_per_generation=4, num_iterations=2, max_steps=8, given=given)
    assert math.isfinite(made.evaluate()["eval_loss"])


def test_rows_come_in_order_where_they_are_not_shuffled_from_a_stream_too(model: str, tmp_path: Path) -> None:
    def endless() -> Any:
        number = 0
        while True:
            number += 1
            yield {"prompt": f"{number} =", "answer": "2"}

    trainer(model, tmp_path / "run", max_steps=2, shuffle_dataset=False, given={"train_dataset": endless()}).train()
    asked = [row["prompt"] for step in (1, 2) for row in rollout_rows(tmp_path / "run", step)[::4]]
    assert asked == ["1 =", "2 =", "3 =", "4 ="]


def test_old_names_are_read_with_a_line_each(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = trainer(
        model, tmp_path / "run", per_device_train_batch_size=1, num_generations=2, max_prompt_length=4, use_vllm=False,
        log_completions=True, bf16=True, given={"eval_dataset": ROWS[:1]}, max_steps=1,
    )  # fmt: skip
    said = capsys.readouterr().out
    assert [note for note in made.notes if f"posttrain.trl: {note}" not in said] == []
    about = (
        "max_prompt_length = 4 cuts",
        "log_completions = True sets nothing",
        "bf16 = True: there is no GPU",
        "1 comp",
    )
    assert [any(note.startswith(each) for note in made.notes) for each in about] == [True] * 4
    assert len(made.notes) == 4
    made.train()
    assert {len(row["prompt_tokens"]) for row in rollout_rows(tmp_path / "run", 1)} <= {1, 2, 3, 4}
    assert ModelConfig(torch_dtype="bfloat16").dtype == "bfloat16"
