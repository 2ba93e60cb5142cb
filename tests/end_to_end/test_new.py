"""`posttrain new`: each kind of folder passes `check-task` and trains as it is, by the commands of its README."""

import json
import shlex
from pathlib import Path

import pytest

from posttrain.commands.new import TEMPLATES, commands_in
from tests.support.commands import called, printed, refusal
from tests.support.refusals import mentions
from tests.support.runs import command, metrics_of

KINDS = sorted(each.name for each in TEMPLATES.iterdir())
SHORT = {
    "reward-model": ["--reward-model.num-epochs", "1", "--run.threads", "1"],
    "rl": [
        *("--run.num-steps", "2", "--rollout.prompts-per-step", "4", "--evaluation.samples", "1"),
        *("--evaluation.every-steps", "0", "--run.threads", "1"),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_folder_passes_check_task_and_trains_as_it_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = printed("new", "my problem", "--kind", kind)
    folder = tmp_path / "my problem"
    typed = commands_in(folder / "README.md")
    assert [line.strip() for line in said.splitlines() if line.startswith("    ")] == ["cd 'my problem'", *typed]
    assert not [file.name for file in folder.iterdir() if file.suffix == ".template"]
    names = []
    for line in typed:
        program, name, *arguments = shlex.split(line)
        assert program == "posttrain"
        names.append(name)
        if name == "view":  # it serves until it is interrupted
            continue
        ended = command(name, *arguments, *SHORT.get(name, []), folder=folder)
        assert ended.code == 0, ended.out + ended.err
        if name == "check-task":
            mentions(ended.out, "every answer got what it deserves")
    assert names[-3:] == ["check-task", "rl", "view"]
    rewards = [line["reward"] for line in metrics_of(folder / "runs" / "first") if line["step"]]
    assert len(rewards) == 2
    assert all(0 < reward < 1 for reward in rewards), "there is something to learn from the first step on"


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_is_asked_twice_and_the_readme_speaks_of_every_file(kind: str) -> None:
    rows = [json.loads(line)["prompt"] for line in (TEMPLATES / kind / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len({*rows}) >= 64
    readme = (TEMPLATES / kind / "README.md").read_text()
    files = [file.name.removesuffix(".template") for file in (TEMPLATES / kind).iterdir()]
    assert [name for name in files if name not in readme and name != "README.md"] == []


def test_a_folder_with_anything_in_it_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    printed("new", tmp_path / "empty")
    before = {file: file.read_bytes() for file in (tmp_path / "empty").iterdir()}
    mentions(refusal("new", tmp_path / "empty", "--kind", "tools"), "the folder is not empty.  Name a new folder.")
    mentions(refusal("new", tmp_path / "empty" / "rows.jsonl"), "is a file.  Name a new folder.")
    assert {file: file.read_bytes() for file in (tmp_path / "empty").iterdir()} == before
    mentions(called("new", tmp_path / "other", "--kind", "jugde").err, "kind", "rule", "judge", "tools")
    assert not (tmp_path / "other").exists()
