"""Process rewards: marks on tokens and spans are read, checked, kept beside the score, and put on the tokens."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import posttrain
from posttrain.algorithms.advantages import sums_differ
from posttrain.algorithms.table import build_algorithm
from posttrain.errors import RunError
from posttrain.records import Finish, Grades, Group, Marks, Prompt, Rollout, TokenSequence
from posttrain.rewards.grading.answers import Graded, ProcessReward, Span
from posttrain.rewards.grading.grade import grade, reward_function
from posttrain.rewards.process_rewards import process_rewards, with_penalties
from posttrain.runs.prompt_preview import marked_lines
from posttrain.runs.run_folder import RunFolder
from posttrain.training.metrics import step_metrics
from tests.support.refusals import refused
from tests.support.reward_rows import Outcome, graded, group
from tests.support.worker_rows import function_of

nan = math.nan
SOURCE = """
from posttrain import ProcessReward, Span

def marks(completions, completion_ids):
    return [
        ProcessReward(0.5, [None, 0.25], [Span(0, 1, -1.0)]) if len(text) > 1 else ProcessReward(len(text))
        for text, ids in zip(completions, completion_ids)
    ]

async def later(completions, completion_ids):
    return marks(completions, completion_ids)

def one(response):
    return marks([response], [None])[0]
"""
GIVEN = ((Marks(tokens=(None, 0.25), spans=((0, 1, -1.0),)), None), (None, Marks((None, 0.25), ((0, 1, -1.0),))))


@pytest.mark.parametrize("name", ["marks", "later", "one"])
@pytest.mark.parametrize("options", [{}, {"workers": 1}, {"cache": True}], ids=["here", "workers", "cache"])
def test_marks_are_kept_beside_the_score_wherever_the_function_is_called(name, options, tmp_path) -> None:
    function = function_of(tmp_path, SOURCE, name, **options)
    groups = [group(["ab", ""], id="p"), group(["c", "de"], id="q")]
    for _ in range(2):  # the second time from the cache, where there is one
        grades = grade(groups, [function])
        assert grades.scores.tolist() == [[[0.5, 0.0], [1.0, 0.5]]]
        assert grades.marks == {name: GIVEN}
    assert grades.num_cached == (4 if "cache" in options else 0)
    assert grades.marked.tolist() == [[[-0.75, 0.0], [0.0, -0.75]]]
    assert grades.totals.tolist() == [[-0.25, 0.0], [1.0, -0.25]]


def test_they_go_with_their_groups_through_select_and_joined() -> None:
    def marks(completions: list[str]) -> list[ProcessReward]:
        return [ProcessReward(0.0, spans=[Span(0, 1, float(ord(text[0])))]) for text in completions]

    def plain(completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]

    groups = [group(["a"], id="p"), group(["b"], id="q"), group(["c"], id="r")]
    grades = graded(groups, plain, marks)
    assert [row[0].spans[0][2] for row in grades.select([2, 0]).marks["marks"]] == [99, 97]
    joined = grades.select([1]).joined(grades.select([0, 2]))
    assert [row[0].total for row in joined.marks["marks"]] == [98, 97, 99]
    assert joined.marks.keys() == {"marks"}
    # Of groups in which nothing was marked, and of groups in which something was.
    first = {"scores": grades.scores[:, :1], "rewards": grades.rewards[:1]}
    nothing = Grades(names=grades.names, weights=grades.weights, **first)
    assert [row[0] is None for row in nothing.joined(grades).marks["marks"]] == [True, False, False, False]


def test_a_score_may_be_graded_and_marks_may_be_arrays_or_tuples() -> None:
    def marks(completions: list[str]) -> list[ProcessReward]:
        return [
            ProcessReward(Graded(1.0, Outcome.RIGHT), np.array([0.5, nan][:1] * 2), [(0, 2, 1)]),
            ProcessReward(True, torch.tensor([1.0, 2.0]), ((0, 1, 0.5), Span(1, 2, 0.0))),
        ]

    grades = graded([group(["ab", "cd"])], marks)
    assert grades.outcomes["marks"] == (("right", ""),)
    assert grades.scores.tolist() == [[[1.0, 1.0]]]
    expected = Marks((0.5, 0.5), ((0, 2, 1.0),)), Marks((1.0, 2.0), ((0, 1, 0.5), (1, 2, 0.0)))
    assert grades.marks["marks"] == (expected,)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (ProcessReward(None, [1.0, 0.0]), "a ProcessReward whose score is None"),
        (ProcessReward(nan, [1.0, 0.0]), "returned nan"),
        (ProcessReward(0.0, [1.0]), "returned 1 token_rewards for a completion of 2 tokens"),
        (ProcessReward(0.0, [1.0, math.inf]), "returned token_rewards[1] = inf (float); give a finite number"),
        (ProcessReward(0.0, ["1", 0.0]), "returned token_rewards[0] = '1' (str)"),
        (ProcessReward(0.0, {1.0, 2.0}), "which has no order, as token_rewards; give a list"),
        (ProcessReward(0.0, 1.0), "returned 1.0 (float) as token_rewards"),
        (ProcessReward(0.0, spans=[(0, 3, 1.0)]), "returned spans[0] = characters 0 to 3 of a text of 2; a span is"),
        (ProcessReward(0.0, spans=[(0, 1, 1.0), (-1, 1, 1.0)]), "spans[1] = characters -1 to 1"),
        (ProcessReward(0.0, spans=[(1, 1, 1.0)]), "characters 1 to 1"),
        (ProcessReward(0.0, spans=[(0.5, 1, 1.0)]), "returned spans[0] = (0.5, 1, 1.0) (tuple); give a list of spans"),
        (ProcessReward(0.0, spans=[(0, 1)]), "returned spans[0] = (0, 1) (tuple)"),
        (ProcessReward(0.0, spans=[(0, 1, nan)]), "returned spans[0] = (0, 1, nan) (tuple)"),
        (ProcessReward(0.0, spans=Span(0, 1, 1.0)), "returned spans[0] = 0 (int)"),
        (ProcessReward(0.0, spans=7), "returned 7 (int) as spans"),
    ],
)
def test_marks_that_are_wrong_stop_with_the_row_named(given: ProcessReward, says: str) -> None:
    def marks(completions: list[str]) -> list[object]:
        return [0.0, given]

    with refused("reward 'marks', prompt 'p', sample 1: ", says, error=RunError):
        graded([group(["ab", "cd"])], marks)
    grades = graded([group(["ab", "cd"])], marks, on_error="none")
    assert (grades.num_failures, grades.marks) == (1, {})


def test_one_process_reward_in_place_of_a_list_is_no_list() -> None:
    with refused("for 2 completions", error=RunError):
        graded([group(["ab", "cd"])], lambda completions: ProcessReward(1.0, [0.0, 0.0]))


def test_the_names_are_public() -> None:
    assert (posttrain.ProcessReward, posttrain.Span) == (ProcessReward, Span)


def byte_level() -> PreTrainedTokenizerFast:
    """A token for each byte, and a few for several: no character beyond ASCII has a token of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("a", "b"), ("ab", "c")]
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *(a + b for a, b in merges), "<|end|>", "<think>"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)
    wrapped.add_special_tokens({"additional_special_tokens": ["<|end|>", "<think>"]})
    return wrapped


