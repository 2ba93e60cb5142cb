"""`posttrain collect` with a tiny model: what it says, shows and refuses, in the terminal and after a signal."""

import io
import json
import re
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.cli import main
from posttrain.commands.collection import prompt_sampler
from tests.support.commands import printed, refusal
from tests.support.refusals import mentions
from tests.support.runs import save_tiny_model

ROWS = [{"prompt": f"{a} and ", "wanted": str(a)} for a in range(6)]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collect")
    save_tiny_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "mine.py").write_text("def length(completions, **c):\n    return [float(len(t)) for t in completions]\n")
    content = {
        "model": {"path": str(folder / "model")},
        "task": {"name": "dataset", "path": str(folder / "rows.jsonl"), "held_out_share": 0.0},
        "rewards": [f"{folder}/mine.py:length"],
        "sampling": {"max_completion_tokens": 5},
        "collect": {"num_prompts": 4, "group_size": 2, "cut_off": "keep"},
        "run": {"threads": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return folder / "recipe.yaml"


def test_the_command_collects_and_says_what_there_is(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = printed("collect", recipe, "--run.folder", folder)
    mentions(said, "sampled    8 completions of 4 prompts", f"rows       {folder}/preferences.jsonl")
    assert f"--resume {folder}" in refusal("collect", recipe, "--run.folder", folder)
    assert main(["collect", "--resume", str(folder), "--run.threads", "1"]) == 0
    told = refusal("collect", "--resume", folder, "--collect.group-size", "3")
    assert "keeps its recipe; only run.threads, judge.endpoint, judge.options may" in told
    assert "judge:\n  name: reward" in printed("config", folder / "config.yaml")


def test_a_dry_run_shows_the_plan_and_the_first_pairs_and_keeps_nothing(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    asked = ["--collect.group-size", "3", "--collect.pairs", "random", "--collect.pairs-per-prompt", "2"]
    said = printed("collect", recipe, "--run.folder", folder, "--dry-run", *asked)
    mentions(said, "samples    4 prompts × 3 completions, round 1", "pairs      random: at most 8", ", reward ")
    assert "compared   " in said
    assert not folder.exists()


def test_a_dry_run_compares_what_the_run_would(recipe: Path, tmp_path: Path) -> None:
    """Completions that the token limit cuts off are dropped: of none of them a pair is made."""
    asked = [str(recipe), "--run.folder", str(tmp_path / "run"), "--collect.cut-off", "drop"]
    asked += ["--sampling.max-completion-tokens", "1"]
    told = printed("collect", *asked, "--dry-run")
    assert main(["collect", *asked]) == 0
    rows = (tmp_path / "run" / "preferences.jsonl").read_text() + (tmp_path / "run" / "ties.jsonl").read_text()
    assert ("compared   none of them" in told) == (not rows)
    assert "compared   none of them" in told


def test_a_changed_file_is_told_when_a_collection_is_resumed(recipe: Path, tmp_path: Path) -> None:
    folder, rows = tmp_path / "run", tmp_path / "rows.jsonl"
    rows.write_text((recipe.parent / "rows.jsonl").read_text())
    assert main(["collect", str(recipe), "--run.folder", str(folder), "--task.path", str(rows)]) == 0
    rows.write_text(rows.read_text() + '{"prompt": "one more"}\n')
    assert f"task.path = {rows} has changed since the run began" in refusal("collect", "--resume", folder)
    assert main(["collect", "--resume", str(folder), "--accept-changes"]) == 0
    assert json.loads((folder / "inputs.json").read_text())["changes"]


def test_votes_in_the_terminal(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    typed = iter(["1", "u", "U", "what?", "2", "t", "q"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(typed))
    asked = ["--judge.name", "person", "--judge.question", "How sound is it?", "--rewards", "--terminal"]
    asked += ["--rater", "anna"]
    said = printed("collect", recipe, "--run.folder", folder, *asked)
    mentions(said, "taken back", "there is no vote to take back", "'what?' is none of them")
    votes = lines(folder / "votes.jsonl")
    assert ["undone" in each for each in votes] == [False, True, False, False]
    left = votes[2]["left"]
    assert votes[2]["vote"] == ("second" if left == "first" else "first")  # 2 is the one on the right
    assert votes[3]["vote"] == "tie"
    mentions(said, "2 open", f"posttrain collect --resume {folder}", "How sound is it?")
    for ends in (raises_end, interrupts):
        monkeypatch.setattr("builtins.input", ends)
        assert "2 of 4 judged by anna" in printed("collect", "--resume", folder, "--terminal", "--rater", "anna")
    assert len(lines(folder / "votes.jsonl")) == 4


def raises_end(prompt: str = "") -> str:
    raise EOFError


def interrupts(prompt: str = "") -> str:
    signal.raise_signal(signal.SIGINT)
    raise AssertionError("goes on although somebody pressed Ctrl-C")


def test_a_signal_while_completions_are_sampled_ends_the_command_after_their_batch(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_it_is = prompt_sampler.PromptSampler.sampled

    def interrupted(self: Any, draws: range, advance: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return as_it_is(self, draws, advance)

    folder = tmp_path / "run"
    monkeypatch.setattr(prompt_sampler.PromptSampler, "sampled", interrupted)
    assert main(["collect", str(recipe), "--run.folder", str(folder), "--collect.max-rows", "2"]) == 130
    assert f"continue   posttrain collect --resume {folder}" in capsys.readouterr().out
    assert len(lines(folder / "completions.jsonl")) == 1
    monkeypatch.setattr(prompt_sampler.PromptSampler, "sampled", as_it_is)
    assert main(["collect", "--resume", str(folder)]) == 0
    assert len(lines(folder / "completions.jsonl")) == 4


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--sampling.temperature", "0"], "makes all completions the same"),
        (["--judge.name", "llm"], "needs judge.endpoint"),
        (
            ["--judge.name", "person"],
            "rewards is only for scored = true, and scored = false.  judge.name = person asks none",
        ),
        (["--judge.name", "persons"], "Did you mean `person`"),
        (["--judge.rubric", "x"], "no such flag"),
        (["--rater", "anna", "anna"], "name each rater once"),
        (["--rater", "anna", "ben", "--terminal"], "--terminal = true asks one person"),
        (["--port", "70000"], "--port = 70000: must be"),
        (["--port", "8000"], "--port = 8000 is only for people who vote, and judge.name = reward"),
        (["--terminal"], "--terminal = true is only for people"),
        (["--rater", "anna"], "--rater = [anna] is only for people"),
        (["--update.learning-rate", "1"], "no such flag"),
    ],
)
def test_mistakes_are_told_in_one_message(flags: list[str], says: str, recipe: Path, tmp_path: Path) -> None:
    assert says in refusal("collect", recipe, "--run.folder", tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()


def test_the_last_vote_can_be_taken_back_in_the_terminal_too(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"

    def votes_of(typed: list[str], *command: str) -> list[str]:
        left = iter(typed)
        monkeypatch.setattr("builtins.input", lambda prompt="": next(left))
        assert main(["collect", *command, "--terminal", "--rater", "anna"]) == 0
        assert next(left, None) is None, "all that was typed was asked for"
        given: dict[str, str] = {}
        for line in lines(folder / "votes.jsonl"):
            if "undone" in line:
                del given[line["undone"]]
            else:
                given[line["pair"]] = line["vote"]
        return list(given.values())

    asked = ["--judge.name", "person", "--judge.question", "How sound is it?", "--rewards"]
    assert votes_of(["t", "t", "t", "t", "u", "s", ""], str(recipe), "--run.folder", str(folder), *asked)[3] == "skip"
    assert "Every pair is judged.  u takes the last vote back" in capsys.readouterr().out
    assert votes_of(["u", "t", "q"], "--resume", str(folder)) == ["tie"] * 4


def test_each_rater_votes_on_a_page_of_their_own(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, told = tmp_path / "run", io.StringIO()
    monkeypatch.setattr(sys, "stdout", told)  # read while the command writes, which capsys does not bear
    asked = ["--judge.name", "person", "--judge.question", "How sound?", "--rewards", "--rater", "anna", "ben"]
    codes: list[int] = []
    running = threading.Thread(
        target=lambda: codes.append(main(["collect", str(recipe), "--run.folder", str(folder), *asked]))
    )
    running.start()
    while "End with the button" not in told.getvalue():
        assert running.is_alive(), told.getvalue()
        time.sleep(0.02)
    said = told.getvalue()
    addresses = dict(re.findall(r"(\w+): 4 of 4 pairs to judge at\s+(\S+)", said))
    for rater, choices in (("anna", ["left", "right", "tie"]), ("ben", ["tie", "tie", "tie", "skip"])):
        base, _, token = addresses[rater].partition("#")
        for choice in choices:
            shown = posted(f"{base}state", token)
            assert (shown["asks"], shown["rater"]) == ("How sound?", rater)
            posted(f"{base}vote", token, {"pair": shown["pair"]["id"], "choice": choice})
        posted(f"{base}end", token, {})
    running.join(30)
    assert codes == [0]
    out = told.getvalue()
    mentions(out, "agreement  anna and ben: 33% alike", "over 3 pairs")
    assert "1 ties, 1 open, 1 of them skipped" in out  # of the fourth pair there is a skip alone
    assert "continue   " not in out, "nobody has anything left to be asked"
    assert json.loads((folder / "summary.json").read_text())["num_skipped"] == 1


def posted(address: str, token: str, body: object = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"X-Posttrain-Token": token, "Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
