"""The record of a sequence: its parts, why it ended, and what files, marks and tables make of given tokens."""

import ast
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from posttrain.batch import completions_of
from posttrain.commands.trace_table import with_gaps
from posttrain.errors import RunError
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.records import Finish, Grades, Group, Marks, Prompt, Rollout, TokenSequence
from posttrain.rewards.process_rewards import process_rewards
from posttrain.runs.rollout_file import parquet_bytes, read_rollouts, token_column_bytes
from posttrain.training.observations import Observations, update_tokens
from tests.support.refusals import refused
from tests.support.sequences import doubles, grades_of, resampled

NAN = math.nan
SOURCE = Path(__file__).parents[2] / "src" / "posttrain"
TEXT = "12=7+3"
"""`12` is sampled, `=7` is a tool's reply, `+3` is sampled again."""
MASK = (True, True, False, False, True, True)


def group() -> Group:
    tokens = tuple(new_tokenizer()(TEXT)["input_ids"])
    assert len(tokens) == len(TEXT)
    logprobs = (-1.0, -2.0, -3.0, -4.0)
    given = TokenSequence(
        tokens=tokens, sampled=MASK, logprobs=logprobs, versions=((0, 6), (2, 5)), finish=Finish.LENGTH
    )
    plain = TokenSequence.one_turn(tokens[:2], logprobs=(-0.5, -0.25), finish=Finish.LENGTH, version=7)
    rollouts = (Rollout(sample=0, sequence=given, text=TEXT), Rollout(sample=1, sequence=plain, text=TEXT[:2]))
    return Group(prompt=Prompt(id="p", text="?", tokens=(1,)), draw=0, rollouts=rollouts)


def grades(marks: Marks | None = None) -> Grades:
    return grades_of([[1.0, 0.0]], marks={"f": ((marks, None),)} if marks else {})


def require_process_rewards(groups: Sequence[Group], given: Grades, *expected: float) -> None:
    found = process_rewards(groups, given, new_tokenizer())
    assert found is not None
    torch.testing.assert_close(found, doubles(*expected), equal_nan=True)


def test_a_sequence_has_a_mark_for_each_token() -> None:
    with refused("a sequence of 2 tokens has 1 marks in `sampled`", error=RunError):
        TokenSequence(tokens=(1, 2), sampled=(True,))


def test_lengths_and_log_probs_are_of_what_was_sampled() -> None:
    rollout = group().rollouts[0]
    assert rollout.num_sampled == len(rollout.logprobs) == 4
    assert rollout.sequence.sampled_tokens == (*rollout.tokens[:2], *rollout.tokens[4:])
    assert rollout.weights_version == 5, "the oldest weights that sampled a token of it"


def test_a_stop_token_at_the_end_writes_no_text() -> None:
    ended = {finish: TokenSequence.one_turn((4, 5), finish=finish).text_tokens for finish in Finish}
    assert ended == {finish: (4,) if finish is Finish.STOP else (4, 5) for finish in Finish}
    assert TokenSequence.one_turn((4, 5)).text_tokens == (4, 5)
    assert {finish for finish in Finish if finish.cut_off} == {Finish.LENGTH, Finish.TURNS}


def test_no_code_asks_which_member_a_finish_is() -> None:
    """`Finish.X` is something to write down and never something to compare with: more members will come."""
    compared = [
        f"{path.name}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare | ast.MatchValue)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "Finish"
    ]
    assert compared == []


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (Marks(tokens=(0.5, None, None, None, None, 2.0)), [0.5, NAN, NAN, 2.0]),
        (Marks(tokens=(None, 1.0, 2.0, 4.0, None, None)), [NAN, 7.0, NAN, NAN]),  # `2` asked for the reply: 1 + 2 + 4
        (Marks(spans=((0, 4, 1.0),)), [NAN, 1.0, NAN, NAN]),  # ends in the reply
        (Marks(spans=((2, 5, 1.0),)), [NAN, NAN, 1.0, NAN]),  # `+` completes it
        (Marks(spans=((2, 3, 1.0), (0, 6, -2.0))), [NAN, 1.0, NAN, -2.0]),
    ],
    ids=str,
)
def test_a_mark_on_given_text_counts_at_the_last_sampled_token_before_it(marks: Marks, expected: list[float]) -> None:
    require_process_rewards([group()], grades(marks), *expected, NAN, NAN)


