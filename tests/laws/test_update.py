"""An update applies the gradient of the loss that the algorithm states, or none at all.

Expected gradients come from the Hugging Face model on unpadded rows, log_softmax, and the formulas written out here.
"""

import math
from dataclasses import replace

import pytest
import torch

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import build_algorithm
from posttrain.algorithms.terms import LossTerm
from posttrain.batch import Batch
from posttrain.errors import RunError
from posttrain.models.policy import Policy
from posttrain.needs import Need
from posttrain.options.training import OptimizerOptions, UpdateOptions
from posttrain.records import Group
from posttrain.training.optimizer import apply_gradients, learning_rate, new_optimizer
from posttrain.training.reference import FrozenCopy
from posttrain.training.update import Objective, group_logprobs, token_view, update
from tests.support.refusals import refused
from tests.support.sequences import resampled
from tests.support.tiny import (
    batch_of,
    gradient_of_update,
    plain_logprobs,
    relative_distance,
    tiny_policy,
    twin,
    weights,
    written_group,
)

GROUPS = [
    written_group((1, 2, 3), [(4, 5), (6,), (7, 8, 9, 5)], name="a"),
    written_group((10, 11), [(12, 13, 14), (15, 11), (16,)], name="b", draw=1),
]
LENGTHS = [2, 1, 4, 3, 2, 1]
ADVANTAGES = [[1.0, -0.5, 0.25], [-1.0, 0.5, 2.0]]
ROLLOUT = torch.arange(6).repeat_interleave(torch.tensor(LENGTHS))
PER_TOKEN = torch.tensor(ADVANTAGES).double().flatten().repeat_interleave(torch.tensor(LENGTHS))
TEMPERATURE = 0.8
UNCLIPPED = {"clip_low": 1.0, "clip_high": math.inf}


def logprobs_of(policy: Policy) -> torch.Tensor:
    """log π of all tokens, through the Hugging Face model."""
    rows = [(group.prompt.tokens, rollout.tokens) for group in GROUPS for rollout in group.rollouts]
    return torch.cat([plain_logprobs(policy.model, *row, TEMPERATURE) for row in rows])


def gradient_of(policy: Policy, loss: torch.Tensor) -> torch.Tensor:
    parts = torch.autograd.grad(loss, list(policy.model.parameters()))
    return torch.cat([part.flatten() for part in parts])


def behaviour(policy: Policy, shift: float = 0.0) -> torch.Tensor:
    """log μ: what the policy says now, moved by a different amount for each token."""
    numbers = logprobs_of(policy).detach()
    return numbers + shift * torch.linspace(-1, 1, len(numbers), dtype=torch.float64)


def sampled_by(log_mu: torch.Tensor) -> list[Group]:
    """The groups, with these behaviour log-probs."""
    parts = iter(log_mu.split(LENGTHS))
    return [
        replace(group, rollouts=tuple(resampled(r, logprobs=tuple(next(parts).tolist())) for r in group.rollouts))
        for group in GROUPS
    ]


def objective_of(algorithm: Algorithm, reference: Policy | None = None) -> Objective:
    kept = None if reference is None else FrozenCopy(reference)
    return Objective(algorithm=algorithm, temperature=TEMPERATURE, reference=kept)


# The policy term.


