"""Which pairs are made of a prompt's completions, and what rewards, answers and votes on them add up to."""

from typing import Any

import pytest

from posttrain.commands.collection.pairs import (
    ChosenPairs,
    agreement,
    choose_pairs,
    length_summary,
    lot,
    order_summary,
    rater_summary,
    standing_votes,
    verdict_by_answers,
    verdict_by_reward,
    verdict_by_votes,
)
from posttrain.options.collect import CollectOptions
from tests.support.comparisons import written_pair, written_prompt


def chosen(*prompts: Any, seed: int = 0, **options: Any) -> ChosenPairs:
    return choose_pairs(prompts, CollectOptions(**options), seed=seed)


def ids(*prompts: Any, **options: Any) -> list[str]:
    return [pair.id for pair in chosen(*prompts, **options).pairs]


@pytest.mark.parametrize(
    ("rewards", "options", "pairs", "num_unscored"),
    [
        ([], {}, ["0:0-1", "0:0-2", "0:0-3", "0:1-2", "0:1-3", "0:2-3"], 0),
        ([0.5, 0.0, 1.0, 0.25], {"pairs": "best_worst"}, ["0:1-2"], 0),
        # Of equal rewards the first is best and the last is worst.
        ([1.0, 1.0, 1.0, 1.0], {"pairs": "best_worst"}, ["0:0-3"], 0),
        ([1.0, 0.0, 1.0, 0.0], {"pairs": "best_worst"}, ["0:0-3"], 0),
        # A negative reward is worse than 0, and one without a reward is neither.
        ([0.0, None, -1.0, -0.5], {"pairs": "best_worst"}, ["0:0-2"], 1),
    ],
)
def test_all_pairs_of_four_completions_are_six_and_the_best_and_the_worst_make_one(
    rewards: list[float | None], options: dict[str, Any], pairs: list[str], num_unscored: int
) -> None:
    prompt = written_prompt(["a", "b", "c", "d"], rewards)
    assert ids(prompt, **options) == pairs
    assert rewards == [] or chosen(prompt, **options).num_unscored == num_unscored


def test_pairs_by_lot_are_some_of_all_pairs_and_hang_on_the_seed_alone() -> None:
    prompts = [written_prompt(["a", "b", "c", "d"], draw=draw) for draw in range(40)]
    two = {"pairs": "random", "pairs_per_prompt": 2}
    made = ids(*prompts, **two)
    assert len(made) == 80
    assert [pair for pair in ids(*prompts) if pair in set(made)] == made  # in order, each once
    assert made == ids(*prompts, **two) != ids(*prompts, **two, seed=1)
    drawn = {pair.partition(":")[2] for pair in ids(*prompts, pairs="random")}
    assert len(drawn) == 6  # each of the six is drawn for one of forty prompts
    assert len(ids(prompts[0], pairs="random", pairs_per_prompt=9)) == 6


def test_completions_of_one_text_count_once_and_are_counted() -> None:
    made = chosen(written_prompt(["a", "b", "a", "a"]))
    assert ([pair.id for pair in made.pairs], made.num_identical) == (["0:0-1"], 2)
    alone = chosen(written_prompt(["a", "a"]))
    assert (alone.pairs, alone.num_lone_prompts) == ((), 1)
    assert chosen(written_prompt(["a", "b"])).num_lone_prompts == 0


@pytest.mark.parametrize(
    ("options", "pairs", "cut_off"), [({}, ["0:0-3"], 1), ({"cut_off": "keep"}, ["0:0-2", "0:0-3", "0:2-3"], 0)]
)
def test_what_says_nothing_or_was_cut_off_is_in_no_pair_unless_it_is_to_be(options, pairs, cut_off) -> None:
    made = chosen(written_prompt(["a", " \n", "c", "d"], cut_off=[2]), **options)
    assert ([pair.id for pair in made.pairs], made.num_empty, made.num_cut_off) == (pairs, 1, cut_off)


def test_a_lot_is_even_and_another_for_each_purpose() -> None:
    heads = sum(lot(0, "side", str(name)) % 2 for name in range(2000))
    assert 900 < heads < 1100  # of 2000 fair coins, 4.5 standard deviations either way
    assert lot(0, "side", "x") != lot(0, "pair", "x")


