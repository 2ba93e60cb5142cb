"""The sampler's log-probs are the trainer's: the same weights, two paths through the model, and a probe before a run.

The bounds are those of the design: float32 to 1e-5 nats in the mean and 1e-4 at most; bfloat16 apart.  A wrong path
falls back to a slower one, or is refused.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import posttrain
from posttrain.algorithms.table import build_algorithm
from posttrain.errors import RunError
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.model_steps import AlignedSlots, ModelSteps
from posttrain.generation.parity import EXACT_NATS, engine_in_parity, largest_gap, probe_prompts, tried_length
from posttrain.generation.request import Sampled, StreamKey
from posttrain.models.forward import PlainForward, SharedPromptForward
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy, as_policy
from posttrain.options.rollout import SamplingParams
from posttrain.options.training import UpdateOptions
from posttrain.records import Group
from posttrain.runs.alarms import GAP, GAP_LIMIT, alarms
from posttrain.runs.reports import StepReport
from posttrain.runs.watchers import SamplerGuard
from posttrain.training.optimizer import new_optimizer
from posttrain.training.update import Objective, group_logprobs, update
from tests.support.decoders import DECODER_CLASSES
from tests.support.engines import ChangedEngine
from tests.support.families import CONTEXT, WINDOW, family_policy
from tests.support.refusals import refused
from tests.support.runs import records, save_tiny_model, tiny_recipe
from tests.support.tiny import FAMILIES, SHAPE, STOP_IDS, batch_of, request, some_prompts, tiny_policy

SHAPES = True
LENGTHS = (3, 17, 1, 9)


def gaps(policy: Policy, groups: list[Group], temperature: float = 1.0) -> torch.Tensor:
    """|log π - log μ| of every token, the trainer's in micro-batches of about two groups."""
    trained = group_logprobs(policy, groups, temperature=temperature, max_tokens=60)
    sampled = [logprob for group in groups for rollout in group.rollouts for logprob in rollout.logprobs]
    return (trained - torch.tensor(sampled, dtype=torch.float64)).abs()


@pytest.mark.parametrize(
    ("dtype", "mean", "largest"), [(torch.float32, 1e-5, 1e-4), (torch.float64, 1e-14, 1e-12)], ids=["f32", "f64"]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", [*FAMILIES, *DECODER_CLASSES])
def test_sampler_and_trainer_agree(
    family: str, temperature: float, dtype: torch.dtype, mean: float, largest: float
) -> None:
    policy = tiny_policy(family, dtype)
    groups = sample_groups(
        InProcessEngine(policy), some_prompts(LENGTHS), request(4, 20, SamplingParams(temperature=temperature))
    )
    gap = gaps(policy, groups, temperature)
    assert gap.mean() <= mean
    assert gap.max() <= largest


@pytest.mark.parametrize("family", [*FAMILIES, *DECODER_CLASSES])
def test_in_bfloat16_they_agree_to_its_own_precision(family: str) -> None:
    # A bfloat16 product errs by 2^-9; through two layers log-probs of a few nats err by about a hundredth.
    policy = tiny_policy(family, torch.float32, compute="bfloat16")
    assert policy.compute_dtype == torch.bfloat16
    groups = sample_groups(InProcessEngine(policy), some_prompts(LENGTHS), request(4, 20))
    gap = gaps(policy, groups)
    assert gap.mean() <= 1e-2
    assert gap.max() <= 1e-1


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
def test_they_agree_after_updates_because_the_sampler_reads_the_weights_anew(family: str) -> None:
    policy, algorithm = tiny_policy(family, torch.float32), build_algorithm({"name": "grpo"})
    engine, options = InProcessEngine(policy), UpdateOptions(learning_rate=1e-2)
    optimizer = new_optimizer(policy.model.parameters(), options)
    objective = Objective(algorithm=algorithm, temperature=1.0)
    stale = None
    for step in range(4):
        groups = sample_groups(engine, some_prompts(LENGTHS), request(4, 12, key=StreamKey(0, "test", step)))
        gap = gaps(policy, groups)
        assert gap.mean() <= 1e-5
        assert gap.max() <= 1e-4
        report = update(
            policy, optimizer, batch_of(groups, [[1, -1, 0.5, -0.5]] * 4, algorithm), objective, options, 1e-2
        )
        assert report.gaps.max().item() <= 1e-4  # the first update of a step sees parity
        stale = gaps(policy, groups)
    assert stale.mean() > 1e-2  # an engine with old weights would be told from one with new ones


def test_completions_grow_beyond_a_sliding_window() -> None:
    # Once they were cut at the window, without a word.
    policy = family_policy("mistral", context=None)
    assert policy.max_positions == CONTEXT
    groups = sample_groups(InProcessEngine(policy), some_prompts((3, 9)), request(6, 80, suppressed=STOP_IDS))
    lengths = {len(group.prompt.tokens) + len(rollout.tokens) for group in groups for rollout in group.rollouts}
    assert lengths == {CONTEXT}
    assert CONTEXT > 4 * WINDOW


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


@pytest.mark.parametrize(("quick", "cache"), [(True, False), (False, True), (True, True)])
def test_a_wrong_way_falls_back_to_the_next_one(quick: bool, cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick pass to the model's own, one with a wrong cache to whole rows."""
    policy = llama() if quick else family_policy("mistral")
    if quick:
        assert isinstance(policy.forward, SharedPromptForward)
        policy.forward.decoder.eps = 0.1  # not the model's
    if cache:
        monkeypatch.setattr(ModelSteps, "slots", lambda self: Forgetful())
    engine = engine_in_parity(policy, max_rows=4, longest=40)
    assert isinstance(engine.policy.forward, PlainForward)
    assert not quick or "nats off" in str(engine.policy.forward_reason)
    refusal = engine.policy.cache_refusal
    assert re.match(r"log-probs with one are up to [\d.]+ nats off", str(refusal)) if cache else refusal is None
    assert policy.cache_refusal is None
    assert largest_gap(engine, 40) <= EXACT_NATS / 100


class Forgetful(AlignedSlots):
    """A cache that loses a row's first token, as one would that knows too little of a family."""

    def visible(self) -> torch.Tensor:
        return super().visible() & (torch.arange(self.seen + 1) > self._first[:, None] - self._left)


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
    lines = records(folder / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[1]["num_alarms"] >= 1
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())[-1] == "step-000002"
