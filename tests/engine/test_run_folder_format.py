"""The layout of a run folder, format 2: its version, the tokenizer, held-out completions and trainer columns."""

from math import nan
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from posttrain.errors import RunError, UserError
from posttrain.records import Finish, Grades, Group, Prompt, Rollout, TokenSequence
from posttrain.runs.folder import VERSION
from posttrain.runs.named_inputs import run_recipe
from posttrain.runs.reports import ScoredCompletions, UpdateTokens
from posttrain.runs.run_folder import RunFolder


def scored(*scores: float, greedy: bool = False, extra: object = None) -> ScoredCompletions:
    """A completion with each of these scores, of one prompt."""
    rollouts = tuple(
        Rollout(
            sample=i,
            sequence=TokenSequence.one_turn((7, i), logprobs=(-0.5, -1.0), finish=Finish.STOP),
            text=f"{i}",
        )
        for i, _ in enumerate(scores)
    )
    group = Group(prompt=Prompt(id="p", text="make", tokens=(3,)), draw=0, rollouts=rollouts)
    column = torch.tensor([scores], dtype=torch.float64)
    extras = {} if extra is None else {"right": (tuple({"seen": extra} for _ in scores),)}
    ones = torch.ones(1, dtype=torch.float64)
    grades = Grades(names=("right",), scores=column[None], weights=ones, rewards=column / 2, extras=extras)
    return ScoredCompletions(groups=[group], grades=grades, judged=column, greedy=greedy)


def rows(run: Path, folder: str, step: int) -> list[dict[str, Any]]:
    return pq.read_table(run / folder / f"step-{step:06d}.parquet").to_pylist()


def test_a_folder_says_its_format_from_the_start(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "seed: 7\n"):
        assert (tmp_path / "format").read_text() == f"{VERSION}\n" == "2\n"


FORMATS = {
    "3": (UserError, ("format 3", "1 to 2", "Update posttrain")),
    "two": (RunError, ("format", "'two'", "delete the file")),
    "": (RunError, ("format", "''", "delete the file")),
}


@pytest.mark.parametrize("content", FORMATS)
def test_a_format_that_is_not_known_is_refused_with_its_value_and_a_remedy(content: str, tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "run: {}\n"):
        pass
    (tmp_path / "format").write_text(content)
    kind, says = FORMATS[content]
    for opened in (RunFolder.resume, run_recipe):
        with pytest.raises(kind) as error:
            opened(tmp_path)
        assert all(each in str(error.value) for each in (*says, str(tmp_path)))


def test_a_folder_without_a_format_is_opened(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "run: {}\n"):
        pass
    (tmp_path / "format").unlink()
    assert run_recipe(tmp_path).sections == {"run": {}}
    with RunFolder.resume(tmp_path) as run:
        run.cut_after(0)


def test_every_held_out_completion_is_kept_with_its_scores(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        run.write_evaluation(4, "brief", [scored(1.0)])
        run.write_evaluation(4, "after", [scored(1.0, nan), scored(0.0, greedy=True)])
    table = rows(tmp_path, "evaluations", 4)
    told = [(row["evaluation"], row["greedy"], row["sample"], row["judged"], row["reward"]) for row in table]
    assert told == [
        ("brief", False, 0, 1.0, 0.5),
        ("after", False, 0, 1.0, 0.5),
        ("after", False, 1, None, None),
        ("after", True, 0, 0.0, 0.0),
    ]
    assert [row["score/right"] for row in table] == [1.0, 1.0, None, 0.0]
    assert table[2]["tokens"] == [7, 1]
    assert "advantage" not in table[0]


def test_an_evaluation_that_is_made_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        run.write_evaluation(4, "brief", [scored(1.0)])
        for score in (0.0, 1.0):
            run.write_evaluation(4, "after", [scored(score)])
    table = rows(tmp_path, "evaluations", 4)
    assert [(row["evaluation"], row["judged"]) for row in table] == [("brief", 1.0), ("after", 1.0)]


def test_a_logged_column_of_several_types_is_json(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        run.write_evaluation(4, "brief", [scored(1.0, extra=1)])
        run.write_evaluation(4, "after", [scored(1.0, extra="x"), scored(1.0)])
    assert [row["extra/right/seen"] for row in rows(tmp_path, "evaluations", 4)] == ["1", '"x"', None]


def test_evaluations_before_a_folder_is_begun_are_written_when_it_is(tmp_path: Path) -> None:
    with RunFolder.claim(tmp_path / "run") as run:
        run.write_evaluation(0, "before", [scored(1.0)])
        assert not (tmp_path / "run" / "evaluations").exists()
        run.begin("seed: 7\n")
    assert len(rows(tmp_path / "run", "evaluations", 0)) == 1


def test_resuming_cuts_what_was_written_after_the_checkpoint(tmp_path: Path) -> None:
    tokens = UpdateTokens(rollouts=[(0, "p", 0)], lengths=[1], columns={"ratio": torch.ones(1)})
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        run.write_evaluation(0, "before", [scored(1.0)])
        for step in (2, 4, 6):
            run.write_evaluation(step, "brief", [scored(1.0)])
            run.write_token_columns(step, [tokens])
        for step in (3, 4):
            run.write_evaluation(step, "after", [scored(0.0)])
    with RunFolder.resume(tmp_path) as run:
        run.cut_after(4)
        assert [row["evaluation"] for row in rows(tmp_path, "evaluations", 4)] == ["brief"]
        run.cut_after(3)  # where the run ended once, and nothing else was measured
    names = [
        [path.name[:11] for path in sorted((tmp_path / each).iterdir())] for each in ("evaluations", "token_columns")
    ]
    assert names == [["step-000000", "step-000002"], ["step-000002"]]
    assert rows(tmp_path, "evaluations", 0)[0]["evaluation"] == "before"


def test_a_damaged_evaluation_is_refused_with_its_file(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        (tmp_path / "evaluations" / "step-000004.parquet").write_bytes(b"PAR1")
        with pytest.raises(RunError) as error:
            run.cut_after(4)
    assert "step-000004.parquet: damaged" in str(error.value)
    assert "Delete it" in str(error.value)


def test_trainer_columns_have_a_row_for_each_completion_of_each_update(tmp_path: Path) -> None:
    first = UpdateTokens(
        rollouts=[(0, "p", 1), (2, "q", 0)],
        lengths=[2, 1],
        columns={"ratio": torch.tensor([1.0, 0.5, 2.0]), "clipped": torch.tensor([False, True, False])},
    )
    second = UpdateTokens(rollouts=[(2, "q", 0)], lengths=[1], columns={"ratio": torch.tensor([1.25])})
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        run.write_token_columns(3, [first, second])
    table = rows(tmp_path, "token_columns", 3)
    assert [(row["update"], row["draw"], row["prompt_id"], row["sample"]) for row in table] == [
        (1, 0, "p", 1),
        (1, 2, "q", 0),
        (2, 2, "q", 0),
    ]
    assert [row["ratio"] for row in table] == [[1.0, 0.5], [2.0], [1.25]]
    assert [row["clipped"] for row in table] == [[False, True], [False], None]
