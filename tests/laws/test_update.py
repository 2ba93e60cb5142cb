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
from posttrain.training.optimizer import apply_gradients, learning_rate, new_optimizer
from posttrain.training.reference import FrozenCopy
from posttrain.training.update import Objective, group_logprobs, token_view, update
from tests.support import tiny
from tests.support.refusals import refused
from tests.support.sequences import resampled
from tests.support.tiny import tiny_policy

LENGTHS = [2, 1, 4, 3, 2, 1]
ROLLOUT = torch.arange(6).repeat_interleave(torch.tensor(LENGTHS))
PER_TOKEN = torch.tensor(tiny.SIX_ADVANTAGES).double().flatten().repeat_interleave(torch.tensor(LENGTHS))
TEMPERATURE = 0.8
UNCLIPPED = {"clip_low": 1.0, "clip_high": math.inf}


def logprobs_of(policy: Policy) -> torch.Tensor:
    """log π of all tokens, through the Hugging Face model."""
    return torch.cat([tiny.plain_logprobs(policy.model, *row, TEMPERATURE) for row in tiny.rows_of(tiny.SIX)])


def vocab_logprobs_of(policy: Policy) -> torch.Tensor:
    return torch.cat([tiny.vocab_logprobs(policy.model, *row, TEMPERATURE) for row in tiny.rows_of(tiny.SIX)])


def behaviour(policy: Policy, shift: float = 0.0) -> torch.Tensor:
    """log μ: what the policy says now, moved by a different amount for each token."""
    numbers = logprobs_of(policy).detach()
    return numbers + shift * torch.linspace(-1, 1, len(numbers), dtype=torch.float64)


def objective_of(algorithm: Algorithm, reference: Policy | None = None) -> Objective:
    kept = None if reference is None else FrozenCopy(reference)
    return Objective(algorithm=algorithm, temperature=TEMPERATURE, reference=kept)


def batch_by(algorithm: Algorithm, log_mu: torch.Tensor | Policy, log_ref: torch.Tensor | None = None) -> Batch:
    """The completions as they were sampled at these log-probs, or by this policy as it is."""
    parts = iter((behaviour(log_mu) if isinstance(log_mu, Policy) else log_mu).split(LENGTHS))
    groups = [
        replace(group, rollouts=tuple(resampled(r, logprobs=tuple(next(parts).tolist())) for r in group.rollouts))
        for group in tiny.SIX
    ]
    return tiny.batch_of(groups, tiny.SIX_ADVANTAGES, algorithm, reference_logprobs=log_ref)


def assert_update(
    policy: Policy, algorithm: Algorithm, batch: Batch, expected: torch.Tensor, reference: Policy | None = None
) -> dict[str, float]:
    """The update's loss and gradient are those of the formula; its metrics."""
    actual, metrics = tiny.gradient_of_update(policy, batch, objective_of(algorithm, reference))
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-12, abs=1e-12)
    assert tiny.relative_distance(actual, tiny.gradient_of(policy, expected)) <= 1e-12
    return metrics


