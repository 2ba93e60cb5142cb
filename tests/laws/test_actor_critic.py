"""What PPO has in common with the other rows, what its passes over a step may do, and the course's step beside it."""

import pytest
import torch
from torch import Tensor

import posttrain
from posttrain.algorithms.table import build_algorithm
from posttrain.course import compute_log_probs, grpo_step
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.policy import Policy
from posttrain.options.model import AdapterOptions
from posttrain.options.training import Passes, UpdateOptions
from posttrain.records import Group
from posttrain.runs.progress import Clock
from posttrain.training.metrics import UpdateReport
from tests.support.adapted import adapted_policy
from tests.support.refusals import refused
from tests.support.runs import SHAPE
from tests.support.stages import Stages, stages_with
from tests.support.tiny import flat_gradient, gradient_of, plain_logprobs, relative_distance, weights

KL = {"coefficient": 0.5, "estimator": "k1", "place": "reward"}
PPO = {"name": "ppo", "critic": {"fit_steps": 0}}
"""The policy learns from the first step on."""
ONE_PASS = {"epochs_per_step": 1, "minibatches_per_epoch": 1}
AS_RLOO = {"name": "ppo", "baseline": "leave_one_out", "whitening": "none", "token_weights": "sum_over_sequence"}
AS_RLOO |= {"gae": {"lambda_policy": 1.0}}


def gradient(stages: Stages) -> torch.Tensor:
    """What one step of gradient descent without clipping takes off the weights."""
    learner = stages.learner
    parameters = list(stages.policy.model.parameters())
    learner.optimizer = torch.optim.SGD([{"params": parameters, "max_grad_norm": 1e9}], lr=1.0)
    before = weights(stages.policy)
    stages.learn(stages.credited())
    return before - weights(stages.policy)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_without_a_critic_and_with_the_others_as_baseline_its_first_update_is_that_of_rloo(temperature: float) -> None:
    theirs = gradient(stages_with({"name": "rloo"}, temperature=temperature, **ONE_PASS))
    ours = gradient(stages_with(AS_RLOO, temperature=temperature, **ONE_PASS))
    assert theirs.norm() > 0.01
    assert relative_distance(ours, theirs) <= 1e-9  # sampler and trainer, and so the ratio from 1, differ by rounding
    later = gradient(stages_with({**AS_RLOO, "gae": {"lambda_policy": 0.5}}, temperature=temperature, **ONE_PASS))
    assert relative_distance(later, theirs) > 0.01


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_the_ratio_is_one_at_the_first_update_whatever_the_temperature(temperature: float) -> None:
    stages = stages_with(PPO, temperature=temperature, **ONE_PASS)
    told = stages.learn(stages.credited())
    assert (told["ratio/min"], told["ratio/max"]) == pytest.approx((1, 1), abs=1e-9)
    assert told["clip_ratio/region_mean"] == 0


def test_ppo_goes_over_a_step_twice_in_four_parts_where_the_recipe_leaves_it() -> None:
    assert build_algorithm({"name": "ppo"}).passes == Passes(epochs=2, minibatches=4)
    for options, updates in (({}, 8), ({"epochs_per_step": 3}, 12)):
        stages = stages_with({"name": "ppo", "largest_epoch_kl": None}, **options)
        assert stages.learn(stages.credited())["num_updates"] == updates
    assert UpdateOptions(minibatches_per_epoch=2).passes(Passes()) == Passes(epochs=1, minibatches=2)
    assert stages_with({"name": "grpo"}).learner.passes == Passes()


def updated(stages: Stages, most: int | None = None) -> tuple[list[UpdateReport], Tensor]:
    """The reports of one step's updates, of the first if so asked, and the policy's weights behind them."""
    batches = stages.learner.batches(credited := stages.credited(), Clock())
    stages.learner.remember(credited)
    reports = stages.learner.learn(batches[:most], 1, Clock())
    return reports, weights(stages.policy)


def test_an_update_is_not_taken_where_the_policy_has_gone_too_far_before_it() -> None:
    """As in Spinning Up and Stable-Baselines3.  At a rate of .01 each update moves the tiny policy 1e-4 nats and more.

    The limit is put between what the second update finds and what the third finds.
    """
    free, _ = updated(stages_with({**PPO, "largest_epoch_kl": None}))
    found = [report.kl_behaviour for report in free]
    assert len(found) == 8
    assert abs(found[0]) < 1e-9
    for taken in (1, 2):  # of which the update that comes next finds more than all before it
        limit = (found[taken] + max(found[:taken])) / 2
        assert found[taken] > limit > max(found[:taken])
        stages = stages_with({**PPO, "largest_epoch_kl": limit})
        reports, moved = updated(stages)
        assert (len(reports), stages.learner.left_out, stages.learner.num_updates) == (taken, 8 - taken, taken)
        assert all(each.grad is None for each in stages.policy.model.parameters())
        assert torch.equal(moved, updated(stages_with({**PPO, "largest_epoch_kl": None}), taken)[1])