def test_on_policy_the_gradient_is_minus_the_advantage_weighted_score() -> None:
    policy, algorithm = tiny_policy(), build_algorithm({"name": "grpo", "token_weights": "mean_over_tokens"})
    batch = batch_of(sampled_by(behaviour(policy)), ADVANTAGES, algorithm)
    actual, metrics = gradient_of_update(policy, batch, objective_of(algorithm))
    expected = gradient_of(policy, -(PER_TOKEN * logprobs_of(policy)).sum() / 13)
    assert relative_distance(actual, expected) <= 1e-12
    assert metrics["loss"] == pytest.approx(-PER_TOKEN.sum().item() / 13, abs=1e-12)  # every ratio is 1
    assert metrics["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-12)
    assert metrics["tokens/trained"] == 13
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-12)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(0, abs=1e-12)
    assert metrics["kl_behaviour"] == pytest.approx(0, abs=1e-12)
    assert metrics["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize(("family", "shift"), [("llama", 0.5), ("gpt2_plain", 0.5), ("llama", -0.5)])
def test_off_policy_the_clipped_surrogate_is_differentiated(family: str, shift: float) -> None:
    policy, algorithm = tiny_policy(family), build_algorithm({"name": "grpo", "clip_low": 0.1, "clip_high": 0.3})
    log_mu = behaviour(policy, shift=shift)
    actual, metrics = gradient_of_update(
        policy, batch_of(sampled_by(log_mu), ADVANTAGES, algorithm), objective_of(algorithm)
    )
    own = logprobs_of(policy)
    ratio = (own - log_mu).exp()
    token_losses = -torch.minimum(ratio * PER_TOKEN, ratio.clamp(0.9, 1.3) * PER_TOKEN)
    shares = 1 / (6 * torch.tensor(LENGTHS).double()[ROLLOUT])
    expected = (shares * token_losses).sum()
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-12)
    assert relative_distance(actual, gradient_of(policy, expected)) <= 1e-12
    high, low = (PER_TOKEN > 0) & (ratio > 1.3), (PER_TOKEN < 0) & (ratio < 0.9)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(high.double().mean().item())
    assert metrics["clip_ratio/low_mean"] == pytest.approx(low.double().mean().item())
    assert min(metrics["clip_ratio/high_mean"], metrics["clip_ratio/low_mean"]) > 0
    assert metrics["clip_ratio/region_mean"] == pytest.approx((high | low).double().mean().item())
    assert metrics["ratio/min"] == pytest.approx(ratio.min().item())
    assert metrics["ratio/max"] == pytest.approx(ratio.max().item())
    assert metrics["kl_behaviour"] == pytest.approx((ratio - 1 - ratio.log()).mean().item())
    gap = (own - log_mu).abs()
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(gap.mean().item())
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(gap.max().item())


def test_the_ratio_can_be_taken_to_the_reference() -> None:
    policy, reference = tiny_policy(), tiny_policy(seed=1)
    algorithm = build_algorithm({"name": "grpo", "ratio_to": "reference", **UNCLIPPED})
    log_ref = behaviour(reference)
    batch = batch_of(GROUPS, ADVANTAGES, algorithm, reference_logprobs=log_ref)
    actual, metrics = gradient_of_update(policy, batch, objective_of(algorithm, reference))
    ratio = (logprobs_of(policy) - log_ref).exp()
    expected = (-ratio * PER_TOKEN / (6 * torch.tensor(LENGTHS).double()[ROLLOUT])).sum()
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-12)
    assert relative_distance(actual, gradient_of(policy, expected)) <= 1e-12


# The KL term.


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_estimate_in_the_loss_is_differentiated(estimator: str) -> None:
    policy, reference = tiny_policy(), tiny_policy(seed=1)
    kl = {"coefficient": 0.3, "estimator": estimator}
    algorithm = build_algorithm({"name": "dapo", "kl": kl, **UNCLIPPED})
    log_mu, log_ref = behaviour(policy, shift=0.1), behaviour(reference)
    batch = batch_of(sampled_by(log_mu), ADVANTAGES, algorithm, reference_logprobs=log_ref)
    actual, metrics = gradient_of_update(policy, batch, objective_of(algorithm))
    own = logprobs_of(policy)
    x = own - log_ref
    term = {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) - 1 + x}[estimator]
    expected = (-(own - log_mu).exp() * PER_TOKEN + 0.3 * term).mean()
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-12)
    assert metrics["kl"] == pytest.approx(term.mean().item(), rel=1e-12)
    assert relative_distance(actual, gradient_of(policy, expected)) <= 1e-12


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
def test_the_full_kl_in_the_loss_is_differentiated(family: str) -> None:
    policy, reference = tiny_policy(family), tiny_policy(family, seed=1)
    algorithm = build_algorithm({"name": "dapo", "kl": {"coefficient": 0.3, "estimator": "full"}, **UNCLIPPED})
    log_mu = behaviour(policy, shift=0.1)
    batch = batch_of(sampled_by(log_mu), ADVANTAGES, algorithm, reference_logprobs=behaviour(reference))
    actual, metrics = gradient_of_update(policy, batch, objective_of(algorithm, reference))

    def all_logprobs(model: torch.nn.Module) -> torch.Tensor:
        rows = [(group.prompt.tokens, rollout.tokens) for group in GROUPS for rollout in group.rollouts]
        logits = [model(input_ids=torch.tensor([[*p, *c]])).logits[0, len(p) - 1 : -1] for p, c in rows]
        return torch.log_softmax(torch.cat(logits) / TEMPERATURE, dim=-1)

    own, other = all_logprobs(policy.model), all_logprobs(reference.model).detach()
    term = (own.exp() * (own - other)).sum(-1)
    expected = (-(logprobs_of(policy) - log_mu).exp() * PER_TOKEN + 0.3 * term).mean()
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-12)
    assert metrics["kl"] == pytest.approx(term.mean().item(), rel=1e-12)
    assert relative_distance(actual, gradient_of(policy, expected)) <= 1e-12


