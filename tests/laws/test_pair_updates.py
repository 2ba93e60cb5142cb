"""The update on pairs and its scores: gradients however they are batched, closed forms at first, and the reference."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.algorithms.preference_losses import OfPairs, PairObjective, ipo
from posttrain.errors import RunError
from posttrain.models.classifiers.heads import TextScorer, new_scorer
from posttrain.models.forward import PlainForward
from posttrain.models.policy import Policy
from posttrain.options.pairs import DpoOptions, RewardTrainingOptions
from posttrain.records import Preference, Prompt, TokenSequence
from posttrain.tasks.preference_set import PreferenceSet
from posttrain.training.dpo.dpo_objective import DpoObjective
from posttrain.training.fit_session import FitSession
from posttrain.training.pair_updates import (
    PairReference,
    accumulate_pairs,
    accumulate_scores,
    answer_lengths,
    logprobs_without_gradient,
    pair_microbatches,
    pair_scores,
    predicting_lengths,
    read_lengths,
)
from posttrain.training.reference import EarlierAdapter, FrozenCopy
from tests.support.adapted import adapted_policy, fill
from tests.support.pairs import dpo_session, one_row_at_a_time, reward_session, rounds_session, some_pairs
from tests.support.refusals import refused
from tests.support.tiny import flat_gradient, relative_distance, through_its_own_forward, tiny_policy, twin

PAIRS = some_pairs(weights=[1.0, 2.0, 0.5, 1.0, 3.0])
REFERENCE = OfPairs(
    torch.linspace(-20, -5, len(PAIRS), dtype=torch.float64), torch.linspace(-9, -16, len(PAIRS), dtype=torch.float64)
)
WEIGHTS = torch.tensor([pair.weight for pair in PAIRS], dtype=torch.float64) / 7.5
OBJECTIVES = {
    "sigmoid": PairObjective(beta=0.3, label_smoothing=0.1),
    "ipo": PairObjective(loss=ipo, beta=0.3, length_normalized=True),
    "with likelihood": PairObjective(beta=0.3, nll_weight=0.5),
}


def learner_of(policy: Policy) -> Policy:
    """A copy that has no gradient yet."""
    learner = twin(policy)
    learner.model.zero_grad()
    return learner


def gradient(
    policy: Policy, objective: PairObjective, budget: int, pairs: list = PAIRS, reference: OfPairs = REFERENCE
) -> torch.Tensor:
    learner = learner_of(policy)
    accumulate_pairs(learner, pairs, reference, objective, budget)
    return flat_gradient(learner)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
def test_loss_and_gradient_are_the_weighted_mean_over_pairs_one_row_at_a_time(name: str, family: str) -> None:
    """Whatever the micro-batches, a shared prompt or padded rows: to the last bits in float64."""
    policy, objective = tiny_policy(family), OBJECTIVES[name]
    losses = objective.losses(one_row_at_a_time(policy, PAIRS), REFERENCE, answer_lengths(PAIRS))
    expected = (WEIGHTS * losses).sum()
    expected.backward()
    for learner in (twin(policy), through_its_own_forward(policy)):
        for budget in (3, 40, 1000):
            learner.model.zero_grad()
            loss, measured = accumulate_pairs(learner, PAIRS, REFERENCE, objective, budget)
            assert loss == pytest.approx(expected.item(), rel=1e-12)
            torch.testing.assert_close(measured.losses, losses.detach(), rtol=1e-12, atol=1e-12)
            assert relative_distance(flat_gradient(learner), flat_gradient(policy)) <= 1e-12


def test_the_order_of_pairs_changes_no_gradient() -> None:
    policy, objective = tiny_policy(), OBJECTIVES["sigmoid"]
    backwards = OfPairs(REFERENCE.chosen.flip(0), REFERENCE.rejected.flip(0))
    turned = gradient(policy, objective, 30, PAIRS[::-1], backwards)
    assert relative_distance(turned, gradient(policy, objective, 30)) <= 1e-12


def test_in_float32_micro_batches_change_the_gradient_by_rounding_alone() -> None:
    policy, objective = tiny_policy(dtype=torch.float32), OBJECTIVES["sigmoid"]
    assert relative_distance(gradient(policy, objective, 3), gradient(policy, objective, 1000)) <= 1e-5


def test_tokens_that_another_says_carry_no_loss() -> None:
    policy = tiny_policy()
    pairs = [replace(PAIRS[0], chosen=replace(PAIRS[0].chosen, sampled=(True, False, False, True))), PAIRS[1]]
    found = logprobs_without_gradient(policy, pairs, 1000)
    expected = one_row_at_a_time(policy, pairs)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected).detach(), rtol=0, atol=1e-12)
    assert answer_lengths(pairs).chosen.tolist() == [2, 1]


def test_micro_batches_hold_every_pair_once_and_a_shared_prompt_counts_once() -> None:
    def split(pairs: list[Preference], budget: int, **padded: bool) -> list[list[int]]:
        return [sorted(micro) for micro in pair_microbatches(pairs, budget, lengths=predicting_lengths, **padded)]

    # Pair 1 and pair 3 share a prompt of five tokens: 5 + (0 + 5) and (1 + 6) more: 17 together, 10 and 12 apart.
    both = [PAIRS[1], PAIRS[3]]
    assert (split(both, 17), len(split(both, 16))) == ([[0, 1]], 2)
    # Padded: rows of 5 + 6 - 1 = 10 and of 11: two pairs are four rows of 11.
    assert (split(both, 44, padded=True), len(split(both, 43, padded=True))) == ([[0, 1]], 2)
    for budget in (1, 20, 1000):
        assert sorted(n for micro in split(PAIRS, budget) for n in micro) == [*range(len(PAIRS))]
    assert split([], 10) == []


def test_the_first_gradient_is_minus_half_beta_times_that_of_the_difference_of_log_probs() -> None:
    """Where policy and reference agree σ(0) = ½: ∇L = -β (1 - ½) ∇(log π(y_w) - log π(y_l)), a mean over pairs."""
    policy, beta = tiny_policy(), 0.7
    logprobs = one_row_at_a_time(policy, PAIRS)
    (-beta / 2 * (WEIGHTS * (logprobs.chosen - logprobs.rejected)).sum()).backward()
    learner = learner_of(policy)
    reference = logprobs_without_gradient(learner, PAIRS, 1000)
    loss, measured = accumulate_pairs(learner, PAIRS, reference, PairObjective(beta=beta), 1000)
    assert relative_distance(flat_gradient(learner), flat_gradient(policy)) <= 1e-12
    assert loss == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-7)
    assert measured.means()["pairs/accuracy"] == 0.5


def test_later_gradients_weigh_each_pair_by_how_wrong_the_implicit_reward_is() -> None:
    policy, beta = tiny_policy(), 0.7
    logprobs = one_row_at_a_time(policy, PAIRS)
    gaps = (logprobs.chosen - logprobs.rejected - REFERENCE.chosen + REFERENCE.rejected).detach()
    wrong = 1 - torch.sigmoid(beta * gaps)
    (-beta * (WEIGHTS * wrong * (logprobs.chosen - logprobs.rejected)).sum()).backward()
    assert relative_distance(gradient(policy, PairObjective(beta=beta), 1000), flat_gradient(policy)) <= 1e-12


def test_a_loss_that_is_no_number_names_its_pair_and_leaves_no_gradient() -> None:
    policy = tiny_policy()
    policy.model.zero_grad()
    broken = OfPairs(REFERENCE.chosen.clone(), REFERENCE.rejected.clone())
    broken.rejected[2] = torch.nan
    with refused("pair pairs:3", "nan", "dpo.learning_rate", error=RunError):
        accumulate_pairs(policy, PAIRS, broken, OBJECTIVES["sigmoid"], 1000)
    assert flat_gradient(policy).norm() == 0


def run_of(policy: Policy, **options: object) -> FitSession[Preference]:
    """A run on the pairs, of steps of six pairs at a high rate."""
    given = DpoOptions(learning_rate=0.05, num_epochs=None, max_grad_norm=float("inf"), **options)
    return dpo_session(policy, given, PreferenceSet(seed=0, training=PAIRS, held_out=PAIRS[:2]))


def objective_of(session: FitSession[Preference]) -> DpoObjective:
    assert isinstance(session.objective, DpoObjective)
    return session.objective


@pytest.mark.parametrize("kind", ["live", "precomputed"])
@pytest.mark.parametrize("make", [adapted_policy, lambda: tiny_policy(dtype=torch.float32)], ids=["adapter", "whole"])
def test_the_reference_is_the_policy_that_training_started_from(make: object, kind: str) -> None:
    policy, then = make(), logprobs_without_gradient(make(), PAIRS, 1000)
    trained = run_of(policy, reference=kind)
    for step in range(1, 4):
        _, metrics = trained.learn(step)
    now = logprobs_without_gradient(policy, PAIRS, 1000)
    assert (now.chosen - then.chosen).abs().max() > 0.1
    found = objective_of(trained).reference.logprobs("training", range(len(PAIRS)), PAIRS)
    torch.testing.assert_close(torch.stack(found), torch.stack(then), rtol=0, atol=2e-5)
    assert metrics["pairs/margin"] > 0.1
    assert metrics["pairs/accuracy"] == 1


def test_what_keeps_a_copy_and_what_does_not() -> None:
    pairs = PreferenceSet(seed=0, training=PAIRS, held_out=[])
    fresh = adapted_policy(filled=False)
    assert isinstance(PairReference(fresh, DpoOptions()).reference, EarlierAdapter)
    assert isinstance(PairReference(tiny_policy(), DpoOptions()).reference, FrozenCopy)
    assert PairReference(tiny_policy(), DpoOptions(reference="precomputed")).reference is None
    rounds = DpoOptions(reference="precomputed", rounds=2)
    assert isinstance(PairReference(tiny_policy(), rounds).reference, FrozenCopy)
    assert PairReference(tiny_policy(), replace(rounds, refresh_reference=True)).reference is None
    saved = dpo_session(tiny_policy(), DpoOptions(num_epochs=None), pairs).trained.tensors()
    assert "reference" not in saved, "the model of the recipe is no part of a checkpoint"


def test_trap_4_an_adapter_that_is_not_switched_off_leaves_no_margin_to_learn_from(monkeypatch) -> None:
    """The notebook called disable_adapter() without `with`: π_ref = π, the margin 0 and the gradient that of step 1."""

    @contextmanager
    def as_in_the_notebook(self: EarlierAdapter) -> Iterator[Policy]:
        yield self.policy

    def margins() -> list[float]:
        trained = run_of(adapted_policy(filled=False))
        assert isinstance(objective_of(trained).reference.reference, EarlierAdapter)
        return [trained.learn(step)[1]["pairs/margin"] for step in range(1, 5)]

    ours = margins()
    assert ours[0] == 0
    assert ours[3] > 0.1
    monkeypatch.setattr(EarlierAdapter, "entered", as_in_the_notebook)
    assert margins() == [0, 0, 0, 0]


def test_precomputed_log_probs_come_back_from_a_checkpoint_to_the_bit() -> None:
    first = objective_of(run_of(tiny_policy(dtype=torch.float32), reference="precomputed"))
    saved = {name: dict(tensors) for name, tensors in first.reference.tensors().items()}
    parts = {f"{part}.{side}" for part in ("training", "held_out") for side in ("chosen", "rejected")}
    assert {*saved["reference_logprobs"]} == parts
    again = PairReference(tiny_policy(seed=3), first.options)
    again.restore(saved)
    for name in ("training", "held_out"):
        assert all(torch.equal(a, b) for a, b in zip(again.kept[name], first.reference.kept[name], strict=True))


def test_a_refreshed_reference_is_the_policy_that_the_round_begins_with() -> None:
    policy = adapted_policy(filled=False)
    options = DpoOptions(learning_rate=0.05, rounds=3, refresh_reference=True, pairs_per_batch=8)
    trained, rounds = rounds_session(policy, options)
    rounds.begin_round(1, PAIRS)
    assert trained.learn(1)[1]["pairs/margin"] == 0
    assert trained.learn(2)[1]["pairs/margin"] > 0
    fill(policy.model, seed=8)
    rounds.begin_round(2, PAIRS)
    assert trained.learn(3)[1]["pairs/margin"] == 0
    then = {name: dict(tensors) for name, tensors in trained.trained.tensors().items()}
    assert {*then} == {"policy", "optimizer", "reference", "pairs"}


def test_a_reference_that_is_not_refreshed_is_the_first_policy_in_every_round() -> None:
    policy = adapted_policy(filled=False)
    first = torch.stack(logprobs_without_gradient(policy, PAIRS, 1000))
    options = DpoOptions(learning_rate=0.05, rounds=3, pairs_per_batch=8)
    trained, rounds = rounds_session(policy, options)
    for number in (1, 2):
        rounds.begin_round(number, PAIRS)
        trained.learn(number)
        found = torch.stack(rounds.reference.logprobs("training", range(len(PAIRS)), PAIRS))
        torch.testing.assert_close(found, first, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("loss", "per_token"), [("ipo", True), ("sigmoid", False), ("hinge", False)])
def test_only_ipo_compares_means_per_token_by_default(loss: str, per_token: bool) -> None:
    assert objective_of(run_of(tiny_policy(), loss=loss)).loss.length_normalized == per_token
    asked = run_of(tiny_policy(), loss=loss, length_normalized=not per_token)
    assert objective_of(asked).loss.length_normalized != per_token


def test_a_round_without_pairs_takes_no_step_and_moves_no_weight() -> None:
    policy = tiny_policy()
    before = [each.clone() for each in policy.model.parameters()]
    trained, rounds = rounds_session(policy, DpoOptions(learning_rate=0.1, rounds=1))
    rounds.begin_round(1, [])
    assert trained.learn(1)[1] == {"num_pairs": 0, "learning_rate": 0.1}
    assert trained.trained.step == 1
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))


FAMILIES = ("qwen3", "gpt2")


def pair(prompt: tuple[int, ...], chosen: tuple[int, ...], rejected: tuple[int, ...], **more: object) -> Preference:
    asked = Prompt(id="p", text="", tokens=prompt)
    answers = {"chosen": TokenSequence.one_turn(chosen), "rejected": TokenSequence.one_turn(rejected)}
    return Preference(prompt=asked, **answers, where="rows:1", **more)  # type: ignore[arg-type]


SCORED = [
    pair((1, 2, 3), (4, 5), (6, 7, 8, 5), margin=0.75),
    pair((6,), (7, 8, 9, 10, 5), (5,), weight=2.0),
    pair((1, 2, 3), (6, 7, 8, 5), (9, 5)),  # the prompt of the first, and an answer of it
    pair((11, 12, 13, 14, 15, 16), (11,), (11, 3, 3)),  # an answer that begins as the other does
]
OPTIONS = RewardTrainingOptions(center_coefficient=0.05, margin_scale=2.0)


def scorer(family: str) -> TextScorer:
    return new_scorer(tiny_policy(family), seed=3)


def alone(of: TextScorer, tokens: tuple[int, ...]) -> Tensor:
    """w · h_last of one unpadded row through the model's own forward pass."""
    hidden = of.policy.model.base_model(input_ids=torch.tensor([tokens])).last_hidden_state
    return of.head.weight[0] @ hidden[0, -1]


