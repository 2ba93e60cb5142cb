"""`posttrain collect` with a tiny model, and its voting page over real HTTP: votes kept, undone, and taken up again."""

import errno
import io
import json
import os
import re
import signal
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from posttrain.cli import main
from posttrain.commands.collection import prompt_sampler
from posttrain.commands.collection.ballot import Ballot, ask_on_pages
from posttrain.commands.collection.collection import VOTES, CollectionFolder
from posttrain.commands.collection.pairs import standing_votes
from posttrain.errors import RunError
from posttrain.server.votes import CHOICES, StaleVote
from posttrain.server.voting_page import PAGE
from tests.support.commands import printed, refusal
from tests.support.comparisons import ballot, written_pair, written_pairs
from tests.support.refusals import mentions, refused
from tests.support.runs import records, save_tiny_model
from tests.support.voted import asked, state, vote, voting

ROWS = [{"prompt": f"{a} and ", "wanted": str(a)} for a in range(6)]


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
    assert ("compared   none" in told) == (not rows)
    assert "compared   none" in told


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
    mentions(said, "vote undone", "there is no vote to undo", "'what?' is not a choice")
    votes = records(folder / "votes.jsonl")
    assert ["undone" in each for each in votes] == [False, True, False, False]
    left = votes[2]["left"]
    assert votes[2]["vote"] == ("second" if left == "first" else "first")  # 2 is the one on the right
    assert votes[3]["vote"] == "tie"
    mentions(said, "2 open", f"posttrain collect --resume {folder}", "How sound is it?")
    for ends in (raises_end, interrupts):
        monkeypatch.setattr("builtins.input", ends)
        assert "2 of 4 judged by anna" in printed("collect", "--resume", folder, "--terminal", "--rater", "anna")
    assert len(records(folder / "votes.jsonl")) == 4


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
    assert len(records(folder / "completions.jsonl")) == 1
    monkeypatch.setattr(prompt_sampler.PromptSampler, "sampled", as_it_is)
    assert main(["collect", "--resume", str(folder)]) == 0
    assert len(records(folder / "completions.jsonl")) == 4


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--sampling.temperature", "0"], "makes all completions the same"),
        (["--judge.name", "llm"], "needs judge.endpoint"),
        (
            ["--judge.name", "person"],
            "rewards is only for scored = true, and scored = false.  judge.name = person does not ask",
        ),
        (["--judge.name", "persons"], "Did you mean `person`"),
        (["--judge.rubric", "x"], "no such flag"),
        (["--rater", "anna", "anna"], "name each rater once"),
        (["--rater", "anna", "ben", "--terminal"], "--terminal = true only works with one rater"),
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