def test_a_kl_in_the_reward_is_reported_as_k3_and_is_no_term_of_the_loss() -> None:
    policy, reference = tiny_policy(), tiny_policy(seed=1)
    kl = {"coefficient": 0.3, "estimator": "k1", "place": "reward"}
    log_mu, log_ref = behaviour(policy), behaviour(reference)
    gradients = []
    for term in (kl, None):
        algorithm = build_algorithm({"name": "grpo", "kl": term})
        batch = batch_of(sampled_by(log_mu), ADVANTAGES, algorithm, reference_logprobs=log_ref)
        gradient, metrics = gradient_of_update(policy, batch, objective_of(algorithm))
        gradients.append(gradient)
        x = log_mu - log_ref
        assert metrics["kl"] == pytest.approx((torch.exp(-x) - 1 + x).mean().item(), rel=1e-9)
    assert torch.equal(*gradients)


def test_a_kl_in_the_loss_acts_where_the_advantage_is_zero() -> None:
    policy, reference = tiny_policy(), tiny_policy(seed=1)
    algorithm = build_algorithm({"name": "dapo", "kl": {"coefficient": 0.3}})
    log_ref = behaviour(reference)
    batch = batch_of(sampled_by(behaviour(policy)), [[0.0] * 3] * 2, algorithm, reference_logprobs=log_ref)
    actual, _ = gradient_of_update(policy, batch, objective_of(algorithm))
    x = logprobs_of(policy) - log_ref
    assert relative_distance(actual, gradient_of(policy, 0.3 * (torch.exp(-x) - 1 + x).mean())) <= 1e-12


@pytest.mark.parametrize("max_tokens", [2, 12, 1000])
def test_reference_log_probs_are_those_of_the_model_in_order(max_tokens: int) -> None:
    reference = tiny_policy(seed=1)
    actual = group_logprobs(reference, GROUPS, temperature=TEMPERATURE, max_tokens=max_tokens)
    torch.testing.assert_close(actual, behaviour(reference), rtol=0, atol=1e-12)


def test_reference_log_probs_keep_to_the_token_budget_also_within_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    policy = tiny_policy()
    original = policy.forward.completion_hidden

    def counted(batch):
        sizes.append(sum(map(len, batch.prompts)) + sum(map(len, batch.completions)))
        return original(batch)

    monkeypatch.setattr(policy.forward, "completion_hidden", counted)
    budget = max(len(group.prompt.tokens) + len(r.tokens) for group in GROUPS for r in group.rollouts)
    group_logprobs(policy, GROUPS, temperature=TEMPERATURE, max_tokens=budget)
    assert max(sizes) <= budget
    assert len(sizes) > len(GROUPS)


def test_a_frozen_copy_does_not_follow_the_policy() -> None:
    policy = tiny_policy()
    reference, before = FrozenCopy(policy).policy, weights(policy)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1.0)
    assert torch.equal(weights(reference), before)
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())


# Which tokens are trained.


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
def test_the_stop_token_is_trained(family: str) -> None:
    # Stop tokens 5 and 11 end two completions; only the completion (15, 11) has an advantage here.
    policy, algorithm = tiny_policy(family), build_algorithm({"name": "dapo"})
    prompt, completion = (10, 11), (15, 11)
    batch = batch_of(GROUPS, [[0, 0, 0], [0, 1.0, 0]], algorithm)
    assert batch.tokens.tolist() == [15, 11]
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
    before = plain_logprobs(policy.model, prompt, completion).detach()
    update(policy, optimizer, batch, objective_of(algorithm), UpdateOptions(), 0.05)
    after = plain_logprobs(policy.model, prompt, completion).detach()
    assert (after > before).all()


