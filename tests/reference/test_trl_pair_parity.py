"""DPOTrainer and RewardTrainer: loss, gradients, weights after two updates, log and evaluation are those of TRL 1.16.

TRL wrote its numbers to tests/data/trl_pair_parity.json; `make trl-parity` writes them anew.  All six pairs are in each
update: in the first policy and reference agree, in the second they do not.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from posttrain.runs.reports import StepReport
from posttrain.tasks.preference_set import PreferenceSet
from posttrain.trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from posttrain.trl.configs.recipe import run_length
from tests.support.pairs import dpo_session, reward_session
from tests.support.tiny import relative_distance
from tests.support.trl_numbers import Recorded, RecordingSgd, decoded

TRL = json.loads((Path(__file__).parents[1] / "data" / "trl_pair_parity.json").read_text(encoding="utf-8"))
CASES: dict[str, dict[str, Any]] = TRL["cases"]
GIVEN = TRL["given"]
WORST = 1e-5
"""Relative distance of a number, or of a parameter's gradient or weights, from TRL's."""
NOT_LOGGED = {"entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected"}
"""What TRL measures of next-token distributions, and we do not."""
OVER_BATCHES = {"min_reward", "max_reward"}
"""With several micro-batches TRL's are means of theirs."""


def fill(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)


def model_of(case: Mapping[str, Any], began: str) -> PreTrainedModel:
    """A model with the weights that the case without an adapter began with, or with others of the same shapes."""
    kind = Qwen3ForCausalLM if case["trainer"] == "dpo" else Qwen3ForSequenceClassification
    made = kind(Qwen3Config(**GIVEN["shape"]))
    fill(dict(made.named_parameters()), decoded(began, CASES[case["trainer"]]["shapes"]))
    return made.double()


def tokenizer() -> PreTrainedTokenizerFast:
    words = models.WordLevel({word: number for number, word in enumerate(GIVEN["words"])}, unk_token="<pad>")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    options = {"chat_template": GIVEN["template"], "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>", **options)


Trainer = DPOTrainer | RewardTrainer


def trainer_of(name: str, folder: str = "unused", **fields: Any) -> tuple[Trainer, RecordingSgd]:
    """posttrain.trl with what TRL was given: fields, model, rows, and gradient descent at the same rate."""
    case = CASES[name]
    fields = TRL["fields"] | case["fields"] | fields
    of_dpo = case["trainer"] == "dpo"
    more: dict[str, Any] = {}
    if case["lora"]:
        more["peft_config"] = LoraConfig(**GIVEN["lora"], task_type="CAUSAL_LM" if of_dpo else "SEQ_CLS")
    if case["reference"]:
        more["ref_model"] = model_of(case, case["reference"])
    rows = GIVEN["rows"][case["rows"]]
    trainer: Trainer = (DPOTrainer if of_dpo else RewardTrainer)(
        model=model_of(case, CASES[case["trainer"]]["began"]),
        args=(DPOConfig if of_dpo else RewardConfig)(output_dir=folder, **fields),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer(),
        **more,
    )
    trained = {
        re.sub(r"^base_model\.model\.|\.default|\.modules_to_save", "", parameter_name): each
        for parameter_name, each in trainer.model.named_parameters()
        if each.requires_grad
    }
    if case["lora"]:
        fill(trained, decoded(case["began"], case["shapes"]))
    sgd = RecordingSgd(trained, fields["learning_rate"])
    trainer.optimizer = sgd
    return trainer, sgd


@dataclass(frozen=True)
class Outcome:
    """Both updates and the evaluation after them."""

    logs: list[dict[str, float]]
    updates: list[Recorded]
    evaluated: dict[str, float]


def logged(trainer: Any, report: StepReport) -> dict[str, Any]:
    """What a step logs; the state counts its tokens, as in training."""
    entry = trainer._entry(report)
    trainer.state.num_input_tokens_seen = int(entry["num_tokens"])
    return dict(entry)


@cache
def outcome(name: str) -> Outcome:
    """Of the case in float64, update by update: nothing but TRL's own rounding is between the numbers."""
    trainer, sgd = trainer_of(name)
    rows = trainer.rows(trainer.train_dataset, "train_dataset")
    options = trainer.options(run_length(trainer.args, len(rows)))
    pairs = PreferenceSet(seed=0, training=trainer.pairs(rows, options), held_out=[])
    logs = []
    made = {"num_steps": 2, "optimizer": trainer.own_optimizer}
    if isinstance(trainer, DPOTrainer):
        session = dpo_session(trainer.policy, options, pairs, reference=trainer.reference, **made)
        if trainer.reference is None:
            trainer._keep_first_policy()
    else:
        session = reward_session(trainer.scorer, options, pairs, **made)
    for step in (1, 2):
        batch, metrics = session.learn(step)
        logs.append(logged(trainer, StepReport(step=step, metrics=metrics, pairs=batch)))
    evaluated = {key.removeprefix("eval_"): value for key, value in trainer.evaluate().items()}
    return Outcome(logs=logs, updates=sgd.updates, evaluated=evaluated)


def require_same(ours: Mapping[str, Tensor], theirs: str, shapes: Mapping[str, list[int]], what: str) -> None:
    """Of every parameter ‖ours - theirs‖ ≤ WORST · ‖theirs‖."""
    assert ours.keys() == shapes.keys()
    for name, expected in decoded(theirs, shapes).items():
        if not expected.any():  # A of LoRA, as long as B is 0
            assert not ours[name].any(), name
            continue
        distance = relative_distance(ours[name].double(), expected.double())
        assert distance <= WORST, f"{what} of {name}: {distance:.1e} apart"


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_weights_are_those_of_trl(name: str, capsys: Any) -> None:
    made, case = outcome(name), CASES[name]
    for number, (ours, theirs) in enumerate(zip(made.updates, case["updates"], strict=True), start=1):
        require_same(ours.gradient, theirs["gradient"], case["shapes"], f"gradient {number}")
    require_same(made.updates[-1].weights, case["weights"], case["shapes"], "weights after both updates")


@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_what_is_logged_are_those_of_trl(name: str, capsys: Any) -> None:
    made, case = outcome(name), CASES[name]
    for ours, theirs in zip(made.logs, case["updates"], strict=True):
        require_same_numbers({"loss": theirs["loss"], **theirs["log"]}, ours, name)
    require_same_numbers(case["evaluated"], made.evaluated, "")


def require_same_numbers(theirs: Mapping[str, float], ours: Mapping[str, float], name: str) -> None:
    for metric, expected in theirs.items():
        if metric not in NOT_LOGGED and not ("micro" in name and metric in OVER_BATCHES):
            assert ours[metric] == pytest.approx(expected, rel=WORST, abs=1e-5), metric


def test_a_whole_run_takes_the_steps_of_trl(tmp_path: Path, capsys: Any) -> None:
    """Through `train()`, with its log and an evaluation in it: what a script sees."""
    name = "dpo, conversational"
    trainer, sgd = trainer_of(name, str(tmp_path / "run"), eval_strategy="steps", eval_steps=2)
    trainer.train()
    case = CASES[name]
    for ours, theirs in zip(sgd.updates, case["updates"], strict=True):
        require_same(ours.gradient, theirs["gradient"], case["shapes"], "gradient")
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry, theirs in zip(logged, case["updates"], strict=True):
        require_same_numbers(theirs["log"], entry, name)
    evaluated = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert evaluated["eval_loss"] == pytest.approx(case["evaluated"]["loss"], rel=WORST)