def test_on_policy_the_gradient_is_minus_the_advantage_weighted_score() -> None:
    policy, algorithm = tiny_policy(), build_algorithm({"name": "grpo", "token_weights": "mean_over_tokens"})
    actual, metrics = tiny.gradient_of_update(policy, batch_by(algorithm, policy), objective_of(algorithm))
    expected = tiny.gradient_of(policy, -(PER_TOKEN * logprobs_of(policy)).sum() / 13)
    assert tiny.relative_distance(actual, expected) <= 1e-12
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
    log_mu, own = behaviour(policy, shift=shift), logprobs_of(policy)
    ratio = (own - log_mu).exp()
    token_losses = -torch.minimum(ratio * PER_TOKEN, ratio.clamp(0.9, 1.3) * PER_TOKEN)
    shares = 1 / (6 * torch.tensor(LENGTHS).double()[ROLLOUT])
    metrics = assert_update(policy, algorithm, batch_by(algorithm, log_mu), (shares * token_losses).sum())
    high, low, gap = (PER_TOKEN > 0) & (ratio > 1.3), (PER_TOKEN < 0) & (ratio < 0.9), (own - log_mu).abs()
    assert min(metrics["clip_ratio/high_mean"], metrics["clip_ratio/low_mean"]) > 0
    expected = {
        "clip_ratio/high_mean": high.double().mean(),
        "clip_ratio/low_mean": low.double().mean(),
        "clip_ratio/region_mean": (high | low).double().mean(),
        "ratio/min": ratio.min(),
        "ratio/max": ratio.max(),
        "kl_behaviour": (ratio - 1 - ratio.log()).mean(),
        "sampling/sampling_logp_difference/mean": gap.mean(),
        "sampling/sampling_logp_difference/max": gap.max(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx({n: v.item() for n, v in expected.items()})


def test_the_ratio_can_be_taken_to_the_reference() -> None:
    policy, reference = tiny_policy(), tiny_policy(seed=1)
    algorithm = build_algorithm({"name": "grpo", "ratio_to": "reference", **UNCLIPPED})
    log_ref = behaviour(reference)
    batch = tiny.batch_of(tiny.SIX, tiny.SIX_ADVANTAGES, algorithm, reference_logprobs=log_ref)
    ratio = (logprobs_of(policy) - log_ref).exp()
    expected = (-ratio * PER_TOKEN / (6 * torch.tensor(LENGTHS).double()[ROLLOUT])).sum()
    assert_update(policy, algorithm, batch, expected, reference)


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "full"])
def test_a_kl_in_the_loss_is_differentiated(family: str, estimator: str) -> None:
    policy, reference = tiny_policy(family), tiny_policy(family, seed=1)
    kl = {"coefficient": 0.3, "estimator": estimator}
    algorithm = build_algorithm({"name": "dapo", "kl": kl, **UNCLIPPED})
    log_mu, log_ref, own = behaviour(policy, shift=0.1), behaviour(reference), logprobs_of(policy)
    if estimator == "full":
        mine, theirs = map(vocab_logprobs_of, (policy, reference))
        term = (mine.exp() * (mine - theirs.detach())).sum(-1)
    else:
        x = own - log_ref
        term = {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) - 1 + x}[estimator]
    expected = (-(own - log_mu).exp() * PER_TOKEN + 0.3 * term).mean()
    metrics = assert_update(policy, algorithm, batch_by(algorithm, log_mu, log_ref), expected, reference)
    assert metrics["kl"] == pytest.approx(term.mean().item(), rel=1e-12)


def test_a_kl_in_the_reward_is_reported_as_k3_and_is_no_term_of_the_loss() -> None:
    policy, reference = tiny_policy(), tiny_policy(seed=1)
    kl = {"coefficient": 0.3, "estimator": "k1", "place": "reward"}
    log_mu, log_ref = behaviour(policy), behaviour(reference)
    gradients = []
    for term in (kl, None):
        algorithm = build_algorithm({"name": "grpo", "kl": term})
        batch = batch_by(algorithm, log_mu, log_ref)
        gradient, metrics = tiny.gradient_of_update(policy, batch, objective_of(algorithm))
        gradients.append(gradient)
        x = log_mu - log_ref
        assert metrics["kl"] == pytest.approx((torch.exp(-x) - 1 + x).mean().item(), rel=1e-9)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("max_tokens", [2, 12, 1000])
def test_reference_log_probs_are_those_of_the_model_in_order(max_tokens: int) -> None:
    reference = tiny_policy(seed=1)
    actual = group_logprobs(reference, tiny.SIX, temperature=TEMPERATURE, max_tokens=max_tokens)
    torch.testing.assert_close(actual, behaviour(reference), rtol=0, atol=1e-12)


