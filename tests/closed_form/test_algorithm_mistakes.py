"""What is said of an algorithm of one's own whose functions return something else than they are to return."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Credit, Evidence, per_rollout
from posttrain.algorithms.table import grpo
from posttrain.algorithms.terms import LossTerm, TokenView
from posttrain.algorithms.token_weights import mean_over_tokens
from posttrain.errors import RunError, UserError
from posttrain.needs import Need
from tests.support.stages import even_tokens, stages_with

NAN = math.nan


def flat_credit(evidence: Evidence) -> Credit:
    raise AssertionError("nobody asks for credit here")


def own(**parts: object) -> Algorithm:
    """GRPO with parts of one's own, by the name of mine."""
    return replace(grpo(), name="mine", **parts)


def with_term(per_token: Callable[[TokenView], object], **options: object) -> Algorithm:
    return own(terms=(*grpo().terms, LossTerm(name="bonus", per_token=per_token, **options)))


def step_with(algorithm: Algorithm, reward: object = even_tokens, **update: object) -> dict[str, float]:
    stages = stages_with(algorithm, reward, **update)
    return stages.learn(stages.credited())


# As it is put together.

MISTAKES = {
    "no term": ("own(terms=())", r"algorithm mine: terms = \(\): a loss is the sum of one term or more, such as"),
    "a term alone": ("own(terms=grpo().terms[0])", r"algorithm mine: terms = LossTerm\(.*give a tuple of LossTerm"),
    "no terms": ("own(terms=(5,))", r"algorithm mine: terms = \(5,\): give a tuple of LossTerm"),
    "twice a name": (
        "own(terms=(*grpo().terms, *grpo().terms))",
        r"algorithm mine: 2 terms have the name 'policy'; give each a name of its own\.",
    ),
    "twice a metric": (
        "own(terms=(kl_term(kl), replace(kl_term(kl), name='more')))",
        r"algorithm mine: 2 terms report the metric 'kl'; give each",
    ),
    "weights by name": (
        "own(token_weights='mean_over_tokens')",
        r"algorithm mine: token_weights = 'mean_over_tokens' \(str\): give a function\.",
    ),
    "no credit": ("own(credit=None)", r"algorithm mine: credit = None \(NoneType\): give a function\."),
    "a need misspelt": (
        "term(needs={'entropies'})",
        r"loss term bonus: needs = \{'entropies'\}: give a set of entropy, full_kl, proximal_logprobs, ",
    ),
    "a need that is no set": (
        "term(needs='entropy')",
        r"loss term bonus: needs = 'entropy': give a set of entropy, ",
    ),
    "a metric of others": (
        "term(metric='reward')",
        r"loss term bonus: metric = 'reward': use None, for loss/bonus, or",
    ),
}
PROGRAM = """
import json, sys
from dataclasses import replace
from posttrain.algorithms.table import grpo
from posttrain.algorithms.terms import KlTerm, LossTerm, Need, kl_term
from posttrain.errors import UserError

kl = KlTerm(coefficient=1.0)
own = lambda **parts: replace(grpo(), name="mine", **parts)
term = lambda **options: LossTerm(name="bonus", per_token=len, **options)
said = {}
for name, line in json.loads(sys.argv[1]).items():
    try:
        said[name] = repr(eval(line))
    except UserError as error:
        said[name] = str(error)
given = [term(needs={"entropy"}), term(needs=["entropy", Need.FULL_KL])]
kinds = {type(need) for each in given for need in each.needs}
print(json.dumps([said, [sorted(each.needs) for each in given], kinds == {Need}]))
"""


@pytest.fixture(scope="module")
def said() -> tuple[dict[str, str], list[list[str]], bool]:
    """In a process whose types nobody checks, as a user's."""
    lines = json.dumps({name: line for name, (line, _) in MISTAKES.items()})
    done = subprocess.run([sys.executable, "-c", PROGRAM, lines], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_an_algorithm_is_refused_as_it_is_made(name: str, said) -> None:
    assert re.match(MISTAKES[name][1], said[0][name]), said[0][name]


def test_a_need_may_be_given_by_its_name(said) -> None:
    assert said[1] == [["entropy"], ["entropy", "full_kl"]]
    assert said[2]


# The same rules in this process, whose types are checked wherever a class is called: so past the class's own checks.

OTHER_PARTS = {"name": "mine", "credit": flat_credit, "token_weights": mean_over_tokens}
POLICY = grpo().terms[0]


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (5, r"terms = 5: give a tuple of LossTerm"),
        ((POLICY, 5), r"terms = \(LossTerm\(.*: give a tuple of LossTerm"),
        ((), r"terms = \(\): a loss is the sum of one term or more"),
        ((POLICY, POLICY), r"2 terms have the name 'policy'"),
    ],
    ids=["a number", "a number among terms", "none", "one name twice"],
)
def test_terms_are_a_tuple_of_terms_with_names_of_their_own(terms: object, message: str) -> None:
    with pytest.raises(UserError, match=f"^algorithm mine: {message}"):
        Algorithm.__post_init__(SimpleNamespace(**OTHER_PARTS, terms=terms))