def expected_loss(of: TextScorer) -> Tensor:
    """By the formula, a pair at a time: margins .75 · 2 and 0, weights 1, 2, 1, 1 of 5."""
    total = torch.zeros((), dtype=torch.float64)
    for each in SCORED:
        chosen, rejected = (alone(of, each.prompt.tokens + answer.tokens) for answer in (each.chosen, each.rejected))
        loss = -F.logsigmoid(chosen - rejected - 2.0 * (each.margin or 0.0)) + 0.05 * (chosen + rejected) ** 2
        total = total + each.weight / 5 * loss
    return total


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [3, 16, 1000])
def test_loss_and_gradient_are_those_of_the_formula_for_every_budget(family: str, budget: int) -> None:
    by_hand, learner = scorer(family), scorer(family)
    expected = expected_loss(by_hand)
    by_formula = torch.autograd.grad(expected, [*by_hand.body_parameters, by_hand.head.weight], materialize_grads=True)
    options = RewardTrainingOptions(center_coefficient=0.05, margin_scale=2.0, tokens_per_microbatch=budget)
    loss, scores = accumulate_scores(learner, SCORED, options)
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    for found, wanted in zip([*learner.body_parameters, learner.head.weight], by_formula, strict=True):
        assert (found.grad - wanted).norm() <= 1e-9 * wanted.norm()
    assert scores.chosen[1].item() == pytest.approx(alone(by_hand, (6, 7, 8, 9, 10, 5)).item(), rel=1e-9)