def test_no_update_trains_a_token_of_the_prompt() -> None:
    # With an untied head, the row of a token that only prompts hold gets the gradient of softmax alone: positive
    # logits slope for every row whose token was not sampled, so descending lowers it everywhere.
    policy, algorithm = tiny_policy("llama"), build_algorithm({"name": "dapo"})
    group = written_group((20, 21, 22), [(1, 2), (3, 4)])
    batch = batch_of([group], [[1.0, 1.0]], algorithm)
    hidden_rows = [(*group.prompt.tokens, *rollout.tokens[:-1]) for rollout in group.rollouts]
    gradient, _ = gradient_of_update(policy, batch, Objective(algorithm=algorithm, temperature=1.0))
    names = [name for name, _ in policy.model.named_parameters()]
    sizes = [parameter.numel() for parameter in policy.model.parameters()]
    head = gradient.split(sizes)[names.index("lm_head.weight")].view(-1, 16)
    slope = torch.zeros_like(head)
    for row, rollout in zip(hidden_rows, group.rollouts, strict=True):
        states = policy.model.model(input_ids=torch.tensor([row])).last_hidden_state[0, 2:].detach()
        chances = torch.softmax(states @ policy.model.lm_head.weight.detach().T, -1)
        ratios = (plain_logprobs(policy.model, group.prompt.tokens, rollout.tokens).detach()
                  - torch.tensor(rollout.logprobs, dtype=torch.float64)).exp()  # fmt: skip
        slope[20:23] += ((ratios[:, None] * chances).T @ states)[20:23] / 4
    torch.testing.assert_close(head[20:23], slope[20:23], rtol=0, atol=1e-12)


# Steps that are not taken.


def trained_once() -> tuple[Policy, torch.optim.Optimizer, Algorithm, UpdateOptions]:
    """A policy whose optimiser has momentum."""
    policy, algorithm = tiny_policy(), build_algorithm({"name": "dapo"})
    options = UpdateOptions(learning_rate=1e-2)
    optimizer = new_optimizer(policy.model.parameters(), options)
    batch = batch_of(sampled_by(behaviour(policy)), ADVANTAGES, algorithm)
    update(policy, optimizer, batch, objective_of(algorithm), options, 1e-2)
    return policy, optimizer, algorithm, options


def test_a_zero_gradient_would_move_weights_that_have_momentum() -> None:
    # Why a step without signal must take no optimiser step at all.
    policy, optimizer, _, _ = trained_once()
    before = weights(policy)
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    apply_gradients(optimizer, 1e-2, 1.0)
    assert not torch.equal(weights(policy), before)


@pytest.mark.parametrize("budget", [1000, 8], ids=["one_micro_batch", "after_another_that_was_fine"])
def test_a_loss_that_is_no_number_stops_before_the_step_and_names_the_completion(budget: int) -> None:
    policy, optimizer, _, options = trained_once()
    log_mu = behaviour(policy)
    log_mu[10] = -math.inf  # second token of prompt b's second completion: π/μ is infinite
    algorithm = build_algorithm({"name": "rloo"})
    batch, before = batch_of(sampled_by(log_mu), ADVANTAGES, algorithm), weights(policy)
    options = replace(options, tokens_per_microbatch=budget)
    with refused("prompt b, sample 1: the loss of a token is", error=RunError):
        update(policy, optimizer, batch, objective_of(algorithm), options, 1e-2)
    assert torch.equal(weights(policy), before)
    # Nor does anything of it reach the next update.
    sound = batch_of(sampled_by(behaviour(policy)), ADVANTAGES, algorithm)
    alone, _ = gradient_of_update(twin(policy), sound, objective_of(algorithm))
    report = update(policy, optimizer, sound, objective_of(algorithm), options, 1e-2)
    assert report.grad_norms["policy"] == pytest.approx(alone.norm().item(), rel=1e-12)


def test_a_gradient_that_is_no_number_stops_before_the_step() -> None:
    policy, optimizer, algorithm, options = trained_once()
    batch = batch_of(sampled_by(behaviour(policy)), ADVANTAGES, algorithm)
    before = weights(policy)
    policy.model.model.norm.weight.register_hook(lambda grad: grad * math.inf)
    with refused("gradient's norm (policy) is", error=RunError):
        update(policy, optimizer, batch, objective_of(algorithm), options, 1e-2)
    assert torch.equal(weights(policy), before)


# The optimiser.


def test_gradients_are_cleared_so_that_each_update_is_its_own() -> None:
    policy, optimizer, algorithm, options = trained_once()
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    batch = batch_of(sampled_by(behaviour(policy)), ADVANTAGES, algorithm)
    alone, _ = gradient_of_update(policy, batch, objective_of(algorithm))
    report = update(policy, optimizer, batch, objective_of(algorithm), options, 1e-2)
    assert report.grad_norms["policy"] == pytest.approx(alone.norm().item(), rel=1e-12)