def answers(*told: tuple[str, str, float]) -> list[dict[str, object]]:
    return [
        {"pair": "0:0-1", "judge": "j", "principle": principle, "order": order, "share": share, "says": f"says {share}"}
        for principle, order, share in told
    ]


@pytest.mark.parametrize(
    ("rewards", "margin", "share"),
    [
        ((1.0, 0.0), 0.0, 1.0),
        ((0.0, 1.0), 0.0, 0.0),
        ((0.5, 0.5), 0.0, 0.5),
        ((0.75, 0.5), 0.25, 0.5),  # a difference of the margin itself is a tie
        ((0.75, 0.5), 0.2, 1.0),
        ((None, 1.0), 0.0, None),  # without both rewards a pair is not judged
        ((1.0, None), 0.0, None),
    ],
)
def test_the_better_reward_wins_by_more_than_the_margin(rewards: Any, margin: float, share: float | None) -> None:
    verdict = verdict_by_reward(written_pair(rewards=rewards), margin, "solved")
    assert (verdict and verdict.share) == share
    assert verdict is None or verdict.margin == pytest.approx(abs(rewards[0] - rewards[1]))


@pytest.mark.parametrize(
    ("told", "share"),
    [
        ([("", "first", 1.0), ("", "second", 1.0)], 1.0),
        ([("", "first", 0.0), ("", "second", 0.0)], 0.0),
        ([("", "first", 1.0), ("", "second", 0.0)], 0.5),  # it likes what comes first
        ([("", "first", 1.0), ("", "second", 0.5)], 0.5),
        ([("p", "first", 1.0), ("p", "second", 1.0), ("q", "first", 0.0), ("q", "second", 0.0)], 0.5),
        ([("p", "first", 1.0), ("p", "second", 1.0), ("q", "first", 1.0), ("q", "second", 0.0)], 1.0),
        ([("p", "first", 0.0), ("p", "second", 0.0), ("q", "first", 0.5), ("q", "second", 0.5)], 0.0),
    ],
)
def test_orders_have_to_agree_and_principles_are_added_up(told: list[tuple[str, str, float]], share: float) -> None:
    verdict = verdict_by_answers(written_pair(), answers(*told))
    assert (verdict.share, verdict.margin) == (share, None)
    assert verdict.reasons == tuple(f"says {share}" for _, _, share in told)
    assert verdict.principles == tuple(dict.fromkeys(name for name, _, _ in told if name))


@pytest.mark.parametrize(
    ("votes", "share"),
    [
        ({"a": "first", "b": "skip"}, 1.0),
        ({"a": "first", "b": "second"}, 0.5),
        ({"a": "second", "b": "second", "c": "first"}, 0.0),
        ({"a": "tie", "b": "second"}, 0.0),
        ({"a": "skip"}, None),
        ({}, None),
    ],
)
def test_most_votes_win_and_skips_say_nothing(votes: dict[str, str], share: float | None) -> None:
    verdict = verdict_by_votes(written_pair(), votes)
    assert (verdict and verdict.share) == share
    assert verdict is None or verdict.judges == tuple(name for name, vote in votes.items() if vote != "skip")


def test_what_was_undone_does_not_stand_and_a_later_vote_does() -> None:
    records = [
        {"rater": "anna", "pair": "0:0-1", "vote": "first"},
        {"rater": "ben", "pair": "0:0-1", "vote": "second"},
        {"rater": "anna", "undone": "0:0-1"},
        {"rater": "anna", "pair": "0:0-1", "vote": "tie"},
        {"rater": "ben", "undone": "0:0-1"},
    ]
    assert standing_votes(records) == {"anna": {"0:0-1": "tie"}, "ben": {}}


def test_raters_are_compared_on_the_pairs_that_both_judged() -> None:
    votes = {
        "ben": {"0": "first", "1": "second", "2": "skip", "3": "tie"},
        "anna": {"0": "first", "1": "first", "2": "first", "4": "tie"},
    }
    found = rater_summary(votes)
    # Common are pairs 0 and 1, of which 0 is judged alike: p_o = .5, p_e = 1·.5 + 0·.5 = .5, κ = 0.
    assert found["agreement"] == {"anna and ben": {"num_common": 2, "raw": 0.5, "kappa": 0.0}}
    assert found["raters"] == {"anna": {"first": 3, "tie": 1}, "ben": {"first": 1, "second": 1, "skip": 1, "tie": 1}}


