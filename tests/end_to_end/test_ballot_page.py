"""The voting page over real HTTP: pairs in order on sides drawn by lot, votes kept, undone, and taken up again."""

import errno
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.commands.collection.ballot import CHOICES, PAGE, Ballot, StaleVote, ask_on_pages
from posttrain.commands.collection.collection import VOTES, CollectionFolder
from posttrain.commands.collection.pairs import standing_votes
from posttrain.errors import RunError
from posttrain.runs import files
from tests.support.comparisons import ballot, written_pair, written_pairs
from tests.support.refusals import mentions, refused
from tests.support.voted import asked, state, vote, voting


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
    votes = [json.loads(line) for line in (tmp_path / "votes.jsonl").read_text().splitlines()]
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


def test_sides_hang_on_the_seed(tmp_path: Path) -> None:
    def lefts(seed: int) -> list[str]:
        made = ballot(tmp_path / str(seed), 12, seed=seed)
        (tmp_path / str(seed)).mkdir(exist_ok=True)
        found = []
        while (pair := made.current()) is not None:
            found.append(pair.left)
            made.vote(pair.id, "tie")
        (tmp_path / str(seed) / "votes.jsonl").unlink()
        return found

    assert lefts(0) == lefts(0)
    assert lefts(0) != lefts(1)


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


def test_the_command_waits_until_every_rater_has_ended(tmp_path: Path) -> None:
    ballots = [ballot(tmp_path, rater=rater) for rater in ("anna", "ben")]
    waiting = threading.Thread(
        target=ask_on_pages, args=(ballots, "Which?"), kwargs={"port": 0, "stopping": lambda: False}
    )
    with redirect_stdout(StringIO()) as said:  # capsys empties what another thread is just writing
        waiting.start()
        while "End with the button" not in said.getvalue():
            time.sleep(0.01)
    addresses = re.findall(r"http://127\.0\.0\.1:(\d+)/#(\S+)", said.getvalue())
    assert len(addresses) == 2
    for port, token in addresses:
        assert waiting.is_alive()
        server = type("Server", (), {"server_port": int(port), "ballots": {}})()
        assert asked(server, "/end", {}, token=token)[0] == 200
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_signal_ends_the_pages_with_every_vote_kept(tmp_path: Path) -> None:
    ask_on_pages([ballot(tmp_path)], "Which?", port=0, stopping=lambda: True)  # returns at once


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server, refused("cannot listen there"):
        ask_on_pages([ballot(tmp_path)], "Which?", port=server.server_port, stopping=lambda: True)


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


def test_a_vote_that_fails_on_a_full_disk_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one rater's line is not on the disk yet, another votes; then the disk is full for the first."""
    begun, fsync = threading.Event(), os.fsync

    def full(descriptor: int) -> None:
        if begun.is_set():
            fsync(descriptor)
            return
        begun.set()
        bens.join(0.5)  # his vote is through, or waits for this one to end
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with CollectionFolder.create(tmp_path / "run", "seed: 7\n") as folder:
        asked = written_pair()
        anna, ben = (Ballot([asked], folder.line_journals[VOTES], rater=rater, seed=0) for rater in ("anna", "ben"))
        monkeypatch.setattr(files.os, "fsync", full)

        def vote_of_ben() -> None:
            assert begun.wait(30)
            ben.vote(asked.id, "tie")

        bens = threading.Thread(target=vote_of_ben)
        bens.start()
        with pytest.raises(RunError):
            anna.vote(asked.id, "tie")
        bens.join()
        assert len(ben.votes) == 1
        assert standing_votes(folder.line_journals[VOTES].records()) == {"ben": {asked.id: "tie"}}