def test_reference_log_probs_keep_to_the_token_budget_also_within_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    policy = tiny_policy()
    original = policy.forward.completion_hidden

    def counted(batch):
        sizes.append(sum(map(len, batch.prompts)) + sum(map(len, batch.completions)))
        return original(batch)

    monkeypatch.setattr(policy.forward, "completion_hidden", counted)
    budget = max(len(prompt) + len(completion) for prompt, completion in tiny.rows_of(tiny.SIX))
    group_logprobs(policy, tiny.SIX, temperature=TEMPERATURE, max_tokens=budget)
    assert max(sizes) <= budget
    assert len(sizes) > len(tiny.SIX)


def test_a_frozen_copy_does_not_follow_the_policy() -> None:
    policy = tiny_policy()
    reference, before = FrozenCopy(policy).policy, tiny.weights(policy)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1.0)
    assert torch.equal(tiny.weights(reference), before)
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
def test_the_stop_token_is_trained(family: str) -> None:
    # Stop tokens 5 and 11 end two completions; only the completion (15, 11) has an advantage here.
    policy, algorithm = tiny_policy(family), build_algorithm({"name": "dapo"})
    prompt, completion = (10, 11), (15, 11)
    batch = tiny.batch_of(tiny.SIX, [[0, 0, 0], [0, 1.0, 0]], algorithm)
    assert batch.tokens.tolist() == [15, 11]
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
    before = tiny.plain_logprobs(policy.model, prompt, completion).detach()
    update(policy, optimizer, batch, objective_of(algorithm), UpdateOptions(), 0.05)
    after = tiny.plain_logprobs(policy.model, prompt, completion).detach()
    assert (after > before).all()


def test_no_update_trains_a_token_of_the_prompt() -> None:
    # With an untied head, the row of a token that only prompts hold gets the gradient of softmax alone: positive
    # logits slope for every row whose token was not sampled, so descending lowers it everywhere.
    policy, algorithm = tiny_policy("llama"), build_algorithm({"name": "dapo"})
    group = tiny.written_group((20, 21, 22), [(1, 2), (3, 4)])
    batch = tiny.batch_of([group], [[1.0, 1.0]], algorithm)
    hidden_rows = [(*group.prompt.tokens, *rollout.tokens[:-1]) for rollout in group.rollouts]
    gradient, _ = tiny.gradient_of_update(policy, batch, Objective(algorithm=algorithm, temperature=1.0))
    names = [name for name, _ in policy.model.named_parameters()]
    sizes = [parameter.numel() for parameter in policy.model.parameters()]
    head = gradient.split(sizes)[names.index("lm_head.weight")].view(-1, 16)
    slope = torch.zeros_like(head)
    for row, rollout in zip(hidden_rows, group.rollouts, strict=True):
        states = policy.model.model(input_ids=torch.tensor([row])).last_hidden_state[0, 2:].detach()
        chances = torch.softmax(states @ policy.model.lm_head.weight.detach().T, -1)
        now = tiny.plain_logprobs(policy.model, group.prompt.tokens, rollout.tokens).detach()
        ratios = (now - torch.tensor(rollout.logprobs, dtype=torch.float64)).exp()
        slope[20:23] += ((ratios[:, None] * chances).T @ states)[20:23] / 4
    torch.testing.assert_close(head[20:23], slope[20:23], rtol=0, atol=1e-12)


def trained_once() -> tuple[Policy, torch.optim.Optimizer, Algorithm, UpdateOptions]:
    """A policy whose optimiser has momentum."""
    policy, algorithm = tiny_policy(), build_algorithm({"name": "dapo"})
    options = UpdateOptions(learning_rate=1e-2)
    optimizer = new_optimizer(policy.model.parameters(), options)
    batch = batch_by(algorithm, policy)
    update(policy, optimizer, batch, objective_of(algorithm), options, 1e-2)
    return policy, optimizer, algorithm, options


def test_a_zero_gradient_would_move_weights_that_have_momentum() -> None:
    # Why a step without signal must take no optimiser step at all.
    policy, optimizer, _, _ = trained_once()
    before = tiny.weights(policy)
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    apply_gradients(optimizer, 1e-2, 1.0)
    assert not torch.equal(tiny.weights(policy), before)