def test_a_pass_of_padded_rows_gives_the_same_scores_and_gradient() -> None:
    shared = scorer("qwen3")
    padded = TextScorer(through_its_own_forward(shared.policy), shared.head)
    assert isinstance(padded.policy.forward, PlainForward)
    ours, theirs = (pair_scores(each, SCORED, 1000) for each in (shared, padded))
    assert (ours.chosen - theirs.chosen).abs().max() <= 1e-9
    assert (ours.rejected - theirs.rejected).abs().max() <= 1e-9


def test_a_pair_is_never_split_and_none_is_lost() -> None:
    for padded, budget in itertools.product((False, True), (3, 12, 20, 1000)):
        batches = [*pair_microbatches(SCORED, budget, lengths=read_lengths, padded=padded)]
        assert sorted(row for batch in batches for row in batch) == [0, 1, 2, 3]
        for pairs in ([SCORED[row] for row in batch] for batch in batches):
            prompts = sum(map(len, {each.prompt.tokens for each in pairs}))
            shared = prompts + sum(len(each.chosen.tokens + each.rejected.tokens) for each in pairs)
            size = 2 * len(pairs) * max(each.num_tokens for each in pairs) if padded else shared
            assert len(pairs) == 1 or size <= budget
    assert len([*pair_microbatches(SCORED, 3, lengths=read_lengths)]) == 4
    assert len([*pair_microbatches(SCORED, 1000, lengths=read_lengths)]) == 1


