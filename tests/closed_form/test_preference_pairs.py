"""Rows with two answers and ranked completions as pairs of tokens, and which pairs go through a model together."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.errors import RunError
from posttrain.models.conversation_masks import Masking
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.options.pairs import PairOptions, RewardTrainingOptions
from posttrain.records import Preference, Prompt, TokenSequence
from posttrain.tasks.preference_set import PreferenceSet, preference_set
from posttrain.tasks.row_files.rows import BadRows, GivenRows
from posttrain.training.dpo.dpo_run import ranked_pairs, sampled_round
from posttrain.training.dpo.learned_rounds import pair_tensors, pairs_from
from posttrain.training.pair_updates import pair_microbatches, read_lengths
from tests.support.conversations import CHATML, OPENING, THOUGHTLESS, WORDY, chat_tokenizer, turns
from tests.support.dataset_rows import json_lines
from tests.support.refusals import refused
from tests.support.sequences import doubles, grades_of
from tests.support.tiny import written_group

ASKED = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
SAID = "<|im_end|>"
PLAIN = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}


def pairs_of(
    rows: Sequence[Mapping[str, Any]] | None,
    *,
    template: str = CHATML,
    longest: int = 200,
    options: PairOptions | None = None,
    held_out: Sequence[Mapping[str, Any]] | None = None,
    **task: Any,
) -> PreferenceSet:
    tokenizer = chat_tokenizer(template)
    masking = Masking(renderer=TokenizerRenderer(tokenizer), stop_ids=(tokenizer.eos_token_id,))
    return preference_set(
        masking,
        DatasetOptions(**{"held_out_share": 0, **task}),
        options or PairOptions(),
        longest=longest,
        seed=0,
        given=GivenRows(rows=rows, held_out=held_out),
    )


def shown(found: PreferenceSet) -> list[tuple[str, str, str]]:
    decode = chat_tokenizer().decode
    return [
        (decode(pair.prompt.tokens), decode(pair.chosen.tokens), decode(pair.rejected.tokens))
        for pair in found.training
    ]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (PLAIN, ("2+2=", f"4{SAID}", f"5{SAID}")),
        # Without a prompt: what both begin with, up to white space that belongs to the answers.
        ({"chosen": "2+2 is 4", "rejected": "2+2 is 5"}, ("2+2 is", f" 4{SAID}", f" 5{SAID}")),
        (
            {"prompt": turns("a"), "chosen": turns("", "b")[1:], "rejected": turns("", "c")[1:]},
            (ASKED, f"b{SAID}", f"c{SAID}"),
        ),
        ({"chosen": turns("a", "b"), "rejected": turns("a", "c")}, (ASKED, f"b{SAID}", f"c{SAID}")),
        (
            {"prompt": turns("a"), "chosen": turns("a", "b"), "rejected": turns("a", "c")},  # the prompt stands twice
            (ASKED, f"b{SAID}", f"c{SAID}"),
        ),
        ({"prompt": "a", "chosen": turns("", "b")[1:], "rejected": "c"}, None),
    ],
)
def test_each_format_of_rows_gives_a_prompt_and_two_answers_that_continue_it(row, expected) -> None:
    if expected is None:
        with refused("must both be text or both be messages"):
            pairs_of([row])
        return
    assert shown(pairs_of([row])) == [expected]


def test_text_becomes_a_conversation_where_the_task_says_so() -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert shown(pairs_of([row], prompt_format="chat")) == [(ASKED, f"b{SAID}", f"c{SAID}")]
    assert shown(pairs_of([{"chosen": turns("a", "b"), "rejected": turns("a", "c")}], prompt_format="plain")) == [
        ("a", f"b{SAID}", f"c{SAID}")
    ]
    (prompt, _, _) = shown(pairs_of([row], system="s"))[0]
    assert prompt == f"<|im_start|>system\ns<|im_end|>\n{ASKED}"


def test_a_conversation_marks_what_the_assistant_says_and_what_the_template_writes_behind_it_is_kept_apart() -> None:
    row, decode = {"chosen": turns("a", "b", "more", "d"), "rejected": turns("a", "c")}, chat_tokenizer().decode
    talk, plain = (pairs_of([each]).training[0] for each in (row, PLAIN))
    assert decode(talk.chosen.sampled_tokens) == f"b{SAID}d{SAID}"
    assert all(talk.rejected.sampled)
    assert (decode(talk.chosen_closing), decode(talk.rejected_closing)) == ("\n", "\n")
    assert (plain.chosen_closing, plain.rejected_closing) == ((), ())


def test_turns_that_are_marked_as_not_learned_are_not_counted_and_no_score_can_leave_them_out() -> None:
    read = {"role": "assistant", "content": "b", "weight": 0}
    talk = {"prompt": turns("a"), "chosen": [read, *turns("c", "d")], "rejected": turns("", "x")[1:]}
    [pair] = pairs_of([talk]).training
    assert chat_tokenizer().decode(pair.chosen.sampled_tokens) == f"d{SAID}"
    with refused("rows:1, message 0:", "a reward model scores the whole of an answer"):
        pairs_of([talk], options=RewardTrainingOptions())


def test_the_thoughts_of_a_template_that_opens_them_are_the_answer_s() -> None:
    row = {"chosen": turns("a", "<think>\nb</think>1"), "rejected": turns("a", "2")}
    assert shown(pairs_of([row], template=OPENING)) == [(f"{ASKED}<think>\n", f"b</think>1{SAID}", f"2{SAID}")]


def test_margin_weight_and_other_columns_travel_with_a_pair() -> None:
    rows = [{**PLAIN, "margin": 2, "weight": 0.5, "topic": "sums"}, {**PLAIN, "margin": None}]
    first, second = pairs_of(rows).training
    assert (first.margin, first.weight, first.where) == (2.0, 0.5, "rows:1")
    assert first.prompt.columns["topic"] == "sums"
    assert (second.margin, second.weight) == (None, 1.0)


BAD: list[tuple[Mapping[str, Any], str]] = [
    ({**PLAIN, "rejected": "4"}, "the same answer"),
    ({**PLAIN, "rejected": ""}, "the column `rejected` is empty"),
    ({**PLAIN, "rejected": " \n"}, "an answer is empty"),
    ({"chosen": turns("a", "b"), "rejected": turns("a", " ")}, "an answer is empty"),
    ({"chosen": turns("a", "b"), "rejected": turns("a")}, "`rejected` has nothing after the prompt"),
    ({"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "b", "e", "d")}, "begins with a message of the role"),
    ({"chosen": turns("a", "b", "c"), "rejected": turns("a", "d")}, "ends with a message of the role user"),
    ({**PLAIN, "margin": -1}, "`margin` must hold a number >= 0"),
    ({**PLAIN, "margin": "much"}, "`margin` must hold a number"),
    ({**PLAIN, "margin": float("nan")}, "`margin` must hold a number"),
    ({**PLAIN, "weight": 0}, "`weight` must hold a number above 0"),
    ({**PLAIN, "weight": True}, "`weight` must hold a number above 0"),
    ({**PLAIN, "tie": True}, "the column `tie` says that neither answer is better"),
]


@pytest.mark.parametrize(("row", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_pair_is_told_by_file_and_line(row: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    path = json_lines(tmp_path / "pairs.jsonl", [PLAIN, row])
    with refused("pairs.jsonl:2", message):
        pairs_of(None, path=path)
    left = pairs_of(None, path=path, skip_bad_rows=1)
    assert [pair.where for pair in left.training] == ["pairs.jsonl:1"]
    assert any("bad pairs left out" in line for line in left.described())


def test_a_turn_that_does_not_end_with_a_stop_token_is_refused() -> None:
    with refused("rows:1", "Set model.stop_tokens"):
        pairs_of([{"chosen": turns("a", "b"), "rejected": turns("a", "c")}], template=WORDY)


def test_turns_that_a_template_rewrites_are_refused_with_a_remedy_that_pairs_have() -> None:
    row = {"chosen": turns("a", "<think>b</think>c", "d", "e"), "rejected": turns("a", "f")}
    with refused("Leave out what follows the first answer") as told:
        pairs_of([row], template=THOUGHTLESS)
    assert "sft." not in str(told.value)


def test_pairs_that_are_too_long_are_told_or_left_out_and_never_cut() -> None:
    long = {**PLAIN, "rejected": "5" * 30}  # 4 tokens of prompt, 30 digits and a stop token: 35
    with refused("pairs.max_length: 1 pairs are longer than 34 tokens: rows:2 (35 tokens)"):
        pairs_of([PLAIN, long], longest=34)
    assert len(pairs_of([PLAIN, long], longest=35).training) == 2
    left = pairs_of([PLAIN, long], longest=34, options=PairOptions(long_pairs="skip"))
    assert (len(left.training), left.too_long) == (1, ["rows:2"])
    assert left.summary()["pairs"] == {"trained": 1, "held_out": 0, "too_long": ["rows:2"], "bad": []}
    with refused("none of the 1 pairs"):
        pairs_of([long], longest=34, options=PairOptions(long_pairs="skip"))


def test_pairs_of_one_prompt_stay_on_one_side_of_the_split() -> None:
    rows = [{"prompt": f"{n}+1=", "chosen": str(n), "rejected": f"{n}{k}"} for n in range(40) for k in range(3)]
    found = pairs_of(rows, held_out_share=0.25)
    trained, apart = ({pair.prompt.text for pair in part} for part in (found.training, found.held_out))
    assert apart
    assert not trained & apart
    assert len(trained | apart) == 40
    given = pairs_of(rows, held_out=[{"prompt": "7+1=", "chosen": "8", "rejected": "9"}])
    assert "7+1=" not in {pair.prompt.text for pair in given.training}
    assert len(given.held_out) == 1


def test_each_epoch_has_every_pair_once_in_an_order_of_its_own() -> None:
    rows = [{"prompt": f"{n}+1=", "chosen": "1", "rejected": "2"} for n in range(10)]
    options = PairOptions(pairs_per_batch=4, num_epochs=2)
    found = pairs_of(rows, options=options)
    first, batches = 0, []
    while first < found.num_pairs(2):
        batch = found.batch(first, options)
        batches.append([pair.where for pair in batch])
        first += len(batch)
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]  # an update ends where an epoch does
    assert found.num_steps(options) == 6
    epochs = [[*chain(*batches[:3])], [*chain(*batches[3:])]]
    assert [sorted(epoch) for epoch in epochs] == [sorted(f"rows:{n + 1}" for n in range(10))] * 2
    assert epochs[0] != epochs[1]
    assert found.num_steps(PairOptions(pairs_per_batch=4, num_epochs=1.5)) == 3 + 2
    assert found.num_steps(PairOptions(num_epochs=None)) is None


def test_other_columns_than_those_of_pairs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    with refused("rows.jsonl:1: its columns", "match no supported format", "chosen, rejected"):
        pairs_of(None, path=str(path))


def test_epochs_of_more_pairs_than_there_are_now_do_not_go_on_with_none() -> None:
    few = PreferenceSet(seed=0, training=[pair((1,), 1, 1)] * 3, held_out=[], too_long=[], bad=BadRows())
    options = RewardTrainingOptions(num_epochs=2, pairs_per_batch=2)
    assert few.batch(4, options) == [few.training[few.number(index)] for index in (4, 5)]
    with refused("all 2 epochs of the 3 pairs are learned", error=RunError):
        few.batch(6, options)


def test_the_plan_names_the_columns_that_nothing_reads() -> None:
    row = {"prompt": "a", "input": "b", "system": "c", "chosen": "d", "rejected": "e", "margin": 1.0, "weight": 2.0}
    assert pairs_of([row]).described()[1] == "row format preference; columns that are not read: input, system, margin"
    asked = {name: value for name, value in row.items() if name not in ("prompt", "margin")} | {"instruction": "a"}
    assert pairs_of([asked]).described()[1] == "row format preference"


NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "most", "expected"),
    [
        ([0.2, 1.0, 0.0, 0.5], 1, [(1, 2)]),
        # 1 with 0, then .5 with .2; with an odd group the one in the middle is left over.
        ([0.2, 1.0, 0.0, 0.5], 9, [(1, 2), (3, 0)]),
        ([0.2, 1.0, 0.0, 0.5, 0.3], 9, [(1, 2), (3, 0)]),
        ([1.0, 1.0, 1.0, 0.0], 9, [(0, 3)]),  # the next two are equal
        ([0.0, 1.0, 0.0, 1.0], 1, [(1, 2)]),  # the first of the best with the last of the worst
        ([0.5, 0.5], 9, []),
        ([NAN, 0.5, NAN, 0.25], 9, [(1, 3)]),
        ([NAN, 0.5], 9, []),
        ([NAN, NAN], 9, []),
    ],
)
def test_the_best_goes_with_the_worst(rewards: list[float], most: int, expected: list[tuple[int, int]]) -> None:
    assert ranked_pairs(rewards, most) == expected


GROUPS = [
    written_group([1, 2], [[3, 5], [4, 4, 5], [7, 5]], name="a", draw=0),
    written_group([9], [[3, 5], [4, 5], [8, 5]], name="b", draw=1),
    written_group([2], [[6, 5], [6, 5], [7, 5]], name="c", draw=2),
]
GRADES = grades_of([[0.5, 1.0, 0.25], [1.0, 1.0, 1.0], [1.0, 0.0, NAN]])


def test_ties_and_equal_answers_make_no_pair_and_are_counted() -> None:
    """Group b earned the same throughout; the judge told apart two completions of group c that are one text."""
    made = sampled_round(3, GROUPS, GRADES, 2)
    (only,) = made.pairs
    assert (only.prompt.tokens, only.chosen.tokens, only.rejected.tokens) == ((1, 2), (4, 4, 5), (7, 5))
    assert (only.margin, only.where, made.num_tied) == (0.75, "round 3, prompt a, samples 1 and 2", 2)
    torch.testing.assert_close(made.sides, doubles([NAN, 1, -1], [NAN] * 3, [NAN] * 3), equal_nan=True)
    told = {"round": 3, "pairs/num": 1, "pairs/frac_tied": 2 / 3, "pairs/reward_gap": 0.75}
    told["reward"] = 5.75 / 8  # (.5 + 1 + .25 + 1 + 1 + 1 + 1 + 0) / 8
    assert {name: made.metrics()[name] for name in told} == pytest.approx(told)
    ties = sampled_round(1, GROUPS[1:2], GRADES.select([1]), 1)
    assert ties.pairs == []
    assert "pairs/reward_gap" not in ties.metrics()


def test_sampled_pairs_go_through_a_checkpoint() -> None:
    pairs = sampled_round(1, GROUPS, GRADES, 1).pairs
    (again,) = pairs_from(pair_tensors(pairs), ["somewhere"])
    assert (again.prompt.tokens, again.chosen.tokens, again.rejected.tokens) == ((1, 2), (4, 4, 5), (7, 5))
    assert again.where == "somewhere"
    given = replace(pairs[0], rejected=TokenSequence(tokens=(7, 5), sampled=(False, True)))
    (again,) = pairs_from(pair_tensors([given]), ["somewhere"])
    assert (again.chosen.sampled, again.rejected.sampled) == ((True, True, True), (False, True))
    assert pairs_from(pair_tensors([]), []) == []


def pair(prompt: tuple[int, ...], chosen: int, rejected: int) -> Preference:
    asked = Prompt(id="p", text="", tokens=prompt)
    answers = [TokenSequence.one_turn((token,) * count) for token, count in ((7, chosen), (8, rejected))]
    return Preference(prompt=asked, chosen=answers[0], rejected=answers[1], where="rows:1")


LONG, SHORT, OTHER = (1, 2, 3, 4), (5,), (6, 6)
PAIRS = [
    pair(LONG, 2, 1),  # 4 + 3 tokens, 6 wide
    pair(SHORT, 1, 1),  # 1 + 2, 2 wide
    pair(LONG, 1, 5),  # 4 + 6, or 6 beside the first; 9 wide
    pair(OTHER, 3, 3),  # 2 + 6, 5 wide
]
"""By their prompts' widest pair, and then by their own: the second, the fourth, the first, the third."""


@pytest.mark.parametrize(
    ("budget", "padded", "expected"),
    [
        (1000, False, [[1, 3, 0, 2]]),
        (24, False, [[1, 3, 0, 2]]),  # 3 + 8 + 7 + 6: the long prompt counts once
        (23, False, [[1, 3, 0], [2]]),
        (17, False, [[1, 3], [0, 2]]),  # 11, and 7 + 6
        (13, False, [[1, 3], [0, 2]]),
        (12, False, [[1, 3], [0], [2]]),
        (1, False, [[1], [3], [0], [2]]),
        (72, True, [[1, 3, 0, 2]]),  # 4 pairs, 8 rows of 9
        (71, True, [[1, 3, 0], [2]]),  # 6 rows of 6
        (36, True, [[1, 3, 0], [2]]),
        (35, True, [[1, 3], [0], [2]]),  # 4 rows of 5; the two long ones would be 4 rows of 9
        (20, True, [[1, 3], [0], [2]]),
        (19, True, [[1], [3], [0], [2]]),
    ],
)
def test_as_many_pairs_as_fit_go_together(budget: int, padded: bool, expected: list[list[int]]) -> None:
    assert [*pair_microbatches(PAIRS, budget, lengths=read_lengths, padded=padded)] == expected
