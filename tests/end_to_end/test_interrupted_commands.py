"""Ctrl-C in every long command, at several moments: what was kept, and the command that goes on, which then does."""

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.accidents import Accident
from tests.support.fit_places import KINDS, place
from tests.support.runs import Ended, command, records, tiny_recipe

GRID = {"world": {"size": 3, "ground": -2.0}, "demonstrations": {"num_episodes": 10}}


def interrupted(moment: str, *argv: object, folder: Path) -> Ended:
    """A command that gets SIGINT at a moment."""
    ended = command(*argv, folder=folder, accident=Accident(moment=moment, signal=signal.SIGINT))
    assert ended.code == 130, ended.out + ended.err
    return ended


def last_line(ended: Ended) -> str:
    return ended.err.splitlines()[-1]


@dataclass(frozen=True)
class Moment:
    """When a run is interrupted, and what it says then."""

    when: str
    keeps: str
    """After the name of the signal."""


LOADING = "open .posttrain.lock 1"
AGAIN = "interrupted.  Nothing of this run is kept yet.  Start again with   posttrain {name} recipe.yaml"
AFTER_THE_LAST = "Continue with   posttrain {name} --resume run   (in Python train(config, resume=True))"


@pytest.mark.parametrize("name", ["rl", *KINDS])
def test_a_run_that_is_interrupted_in_the_evaluation_at_its_end_stops_at_once_and_is_resumed(
    name: str, folder: Path
) -> None:
    if name == "rl":
        where = tiny_recipe(folder / "ends", run={"num_steps": 1}).parent
        moment = "call posttrain.training.rl:conclude_rl 1"
    else:
        where = place(name, folder / f"ends-{name}")
        moment = "call posttrain.training.fit:conclude 1"
    assert last_line(interrupted(LOADING, name, "recipe.yaml", folder=where)) == (
        f"posttrain: SIGINT: {AGAIN.format(name=name)}"
    )
    ended = interrupted(moment, name, "recipe.yaml", folder=where)
    last = max(path.name for path in (where / "run" / "checkpoints").iterdir())
    kept = f"Kept: step {int(last[5:])} and everything before it."
    assert last_line(ended) == f"posttrain: SIGINT: interrupted.  {kept}  {AFTER_THE_LAST.format(name=name)}"
    assert command(name, "--resume", "run", folder=where).code == 0
    assert json.loads((where / "run" / "summary.json").read_text())["after"]


@pytest.mark.parametrize(
    ("moment", "says", "written"),
    [
        (
            "call posttrain.irl_runs.methods:fit_reward 1",
            "Nothing was kept.  Start again with   posttrain irl recipe.yaml",
            False,
        ),
        ("open reward.npz 1", "The run is finished: all results are in run.", True),
    ],
)
def test_inverse_rl_ends_at_once_until_it_writes_its_results(
    moment: str, says: str, *, written: bool, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**GRID, "run": {"folder": "run", "plots": False}}))
    ended = interrupted(moment, "irl", "recipe.yaml", folder=tmp_path)
    assert last_line(ended) == f"posttrain: SIGINT: interrupted.  {says}"
    assert (tmp_path / "run" / "summary.json").is_file() == written


def test_an_evaluation_keeps_nothing_and_says_how_to_start_again(folder: Path) -> None:
    where = tiny_recipe(folder / "measured", rewards=[]).parent
    argv = ("eval", folder / "model", "recipe.yaml", "--output", "it.json")
    ended = interrupted("call posttrain.training.held_out:full_evaluation 1", *argv, folder=where)
    again = " ".join(map(str, argv))
    assert last_line(ended) == (
        f"posttrain: SIGINT: interrupted.  Nothing was kept.  Start again with   posttrain {again}"
    )
    assert not (where / "it.json").exists()