def test_a_judge_that_likes_the_first_place_is_seen_to() -> None:
    told = {
        "0": answers(("", "first", 1.0), ("", "second", 0.0)),  # what is shown first wins both times
        "1": answers(("", "first", 1.0), ("", "second", 1.0)),  # shown first: 1, then 0
        "2": answers(("", "", 1.0)),  # was not asked
    }
    found = order_summary(told)
    assert found["num_asked_in_both_orders"] == 2
    # (1 + 1 + 1 + 0) / 4
    assert (found["same_in_both_orders"], found["first_shown_share"]) == (0.5, 0.75)
    steady = order_summary({**told, "0": answers(("", "first", 0.0), ("", "second", 0.0))})
    assert (steady["same_in_both_orders"], steady["first_shown_share"]) == (1.0, 0.5)


def test_a_row_has_the_better_one_as_chosen_and_says_how_it_came_about() -> None:
    row = verdict_by_reward(written_pair("bad", "good", rewards=(0.25, 1.0)), 0.0, "solved").as_row()
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("3 + 4?", "good", "bad")
    assert (row["margin"], row["tie"], row["judge"], row["principle"]) == (0.75, False, "solved", None)
    assert (row["pair"], row["prompt_id"], row["chosen_sample"], row["rejected_sample"]) == ("0:0-1", "p0", 1, 0)
    assert (row["chosen_reward"], row["rejected_reward"]) == (1.0, 0.25)
    votes = {"a": "second", "b": "second", "c": "first", "d": "tie"}
    row = verdict_by_votes(written_pair("bad", "good"), votes).as_row()
    assert (row["votes"], row["judge"]) == ({"chosen": 2, "rejected": 1, "tie": 1}, "a, b, c, d")


def test_a_conversation_is_answered_by_a_message() -> None:
    messages = ({"role": "user", "content": "3 + 4?"},)
    prompt = written_prompt(["7", "8"], [1.0, 0.0], prompt=messages)
    row = verdict_by_reward(type(written_pair())(prompt, *prompt.completions), 0.0, "solved").as_row()
    assert row["prompt"] == messages
    assert [row[name] for name in ("chosen", "rejected")] == [[{"role": "assistant", "content": c}] for c in "78"]


def test_length_is_told_where_one_is_longer() -> None:
    pairs = [written_pair("123", "1", rewards=(1, 0)), written_pair("12345", "1", rewards=(0, 1))]
    pairs += [written_pair("12", "34", rewards=(1, 0))]
    # With a stop token each: chosen 4, 2, 3 and rejected 2, 6, 3; of the two unequal ones the longer was chosen once.
    assert length_summary([verdict_by_reward(pair, 0.0, "solved") for pair in pairs]) == {
        "mean_chosen_tokens": 3.0,
        "mean_rejected_tokens": pytest.approx(11 / 3),
        "longer_chosen_share": 0.5,
    }


F, S, T = "first", "second", "tie"


@pytest.mark.parametrize(
    ("one", "other", "raw", "kappa"),
    [
        # p_o = 14/20 = .7; one says `first` 12 of 20 times, the other 10: p_e = .6·.5 + .4·.5 = .5; κ = .2/.5 = .4
        ([F] * 8 + [S] * 6 + [F] * 4 + [S] * 2, [F] * 8 + [S] * 6 + [S] * 4 + [F] * 2, 0.7, 0.4),
        # Equal in one place of four; p_e = (2·1 + 1·2 + 1·1)/16 = 5/16; κ = (4/16 - 5/16)/(11/16)
        ([F, F, S, T], [F, S, T, S], 0.25, -1 / 11),
        ([F, S], [F, S], 1.0, 1.0),
        ([F, S], [S, F], 0.0, -1.0),
        # Undefined where chance explains all, and where nothing is common.
        ([T, T], [T, T], 1.0, None),
        ([], [], None, None),
        # One always says first and the other always second: p_e = 0, so chance explains nothing, and κ = 0.
        ([F] * 3, [S] * 3, 0.0, 0.0),
    ],
)
def test_kappa_is_what_is_left_of_agreement_beyond_chance(one, other, raw, kappa) -> None:
    found = agreement(one, other)
    assert found == pytest.approx({"num_common": len(one), "raw": raw, "kappa": kappa})