def metaspace() -> PreTrainedTokenizerFast:
    """Pieces that carry the space before a word, which the decoder drops at the start, and bytes where none fits."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", 0.0) for byte in range(256))]
    pieces += [(piece, -1.0) for piece in ("▁a", "▁b", "c", "▁", "a", "b")]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


TOKENIZERS = {"byte level": byte_level(), "metaspace": metaspace()}
BYTES = TOKENIZERS["byte level"]


def written(tokens: list[int], *, tokenizer: Any = BYTES, stop: int | None = None, prefill: str = "") -> Group:
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    ids = tuple(tokens) if stop is None else (*tokens, stop)
    finish = Finish.LENGTH if stop is None else Finish.STOP
    sequence = TokenSequence.one_turn(ids, logprobs=(0.0,) * len(ids), finish=finish)
    prompt = Prompt(id="p", text="1" + prefill, tokens=(1,), prefill=prefill)
    return Group(prompt=prompt, draw=0, rollouts=(Rollout(sample=0, sequence=sequence, text=text),))


def column(given: Group, *spans: tuple[int, int, float], tokenizer: Any = BYTES) -> list[float]:
    grades = graded([given], lambda completions: [ProcessReward(0.0, spans=spans)])
    return process_rewards([given], grades, tokenizer).tolist()


FACE = "a\N{GRINNING FACE}é"
"""A token, four and two."""
OF_FACE = BYTES.encode(FACE)


@pytest.mark.parametrize(
    ("given", "spans", "expected"),
    [
        # Tokens abc, Ġa, b and d: a space is of the next token.
        (written(BYTES.encode("abc abd")), [(0, 3, 1.0)], [1.0, nan, nan, nan]),
        (written(BYTES.encode("abc abd")), [(0, 4, 1.0)], [nan, 1.0, nan, nan]),
        (written(BYTES.encode("abc abd")), [(1, 7, 1.0), (0, 2, 0.5), (2, 3, 0.0)], [0.5, nan, nan, 1.0]),
        # A character of several tokens is complete with the last of them.
        (written(OF_FACE), [(0, 1, 1.0)], [1.0, *[nan] * 6]),
        (written(OF_FACE), [(0, 2, 1.0), (1, 2, 2.0)], [nan, nan, nan, nan, 3.0, nan, nan]),
        (written(OF_FACE), [(2, 3, 1.0)], [*[nan] * 6, 1.0]),
        # Half a character at the end is a character of the text.
        (written(OF_FACE[:3]), [(1, 2, 1.0)], [nan, 1.0, nan]),
        # The stop token writes nothing.
        (written(BYTES.encode("ab"), stop=BYTES.convert_tokens_to_ids("<|end|>")), [(0, 2, 1.0)], [1.0, nan]),
        # Spans count from the start of the prefill, which nobody sampled.
        (written(BYTES.encode("ab d"), prefill="<think>"), [(0, 7, 9.0), (0, 8, 1.0), (9, 11, 2.0)], [1.0, nan, 2.0]),
    ],
)
def test_a_span_is_earned_by_the_token_that_completes_it(given, spans, expected) -> None:
    assert column(given, *spans) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_the_stop_token_can_be_marked_as_a_token() -> None:
    given = written(BYTES.encode("ab"), stop=BYTES.convert_tokens_to_ids("<|end|>"))
    grades = graded([given], lambda completions: [ProcessReward(0.0, [None, 0.25], [(0, 2, 1.0)])])
    assert process_rewards([given], grades, BYTES).tolist() == [1.0, 0.25]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_every_span_is_on_one_token_and_no_text_before_it_says_as_much(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    text = data.draw(st.text("abc é\N{GRINNING FACE}", min_size=1, max_size=12))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    given = written(tokens, tokenizer=tokenizer)
    decoded = given.rollouts[0].text
    if not decoded:
        return
    start = data.draw(st.integers(0, len(decoded) - 1))
    end = data.draw(st.integers(start + 1, len(decoded)))
    placed = column(given, (start, end, 0.7), tokenizer=tokenizer)
    assert [value for value in placed if value == value] == [0.7]
    token = placed.index(0.7)
    assert tokenizer.decode(tokens[: token + 1], skip_special_tokens=False)[:end] == decoded[:end]
    assert tokenizer.decode(tokens[:token], skip_special_tokens=False)[:end] != decoded[:end]


@given(
    tokens=st.lists(st.one_of(st.none(), st.floats(-5, 5)), min_size=3, max_size=3),
    spans=st.lists(st.tuples(st.integers(0, 1), st.integers(2, 3), st.floats(-5, 5)), max_size=4),
    weights=st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)),
)
def test_all_that_is_marked_is_on_the_tokens_times_its_functions_weight(tokens, spans, weights) -> None:
    given = written(BYTES.encode("cba"))
    first = reward_function(lambda completions: [ProcessReward(0.0, tokens, spans)], name="first", weight=weights[0])
    second = reward_function(lambda completions: [ProcessReward(1.0, [1, 2, 3])], name="second", weight=weights[1])
    ignored = reward_function(lambda completions: [ProcessReward(1.0, [9, 9, 9])], name="ignored", weight=0.0)
    grades = grade([given], [first, second, ignored])
    total = math.fsum([*(each for each in tokens if each is not None), *(each[2] for each in spans)])
    earned = process_rewards([given], grades, BYTES)
    assert earned.sum().item() == pytest.approx(weights[0] * total + 6 * weights[1], abs=1e-12)
    assert grades.totals.item() == pytest.approx(weights[0] * total + 7 * weights[1], abs=1e-12)


def test_functions_without_weight_or_marks_give_no_column() -> None:
    given = written(BYTES.encode("ab"))
    marks = reward_function(lambda completions: [ProcessReward(0.0, [1.0])], name="marks", weight=0.0)
    plain = reward_function(lambda completions: [1.0], name="plain")
    for functions in ([marks, plain], [plain]):
        assert process_rewards([given], grade([given], functions), BYTES) is None


def test_a_text_that_is_not_what_its_tokens_say_is_told_with_its_row() -> None:
    with refused("prompt 'p', sample 0: ", "token_rewards", error=RunError):
        column(group(["xyz"]), (0, 3, 1.0))


def test_penalties_are_added_and_where_no_step_ends_they_stand_alone() -> None:
    steps, penalties = torch.tensor([nan, 0.5]).double(), torch.tensor([-0.25, -0.25]).double()
    assert with_penalties(steps, penalties).tolist() == [-0.25, 0.25]
    assert with_penalties(steps, None).tolist() == [0.0, 0.5]
    assert with_penalties(None, penalties) is penalties
    assert with_penalties(None, None) is None


def test_marks_are_in_the_journal_as_given_and_in_the_rollout_file_token_by_token(tmp_path: Path) -> None:
    groups = [written(BYTES.encode("ab d")), written(BYTES.encode("d"))]

    def steps(completions: list[str]) -> list[object]:
        return [ProcessReward(0.5, spans=[Span(0, 2, 0.25)]), 0.0]

    grades = graded(groups, steps)
    column = with_penalties(process_rewards(groups[:1], grades.select([0]), BYTES), None)
    with RunFolder.create(tmp_path / "run", "") as folder:
        folder.journal_scores(1, groups, grades)
        # The second group took no part in the step.
        path = folder.write_rollouts(1, groups, grades, grades.rewards, token_columns={"token_rewards": column})
    lines = [json.loads(line) for line in (tmp_path / "run" / "scores.jsonl").read_text().splitlines()]
    given = {"tokens": [], "spans": [[0, 2, 0.25]]}
    assert [line["marks"] for line in lines] == [{"steps": [given]}, {"steps": [None]}]
    rows = pq.read_table(path).to_pylist()
    assert [row["token_rewards"] for row in rows] == [[0.25, 0.0, 0.0], None]
    assert [row["marks/steps"] for row in rows] == [json.dumps(given), None]


def test_a_dry_run_shows_what_is_marked() -> None:
    def steps(completions: list[str]) -> list[object]:
        return [ProcessReward(0.5, [0.25, None], [Span(0, 2, -0.5), *[Span(i, i + 1, 0.125) for i in range(8)]])]

    given = group(["7\n+ 4 = 11!"])
    (line,) = marked_lines(given, graded([given], steps), 0)
    # The sixth character on, of eight marks beside the token and the pair, is told by number.
    shown = ", ".join(f"{each!r} 0.125" for each in "7\n+ 4 ")
    assert line == f"steps: token 0 0.25, '7\\n' -0.5, {shown}, and 2 more; 0.75 in total"


def test_what_is_marked_is_a_metric_and_tells_groups_apart() -> None:
    def steps(completions: list[str]) -> list[object]:
        return [ProcessReward(0.5, [0.25 * len(text), 0.0]) if text else None for text in completions]

    groups = [group(["a", "abc", ""])]
    grades = graded(groups, steps)
    metrics = step_metrics(groups, grades, torch.ones(1, 3, dtype=torch.bool))
    assert metrics["process_rewards/steps/mean"] == 0.5  # of .25 and .75: the third was not scored
    assert (metrics["reward"], metrics["frac_uninformative_groups"]) == (0.5, 0.0)
    assert sums_differ(grades).tolist() == [True]
    assert sums_differ(graded(groups, lambda completions: [ProcessReward(0.5, [0.0, 0.0])] * 3)).tolist() == [False]


def test_dynamic_sampling_asks_whether_totals_differ() -> None:
    """DAPO's credit is of whole completions: steps that come to the same in all of them leave no advantage."""

    def marked(totals: list[float]) -> Grades:
        return graded([group(["ab"] * len(totals))], lambda completions: [ProcessReward(1.0, [t, 0.0]) for t in totals])

    informative = build_algorithm({"name": "dapo"}).informative
    assert informative(marked([0.5, 0.5])).tolist() == [False]
    assert sums_differ(marked([0.5, 0.5])).tolist() == [True], "where credit goes to steps there is something to learn"
    assert informative(marked([0.5, 0.25])).tolist() == [True]