def test_the_noise_of_an_adapters_dropout_is_not_taken_for_a_distance() -> None:
    """The first update finds nothing but that noise, here far above the limit, and is taken."""
    policy = adapted_policy(options=AdapterOptions(rank=3, alpha=6, dropout=0.5))
    stages = stages_with({**PPO, "largest_epoch_kl": 1e-9}, policy=policy)
    reports, _ = updated(stages)
    assert reports[0].kl_behaviour > 1e-9
    assert all(report.kl_behaviour <= reports[0].kl_behaviour + 1e-9 for report in reports)
    assert len(reports) + stages.learner.left_out == 8


def test_evaluations_and_dry_runs_leave_no_trace_in_what_a_run_remembers() -> None:
    """Credit is made of them too; only what is learned from is remembered."""
    stages = stages_with({"name": "ppo", "kl": KL, "adaptive_kl": {"target": 1.0}, "reward_scaling": {}})
    before = stages.learner.actor_critic_state
    credited = stages.credited()
    assert stages.learner.actor_critic_state == before != credited.next_state
    stages.learner.remember(credited)
    assert stages.learner.actor_critic_state == credited.next_state


def test_the_adaptive_coefficient_is_what_the_next_steps_rewards_lose() -> None:
    # The reference is the policy: the KL is 0, which is 100 % below the target, and -.2 · 20 / 20 is its limit.
    stages = stages_with({**PPO, "kl": KL, "adaptive_kl": {"target": 1.0, "horizon": 20.0}})
    credited = stages.credited()
    assert (credited.metrics["kl_coefficient"], credited.metrics["kl_completion"]) == (0.5, pytest.approx(0, abs=1e-6))
    stages.learn(credited)
    assert stages.credited(2).metrics["kl_coefficient"] == pytest.approx(0.4)


def test_a_policy_that_stands_still_says_nothing_of_its_kl_coefficient() -> None:
    """While the critic learns alone the KL is 0, whatever the coefficient is: lowering it would follow from nothing."""
    config = {"name": "ppo", "kl": KL, "adaptive_kl": {"target": 1.0, "horizon": 20.0}}
    stages = stages_with({**config, "critic": {"fit_steps": 2, "rate_scale": 1e-9}})
    told = []
    for step in (1, 2, 3, 4, 5):
        credited = stages.credited(step)
        stages.learn(credited)
        told.append((credited.metrics["value/critic_alone"], credited.metrics["kl_coefficient"]))
    assert told[:4] == [(1.0, 0.5), (1.0, 0.5), (0.0, 0.5), (0.0, 0.5)]
    assert told[4][1] != 0.5


def test_the_scaled_rewards_are_what_credit_is_made_of() -> None:
    stages = stages_with({"name": "ppo", "reward_scaling": {}, "whitening": "none"})
    credited = stages.credited()
    rewards = credited.collected.grades.rewards
    expected = (rewards - rewards.mean()) / rewards.std(correction=0)
    lengths = torch.tensor([len(rollout.tokens) for group in credited.collected.groups for rollout in group.rollouts])
    returns = credited.groups.columns.returns
    torch.testing.assert_close(returns, expected.flatten().repeat_interleave(lengths))
    assert credited.metrics["reward_scaled"] == pytest.approx(0, abs=1e-12)
    assert credited.metrics["value/mean"] == pytest.approx(0, abs=1e-6), "a new critic expects the mean of these"
    assert rewards.mean() > 1


def test_what_is_told_of_scaled_rewards_is_their_mean() -> None:
    stages = stages_with({"name": "ppo", "reward_scaling": {"centre": False, "clip": None}, "whitening": "none"})
    credited = stages.credited()
    rewards = credited.collected.grades.rewards
    assert credited.metrics["reward_scaled"] == pytest.approx((rewards.mean() / rewards.std(correction=0)).item())


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
ASKED = [[{"role": "user", "content": "15 * 23?"}]]
TEMPERATURE, TOKENS, SEED = 0.7, 5, 11


@pytest.fixture
def policy() -> Policy:
    tokenizer = new_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return posttrain.as_policy(new_model(SHAPE, tokenizer, seed=0).double(), tokenizer)


