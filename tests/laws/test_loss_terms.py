"""The loss is a sum of terms, each of which says what it needs; nothing else is computed, nobody asks for a name."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.losses import ClipRange, clipped_surrogate
from posttrain.algorithms.table import ALGORITHMS, build_algorithm
from posttrain.algorithms.terms import LossTerm, TokenView, policy_term
from posttrain.errors import RunError
from posttrain.models import forward as forward_module
from posttrain.needs import MissingColumn, Need
from posttrain.records import Rollout
from posttrain.training import credited_step, learner, update as update_module
from posttrain.training.reference import FrozenCopy
from posttrain.training.update import Objective
from tests.support import tiny
from tests.support.sequences import known, resampled
from tests.support.stages import PLAIN_DAPO, stages_with
from tests.support.tiny import tiny_policy

REFERENCE = torch.linspace(-4, -1, 13, dtype=torch.float64)


OWN_TERM = LossTerm(name="pull", per_token=lambda view: (view.logprobs + 1).square(), coefficient=0.25)
"""log π is drawn towards -1."""


def with_terms(algorithm: Algorithm, *terms: LossTerm) -> Algorithm:
    return replace(algorithm, terms=terms)


def gradient(algorithm: Algorithm) -> tuple[Tensor, dict[str, float]]:
    batch = tiny.batch_of(tiny.SIX, tiny.SIX_ADVANTAGES, algorithm, reference_logprobs=REFERENCE)
    objective = Objective(algorithm=algorithm, temperature=0.8, reference=FrozenCopy(tiny_policy(seed=1)))
    return tiny.gradient_of_update(tiny_policy(), batch, objective)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_the_gradient_of_a_sum_of_terms_is_the_sum_of_their_gradients(name: str) -> None:
    algorithm = build_algorithm({"name": name, "kl": {"coefficient": 0.3}})
    (full,) = build_algorithm({"name": name, "kl": {"coefficient": 0.7, "estimator": "full"}}).terms[1:]
    terms = (*algorithm.terms, replace(full, name="full", metric=None), OWN_TERM)
    together, metrics = gradient(with_terms(algorithm, *terms))
    alone = [gradient(with_terms(algorithm, term)) for term in terms]
    assert all(part.norm() > 1e-3 for part, _ in alone)
    assert tiny.relative_distance(together, sum(part for part, _ in alone)) <= 1e-12
    assert metrics["loss"] == pytest.approx(sum(of_one["loss"] for _, of_one in alone), abs=1e-12)


def test_a_coefficient_multiplies_its_term_alone() -> None:
    algorithm = build_algorithm({"name": "rloo"})
    plain, _ = gradient(with_terms(algorithm, *algorithm.terms))
    once, _ = gradient(with_terms(algorithm, replace(OWN_TERM, coefficient=1.0)))
    both, metrics = gradient(with_terms(algorithm, *algorithm.terms, OWN_TERM))
    assert tiny.relative_distance(both, plain + 0.25 * once) <= 1e-12
    twice, _ = gradient(with_terms(algorithm, replace(OWN_TERM, coefficient=2.0)))
    assert tiny.relative_distance(twice, 2 * once) <= 1e-12
    # Reported as it is, before its coefficient.
    _, of_once = gradient(with_terms(algorithm, replace(OWN_TERM, coefficient=1.0)))
    assert metrics["loss/pull"] == of_once["loss/pull"]


def test_a_term_that_acts_without_advantage_keeps_completions_and_one_that_does_not_lets_them_go() -> None:
    algorithm = build_algorithm({"name": "grpo"})
    assert not algorithm.keeps_zero_advantages
    assert with_terms(algorithm, *algorithm.terms, OWN_TERM).keeps_zero_advantages
    vanishing = replace(OWN_TERM, vanishes_without_advantage=True)
    assert not with_terms(algorithm, *algorithm.terms, vanishing).keeps_zero_advantages


@pytest.mark.parametrize("name", ["loss", "reward", "grad_norm", "kl", "entropy", "ratio/mean", "tokens/trained"])
def test_no_name_of_a_term_takes_the_place_of_another_metric(name: str) -> None:
    algorithm = build_algorithm({"name": "rloo"})
    _, other = gradient(with_terms(algorithm, *algorithm.terms, OWN_TERM))
    _, metrics = gradient(with_terms(algorithm, *algorithm.terms, replace(OWN_TERM, name=name)))
    assert metrics.pop(f"loss/{name}") == other.pop("loss/pull")
    assert metrics == other


def test_the_kl_of_the_package_has_the_name_that_it_had_beside_a_users_own() -> None:
    algorithm = build_algorithm({"name": "rloo", "kl": {"coefficient": 0.3}})
    _, plain = gradient(algorithm)
    _, metrics = gradient(with_terms(algorithm, *algorithm.terms, replace(OWN_TERM, name="my kl")))
    assert metrics["kl"] == plain["kl"] > 0.01
    assert metrics["loss/my kl"] != metrics["kl"]
    assert [name for name in plain if name.startswith("loss/")] == []


def test_a_token_is_clipped_where_any_of_two_policy_terms_clips_it() -> None:
    policy, algorithm = tiny_policy(), build_algorithm({"name": "dapo"})

    def at_other_ratios(rollout: Rollout) -> Rollout:
        """log μ is -0.1 or -9 in turn: every ratio is far below 1 or far above it."""
        return resampled(rollout, logprobs=(-0.1, -9.0, -0.1, -9.0)[: len(rollout.tokens)])

    groups = [replace(group, rollouts=tuple(map(at_other_ratios, group.rollouts))) for group in tiny.SIX]
    narrow, wide = (
        policy_term(clipped_surrogate, clip=ClipRange(low=low, high=high), name=name)
        for name, low, high in (("lower", 0.5, 1e9), ("upper", 1.0, 0.5))
    )

    def shares(*terms: LossTerm) -> tuple[float, float]:
        made = with_terms(algorithm, *terms)
        batch = tiny.batch_of(groups, tiny.SIX_ADVANTAGES, made)
        _, metrics = tiny.gradient_of_update(policy, batch, Objective(algorithm=made, temperature=1.0))
        return 13 * metrics["clip_ratio/low_mean"], 13 * metrics["clip_ratio/high_mean"]

    # Below 1 and A < 0: of (6), (12, 13, 14).  Above 1 and A > 0: of (4, 5), (7, 8, 9, 5), (15, 11).
    low, high = 1 + 2, 1 + 2 + 1
    assert shares(narrow) == pytest.approx((low, 0))
    assert shares(wide) == pytest.approx((0, high))
    assert shares(narrow, wide) == pytest.approx((low, high))
    assert shares(narrow, replace(narrow, name="again")) == pytest.approx((low, 0))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the passes over the output layer beside log-probs, and those of the reference."""
    calls: Counter[str] = Counter()

    def counted(module: object, name: str) -> None:
        original = getattr(module, name)

        def call(*arguments: object, **options: object) -> object:
            calls[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    counted(forward_module, "full_kl")
    counted(forward_module, "token_entropies")
    counted(update_module, "distributions")
    counted(credited_step, "group_logprobs")
    return calls


KL = {"coefficient": 0.1}
NEEDED = [
    (PLAIN_DAPO, {}),
    ({**PLAIN_DAPO, "kl": KL}, {"group_logprobs": 1}),
    ({**PLAIN_DAPO, "kl": {**KL, "place": "reward"}}, {"group_logprobs": 1}),
    ({**PLAIN_DAPO, "ratio_to": "reference"}, {"group_logprobs": 1}),
    ({**PLAIN_DAPO, "kl": {**KL, "estimator": "full"}}, {"full_kl": 1, "distributions": 1}),
]


@pytest.mark.parametrize(("config", "expected"), NEEDED, ids=str)
def test_only_what_a_term_needs_is_computed(config, expected, passes: Counter[str]) -> None:
    stages = stages_with(config)
    assert (stages.learner.reference is not None) == bool(expected)
    if not expected:  # not even where there is one
        stages.learner.reference = FrozenCopy(tiny_policy(seed=1))
    stages.learn(stages.credited())
    assert passes == expected


def test_entropies_are_computed_where_a_term_or_the_recipe_asks_for_them(passes: Counter[str]) -> None:
    algorithm = build_algorithm(PLAIN_DAPO)
    wanting = replace(OWN_TERM, needs=frozenset({Need.ENTROPY}))
    for made, options, expected in (
        (algorithm, {}, 0),
        (algorithm, {"measure_entropy": True}, 1),
        (with_terms(algorithm, *algorithm.terms, wanting), {}, 1),
    ):
        passes.clear()
        stages = stages_with(made, **options)
        stages.learn(stages.credited())
        assert passes["token_entropies"] == expected


def test_a_term_sees_what_it_needs_and_nothing_that_nobody_needs() -> None:
    seen: list[TokenView] = []

    def watching(view: TokenView) -> Tensor:
        seen.append(view)
        return view.logprobs

    algorithm = build_algorithm({"name": "rloo"})
    for need in (None, Need.FULL_KL, Need.ENTROPY):
        seen.clear()
        needs = frozenset() if need is None else frozenset({need})
        term = LossTerm(name="watching", per_token=watching, needs=needs, reported=False)
        gradient(with_terms(algorithm, term))
        assert len(seen) == 1
        assert {*seen[0].known} == {Need.FULL_KL: {"full_kl"}, Need.ENTROPY: {"entropies"}}.get(need, set())
        assert not seen[0].columns.known


def test_values_are_shown_to_the_terms_that_need_them_alone() -> None:
    tokens = torch.zeros(3, dtype=torch.float64)
    columns = tiny.batch_of(tiny.SIX, tiny.SIX_ADVANTAGES, build_algorithm({"name": "rloo"})).columns
    view = TokenView(logprobs=tokens, rollout=tokens.long(), columns=columns, known=known(values=tokens))
    assert view.seen_with(frozenset({Need.VALUES})).values is tokens
    with pytest.raises(MissingColumn, match="`values`"):
        assert view.seen_with(frozenset({Need.ENTROPY})).values


def test_a_term_of_the_entropy_is_differentiated() -> None:
    policy, algorithm = tiny_policy(), build_algorithm({"name": "dapo"})
    bonus = LossTerm(
        name="entropy_bonus", per_token=lambda view: -view.entropies, coefficient=0.1, needs=frozenset({Need.ENTROPY})
    )
    actual, _ = gradient(with_terms(algorithm, bonus))
    logprobs = torch.cat([tiny.vocab_logprobs(policy.model, *row, 0.8) for row in tiny.rows_of(tiny.SIX)])
    loss = 0.1 * (logprobs.exp() * logprobs).sum(-1).mean()
    assert tiny.relative_distance(actual, tiny.gradient_of(policy, loss)) <= 1e-10


@pytest.mark.parametrize("function", ["per_token", "clipped", "measures"])
def test_a_function_of_a_term_that_reads_an_undeclared_column_is_told_with_its_owner(function: str) -> None:
    readers = {
        "per_token": lambda view: view.columns.reference_logprobs,
        "clipped": lambda view: view.columns.reference_logprobs > 0,
        "measures": lambda view: {"mine": view.columns.reference_logprobs},
    }
    term = replace(OWN_TERM, **{function: readers[function]})
    with pytest.raises(RunError) as refused:
        gradient(with_terms(build_algorithm(PLAIN_DAPO), term))
    for said in ("algorithm dapo", "term pull", "`reference_logprobs`", "Need.REFERENCE_LOGPROBS", "`needs`"):
        assert said in str(refused.value)


def asks_which_algorithm(source: str) -> list[str]:
    """The places where code, but for the text of a message, reads a name of an algorithm or states one."""
    return [ast.unparse(node) for node in outside_of_messages(ast.parse(source)) if names_one(node)]


def outside_of_messages(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield from outside_of_messages(child)


def names_one(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="name", value=owner):
            return "algorithm" in ast.unparse(owner)
        case ast.Constant(value=str(text)):
            return text in ALGORITHMS
        case ast.Name(id=name) | ast.alias(name=name):
            return name in ALGORITHMS
        case ast.Attribute(attr=name):
            return name in ALGORITHMS
    return False


@pytest.mark.parametrize("module", [update_module, learner, credited_step])
def test_no_line_of_the_update_asks_which_algorithm_runs(module: object) -> None:
    assert asks_which_algorithm(Path(module.__file__).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "x = objective.algorithm.name == y",
        "if kind == 'grpo': pass",
        "from posttrain.algorithms.table import gspo",
        "table.dapo()",
        "match self.algorithm.name:\n    case y: pass",
    ],
)
def test_a_line_that_does_would_be_noticed(line: str) -> None:
    assert asks_which_algorithm(line)
    assert not asks_which_algorithm("raise ValueError(f'algorithm {algorithm.name}: no values')")