def test_needs_are_a_set_of_what_there_is_and_become_one() -> None:
    given = SimpleNamespace(name="bonus", metric=None, needs=["entropy", Need.FULL_KL])
    LossTerm.__post_init__(given)
    assert given.needs == frozenset({Need.ENTROPY, Need.FULL_KL})
    assert {type(need) for need in given.needs} == {Need}
    for needs in ("entropy", ["entropies"], 5):
        with pytest.raises(UserError, match=r"loss term bonus: needs = .* give a set of entropy, "):
            LossTerm.__post_init__(SimpleNamespace(name="bonus", metric=None, needs=needs))


# Credit.


def flat(evidence: Evidence) -> Tensor:
    return torch.ones(len(evidence.rollout), dtype=torch.float64)


CREDITS = {
    "a tensor": (flat, r"its credit rule returned a tensor \[\d+\] of float64; return a.*Credit\(advantages\)"),
    "one for each completion": (
        lambda evidence: Credit(evidence.rewards.flatten()),
        r"returned a tensor \[20\] of float64 as advantages; .* one number for each of the \d+ comp.*per_rollout",
    ),
    "of two dimensions": (
        lambda evidence: Credit(flat(evidence)[:, None]),
        r"returned a tensor \[\d+, 1\] of float64 as advantages",
    ),
    "whole numbers": (
        lambda evidence: Credit(flat(evidence).long()),
        r"returned a tensor \[\d+\] of int64 as advantages",
    ),
    "no advantages": (lambda evidence: Credit(None), r"returned None \(NoneType\) as advantages"),
    "a return too few": (
        lambda evidence: Credit(flat(evidence), returns=flat(evidence)[1:]),
        r"returned a tensor \[\d+\] of float64 as returns",
    ),
}


@pytest.mark.parametrize("name", CREDITS)
def test_credit_of_another_shape_is_told_with_the_one_that_it_should_have(name: str) -> None:
    rule, message = CREDITS[name]
    with pytest.raises(RunError, match=rf"(?s)^algorithm mine: .*{message}"):
        stages_with(own(credit=rule)).credited()


@pytest.mark.parametrize("column", ["advantages", "returns"])
def test_credit_that_is_no_number_names_the_completion(column: str) -> None:
    def rule(evidence: Evidence) -> Credit:
        columns = {"advantages": flat(evidence), "returns": flat(evidence)}
        columns[column][evidence.rollout == 6] = math.inf  # the third of the second group of four
        return Credit(**columns)

    said = rf"^algorithm mine: .* gave prompt draw 1, sample 2, inf as {column}, although every rollout .* scored"
    with pytest.raises(RunError, match=said):
        stages_with(own(credit=rule)).credited()


def one_unscored(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float | None]:
    """The second completion of the fourth group of four has no score."""
    scores: list[float | None] = [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]
    scores[13] = None
    return scores


def test_a_mean_over_an_unscored_rollout_is_told_as_what_it_is() -> None:
    naive = per_rollout(lambda rewards: rewards - rewards.mean(dim=1, keepdim=True))
    with pytest.raises(RunError) as raised:
        stages_with(own(credit=naive), one_unscored).credited()
    message = str(raised.value)
    assert message.startswith("algorithm mine: its credit rule gave prompt draw 3, sample 0, nan as advantages.")
    assert "1 of the 4 rollouts of that prompt are unscored" in message
    assert "rewards.nanmean" in message
    assert "learning_rate" not in message
    with pytest.raises(RunError, match=r"prompt draw 0, sample 0, nan .*Rewards of other prompts are NaN"):
        stages_with(own(credit=per_rollout(lambda rewards: rewards - rewards.mean())), one_unscored).credited()

    def careful(rewards: Tensor) -> Tensor:
        """What the message says."""
        return torch.where(rewards.isnan(), 0.0, rewards - rewards.nanmean(dim=1, keepdim=True))

    assert step_with(own(credit=per_rollout(careful)), one_unscored)["num_updates"] == 1