def collecting(where: Path) -> list[str]:
    """The arguments of a small collection, and its files."""
    where.mkdir()
    (where / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n} and "}) + "\n" for n in range(4)))
    (where / "mine.py").write_text("def length(completions, **c):\n    return [float(len(t)) for t in completions]\n")
    recipe = {
        "model": {"path": str(where.parent / "model")},
        "task": {"name": "dataset", "path": "rows.jsonl", "held_out_share": 0.0},
        "rewards": ["mine.py:length"],
        "sampling": {"max_completion_tokens": 4},
        "collect": {"num_prompts": 4, "group_size": 2, "cut_off": "keep", "max_rows": 2},
        "run": {"threads": 1, "folder": "run"},
    }
    (where / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return ["collect", "recipe.yaml"]


def test_a_collection_keeps_the_batch_in_progress_and_a_second_signal_says_what_there_is(folder: Path) -> None:
    where = folder / "collected"
    argv = collecting(where)
    ended = interrupted(
        "call posttrain.commands.collection.prompt_sampler:PromptSampler.sampled 1", *argv, folder=where
    )
    assert last_line(ended) == (
        "SIGINT: the collection stops after the current part, and saves it.  Interrupt again to stop immediately."
    )
    assert "continue   posttrain collect --resume run\n" in ended.out
    assert len(records(where / "run" / "completions.jsonl")) == 1
    assert command("collect", "--resume", "run", folder=where).code == 0
    assert len(records(where / "run" / "preferences.jsonl")) > 0


TWICE = """
def length(completions, **c):
    import os, signal
    calls.append(0)
    if len(calls) == 2:  # one prompt is on the disk
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    return [float(len(t)) for t in completions]

calls = []
"""


def test_a_collection_that_is_ended_at_once_keeps_the_prompts_before(folder: Path) -> None:
    where = folder / "twice"
    argv = collecting(where)
    (where / "mine.py").write_text(TWICE)
    ended = command(*argv, folder=where)
    assert ended.code == 130, ended.err
    kept = "Kept: 1 prompt with its completions, 0 answers, 0 votes."
    assert last_line(ended) == (
        f"posttrain: SIGINT: interrupted.  {kept}  Continue with   posttrain collect --resume run"
    )


def several(where: Path) -> tuple[list[str], list[str]]:
    """The arguments of a small comparison, and those of two phases."""
    recipe = tiny_recipe(where, evaluation={"every_steps": 0, "samples": 1}, run={"num_steps": 1})
    content = yaml.safe_load(recipe.read_text())
    content["run"].pop("folder")
    (where / "base.yaml").write_text(yaml.safe_dump(content))
    phases = [{"name": name, "recipe": "base.yaml"} for name in ("one", "two")]
    (where / "phases.yaml").write_text(yaml.safe_dump({"phases": phases}))
    return ["compare", "base.yaml", "--seeds", "1"], ["phases", "phases.yaml"]


IN_A_CHILD = "call posttrain.runs.interruption:last_line 1"
"""A second after it began: it loads its model."""


def typed(argv: Sequence[str]) -> str:
    return " ".join(("posttrain", *argv))


@pytest.mark.parametrize(
    ("which", "moment", "keeps"),
    [
        ("compare", IN_A_CHILD, "Kept: 0 of 1 runs."),
        (
            "compare",
            "call posttrain.commands.comparison.cells:kl_to_start 1",
            "Kept: 0 of 1 runs, base seed 0 up to its last checkpoint.",
        ),
        ("phases", IN_A_CHILD, "No phase is saved yet."),
        ("phases", "subprocess.Popen python 2", "Kept: phase one."),
    ],
)
def test_a_command_of_several_runs_says_which_are_kept_and_the_same_command_goes_on(
    which: str, moment: str, keeps: str, folder: Path
) -> None:
    where = folder / f"{which}-{len(moment)}"
    argv = dict(zip(("compare", "phases"), several(where), strict=True))[which]
    ended = interrupted(moment, *argv, folder=where)
    assert last_line(ended) == f"posttrain: SIGINT: interrupted.  {keeps}  Continue with   {typed(argv)}"
