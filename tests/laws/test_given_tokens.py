"""Tokens that the policy was given, such as a tool's reply, change nothing but what it reads.

Spans of given tokens are inserted anywhere in sampled completions.  The gradient of the update is then compared with
one that knows no batches: every completion is a row of its own through the library's forward pass, its sampled tokens
are picked by the mask, and autograd differentiates the algorithm's loss of them.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.batch import Batch, collate, completions_of
from posttrain.models import forward as forward_module
from posttrain.models.adapters.adaptable import add_adapter
from posttrain.models.forward import CompletionBatch, PlainForward, predicting
from posttrain.models.logprobs import distribution_kl
from posttrain.models.policy import Policy, as_policy
from posttrain.models.shared_prompt.decoder import Decoder
from posttrain.records import Group, Rollout
from posttrain.runs.progress import Clock
from posttrain.training.collector import CollectedStep
from posttrain.training.metrics import step_metrics, step_tokens
from posttrain.training.observations import Observations
from posttrain.training.reference import FrozenCopy, Teacher
from posttrain.training.update import micro_losses
from tests.support import tiny
from tests.support.adapted import LORA, fill
from tests.support.sequences import evidence_of, known, resampled, view_of
from tests.support.stages import LIMIT, Stages, stages_with
from tests.support.tiny import tiny_model, tiny_policy

TEMPERATURE = 0.8
ONE_UPDATE = {"epochs_per_step": 1, "minibatches_per_epoch": 1}
LOSS_KL = {"coefficient": 0.3}
CRITIC = {"fit_steps": 0, "through_trunk": True}
CONFIGS = [
    {"name": "reinforce"},
    {"name": "rloo"},
    {"name": "grpo", "kl": LOSS_KL},
    {"name": "dr_grpo"},
    {"name": "dapo", "resample": None},
    {"name": "gspo", "clip_low": 0.3, "clip_high": 0.3, "sequence_ratio": "product"},
    {"name": "gspo", "clip_low": 0.3, "clip_high": 0.3, "kl": {**LOSS_KL, "level": "completion"}},
    {"name": "cispo", "correction": {}},
    {"name": "maxrl"},
    {"name": "ppo", "gae": {"lambda_policy": 0.9, "truncated": "bootstrap"}, "critic": CRITIC, "entropy_bonus": 0.1},
    {"name": "ppo", "kl": {**LOSS_KL, "estimator": "k1", "place": "reward"}, "critic": CRITIC},
    {"name": "distill"},
    {"name": "distill", "signal": "sampled", "horizon": "completion"},
    {"name": "grpo", "kl": {**LOSS_KL, "estimator": "full"}},
]


def with_given(rollout: Rollout, seed: int) -> Rollout:
    """The rollout with given tokens at some of the places before, between and behind its sampled ones."""
    drawn = random.Random(f"{seed} {rollout.tokens} {rollout.sample}")
    tokens: list[int] = []
    sampled: list[bool] = []
    for token in (*rollout.tokens, None):
        reply = [drawn.randrange(tiny.VOCAB) for _ in range(drawn.choice((0, 0, 1, 3)))]
        tokens += [*reply, *([] if token is None else [token])]
        sampled += [*[False] * len(reply), *([] if token is None else [True])]
    return resampled(rollout, tokens=tuple(tokens), sampled=tuple(sampled))


def inserted(collected: CollectedStep, seed: int = 7) -> CollectedStep:
    """The step with given tokens in its completions; their rewards stay as they are."""
    groups = [
        replace(group, rollouts=tuple(with_given(each, seed + number) for each in group.rollouts))
        for number, group in enumerate(collected.groups)
    ]
    assert any(not each.sequence.sampled[-1] for group in groups for each in group.rollouts)
    assert any(not each.sequence.sampled[0] for group in groups for each in group.rollouts)
    return replace(collected, groups=groups)


def stages_of(config: Mapping[str, Any], policy: Policy) -> Stages:
    """Stages whose reference and teacher are other models than the policy."""
    stages = stages_with(config, policy=policy, temperature=TEMPERATURE, **ONE_UPDATE)
    learner = stages.learner
    if learner.reference is not None:
        learner.reference = FrozenCopy(tiny_policy(seed=1))
    if learner.teacher is not None:
        learner.teacher = Teacher(FrozenCopy(tiny_policy(seed=2)), None)
    if learner.critic is not None:
        drawn = torch.Generator().manual_seed(5)
        learner.actor_critic_state = replace(learner.actor_critic_state, begun=True)
        with torch.no_grad():
            for each in learner.critic.head.parameters():
                each.copy_(torch.randn(each.shape, generator=drawn, dtype=each.dtype) / 4)
    return stages


def trained_parameters(stages: Stages) -> list[Tensor]:
    heads = [each.head for each in [stages.learner.critic] if each is not None]
    modules = [stages.policy.model, *heads]
    return [each for module in modules for each in module.parameters() if each.requires_grad]


def gradient_by_us(
    stages: Stages,
    collected: CollectedStep,
    *,
    split: Callable[[Batch], Iterable[Batch]] | None = None,
    poison: Callable[[pytest.MonkeyPatch], None] = lambda patch: None,
) -> Tensor:
    """Of a step through credit, batches and micro-batches; `poison` changes the passes of the update."""
    learner = stages.learner
    (batch,) = learner.batches(learner.credit(collected, Clock()), Clock())
    parameters = trained_parameters(stages)
    for each in parameters:
        each.grad = None
    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        for micro in split(batch) if split else batch.split(60, padded=stages.policy.forward.padded):
            for share in micro_losses(stages.policy, micro, learner.objective(), Observations()):
                share.backward()
    return flat([each.grad for each in parameters], parameters)


def flat(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(own) if each is None else each).flatten() for each, own in pairs])


Row = tuple[Group, Rollout]


def states(policy: Policy, row: Row) -> Tensor:
    """Hidden states behind the last prompt token and every completion token, one row through the library's model."""
    prompt, tokens = row[0].prompt.tokens, [[*row[0].prompt.tokens, *row[1].tokens]]
    return policy.model.base_model(torch.tensor(tokens), use_cache=False).last_hidden_state[0, len(prompt) - 1 :]


