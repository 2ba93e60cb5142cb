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


def ids(chosen: ChosenPairs) -> list[str]:
    return [pair.id for pair in chosen.pairs]


def chosen(*prompts: Any, seed: int = 0, **options: Any) -> ChosenPairs:
    return choose_pairs(prompts, CollectOptions(**options), seed=seed)


def test_all_pairs_of_four_completions_are_six() -> None:
    made = chosen(written_prompt(["a", "b", "c", "d"]))
    assert ids(made) == ["0:0-1", "0:0-2", "0:0-3", "0:1-2", "0:1-3", "0:2-3"]


def test_best_and_worst_by_reward_make_one_pair() -> None:
    made = chosen(written_prompt(["a", "b", "c", "d"], [0.5, 0.0, 1.0, 0.25]), pairs="best_worst")
    assert ids(made) == ["0:1-2"]
    # Of equal rewards the first is best and the last is worst.
    assert ids(chosen(written_prompt(["a", "b", "c"], [1.0, 1.0, 1.0]), pairs="best_worst")) == ["0:0-2"]
    assert ids(chosen(written_prompt(["a", "b", "c", "d"], [1.0, 0.0, 1.0, 0.0]), pairs="best_worst")) == ["0:0-3"]
    # A negative reward is worse than 0, and one without a reward is neither.
    made = chosen(written_prompt(["a", "b", "c"], [0.0, None, -1.0]), pairs="best_worst")
    assert ids(made) == ["0:0-2"]
    assert made.num_unscored == 1


def test_pairs_by_lot_are_some_of_all_pairs_and_hang_on_the_seed_alone() -> None:
    prompts = [written_prompt(["a", "b", "c", "d"], draw=draw) for draw in range(40)]
    made = chosen(*prompts, pairs="random", pairs_per_prompt=2)
    every = ids(chosen(*prompts))
    assert len(made.pairs) == 80
    assert [pair for pair in every if pair in set(ids(made))] == ids(made)  # in order, each once
    assert ids(made) == ids(chosen(*prompts, pairs="random", pairs_per_prompt=2))
    assert ids(made) != ids(chosen(*prompts, pairs="random", pairs_per_prompt=2, seed=1))
    drawn = {pair.partition(":")[2] for pair in ids(chosen(*prompts, pairs="random"))}
    assert len(drawn) == 6  # each of the six is drawn for one of forty prompts
    assert len(chosen(prompts[0], pairs="random", pairs_per_prompt=9).pairs) == 6


def test_completions_of_one_text_count_once_and_are_counted() -> None:
    made = chosen(written_prompt(["a", "b", "a", "a"]))
    assert ids(made) == ["0:0-1"]
    assert made.num_identical == 2
    alone = chosen(written_prompt(["a", "a"]))
    assert (alone.pairs, alone.num_lone_prompts) == ((), 1)
    assert chosen(written_prompt(["a", "b"])).num_lone_prompts == 0


def test_what_says_nothing_or_was_cut_off_is_in_no_pair_unless_it_is_to_be() -> None:
    prompt = written_prompt(["a", " \n", "c", "d"], cut_off=[2])
    made = chosen(prompt)
    assert ids(made) == ["0:0-3"]
    assert (made.num_empty, made.num_cut_off) == (1, 1)
    kept = chosen(prompt, cut_off="keep")
    assert ids(kept) == ["0:0-2", "0:0-3", "0:2-3"]
    assert kept.num_cut_off == 0


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
    ],
)
def test_the_better_reward_wins_by_more_than_the_margin(rewards, margin, share) -> None:
    verdict = verdict_by_reward(written_pair(rewards=rewards), margin, "solved")
    assert verdict.share == share
    assert verdict.margin == pytest.approx(abs(rewards[0] - rewards[1]))


def test_a_pair_of_which_one_has_no_reward_is_not_judged() -> None:
    assert verdict_by_reward(written_pair(rewards=(None, 1.0)), 0.0, "solved") is None
    assert verdict_by_reward(written_pair(rewards=(1.0, None)), 0.0, "solved") is None


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
    assert verdict.share == share
    assert verdict.reasons == tuple(f"says {share}" for _, _, share in told)
    assert verdict.principles == tuple(dict.fromkeys(name for name, _, _ in told if name))
    assert verdict.margin is None


def test_most_votes_win_and_skips_say_nothing() -> None:
    pair = written_pair()
    assert verdict_by_votes(pair, {"a": "first", "b": "skip"}).share == 1.0
    assert verdict_by_votes(pair, {"a": "first", "b": "second"}).share == 0.5
    assert verdict_by_votes(pair, {"a": "second", "b": "second", "c": "first"}).share == 0.0
    assert verdict_by_votes(pair, {"a": "tie", "b": "second"}).share == 0.0
    assert verdict_by_votes(pair, {"a": "skip"}) is None
    assert verdict_by_votes(pair, {}) is None
    assert verdict_by_votes(pair, {"a": "first", "b": "skip"}).judges == ("a",)


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
    assert found["same_in_both_orders"] == 0.5
    assert found["first_shown_share"] == 0.75  # (1 + 1 + 1 + 0) / 4
    steady = order_summary({**told, "0": answers(("", "first", 0.0), ("", "second", 0.0))})
    assert (steady["same_in_both_orders"], steady["first_shown_share"]) == (1.0, 0.5)


