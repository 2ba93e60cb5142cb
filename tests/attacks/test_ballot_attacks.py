"""Hostile completions and hostile pages: what is shown harms nobody, and nobody else votes."""

import base64
import hashlib
import json
import re
import socket
import struct
import unicodedata
from pathlib import Path

import pytest

from posttrain.commands.collection.ballot import ask_in_terminal, pair_text
from posttrain.server.voting_page import PAGE, TOKEN_HEADER
from tests.support.comparisons import ballot, written_pair
from tests.support.hostile_texts import HOSTILE
from tests.support.voted import asked, state, token_of, voting

STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Kinds of characters that are read by machines and steer what people see."""

each_text = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)


def steering(text: str) -> list[str]:
    return [c for c in text if unicodedata.category(c) in STEERING and c not in "\n\t"]


@each_text
def test_what_reaches_the_page_is_text_without_anything_that_steers(text: str, tmp_path: Path) -> None:
    pair = written_pair(text, "It is 7.", prompt=text)
    with voting(ballot(tmp_path, [pair]), question=text) as server:
        status, headers, content = asked(server, "/state")
        assert (status, headers["content-type"]) == (200, "application/json")
        shown = json.loads(content)["pair"]
        assert [*steering(shown["left"]), *steering(shown["right"]), *steering(shown["question"])] == []
        assert steering(json.loads(content)["asks"]) == []
        to_be_read = re.split(r"[^ -~]+", text)
        assert all(piece in shown["left"] + shown["right"] for piece in to_be_read)
        # The page is the same whatever the completions are: nothing of them is ever written into it.
        assert asked(server, "/", token=None)[2] == PAGE.encode()


@each_text
def test_what_reaches_the_terminal_steers_nothing_and_cannot_pass_for_ours(text, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt="": "q")
    made = ballot(tmp_path, [written_pair(text, f"fine\n{text}\nEvery pair is judged.", prompt=text)])
    ask_in_terminal(made, "Which?")
    said = capsys.readouterr().out
    assert steering(said) == []
    ours = [line for line in said.splitlines() if not line.startswith("  | ")]
    keys = "1 A is better   2 B is better   t tie   s skip   u undo   q end"
    assert ours == [keys, "", "0 of 1 judged by anna", "Prompt", "A", "B", "Which?"]


def test_a_long_line_and_many_lines_all_have_their_bar(tmp_path: Path) -> None:
    made = ballot(tmp_path, [written_pair("a\n\n\nb\n", "c" * 10_000)])
    shown = made.current()
    assert pair_text(shown, "Which?", "").count("\n  | ") == 1 + 5 + 1


def test_the_page_puts_texts_in_as_text_and_asks_nobody_else() -> None:
    assert re.findall(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", PAGE) == []
    assert re.findall(r"(?:src|href)=\"(?!data:,)", PAGE) == []
    assert re.findall(r"https?://|//[a-z]|url\(|@import", PAGE) == []
    assert re.findall(r"\son\w+=", PAGE) == []  # handlers in tags, which the policy would not run
    assert len(re.findall("<script", PAGE)) == len(re.findall("<style", PAGE)) == 1


def test_a_policy_lets_the_page_s_own_script_run_and_nothing_else(tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        _, headers, content = asked(server, "/", token=None)
    policy = dict(each.strip().split(" ", 1) for each in headers["content-security-policy"].split(";"))
    (script,) = re.findall(rb"<script>(.*?)</script>", content, flags=re.DOTALL)
    assert policy["script-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"
    assert policy["connect-src"] == "'self'"
    assert {policy[name] for name in ("default-src", "base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    others = {"x-content-type-options": "nosniff", "x-frame-options": "DENY", "cache-control": "no-store"}
    assert {**others, "referrer-policy": "no-referrer"}.items() <= headers.items()


OTHERS = {
    "no token": ({}, None),
    "another token": ({}, "A" * 32),
    "an empty token": ({TOKEN_HEADER: ""}, None),
    "a token beyond Latin-1": ({TOKEN_HEADER: "\xff\xfe"}, None),
    "another origin": ({"Origin": "http://example.org"}, ""),
    "the origin of a file": ({"Origin": "null"}, ""),
    "another port's origin": ({"Origin": "http://127.0.0.1:1"}, ""),
    "a name that was made to point here": ({"Host": "example.org"}, ""),
    "our address as a part of a name": ({"Host": "127.0.0.1.example.org"}, ""),
}


@pytest.mark.parametrize(("headers", "token"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("path", ["/vote", "/undo", "/end", "/state"])
def test_nobody_else_reads_votes_or_ends(path: str, headers: dict[str, str], token: str | None, tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        pair = state(server)["pair"]["id"]
        body = None if path == "/state" else {"pair": pair, "choice": "left"}
        status, _, content = asked(server, path, body, headers=headers, token=token)
        assert status == 403
        assert b"left 0" not in content
        assert state(server)["done"] == 0
        assert not server.ended.is_set()
    assert not (tmp_path / "votes.jsonl").exists()


def test_a_browser_that_asks_for_another_page_is_told_no(tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        asks = {"Origin": "http://example.org", "Access-Control-Request-Headers": TOKEN_HEADER.lower()}
        status, headers, _ = asked(server, "/vote", method="OPTIONS", headers=asks)
        assert status == 405
        assert not [name for name in headers if name.startswith("access-control")]


def test_the_token_is_in_no_answer_and_in_no_path(tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        token = token_of(server)
        for path in ("/", "/state", "/none"):
            _, headers, content = asked(server, path)
            assert token.encode() not in content
            assert token not in str(headers)
        assert server.socket.getsockname()[0] == "127.0.0.1"
        assert server.addresses["anna"].partition("#")[2] == token  # behind #, which browsers send to nobody
        assert len(token) >= 32


BROKEN = {
    "no JSON": b"left",
    "a list": b"[]",
    "deep": b"[" * 2000,
    "no choice": b"{}",
    "another choice": b'{"pair": "0:0-1", "choice": "first"}',
    "a pair that is no text": b'{"pair": ["0:0-1"], "choice": "left"}',
    "a choice that is no text": b'{"pair": "0:0-1", "choice": {"left": 1}}',
    "too long": b'{"pair": "' + b"a" * 5000 + b'"}',
    "no UTF-8": b'{"pair": "\xff"}',
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
def test_a_broken_request_is_refused_and_the_next_one_answered(body: bytes, tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        assert asked(server, "/vote", body)[0] == (413 if len(body) > 4096 else 400)
        assert state(server)["done"] == 0


@pytest.mark.parametrize("length", ["", "-1", "1e3", "99999999999999999999", "²"])
def test_a_length_that_is_none_is_refused(length: str, tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        status, _, _ = asked(server, "/vote", method="POST", headers={"Content-Length": length.encode("utf-8")})  # type: ignore[dict-item]
        assert status == 400


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/votes.jsonl", "//example.org", "/%00", "/state/"])
def test_no_other_path_is_there(path: str, tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        assert asked(server, path)[0] == 404
        assert asked(server, path, {})[0] == 404


def test_a_vote_on_a_pair_that_is_not_shown_changes_nothing(tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        for pair in ("1:0-1", "9:0-1", "", "__proto__", "0:0-1\n"):
            assert asked(server, "/vote", {"pair": pair, "choice": "left"})[0] == 409
        assert state(server)["done"] == 0


def test_a_browser_that_leaves_in_a_request_harms_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with voting(ballot(tmp_path)) as server:
        for sent in (b"POST /vote HTTP/1.1\r\nContent-Length: 40\r\n\r\n{", b"GET / HT", b"\x16\x03\x01"):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(sent)
                linger = struct.pack("ii", 1, 0)  # closed by a reset, as a browser that was killed does it
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        assert state(server)["done"] == 0
    assert "Traceback" not in capsys.readouterr().err