def sampled_states(policy: Policy, rows: Sequence[Row]) -> Tensor:
    """Those that predict what was sampled, which the mask picks."""
    return torch.cat([states(policy, row)[:-1][torch.tensor(row[1].sequence.sampled)] for row in rows])


def distributions(policy: Policy, hidden: Tensor) -> Tensor:
    return (policy.output_layer.logits(hidden) / TEMPERATURE).log_softmax(dim=-1)


@torch.no_grad()
def other_distributions(other: Any, rows: Sequence[Row]) -> Tensor | None:
    if other is None:
        return None
    with other.entered() as policy:
        return distributions(policy, sampled_states(policy, rows))


def gradient_by_the_formula(stages: Stages, collected: CollectedStep) -> Tensor:
    """Of Σ_t w_t L_t over the sampled tokens t, each completion a row of its own."""
    learner, algorithm = stages.learner, stages.learner.algorithm
    rows = [(group, rollout) for group in collected.groups for rollout in group.rollouts]
    lengths = torch.tensor([rollout.num_sampled for _, rollout in rows])
    targets = [torch.tensor(rollout.tokens)[torch.tensor(rollout.sequence.sampled)] for _, rollout in rows]
    targets = torch.cat(targets)[:, None]
    hidden = sampled_states(stages.policy, rows)
    logits = distributions(stages.policy, hidden)
    reference, teacher = (other_distributions(each, rows) for each in (learner.reference, learner.teacher))
    values = final = None
    if learner.critic is not None:
        values, shape = learner.critic.head(hidden), collected.grades.rewards.shape
        ends = [learner.critic.head(states(stages.policy, row)[-1:]) for row in rows]
        cut = torch.tensor([rollout.finish.cut_off for _, rollout in rows])
        final = (torch.cat(ends).detach() * cut).view(shape)
    columns = columns_by_the_formula(
        stages,
        collected,
        reference_logprobs=None if reference is None else reference.gather(1, targets)[:, 0],
        teacher_logprobs=None if teacher is None else teacher.gather(1, targets)[:, 0],
        proximal_logprobs=logits.detach().gather(1, targets)[:, 0],
        values=None if values is None else values.detach(),
        final_values=final,
    )
    seen = known(
        values=values,
        entropies=-(logits.exp() * logits).sum(dim=-1),
        full_kl=None if reference is None else distribution_kl(logits, reference),
        teacher_kl=None if teacher is None else distribution_kl(logits, teacher),
    )
    rollout = torch.arange(len(rows)).repeat_interleave(lengths)
    view = view_of(logits.gather(1, targets)[:, 0], rollout, seen=seen, **columns)
    parameters = trained_parameters(stages)
    loss = (view.columns.weights * algorithm.loss(view)).sum()
    return flat(torch.autograd.grad(loss, parameters, allow_unused=True), parameters)