def sampled(policy: Policy, seed: int = SEED) -> Group:
    """What a step of this seed samples."""
    options = {"group_size": 4, "temperature": TEMPERATURE, "max_completion_tokens": TOKENS}
    return posttrain.generate(policy, ASKED, seed=seed, **options)[0]  # type: ignore[arg-type]


def step(policy: Policy, reward: object, seed: int | None = SEED) -> tuple[float, float, list[str]]:
    model, tokenizer = policy.model, policy.tokenizer
    return grpo_step(model, tokenizer, "15 * 23?", "345", reward, 4, TEMPERATURE, TOKENS, seed=seed)  # type: ignore[arg-type]


def graded(policy: Policy, rewards: list[float], seed: int = SEED) -> tuple[float, Tensor]:
    """Loss and gradient of -(1/G) Σ (r - mean r) Σ_t log π, through the model's own forward pass, row by row."""
    group, mean = sampled(policy, seed), sum(rewards) / 4
    rows = [plain_logprobs(policy.model, group.prompt.tokens, each.tokens, TEMPERATURE) for each in group.rollouts]
    loss = torch.stack([-(reward - mean) * row.sum() / 4 for reward, row in zip(rewards, rows, strict=True)]).sum()
    return loss.item(), gradient_of(policy, loss)


def test_log_probs_are_the_models_own_and_have_their_gradient(policy: Policy) -> None:
    prompt = policy.tokenizer("12+30=")["input_ids"]
    response = policy.tokenizer("42 or so")["input_ids"]
    for given, tokens in (("42 or so", response), ([*response, policy.stop_ids[0]],) * 2):
        total = compute_log_probs(policy.model, policy.tokenizer, "12+30=", given)
        expected = plain_logprobs(policy.model, prompt, tokens).sum()
        assert total.item() == pytest.approx(expected.item(), rel=1e-6)
        assert relative_distance(gradient_of(policy, total), gradient_of(policy, expected)) < 1e-5
    with refused("response: is empty"):
        compute_log_probs(policy.model, policy.tokenizer, "12+30=", "")


def test_a_step_leaves_the_gradient_of_the_course_s_equation_beside_what_was_there(policy: Policy) -> None:
    rewards = [1.0, -0.5, 1.0, -1.0]
    loss, gradient = graded(policy, rewards)
    given = iter(rewards)
    told: list[tuple[str, str]] = []

    def reward_fn(response: str, ground_truth: str) -> float:
        told.append((response, ground_truth))
        return next(given)

    found, mean_reward, responses = step(policy, reward_fn)
    assert found == pytest.approx(loss, rel=1e-6)
    assert mean_reward == 0.125
    assert responses == [rollout.text for rollout in sampled(policy).rollouts]
    assert told == [(response, "345") for response in responses]
    assert relative_distance(flat_gradient(policy), gradient) < 1e-5

    given = iter(rewards)
    step(policy, reward_fn)  # the caller's zero_grad was not called
    assert relative_distance(flat_gradient(policy), 2 * gradient) < 1e-5


def test_a_group_of_one_reward_costs_nothing_and_teaches_nothing(policy: Policy) -> None:
    loss, mean_reward, responses = step(policy, lambda response, truth: 0.9)
    assert (loss, mean_reward, len(responses)) == (0.0, pytest.approx(0.9), 4)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_responses_are_decided_by_the_seed_or_else_by_torch_s_own(policy: Policy) -> None:
    def responses(seed: int | None) -> list[str]:
        return step(policy, lambda response, truth: 0.0, seed)[2]

    assert responses(1) == responses(1) != responses(2)
    torch.manual_seed(5)
    first, second = responses(None), responses(None)
    torch.manual_seed(5)
    assert (responses(None), first) == (first, first)
    assert second != first


@pytest.mark.parametrize(("G", "temperature", "says"), [(1, 0.7, "G = 1"), (4, 0.0, "temperature = 0")])
def test_a_group_that_cannot_differ_is_refused(policy: Policy, G: int, temperature: float, says: str) -> None:
    with refused(says, "two different responses"):
        grpo_step(policy.model, policy.tokenizer, "?", "", lambda response, truth: 0.0, G, temperature)


def test_steps_make_what_is_rewarded_likelier(policy: Policy) -> None:
    def vowel(text: str, vowels: str) -> float:
        return float(bool(set(text) & set(vowels)))

    optimizer = torch.optim.Adam(policy.model.parameters(), lr=0.05)
    rewards = []
    for seed in range(20):
        optimizer.zero_grad()
        rewards.append(grpo_step(policy.model, policy.tokenizer, "?", "aeiou", vowel, 16, 1.0, 2, seed=seed)[1])
        optimizer.step()
    assert sum(rewards[:5]) / 5 < 0.7
    assert sum(rewards[-5:]) / 5 > 0.85
