"""Before a run, sampler and trainer are compared with the model itself: a wrong one falls back, or is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import posttrain
from posttrain.errors import RunError
from posttrain.generation.model_steps import AlignedSlots, ModelSteps
from posttrain.generation.parity import EXACT_NATS, engine_in_parity, largest_gap, probe_prompts, tried_length
from posttrain.generation.request import Sampled
from posttrain.models.forward import PlainForward, SharedPromptForward
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy, as_policy
from posttrain.runs.alarms import GAP, GAP_LIMIT, alarms
from posttrain.runs.reports import StepReport
from posttrain.runs.watchers import SamplerGuard
from tests.support.engines import ChangedEngine
from tests.support.families import family_policy
from tests.support.refusals import refused
from tests.support.runs import save_tiny_model, tiny_recipe
from tests.support.tiny import FAMILIES, SHAPE, tiny_policy


def llama() -> Policy:
    torch.manual_seed(0)
    return as_policy(LlamaForCausalLM(LlamaConfig(**SHAPE)), tiny_policy("llama").tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_are_right_go_through_the_pass_that_was_chosen(family: str) -> None:
    policy = tiny_policy(family)
    engine = engine_in_parity(policy, max_rows=4, longest=40)
    assert engine.policy is policy
    assert largest_gap(engine, 40) < 1e-9


def test_float32_stays_a_hundred_times_below_its_bound() -> None:
    assert largest_gap(engine_in_parity(llama(), max_rows=4, longest=40), 40) < EXACT_NATS / 100


def test_a_wrong_quick_pass_falls_back_to_the_models_own() -> None:
    policy = llama()
    assert isinstance(policy.forward, SharedPromptForward)
    policy.forward.decoder.eps = 0.1  # not the model's
    engine = engine_in_parity(policy, max_rows=4, longest=40)
    assert isinstance(engine.policy.forward, PlainForward)
    assert "nats off" in str(engine.policy.forward_reason)
    assert largest_gap(engine, 40) <= EXACT_NATS


class Forgetful(AlignedSlots):
    """A cache that loses a row's first token, as one would that knows too little of a family."""

    def visible(self) -> torch.Tensor:
        return super().visible() & (torch.arange(self.seen + 1) > self._first[:, None] - self._left)


def test_a_model_whose_cache_is_wrong_samples_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSteps, "slots", lambda self: Forgetful())
    policy = family_policy("mistral")
    engine = engine_in_parity(policy, max_rows=4, longest=40)
    assert policy.cache_refusal is None
    assert re.match(r"log-probs with one are up to [\d.]+ nats off", str(engine.policy.cache_refusal))
    assert largest_gap(engine, 40) <= EXACT_NATS / 100


def test_where_quick_pass_and_cache_are_both_wrong_whole_rows_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSteps, "slots", lambda self: Forgetful())
    policy = llama()
    assert isinstance(policy.forward, SharedPromptForward)
    policy.forward.decoder.eps = 0.1
    chosen = engine_in_parity(policy, max_rows=4, longest=40).policy
    assert isinstance(chosen.forward, PlainForward)
    assert "by the quicker one" in str(chosen.forward_reason)
    assert "with one" in str(chosen.cache_refusal)


def test_a_model_whose_answers_depend_on_batch_mates_is_refused() -> None:
    policy = family_policy("mistral")

    def mixing(module: nn.Module, arguments: object, output: torch.Tensor) -> torch.Tensor:
        return output + output.mean(dim=0, keepdim=True)

    policy.model.model.layers[0].mlp.register_forward_hook(mixing)
    with refused("mistral", "up to 40 tokens", "rounding"):
        engine_in_parity(policy, max_rows=4, longest=40)


def test_the_probe_goes_beyond_every_window_that_the_run_can_reach() -> None:
    windowed, plain = family_policy("mistral"), llama()
    assert tried_length(windowed, 7) == 7  # a run that stays inside
    assert tried_length(windowed, 40) == 40
    windowed.model.config.sliding_window = 4096
    assert tried_length(windowed, 4000) == 512
    assert tried_length(windowed, 4100) == 4100
    assert tried_length(windowed, 9000) == 4160
    assert tried_length(plain, 400) == 400
    assert tried_length(plain, 9000) == 512
    longest = [len(prompt.tokens) for prompt in probe_prompts(family_policy("mistral"), 40)][-1]
    assert longest == 36  # and the tokens that are sampled


def step(number: int, gap: float | None) -> StepReport:
    metrics = {} if gap is None else {GAP: gap, GAP_LIMIT: EXACT_NATS}
    return StepReport(step=number, metrics=metrics)


def test_three_steps_in_a_row_beyond_the_limit_end_the_run() -> None:
    guard = SamplerGuard()
    for number, gap in enumerate([0.5, 0.5, 1e-4, 0.5, None, 0.5]):  # a step without an update says nothing
        guard.on_step(step(number, gap))
    with refused("for 3 steps", "0.001", "0.75", error=RunError):
        guard.on_step(step(7, 0.75))


def test_a_step_beyond_the_limit_is_an_alarm() -> None:
    line = {"step": 1, GAP_LIMIT: EXACT_NATS}
    assert alarms([{**line, GAP: 1e-3}], {}) == []
    (alarm,) = alarms([{**line, GAP: 1.1e-3}], {})
    assert (alarm.name, alarm.says.split(" is ")[1][:11]) == ("sampler gap", "0.0011 nats")
    assert alarms([{"step": 1, GAP: 9.0}], {}) == []  # dropout is in the update alone


def test_a_run_through_a_sampler_that_is_wrong_ends_before_its_third_step_is_saved(tmp_path: Path) -> None:
    folder = tiny_recipe(tmp_path / "case").parent
    save_tiny_model(tmp_path / "model")

    def shifted(sampled: Sampled) -> Sampled:
        return replace(sampled, logprobs=tuple(value - 0.5 for value in sampled.logprobs))

    config = posttrain.load_recipe(folder / "recipe.yaml", checkpoint={"every_steps": 1})
    policy = load_policy(config.model)
    with refused("step 3: ", "for 3 steps", error=RunError):
        posttrain.train(config, policy=policy, engine=ChangedEngine(policy, shifted))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[1]["num_alarms"] >= 1
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())[-1] == "step-000002"