@pytest.mark.parametrize(
    "rule", [lambda rewards: rewards.mean(dim=1), lambda rewards: 5.0], ids=["too few", "a number"]
)
def test_an_advantage_for_each_completion_is_wanted_of_a_rule_for_completions(rule: object) -> None:
    with pytest.raises(
        RunError, match=r"^advantage rule <lambda>: returned (\[5\]|float) for rewards \[5, 4\]; return a"
    ):
        stages_with(own(credit=per_rollout(rule))).credited()


# Terms.


LOSSES = {
    "a scalar": (lambda view: view.logprobs.mean(), r"its loss term bonus returned a tensor \[\] of float64; return a"),
    "too few": (lambda view: view.logprobs[1:], r"its loss term bonus returned a tensor \[\d+\] of float64; return a"),
    "a number": (
        lambda view: 1.0,
        r"its loss term bonus returned 1\.0 \(float\); return a floating-point tensor of one",
    ),
    "whole numbers": (lambda view: view.rollout, r"its loss term bonus returned a tensor \[\d+\] of int64; return a"),
    "an undeclared entropy": (
        lambda view: -view.entropies,
        r"its loss term bonus cannot read `entropies`\.  Add Need\.ENTROPY to its `needs`\.",
    ),
    "an undeclared reference": (
        lambda view: view.logprobs - view.columns.reference_logprobs,
        r"its loss term bonus cannot read `reference_logprobs`\.  Add Need\.REFERENCE_LOGPROBS to its `needs`\.",
    ),
    "returns that nobody gave": (
        lambda view: view.columns.returns.square(),
        r"its loss term bonus cannot read `returns`\.  The credit rule must return `returns` beside its advantages",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_term_that_gives_no_loss_to_each_token_is_named(name: str) -> None:
    per_token, message = LOSSES[name]
    with pytest.raises(RunError, match=rf"^algorithm mine: {message}"):
        step_with(with_term(per_token))


def test_what_was_computed_for_others_is_not_seen_by_a_term_that_does_not_ask() -> None:
    # With `measure_entropy` entropies are there without their gradient: a bonus made of them would do nothing.
    undeclared, declared = with_term(lambda view: -view.entropies), {"needs": frozenset({Need.ENTROPY})}
    with pytest.raises(RunError, match="its loss term bonus cannot read `entropies`"):
        step_with(undeclared, measure_entropy=True)
    assert step_with(with_term(lambda view: -view.entropies, **declared), measure_entropy=True)["num_updates"] == 1


def test_an_error_of_the_terms_own_stays_what_it_is() -> None:
    with pytest.raises(TypeError, match="argument"):
        step_with(with_term(lambda: None))


def test_a_term_that_is_no_number_is_named_beside_those_that_are() -> None:
    broken = with_term(lambda view: (view.logprobs - view.logprobs).log() * 0)
    each = r"algorithm mine: -?[\d.e-]+ by its term policy, nan by its term bonus"
    with pytest.raises(RunError, match=rf"^prompt draw \d, sample \d: the loss of a token is nan \({each}\)"):
        step_with(broken)


# Token weights.


def scaled(factor: float) -> Callable[..., Tensor]:
    def rule(lengths: Tensor, scored: Tensor, *, max_completion_tokens: int) -> Tensor:
        weights = mean_over_tokens(lengths, scored, max_completion_tokens=max_completion_tokens).clone()
        weights[7] *= factor
        return weights

    return rule


def for_each_token(lengths: Tensor, scored: Tensor, *, max_completion_tokens: int) -> Tensor:
    return torch.ones(int(lengths.sum()), dtype=torch.float64)


WEIGHTS = {
    "for each token": (
        for_each_token,
        r"for_each_token, returned a tensor \[\d+\] of float64; return .* each of the 20 rollouts",
    ),
    "nan": (scaled(NAN), r"rule, gave rollout 7 of 20 the weight nan; a weight is a finite number, 0 or more"),
    "negative": (scaled(-1.0), r"rule, gave rollout 7 of 20 the weight -0\.\d+; a weight is"),
    "nothing": (lambda *given, **named: None, r"<lambda>, returned None \(NoneType\); return"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_are_none_are_named_with_their_rule(name: str) -> None:
    rule, message = WEIGHTS[name]
    with pytest.raises(RunError, match=rf"^algorithm mine: its rule of token weights, {message}"):
        step_with(own(token_weights=rule))
