"""Scores of pairs and their gradient: the same numbers however pairs are batched, padded or share their prompts."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.errors import RunError
from posttrain.models.classifiers.heads import TextScorer, new_scorer
from posttrain.models.forward import PlainForward
from posttrain.options.pairs import RewardTrainingOptions
from posttrain.records import Preference, Prompt, TokenSequence
from posttrain.tasks.preference_set import PreferenceSet
from posttrain.training.fit import learn
from posttrain.training.pair_updates import accumulate_scores, pair_microbatches, pair_scores, read_lengths
from tests.support.pairs import reward_session
from tests.support.refusals import refused
from tests.support.tiny import through_its_own_forward, tiny_policy

FAMILIES = ("qwen3", "gpt2")


def pair(prompt: tuple[int, ...], chosen: tuple[int, ...], rejected: tuple[int, ...], **more: object) -> Preference:
    asked = Prompt(id="p", text="", tokens=prompt)
    answers = {"chosen": TokenSequence.one_turn(chosen), "rejected": TokenSequence.one_turn(rejected)}
    return Preference(prompt=asked, **answers, where="rows:1", **more)  # type: ignore[arg-type]


PAIRS = [
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
    for each in PAIRS:
        chosen, rejected = (alone(of, each.prompt.tokens + answer.tokens) for answer in (each.chosen, each.rejected))
        loss = -F.logsigmoid(chosen - rejected - 2.0 * (each.margin or 0.0)) + 0.05 * (chosen + rejected) ** 2
        total = total + each.weight / 5 * loss
    return total


def gradient(of: TextScorer) -> Tensor:
    found = [*of.body_parameters, of.head.weight]
    return torch.cat([torch.zeros_like(each).flatten() if each.grad is None else each.grad.flatten() for each in found])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [3, 16, 1000])
def test_loss_and_gradient_are_those_of_the_formula_for_every_budget(family: str, budget: int) -> None:
    by_hand, learner = scorer(family), scorer(family)
    expected = expected_loss(by_hand)
    expected.backward()
    options = RewardTrainingOptions(center_coefficient=0.05, margin_scale=2.0, tokens_per_microbatch=budget)
    loss, scores = accumulate_scores(learner, PAIRS, options)
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    assert (gradient(learner) - gradient(by_hand)).norm() <= 1e-9 * gradient(by_hand).norm()
    assert scores.chosen[1].item() == pytest.approx(alone(by_hand, (6, 7, 8, 9, 10, 5)).item(), rel=1e-9)


def test_a_pass_of_padded_rows_gives_the_same_scores_and_gradient() -> None:
    shared = scorer("qwen3")
    padded = TextScorer(through_its_own_forward(shared.policy), shared.head)
    assert isinstance(padded.policy.forward, PlainForward)
    ours, theirs = (pair_scores(each, PAIRS, 1000) for each in (shared, padded))
    assert (ours.chosen - theirs.chosen).abs().max() <= 1e-9
    assert (ours.rejected - theirs.rejected).abs().max() <= 1e-9


def test_a_pair_is_never_split_and_none_is_lost() -> None:
    for padded in (False, True):
        for budget in (3, 12, 20, 1000):
            batches = [*pair_microbatches(PAIRS, budget, lengths=read_lengths, padded=padded)]
            assert sorted(row for batch in batches for row in batch) == [0, 1, 2, 3]
            for batch in batches:
                prompts = sum(map(len, {PAIRS[row].prompt.tokens for row in batch}))
                size = (
                    2 * len(batch) * max(PAIRS[row].num_tokens for row in batch)
                    if padded
                    else prompts + sum(len(PAIRS[row].chosen.tokens + PAIRS[row].rejected.tokens) for row in batch)
                )
                assert len(batch) == 1 or size <= budget
    assert len([*pair_microbatches(PAIRS, 3, lengths=read_lengths)]) == 4
    assert len([*pair_microbatches(PAIRS, 1000, lengths=read_lengths)]) == 1


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
    rows = [replace(each, where=f"rows:{number}") for number, each in enumerate([PAIRS[0], PAIRS[3], PAIRS[2]])]
    score = partial(accumulate_scores, of, rows, OPTIONS) if with_gradient else partial(pair_scores, of, rows, 1000)
    with refused("pair rows:2", "nan", "reward_model.learning_rate", error=RunError):
        score()


def test_a_step_counts_its_pairs_and_the_head_has_its_multiple_of_the_rate() -> None:
    options = RewardTrainingOptions(learning_rate=1e-3, head_rate_scale=7.0, pairs_per_batch=2, num_epochs=None)
    session = reward_session(scorer("qwen3"), options, PreferenceSet(seed=0, training=PAIRS[:3], held_out=[]))
    for step in (1, 2):
        learn(session, step)
    assert session.trained.run.first == 3, "the next batch begins behind the last"
    rates = {group["module"]: group["lr"] for group in session.trained.optimizer.param_groups}
    assert rates["head"] == pytest.approx(7 * rates["policy"])