def test_closing_tokens_are_read_and_the_score_is_that_of_the_last_one() -> None:
    of = scorer("qwen3")
    closed = pair((1, 2), (3, 5), (4, 5), chosen_closing=(9,), rejected_closing=(9,))
    found = pair_scores(of, [closed], 1000)
    assert found.chosen.item() == pytest.approx(alone(of, (1, 2, 3, 5, 9)).item(), rel=1e-9)


def test_the_head_is_a_function_of_the_seed_and_of_nothing_else() -> None:
    first = new_scorer(tiny_policy(), seed=3).head.weight
    torch.manual_seed(17)
    torch.rand(5)
    assert torch.equal(new_scorer(tiny_policy(), seed=3).head.weight, first)
    assert not torch.equal(new_scorer(tiny_policy(), seed=4).head.weight, first)


def test_an_output_layer_of_its_own_is_not_trained_and_one_that_is_the_embedding_is() -> None:
    tied, apart = tiny_policy("qwen3"), tiny_policy("llama")
    inside = {id(each) for each in new_scorer(tied, seed=0).body_parameters}
    assert id(tied.model.get_output_embeddings().weight) in inside
    inside = {id(each) for each in new_scorer(apart, seed=0).body_parameters}
    assert id(apart.model.get_output_embeddings().weight) not in inside
    assert len(inside) == len([*apart.model.parameters()]) - 1