def test_a_row_has_the_better_one_as_chosen_and_says_how_it_came_about() -> None:
    verdict = verdict_by_reward(written_pair("bad", "good", rewards=(0.25, 1.0)), 0.0, "solved")
    row = verdict.as_row()
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("3 + 4?", "good", "bad")
    assert (row["margin"], row["tie"], row["judge"], row["principle"]) == (0.75, False, "solved", None)
    assert (row["pair"], row["prompt_id"], row["chosen_sample"], row["rejected_sample"]) == ("0:0-1", "p0", 1, 0)
    assert (row["chosen_reward"], row["rejected_reward"]) == (1.0, 0.25)


def test_votes_stand_in_a_row_by_what_was_chosen() -> None:
    verdict = verdict_by_votes(written_pair("bad", "good"), {"a": "second", "b": "second", "c": "first", "d": "tie"})
    row = verdict.as_row()
    assert row["votes"] == {"chosen": 2, "rejected": 1, "tie": 1}
    assert row["judge"] == "a, b, c, d"


def test_a_conversation_is_answered_by_a_message() -> None:
    messages = ({"role": "user", "content": "3 + 4?"},)
    prompt = written_prompt(["7", "8"], [1.0, 0.0], prompt=messages)
    pair = written_pair(rewards=(1.0, 0.0))
    verdict = verdict_by_reward(type(pair)(prompt, *prompt.completions), 0.0, "solved")
    row = verdict.as_row()
    assert row["prompt"] == messages
    assert row["chosen"] == [{"role": "assistant", "content": "7"}]
    assert row["rejected"] == [{"role": "assistant", "content": "8"}]


def test_length_is_told_where_one_is_longer() -> None:
    pairs = [written_pair("123", "1", rewards=(1, 0)), written_pair("12345", "1", rewards=(0, 1))]
    pairs += [written_pair("12", "34", rewards=(1, 0))]
    verdicts = [verdict_by_reward(pair, 0.0, "solved") for pair in pairs]
    found = length_summary([verdict for verdict in verdicts if verdict is not None])
    # With a stop token each: chosen 4, 2, 3 and rejected 2, 6, 3; of the two unequal ones the longer was chosen once.
    assert found == {
        "mean_chosen_tokens": 3.0,
        "mean_rejected_tokens": pytest.approx(11 / 3),
        "longer_chosen_share": 0.5,
    }


def test_kappa_is_what_is_left_of_agreement_beyond_chance() -> None:
    # 20 pairs: both first 8, both second 6, one first and other second 4, the other way round 2.
    one = ["first"] * 8 + ["second"] * 6 + ["first"] * 4 + ["second"] * 2
    other = ["first"] * 8 + ["second"] * 6 + ["second"] * 4 + ["first"] * 2
    found = agreement(one, other)
    # p_o = 14/20 = .7; the first says `first` 12 of 20 times, the other 10: p_e = .6·.5 + .4·.5 = .5; κ = .2/.5 = .4
    assert found["num_common"] == 20
    assert found["raw"] == pytest.approx(0.7)
    assert found["kappa"] == pytest.approx(0.4)


def test_three_verdicts_count_as_three() -> None:
    found = agreement(["first", "first", "second", "tie"], ["first", "second", "tie", "second"])
    # equal in one place of four; p_e = (2·1 + 1·2 + 1·1)/16 = 5/16; κ = (4/16 - 5/16)/(11/16) = -1/11
    assert found["raw"] == pytest.approx(0.25)
    assert found["kappa"] == pytest.approx(-1 / 11)


def test_full_agreement_is_one_and_full_disagreement_of_two_verdicts_is_minus_one() -> None:
    assert agreement(["first", "second"], ["first", "second"])["kappa"] == pytest.approx(1.0)
    assert agreement(["first", "second"], ["second", "first"])["kappa"] == pytest.approx(-1.0)


def test_kappa_is_undefined_where_chance_explains_all_and_where_nothing_is_common() -> None:
    same = agreement(["tie", "tie"], ["tie", "tie"])
    assert (same["raw"], same["kappa"]) == (1.0, None)
    nothing = agreement([], [])
    assert (nothing["num_common"], nothing["raw"], nothing["kappa"]) == (0, None, None)
    # One always says first and the other always second: p_e = 0, so chance explains nothing, and κ = 0.
    assert agreement(["first"] * 3, ["second"] * 3)["kappa"] == pytest.approx(0.0)