@pytest.mark.parametrize("limit", [0.01, 1e9])
def test_a_long_gradient_is_scaled_to_the_limit_and_its_norm_before_that_is_reported(limit: float) -> None:
    policy, algorithm = tiny_policy(), build_algorithm({"name": "dapo"})
    batch = batch_of(sampled_by(behaviour(policy)), ADVANTAGES, algorithm)
    whole, _ = gradient_of_update(policy, batch, objective_of(algorithm))
    moved = twin(policy)
    optimizer = torch.optim.SGD(moved.model.parameters(), lr=123.0)
    report = update(moved, optimizer, batch, objective_of(algorithm), UpdateOptions(max_grad_norm=limit), 0.5)
    assert report.grad_norms["policy"] == pytest.approx(whole.norm().item(), rel=1e-12)
    expected = 0.5 * whole * min(1.0, limit / whole.norm().item())
    # torch divides by the norm plus 1e-6.
    assert relative_distance(weights(policy) - weights(moved), expected) <= 1e-4
    assert report.learning_rate == 0.5


def test_decay_shrinks_matrices_and_no_norm_or_bias() -> None:
    policy = tiny_policy("qwen2")
    options = OptimizerOptions(learning_rate=0.1, weight_decay=0.5)
    optimizer = new_optimizer(policy.model.parameters(), options)
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    apply_gradients(optimizer, 0.1, 1.0)
    for name, parameter in policy.model.named_parameters():
        left = 1 - 0.1 * 0.5 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), left * before[name], rtol=1e-12, atol=0)


def test_the_learning_rate_rises_and_falls_as_stated() -> None:
    # Warm-up over 4 updates: lr/4, 2 lr/4, 3 lr/4, lr.  Then 8 updates of decay to update 12, where it is 0.
    def rates(schedule: str) -> list[float]:
        options = OptimizerOptions(learning_rate=2.0, warmup_steps=4, schedule=schedule)
        return [learning_rate(options, update, 12) for update in range(13)]

    assert rates("constant") == [0.5, 1.0, 1.5, *[2.0] * 10]
    assert rates("linear") == pytest.approx([0.5, 1.0, 1.5, 2.0, *(2.0 * left / 8 for left in range(8, -1, -1))])
    cosine = [1 + math.cos(math.pi * gone / 8) for gone in range(9)]
    assert rates("cosine") == pytest.approx([0.5, 1.0, 1.5, 2.0, *cosine], abs=1e-15)
    assert learning_rate(OptimizerOptions(learning_rate=2.0, schedule="linear"), 0, 10) == 2.0
    assert learning_rate(OptimizerOptions(learning_rate=2.0, schedule="cosine"), 20, 10) == 0.0
    assert learning_rate(OptimizerOptions(learning_rate=2.0, schedule="linear"), 1, 1) == 0.0


def test_entropies_that_are_only_measured_keep_no_graph_in_memory() -> None:
    policy, algorithm = tiny_policy(), build_algorithm({"name": "dapo"})
    batch = batch_of(sampled_by(behaviour(policy)), ADVANTAGES, algorithm)
    measured = token_view(policy, batch, replace(objective_of(algorithm), measure_entropy=True))
    assert not measured.entropies.requires_grad
    bonus = LossTerm(name="bonus", per_token=lambda view: -view.entropies, needs=frozenset({Need.ENTROPY}))
    learned = token_view(policy, batch, objective_of(replace(algorithm, terms=(*algorithm.terms, bonus))))
    assert learned.entropies.requires_grad


def test_entropy_is_measured_when_asked_and_changes_no_gradient() -> None:
    policy, algorithm = tiny_policy(), build_algorithm({"name": "dapo"})
    batch: Batch = batch_of(sampled_by(behaviour(policy)), ADVANTAGES, algorithm)
    plain, without = gradient_of_update(policy, batch, objective_of(algorithm))
    measured, metrics = gradient_of_update(policy, batch, replace(objective_of(algorithm), measure_entropy=True))
    assert "entropy" not in without
    assert torch.equal(plain, measured)
    rows = [(group.prompt.tokens, rollout.tokens) for group in GROUPS for rollout in group.rollouts]
    logits = [policy.model(input_ids=torch.tensor([[*p, *c]])).logits[0, len(p) - 1 : -1] for p, c in rows]
    chances = torch.softmax(torch.cat(logits).detach() / TEMPERATURE, -1)
    assert metrics["entropy"] == pytest.approx(-(chances * chances.log()).sum(-1).mean().item(), rel=1e-12)