def test_a_mark_before_anything_was_sampled_earns_nothing() -> None:
    whole = group()
    first = resampled(whole.rollouts[0], sampled=(False, *MASK[1:]), logprobs=(-1.0,) * 3, versions=())
    marked = replace(whole, rollouts=(first, whole.rollouts[1]))
    marks = Marks(tokens=(9.0, 1.0, None, None, None, None))
    require_process_rewards([marked], grades(marks), 1.0, NAN, NAN, NAN, NAN)


def written(path: Path, *, older: bool = False) -> Path:
    earned = doubles(NAN, 0.5, NAN, 2.0, NAN, NAN)
    columns = {"process_rewards": earned, "token_advantages": torch.arange(6).double()}
    marked = grades(Marks(tokens=(None,) * 6))
    data = parquet_bytes(3, [group()], marked, torch.zeros(1, 2).double(), token_columns=columns)
    table = pq.read_table(pa.BufferReader(data))
    # An earlier version had a log-prob and a process reward for each token.
    pq.write_table(table.drop_columns(["sampled", "process_rewards", "marks/f"]) if older else table, path)
    return path


def test_the_file_says_which_tokens_were_sampled_and_has_a_number_for_each_of_those(tmp_path: Path) -> None:
    first, second = pq.read_table(written(tmp_path / "step.parquet")).to_pylist()
    assert (first["sampled"], second["sampled"]) == ([*MASK], [True, True])
    assert (first["logprobs"], first["token_advantages"]) == ([-1, -2, -3, -4], [0, 1, 2, 3])
    assert (second["token_advantages"], second["weights_version"]) == ([4, 5], 7)


def test_a_step_is_read_back_with_its_given_tokens(tmp_path: Path) -> None:
    ((again,), known) = read_rollouts(written(tmp_path / "step.parquet"))
    for rollout, expected in zip(again.rollouts, group().rollouts, strict=True):
        assert (rollout.tokens, rollout.sequence.sampled) == (expected.tokens, expected.sequence.sampled)
        assert (rollout.logprobs, rollout.finish) == (expected.logprobs, expected.finish)
    assert known.marks["stored"][0][0] == Marks(tokens=(None, 0.5, None, None, None, 2.0))
    require_process_rewards([again], known, NAN, 0.5, NAN, 2.0, NAN, NAN)


def test_in_a_file_of_an_earlier_version_all_tokens_were_sampled(tmp_path: Path) -> None:
    ((again,), _) = read_rollouts(written(tmp_path / "step.parquet", older=True))
    assert all(all(rollout.sequence.sampled) for rollout in again.rollouts)


def test_a_table_shows_given_tokens_without_numbers() -> None:
    found = with_gaps([1.0, 2.0, 3.0, 4.0], MASK)
    assert found == pytest.approx([1.0, 2.0, NAN, NAN, 3.0, 4.0], nan_ok=True)


def test_columns_of_an_update_have_a_number_for_each_sampled_token() -> None:
    """Tokens 1 and 3 were sampled, 2 was given."""
    sequence = TokenSequence(tokens=(1, 2, 3), sampled=(True, False, True), logprobs=(-1.0, -2.0), finish=Finish.STOP)
    rollout = Rollout(sample=0, sequence=sequence, text="")
    batch = completions_of([Group(prompt=Prompt(id="p", text="", tokens=(5,)), draw=4, rollouts=(rollout,))])
    kept = update_tokens(batch, [batch], Observations(logprobs=[doubles(-1.0, -2.5)]))
    assert [*kept.lengths] == [2]
    assert {len(column) for column in kept.columns.values()} == {2}
    assert kept.columns["ratio"].tolist() == pytest.approx([1.0, math.exp(-0.5)])
    table = pq.read_table(pa.BufferReader(token_column_bytes(1, [kept]))).to_pylist()
    assert [row["policy_logprobs"] for row in table] == [[-1.0, -2.5]]
