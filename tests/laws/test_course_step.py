"""The course's step over a model in memory has the gradient of its equation, and its log-probs are the model's own."""

import pytest
import torch
from torch import Tensor

import posttrain
from posttrain.course import compute_log_probs, grpo_step
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.policy import Policy
from posttrain.records import Group
from tests.support.refusals import refused
from tests.support.runs import SHAPE
from tests.support.tiny import flat_gradient, plain_logprobs, relative_distance

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
    policy.model.zero_grad(set_to_none=True)
    loss = sum(
        -(reward - mean) * plain_logprobs(policy.model, group.prompt.tokens, rollout.tokens, TEMPERATURE).sum() / 4
        for reward, rollout in zip(rewards, group.rollouts, strict=True)
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    gradient = flat_gradient(policy)
    policy.model.zero_grad(set_to_none=True)
    return loss.item(), gradient


def test_log_probs_are_the_models_own_and_have_their_gradient(policy: Policy) -> None:
    prompt = policy.tokenizer("12+30=")["input_ids"]
    response = policy.tokenizer("42 or so")["input_ids"]
    total = compute_log_probs(policy.model, policy.tokenizer, "12+30=", "42 or so")
    total.backward()
    ours = flat_gradient(policy)
    policy.model.zero_grad(set_to_none=True)
    expected = plain_logprobs(policy.model, prompt, response).sum()
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert relative_distance(ours, flat_gradient(policy)) < 1e-5
    stop = policy.stop_ids[0]
    with_stop = compute_log_probs(policy.model, policy.tokenizer, "12+30=", [*response, stop])
    assert with_stop.item() == pytest.approx(
        plain_logprobs(policy.model, prompt, [*response, stop]).sum().item(), rel=1e-6
    )
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
