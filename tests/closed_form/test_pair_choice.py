"""Which pairs are made of a prompt's completions, and which completions are in none."""

from typing import Any

from posttrain.commands.collection.pairs import ChosenPairs, choose_pairs, lot
from posttrain.options.collect import CollectOptions
from tests.support.comparisons import written_prompt


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