def columns_by_the_formula(stages: Stages, collected: CollectedStep, **others: Tensor | None) -> dict[str, Any]:
    """Credit of the sampled tokens and their weights, of what other models know of them."""
    algorithm, grades = stages.learner.algorithm, collected.grades
    rollouts = [rollout for group in collected.groups for rollout in group.rollouts]
    behaviour = torch.tensor([number for each in rollouts for number in each.logprobs], dtype=torch.float64)
    columns = known(behaviour_logprobs=behaviour, **others)
    penalty = algorithm.kl_penalty
    lengths = torch.tensor([sum(each.sequence.sampled) for each in rollouts])
    shape = grades.rewards.shape
    given = {"scores": grades.scores, "weights": grades.weights, "known": columns}
    given["token_rewards"] = None if penalty is None else -0.3 * kl.k1(behaviour, columns["reference_logprobs"])
    given["truncated"] = torch.tensor([each.finish.cut_off for each in rollouts]).view(shape)
    credit = algorithm.credit(evidence_of(grades.rewards, lengths.view(shape), limit=LIMIT, **given))
    scored = torch.ones(len(rollouts), dtype=torch.bool)
    weights = algorithm.token_weights(lengths, scored, max_completion_tokens=LIMIT)
    columns.pop("final_values", None)
    columns |= {"advantages": credit.advantages, "weights": weights.repeat_interleave(lengths)}
    return columns | {"value_range": credit.value_range, "returns": credit.returns}