@pytest.mark.parametrize("with_gradient", [True, False])
def test_a_score_that_is_no_number_stops_with_the_pair_that_it_is_of(with_gradient: bool) -> None:
    """Only texts with token 9 have one: the rejected answer of the third pair has it, and no other text."""
    of = scorer("qwen3")
    embedding = of.policy.model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[9] = torch.inf
    rows = [replace(each, where=f"rows:{number}") for number, each in enumerate([SCORED[0], SCORED[3], SCORED[2]])]
    score = partial(accumulate_scores, of, rows, OPTIONS) if with_gradient else partial(pair_scores, of, rows, 1000)
    with refused("pair rows:2", "nan", "reward_model.learning_rate", error=RunError):
        score()


def test_a_step_counts_its_pairs_and_the_head_has_its_multiple_of_the_rate() -> None:
    options = RewardTrainingOptions(learning_rate=1e-3, head_rate_scale=7.0, pairs_per_batch=2, num_epochs=None)
    session = reward_session(scorer("qwen3"), options, PreferenceSet(seed=0, training=SCORED[:3], held_out=[]))
    for step in (1, 2):
        session.learn(step)
    assert session.trained.run.first == 3, "the next batch begins behind the last"
    rates = {group["module"]: group["lr"] for group in session.trained.optimizer.param_groups}
    assert rates["head"] == pytest.approx(7 * rates["policy"])
