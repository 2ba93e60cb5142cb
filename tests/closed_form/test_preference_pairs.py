"""Rows with two answers as pairs of tokens: every format, what follows an answer, and which rows make no pair."""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RunError
from posttrain.models.conversation_masks import Masking
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.options.pairs import PairOptions, RewardTrainingOptions
from posttrain.records import Preference, Prompt, TokenSequence
from posttrain.tasks.preference_set import PreferenceSet, preference_set
from posttrain.tasks.row_files.rows import BadRows, GivenRows
from tests.support.conversations import CHATML, OPENING, THOUGHTLESS, WORDY, chat_tokenizer, turns
from tests.support.dataset_rows import json_lines
from tests.support.refusals import refused

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
def test_each_format_of_rows_gives_a_prompt_and_two_answers_that_continue_it(
    row: Mapping[str, Any], expected: tuple[str, str, str] | None
) -> None:
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


def test_what_the_template_writes_behind_the_last_stop_token_is_kept_apart() -> None:
    (pair,) = pairs_of([{"chosen": turns("a", "b"), "rejected": turns("a", "c")}]).training
    decode = chat_tokenizer().decode
    assert (decode(pair.chosen_closing), decode(pair.rejected_closing)) == ("\n", "\n")
    (plain,) = pairs_of([PLAIN]).training
    assert (plain.chosen_closing, plain.rejected_closing) == ((), ())


def test_a_conversation_that_goes_on_marks_what_the_assistant_says() -> None:
    row = {"chosen": turns("a", "b", "more", "d"), "rejected": turns("a", "c")}
    (pair,) = pairs_of([row]).training
    assert chat_tokenizer().decode(pair.chosen.sampled_tokens) == f"b{SAID}d{SAID}"
    assert all(pair.rejected.sampled)


def test_turns_that_are_marked_as_not_learned_are_not_counted_and_no_score_can_leave_them_out() -> None:
    read = {"role": "assistant", "content": "b", "weight": 0}
    talk = {"prompt": turns("a"), "chosen": [read, *turns("c", "d")], "rejected": turns("", "x")[1:]}
    [pair] = pairs_of([talk]).training
    assert chat_tokenizer().decode(pair.chosen.sampled_tokens) == f"d{SAID}"
    with refused("rows:1, message 0:", "a reward model scores the whole of an answer"):
        pairs_of([talk], options=RewardTrainingOptions())


def test_the_thoughts_of_a_template_that_opens_them_are_the_answer_s() -> None:
    row = {"chosen": turns("a", "<think>\nb</think>1"), "rejected": turns("a", "2")}
    assert shown(pairs_of([row], template=OPENING)) == [
        (f"{ASKED}<think>\n", f"b</think>1{SAID}", f"2{SAID}"),
    ]


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
    asked = Prompt(id="p", text="", tokens=(1,))
    pairs = [
        Preference(
            prompt=asked,
            chosen=TokenSequence.one_turn((2,)),
            rejected=TokenSequence.one_turn((3,)),
            where=f"rows:{row}",
        )
        for row in range(3)
    ]
    few = PreferenceSet(seed=0, training=pairs, held_out=[], too_long=[], bad=BadRows())
    options = RewardTrainingOptions(num_epochs=2, pairs_per_batch=2)
    assert [*few.batch_indices(4, options)] == [4, 5]
    with refused("all 2 epochs of the 3 pairs are learned", error=RunError):
        few.batch_indices(6, options)


def test_the_plan_names_the_columns_that_nothing_reads() -> None:
    row = {"prompt": "a", "input": "b", "system": "c", "chosen": "d", "rejected": "e", "margin": 1.0, "weight": 2.0}
    assert pairs_of([row]).described()[1] == "row format preference; columns that are not read: input, system, margin"
    asked = {name: value for name, value in row.items() if name not in ("prompt", "margin")} | {"instruction": "a"}
    assert pairs_of([asked]).described()[1] == "row format preference"