@pytest.mark.parametrize("forward", ["shared prompt", "plain"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_gradient_is_that_of_the_sampled_tokens(config: Mapping[str, Any], forward: str) -> None:
    policy = tiny_policy() if forward == "shared prompt" else tiny.through_its_own_forward(tiny_policy())
    stages = stages_of(config, policy)
    collected = inserted(stages.collected())
    expected = gradient_by_the_formula(stages, collected)
    assert expected.norm() > 1e-3
    assert tiny.relative_distance(gradient_by_us(stages, collected), expected) <= 1e-12


@pytest.mark.parametrize("config", [CONFIGS[2], CONFIGS[9]], ids=str)
def test_so_it_is_for_an_adapter(config: Mapping[str, Any]) -> None:
    model = tiny_model("qwen3")
    add_adapter(model, LORA, seed=0)
    fill(model)
    policy = as_policy(model, tiny.tokenizer())
    stages = stages_of(config, replace(policy, forward=tiny.TrustedForward(model, policy.compute_dtype)))
    collected = inserted(stages.collected())
    expected = gradient_by_the_formula(stages, collected)
    assert tiny.relative_distance(gradient_by_us(stages, collected), expected) <= 1e-12


@pytest.mark.parametrize("name", tiny.BY_REWARD)
def test_credit_and_weights_of_sampled_tokens_are_what_they_were(name: str) -> None:
    """To the bit: lengths, divisors, penalties for length and statistics know nothing of given tokens."""
    stages = stages_of({"name": name, **({"resample": None} if name == "dapo" else {})}, tiny_policy())
    before = stages.collected()
    steps = [stages.learner.credit(step, Clock()) for step in (before, inserted(before))]
    without, with_them = (batch for step in steps for batch in stages.learner.batches(step, Clock()))
    assert sum(with_them.lengths) > sum(without.lengths) == len(with_them.tokens)
    for column in ("advantages", "weights", "behaviour_logprobs"):
        assert torch.equal(getattr(with_them.columns, column), getattr(without.columns, column))
    assert torch.equal(with_them.tokens, without.tokens)
    assert torch.equal(with_them.rollout, without.rollout)


def nan_in_hidden_states(patch: pytest.MonkeyPatch) -> None:
    """The plain pass: hidden states are NaN wherever they predict no sampled token."""
    original, made = forward_module.model_hidden, PlainForward.completion_hidden

    def completion_hidden(self: PlainForward, batch: CompletionBatch) -> Tensor:
        def poisoned(*arguments: Any, **options: Any) -> Tensor:
            hidden = original(*arguments, **options)
            ends = [row * hidden.shape[1] + len(batch.prompts[p]) - 1 for row, p in enumerate(batch.prompt_of)]
            places = predicting(batch, ends, [end + 1 for end in ends])
            return torch.where(among(places, hidden[..., 0]), hidden, torch.nan)

        with pytest.MonkeyPatch.context() as within:
            within.setattr(forward_module, "model_hidden", poisoned)
            return made(self, batch)

    patch.setattr(PlainForward, "completion_hidden", completion_hidden)


def nan_behind_attention(patch: pytest.MonkeyPatch) -> None:
    """The shared-prompt pass: in the last layer every token that predicts no sampled one attends to NaN.

    What the layers before make of it is read by later tokens, and its last key and value are: a NaN there may count.
    """
    block, attention = Decoder._block, Decoder._attention

    def poisoned(self: Decoder, index: int, x: Tensor, *, wanted: Tensor | None, **options: Any) -> Tensor:
        def attended(*arguments: Any) -> Tensor:
            found = attention(*arguments)
            return found if wanted is None else torch.where(among(wanted, found[:, 0]), found, torch.nan)

        with pytest.MonkeyPatch.context() as within:
            within.setattr(Decoder, "_attention", attended)
            return block(self, index, x, wanted=wanted, **options)

    patch.setattr(Decoder, "_block", poisoned)


def among(places: Tensor, like: Tensor) -> Tensor:
    """Which places of a tensor are among these, with an axis more."""
    found = torch.zeros(like.numel(), dtype=torch.bool)
    found[places] = True
    assert not found.all()
    return found.view(*like.shape, 1)


def one_of_each_prompt(batch: Batch) -> list[Batch]:
    """Micro-batches in which nothing is shared: whole sequences, packed one after the other."""
    return [batch.select(range(first, len(batch.completions), 4)) for first in range(4)]


@pytest.mark.parametrize("layout", ["plain", "shared prompt", "packed"])
@pytest.mark.parametrize("config", [CONFIGS[2], CONFIGS[9], CONFIGS[13]], ids=str)
def test_nan_in_what_belongs_to_a_given_token_changes_nothing(config: Mapping[str, Any], layout: str) -> None:
    """Exact zeros of a backward pass times NaN would be NaN: what predicts nothing must not be in the graph at all."""
    policy = tiny.through_its_own_forward(tiny_policy()) if layout == "plain" else tiny_policy()
    stages = stages_of(config, policy)
    collected = inserted(stages.collected())
    split = one_of_each_prompt if layout == "packed" else None
    expected = gradient_by_us(stages, collected, split=split)
    poison = nan_in_hidden_states if layout == "plain" else nan_behind_attention
    assert tiny.relative_distance(gradient_by_us(stages, collected, split=split, poison=poison), expected) <= 1e-12


def test_nothing_is_picked_where_nothing_was_given() -> None:
    stages = stages_with()
    collected = stages.collected()
    assert completions_of(collected.groups).sampled is None
    batch = completions_of(inserted(collected).groups)
    assert batch.sampled is not None
    every = torch.tensor([token for tokens in batch.completions for token in tokens])
    assert torch.equal(every[batch.sampled], batch.tokens)


def test_metrics_are_of_what_was_sampled_and_the_count_of_tokens_is_of_what_was_read() -> None:
    stages = stages_with()
    collected = stages.collected()
    informed = torch.ones(collected.grades.rewards.shape, dtype=torch.bool)
    longer = inserted(collected)
    measured = [step_metrics(each.groups, each.grades, informed) for each in (longer, collected)]
    assert measured[0] == measured[1]
    assert longer.num_completion_tokens == collected.num_completion_tokens
    num_given = sum(len(each.tokens) - each.num_sampled for group in longer.groups for each in group.rollouts)
    assert step_tokens(longer.groups) == step_tokens(collected.groups) + num_given


def test_a_completion_that_is_masked_as_cut_off_is_so_whatever_was_given_in_it() -> None:
    stages = stages_with({"name": "grpo", "mask_truncated": True})
    credited = stages.learner.credit(inserted(stages.collected()), Clock())
    options = {"max_completion_tokens": LIMIT, "keep_zero_advantages": True, "masks_truncated": True}
    batch = collate(credited.groups, stages.learner.algorithm.weighted, **options)
    kept = [each for group in credited.groups.groups for each in group.rollouts if not each.finish.cut_off]
    assert 0 < len(kept) < 20
    assert batch.completions == tuple(each.tokens for each in kept)
