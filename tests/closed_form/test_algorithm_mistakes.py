"""What is said of an algorithm of one's own whose functions return something else than they are to return."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Credit, Evidence, per_rollout
from posttrain.algorithms.losses import mean_over_tokens
from posttrain.algorithms.table import grpo
from posttrain.algorithms.terms import KlTerm, LossTerm, TokenView, kl_term
from posttrain.errors import RunError
from posttrain.needs import Need
from tests.support.refusals import refused
from tests.support.stages import even_tokens, stages_with

NAN = math.nan


def own(**parts: object) -> Algorithm:
    """GRPO with parts of one's own, by the name of mine."""
    return replace(grpo(), name="mine", **parts)


def with_term(per_token: Callable[[TokenView], object], **options: object) -> Algorithm:
    return own(terms=(*grpo().terms, LossTerm(name="bonus", per_token=per_token, **options)))


def step_with(algorithm: Algorithm, reward: object = even_tokens, **update: object) -> dict[str, float]:
    stages = stages_with(algorithm, reward, **update)
    return stages.learn(stages.credited())


# As it is put together: past the checks of types that tests have and users have not.

POLICY, KL = grpo().terms[0], kl_term(KlTerm(coefficient=1.0))
PARTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"terms": ()}, ("terms = ()", "give a tuple of LossTerm")),
    ({"terms": 5}, ("terms = 5", "give a tuple of LossTerm")),
    ({"terms": POLICY}, ("terms = LossTerm(", "give a tuple of LossTerm")),
    ({"terms": (POLICY, 5)}, ("terms = (LossTerm(", "give a tuple of LossTerm")),
    ({"terms": (POLICY, POLICY)}, ("2 terms", "name 'policy'")),
    ({"terms": (KL, replace(KL, name="more"))}, ("2 terms", "metric 'kl'")),
    ({"token_weights": "mean_over_tokens"}, ("token_weights = 'mean_over_tokens' (str)", "give a function")),
    ({"credit": None}, ("credit = None (NoneType)", "give a function")),
]