@pytest.mark.parametrize("budget", [1000, 8], ids=["one_micro_batch", "after_another_that_was_fine"])
def test_a_loss_that_is_no_number_stops_before_the_step_and_names_the_completion(budget: int) -> None:
    policy, optimizer, _, options = trained_once()
    log_mu = behaviour(policy)
    log_mu[10] = -math.inf  # second token of prompt b's second completion: π/μ is infinite
    algorithm = build_algorithm({"name": "rloo"})
    batch, before = batch_by(algorithm, log_mu), tiny.weights(policy)
    options = replace(options, tokens_per_microbatch=budget)
    with refused("prompt b, sample 1: the loss of a token is", error=RunError):
        update(policy, optimizer, batch, objective_of(algorithm), options, 1e-2)
    assert torch.equal(tiny.weights(policy), before)
    # Nor does anything of it reach the next update.
    sound = batch_by(algorithm, policy)
    alone, _ = tiny.gradient_of_update(tiny.twin(policy), sound, objective_of(algorithm))
    report = update(policy, optimizer, sound, objective_of(algorithm), options, 1e-2)
    assert report.grad_norms["policy"] == pytest.approx(alone.norm().item(), rel=1e-12)


def test_a_gradient_that_is_no_number_stops_before_the_step() -> None:
    policy, optimizer, algorithm, options = trained_once()
    batch = batch_by(algorithm, policy)
    before = tiny.weights(policy)
    policy.model.model.norm.weight.register_hook(lambda grad: grad * math.inf)
    with refused("gradient's norm (policy) is", error=RunError):
        update(policy, optimizer, batch, objective_of(algorithm), options, 1e-2)
    assert torch.equal(tiny.weights(policy), before)


@pytest.mark.parametrize("limit", [0.01, 1e9])
def test_a_long_gradient_is_scaled_to_the_limit_and_its_norm_before_that_is_reported(limit: float) -> None:
    policy, algorithm = tiny_policy(), build_algorithm({"name": "dapo"})
    batch = batch_by(algorithm, policy)
    whole, _ = tiny.gradient_of_update(policy, batch, objective_of(algorithm))
    moved = tiny.twin(policy)
    optimizer = torch.optim.SGD(moved.model.parameters(), lr=123.0)
    report = update(moved, optimizer, batch, objective_of(algorithm), UpdateOptions(max_grad_norm=limit), 0.5)
    assert report.grad_norms["policy"] == pytest.approx(whole.norm().item(), rel=1e-12)
    expected = 0.5 * whole * min(1.0, limit / whole.norm().item())
    # torch divides by the norm plus 1e-6.
    assert tiny.relative_distance(tiny.weights(policy) - tiny.weights(moved), expected) <= 1e-4
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
    batch = batch_by(algorithm, policy)
    measured = token_view(policy, batch, replace(objective_of(algorithm), measure_entropy=True))
    assert not measured.entropies.requires_grad
    bonus = LossTerm(name="bonus", per_token=lambda view: -view.entropies, needs=frozenset({Need.ENTROPY}))
    learned = token_view(policy, batch, objective_of(replace(algorithm, terms=(*algorithm.terms, bonus))))
    assert learned.entropies.requires_grad


def test_entropy_is_measured_when_asked_and_changes_no_gradient() -> None:
    policy, algorithm = tiny_policy(), build_algorithm({"name": "dapo"})
    batch = batch_by(algorithm, policy)
    plain, without = tiny.gradient_of_update(policy, batch, objective_of(algorithm))
    measured, metrics = tiny.gradient_of_update(policy, batch, replace(objective_of(algorithm), measure_entropy=True))
    assert "entropy" not in without
    assert torch.equal(plain, measured)
    logs = vocab_logprobs_of(policy).detach()
    assert metrics["entropy"] == pytest.approx(-(logs.exp() * logs).sum(-1).mean().item(), rel=1e-12)