def test_the_last_vote_can_be_taken_back_in_the_terminal_too(recipe: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    folder = tmp_path / "run"

    def votes_of(typed: list[str], *command: str) -> list[str]:
        left = iter(typed)
        monkeypatch.setattr("builtins.input", lambda prompt="": next(left))
        assert main(["collect", *command, "--terminal", "--rater", "anna"]) == 0
        assert next(left, None) is None, "all that was typed was asked for"
        given: dict[str, str] = {}
        for line in records(folder / "votes.jsonl"):
            if "undone" in line:
                del given[line["undone"]]
            else:
                given[line["pair"]] = line["vote"]
        return list(given.values())

    asked = ["--judge.name", "person", "--judge.question", "How sound is it?", "--rewards"]
    assert votes_of(["t", "t", "t", "t", "u", "s", ""], str(recipe), "--run.folder", str(folder), *asked)[3] == "skip"
    assert "Every pair is judged.  u undoes the last vote" in capsys.readouterr().out
    assert votes_of(["u", "t", "q"], "--resume", str(folder)) == ["tie"] * 4


def test_each_rater_votes_on_a_page_of_their_own(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, told = tmp_path / "run", io.StringIO()
    monkeypatch.setattr(sys, "stdout", told)  # read while the command writes, which capsys does not bear
    asked = ["--judge.name", "person", "--judge.question", "How sound?", "--rewards", "--rater", "anna", "ben"]
    codes: list[int] = []
    command = ["collect", str(recipe), "--run.folder", str(folder), *asked]
    running = threading.Thread(target=lambda: codes.append(main(command)))
    running.start()
    while "Finish with the button" not in told.getvalue():
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


def test_a_vote_is_on_the_disk_before_the_next_pair_is_shown(tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        first = state(server)
        assert (first["done"], first["total"], first["undo"]) == (0, 3, False)
        assert first["pair"]["question"] == "What is 3 + 4?"
        assert {first["pair"]["left"], first["pair"]["right"]} == {"left 0", "right 0"}
        status, second = vote(server, "left")
        assert status == 200
        (kept,) = (tmp_path / "votes.jsonl").read_text().splitlines()
        winner = first["pair"]["left"]
        assert json.loads(kept) == {
            "rater": "anna",
            "pair": first["pair"]["id"],
            "vote": "first" if winner == "left 0" else "second",
            "left": "first" if winner == "left 0" else "second",
        }
        assert (second["done"], second["undo"]) == (1, True)
        assert second["pair"]["id"] != first["pair"]["id"]


def test_each_choice_is_kept_as_what_it_says_of_the_pair(tmp_path: Path) -> None:
    with voting(ballot(tmp_path, 4)) as server:
        for choice in CHOICES:
            shown = state(server)["pair"]
            assert vote(server, choice)[0] == 200
            kept = json.loads((tmp_path / "votes.jsonl").read_text().splitlines()[-1])
            left_is_first = shown["left"].startswith("left")
            expected = {"left": "first" if left_is_first else "second", "right": "second" if left_is_first else "first"}
            assert kept["vote"] == expected.get(choice, choice)
        assert state(server)["pair"] is None


def test_an_undo_asks_again_and_goes_back_as_far_as_one_likes(tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        shown = []
        for choice in ("left", "skip"):
            shown.append(state(server)["pair"])
            vote(server, choice)
        for expected in reversed(shown):
            _, _, content = asked(server, "/undo", {})
            assert json.loads(content)["pair"] == expected
        assert not state(server)["undo"]
        assert asked(server, "/undo", {})[0] == 200  # there is nothing, and nothing happens
        assert len((tmp_path / "votes.jsonl").read_text().splitlines()) == 4


def test_who_comes_back_goes_on_where_they_stopped(tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        vote(server, "left")
        vote(server, "tie")
        asked(server, "/undo", {})
        before = state(server)
    (tmp_path / "votes.jsonl").write_bytes((tmp_path / "votes.jsonl").read_bytes() + b'{"rater": "anna", "pa')
    with voting(ballot(tmp_path)) as server:
        assert state(server) == before
        vote(server, "right")
        vote(server, "right")
    votes = records(tmp_path / "votes.jsonl")
    assert len(votes) == 5  # the torn line is gone, and what came after it is whole
    assert len(ballot(tmp_path).votes) == 3


def test_raters_have_ballots_and_sides_of_their_own(tmp_path: Path) -> None:
    pairs = written_pairs(24)
    anna, ben = (ballot(tmp_path, pairs, rater=rater) for rater in ("anna", "ben"))
    with voting(anna, ben) as server:
        assert len(set(server.addresses.values())) == 2
        sides = []
        while (shown := state(server, "anna")["pair"]) is not None:
            sides.append((shown["left"], state(server, "ben")["pair"]["left"]))
            vote(server, "left", rater="anna")
            vote(server, "left", rater="ben")
    of_anna, of_ben = zip(*sides, strict=True)
    assert of_anna != of_ben
    assert 5 < sum(text.startswith("left") for text in of_anna) < 19  # of 24 fair coins
    assert anna.votes != ben.votes


def test_a_button_that_is_pressed_twice_votes_once(tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        pair = state(server)["pair"]["id"]
        with ThreadPoolExecutor(8) as pool:
            statuses = sorted(status for status, _ in pool.map(lambda _: vote(server, "left", pair), range(8)))
        assert statuses == [200] + [409] * 7
        assert state(server)["done"] == 1
    assert len((tmp_path / "votes.jsonl").read_text().splitlines()) == 1


@given(st.lists(st.sampled_from([*CHOICES, "undo", "reopen"]), max_size=24))
@settings(max_examples=12)
def test_a_ballot_is_a_stack_of_votes(tmp_path_factory: pytest.TempPathFactory, moves: list[str]) -> None:
    folder = tmp_path_factory.mktemp("ballot")
    made, expected = ballot(folder, 5), []
    for move in moves:
        pair = made.current()
        if move == "reopen":
            made = ballot(folder, 5)
        elif move == "undo":
            assert made.undo() == bool(expected)
            expected = expected[:-1]
        elif pair is not None:
            made.vote(pair.id, move)
            expected = [*expected, pair.id]
            with pytest.raises(StaleVote):
                made.vote(pair.id, move)
        assert list(made.votes) == expected
        assert len(made.votes) == len(expected)


def test_a_signal_ends_the_pages_with_every_vote_kept(tmp_path: Path) -> None:
    ask_on_pages([ballot(tmp_path)], "Which?", port=0, stopping=lambda: True)  # returns at once


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server, refused("cannot listen there"):
        ask_on_pages([ballot(tmp_path)], "Which?", port=server.port, stopping=lambda: True)


@pytest.mark.parametrize("name", ["", " ", "an\nna", "\x1b[2J"])
def test_a_rater_needs_a_name_that_can_be_shown(name: str, tmp_path: Path) -> None:
    with refused("rater ", "use letters only"):
        ballot(tmp_path, rater=name)


def test_everything_on_the_page_that_can_be_used_has_a_name_and_a_key() -> None:
    buttons = re.findall(r"<button([^>]*)>([^<]+)", PAGE)
    assert {text for _, text in buttons} == {"A is better", "B is better", "Tie", "Skip", "Undo", "End"}
    shortcuts = re.findall(r'aria-keyshortcuts="(.)"', PAGE)
    assert shortcuts == ["1", "2", "t", "s", "u"]
    for section in re.findall(r"<section aria-labelledby=\"([\w-]+)\"", PAGE):
        assert f'id="{section}"' in PAGE
    mentions(PAGE, '<label for="bar">', 'aria-live="polite"', '<html lang="en">')
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in PAGE


def test_a_vote_that_fails_on_a_full_disk_takes_no_other_with_it(tmp_path: Path, monkeypatch) -> None:
    """While one rater's line is written, another votes; then the disk is full for the first."""
    begun, sync = threading.Event(), os.fsync

    def full(descriptor: int) -> None:
        if threading.current_thread() is bens:
            sync(descriptor)
            return
        begun.set()
        bens.join(0.5)  # his vote is through, or waits for this one to end
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with CollectionFolder.create(tmp_path / "run", "seed: 7\n") as folder:
        asked = written_pair()
        anna, ben = (Ballot([asked], folder.line_journals[VOTES], rater=rater, seed=0) for rater in ("anna", "ben"))

        def vote_of_ben() -> None:
            assert begun.wait(30)
            ben.vote(asked.id, "tie")

        bens = threading.Thread(target=vote_of_ben)
        bens.start()
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RunError):
            anna.vote(asked.id, "tie")
        bens.join()
        assert len(ben.votes) == 1
        assert standing_votes(folder.line_journals[VOTES].records()) == {"ben": {asked.id: "tie"}}