@pytest.mark.parametrize(("parts", "words"), PARTS, ids=lambda value: str(value)[:40])
def test_what_cannot_be_an_algorithm_is_refused_as_it_is_made(parts: dict[str, Any], words: tuple[str, ...]) -> None:
    made = {"name": "mine", "credit": len, "token_weights": mean_over_tokens, "terms": (POLICY,), **parts}
    with refused("algorithm mine", *words):
        Algorithm.__post_init__(SimpleNamespace(**made))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"needs": {"entropies"}}, ("needs = {'entropies'}", "entropy, full_kl, proximal_logprobs")),
        ({"needs": "entropy"}, ("needs = 'entropy'", "give a set")),
        ({"needs": 5}, ("needs = 5", "give a set")),
        ({"metric": "reward"}, ("metric = 'reward'", "loss/bonus")),
    ],
    ids=str,
)
def test_what_cannot_be_a_term_is_refused_as_it_is_made(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with refused("loss term bonus", *words):
        LossTerm.__post_init__(SimpleNamespace(**{"name": "bonus", "metric": None, "needs": (), **options}))


def test_a_need_may_be_given_by_its_name() -> None:
    given = SimpleNamespace(name="bonus", metric=None, needs=["entropy", Need.FULL_KL])
    LossTerm.__post_init__(given)
    assert given.needs == frozenset({Need.ENTROPY, Need.FULL_KL})
    assert {type(need) for need in given.needs} == {Need}


def flat(evidence: Evidence) -> Tensor:
    return torch.ones(len(evidence.rollout), dtype=torch.float64)


CREDITS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a tensor": (flat, ("a tensor [", "Credit(advantages)")),
    "one for each completion": (
        lambda evidence: Credit(evidence.rewards.flatten()),
        ("a tensor [20] of float64 as advantages", "completion tokens", "per_rollout"),
    ),
    "of two dimensions": (lambda evidence: Credit(flat(evidence)[:, None]), (", 1] of float64 as advantages",)),
    "whole numbers": (lambda evidence: Credit(flat(evidence).long()), ("] of int64 as advantages",)),
    "no advantages": (lambda evidence: Credit(None), ("None (NoneType) as advantages",)),
    "a return too few": (
        lambda evidence: Credit(flat(evidence), returns=flat(evidence)[1:]),
        ("of float64 as returns",),
    ),
    "too few for completions": (per_rollout(lambda rewards: rewards.mean(dim=1)), ("<lambda>", "[5]", "[5, 4]")),
    "a number for completions": (per_rollout(lambda rewards: 5.0), ("<lambda>", "float", "[5, 4]")),
}


@pytest.mark.parametrize("name", CREDITS)
def test_credit_of_another_shape_is_told_with_the_one_that_it_should_have(name: str) -> None:
    rule, words = CREDITS[name]
    with refused(*words, error=RunError):
        stages_with(own(credit=rule)).credited()


@pytest.mark.parametrize("column", ["advantages", "returns"])
def test_credit_that_is_no_number_names_the_completion(column: str) -> None:
    def rule(evidence: Evidence) -> Credit:
        columns = {"advantages": flat(evidence), "returns": flat(evidence)}
        columns[column][evidence.rollout == 6] = math.inf  # the third of the second group of four
        return Credit(**columns)

    with refused("algorithm mine", f"prompt draw 1, sample 2, inf as {column}", "division by 0", error=RunError):
        stages_with(own(credit=rule)).credited()


def one_unscored(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float | None]:
    """The second completion of the fourth group of four has no score."""
    scores: list[float | None] = [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]
    scores[13] = None
    return scores


def test_a_mean_over_an_unscored_rollout_is_told_as_what_it_is() -> None:
    naive = per_rollout(lambda rewards: rewards - rewards.mean(dim=1, keepdim=True))
    with refused("prompt draw 3, sample 0, nan", "1 rollouts of that prompt", "rewards.nanmean", error=RunError):
        stages_with(own(credit=naive), one_unscored).credited()
    with refused("prompt draw 0, sample 0, nan", "another prompt", error=RunError):
        stages_with(own(credit=per_rollout(lambda rewards: rewards - rewards.mean())), one_unscored).credited()

    def careful(rewards: Tensor) -> Tensor:
        """What the message says."""
        return torch.where(rewards.isnan(), 0.0, rewards - rewards.nanmean(dim=1, keepdim=True))

    assert step_with(own(credit=per_rollout(careful)), one_unscored)["num_updates"] == 1


LOSSES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a scalar": (lambda view: view.logprobs.mean(), ("a tensor [] of float64", "for each token")),
    "too few": (lambda view: view.logprobs[1:], ("] of float64", "for each token")),
    "a number": (lambda view: 1.0, ("1.0 (float)", "floating-point")),
    "whole numbers": (lambda view: view.rollout, ("] of int64", "floating-point")),
    "an undeclared entropy": (lambda view: -view.entropies, ("`entropies`", "Need.ENTROPY", "`needs`")),
    "an undeclared reference": (
        lambda view: view.logprobs - view.columns.reference_logprobs,
        ("`reference_logprobs`", "Need.REFERENCE_LOGPROBS"),
    ),
    "returns that nobody gave": (lambda view: view.columns.returns.square(), ("`returns`", "credit rule")),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_term_that_gives_no_loss_to_each_token_is_named(name: str) -> None:
    per_token, words = LOSSES[name]
    with refused("algorithm mine", "loss term bonus", *words, error=RunError):
        step_with(with_term(per_token))


def test_what_was_computed_for_others_is_not_seen_by_a_term_that_does_not_ask() -> None:
    # With `measure_entropy` entropies are there without their gradient: a bonus made of them would do nothing.
    undeclared, declared = with_term(lambda view: -view.entropies), {"needs": frozenset({Need.ENTROPY})}
    with refused("loss term bonus", "`entropies`", error=RunError):
        step_with(undeclared, measure_entropy=True)
    assert step_with(with_term(lambda view: -view.entropies, **declared), measure_entropy=True)["num_updates"] == 1


def test_an_error_of_the_terms_own_stays_what_it_is() -> None:
    with refused("argument", error=TypeError):
        step_with(with_term(lambda: None))


def test_a_term_that_is_no_number_is_named_beside_those_that_are() -> None:
    broken = with_term(lambda view: (view.logprobs - view.logprobs).log() * 0)
    with refused("prompt draw", "the loss of a token is nan", "policy", "nan by its term bonus", error=RunError):
        step_with(broken)


def scaled(factor: float) -> Callable[..., Tensor]:
    def rule(lengths: Tensor, scored: Tensor, *, max_completion_tokens: int) -> Tensor:
        weights = mean_over_tokens(lengths, scored, max_completion_tokens=max_completion_tokens).clone()
        weights[7] *= factor
        return weights

    return rule


def for_each_token(lengths: Tensor, scored: Tensor, *, max_completion_tokens: int) -> Tensor:
    return torch.ones(int(lengths.sum()), dtype=torch.float64)


WEIGHTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "for each token": (for_each_token, ("for_each_token", "] of float64", "each of the 20 rollouts")),
    "nan": (scaled(NAN), ("gave rollout 7 of 20 the weight nan", "finite")),
    "negative": (scaled(-1.0), ("gave rollout 7 of 20 the weight -0.", "at least 0")),
    "nothing": (lambda *given, **named: None, ("<lambda>", "None (NoneType)")),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_are_none_are_named_with_their_rule(name: str) -> None:
    rule, words = WEIGHTS[name]
    with refused("algorithm mine: its rule of token weights", *words, error=RunError):
        step_with(own(token_weights=rule))
