"""The voting page in a headless Chromium: `make test-browser`; skipped, with the reason, where there is none."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.support.browser import VARIABLE, Browser, browser, chromium
from tests.support.comparisons import ballot, written_pair
from tests.support.hostile_texts import HOSTILE
from tests.support.runs import records
from tests.support.voted import state, voting

pytestmark = pytest.mark.skipif(
    chromium() is None, reason=f"needs Chromium: none is on the PATH, and {VARIABLE} names none"
)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    with browser(program, tmp_path_factory.mktemp("profile")) as made:
        yield made


def votes(folder: Path) -> list[str]:
    file = folder / "votes.jsonl"
    return [each.get("vote", "undone") for each in (records(file) if file.exists() else [])]


SHOWN = "document.body.dataset.pair"


def test_keys_and_buttons_vote_undo_and_end(window: Browser, tmp_path: Path) -> None:
    made = ballot(tmp_path, 5)
    with voting(made, question="Which sum is right?") as server:
        window.open(server.addresses["anna"])
        for key, how_many in (("1", 1), ("2", 2), ("t", 3), ("s", 4), ("u", 3)):
            window.until(SHOWN)
            window.press(key)
            window.until(f"document.getElementById('count').textContent.startsWith('{how_many} of 5')")
        assert window.run("document.getElementById('asks').textContent") == "Which sum is right?"
        assert window.run("document.getElementById('bar').value") == 3
        for button in ("vote-left", "vote-right"):
            before = window.until(SHOWN)
            window.click(button)
            window.until(f"{SHOWN} !== {before!r}")
        window.until("!document.getElementById('done').hidden")
        assert window.run("document.getElementById('vote-left').disabled")
        window.click("end")
        window.until("document.getElementById('said').textContent.startsWith('Finished')")
        assert server.ended.is_set()
    kept = votes(tmp_path)
    assert set(kept[:2]) <= {"first", "second"}
    assert kept[2:5] == ["tie", "skip", "undone"]
    assert len(kept) == 7
    assert set(made.votes) == {f"{draw}:0-1" for draw in range(5)}
    assert window.said == []


def test_what_the_left_says_is_what_a_vote_for_it_is_for(window: Browser, tmp_path: Path) -> None:
    made = ballot(tmp_path, 6)
    with voting(made) as server:
        window.open(server.addresses["anna"])
        chosen = {}
        while pair := window.until(f"{SHOWN} || (document.getElementById('done').hidden ? '' : 'none')"):
            if pair == "none":
                break
            chosen[pair] = window.run("document.getElementById('left').textContent")
            window.press("1")
            window.until(f"{SHOWN} !== {pair!r}")
    for pair, text in chosen.items():
        assert made.votes[pair] == ("first" if text.startswith("left") else "second")
    assert len(chosen) == 6


def test_hostile_completions_are_text_and_nothing_else(window: Browser, tmp_path: Path) -> None:
    pairs = [written_pair(text, "It is 7.", prompt=text) for text in HOSTILE.values()]
    for number, pair in enumerate(pairs):
        folder = tmp_path / str(number)
        folder.mkdir()
        with voting(ballot(folder, [pair])) as server:
            before = len(window.requests)
            window.open(server.addresses["anna"])
            window.until(SHOWN)
            expected = state(server)["pair"]
            for part in ("question", "left", "right"):
                box = f"document.getElementById({part!r})"
                assert window.run(f"{box}.textContent") == expected[part]
                assert window.run(f"{box}.childElementCount") == 0
            assert window.run("document.title") == "Which is better?"
            assert window.run("document.querySelectorAll('script').length") == 1
            assert window.run("document.querySelectorAll('form, img, iframe, meta[http-equiv]').length") == 0
            assert window.run("getComputedStyle(document.querySelector('nav')).display") == "flex"
            base = f"http://127.0.0.1:{server.port}/"
            asked = [each for each in window.requests[before:] if not each.startswith("data:")]
            assert asked
            assert all(each.startswith(base) for each in asked)
        assert votes(folder) == []


@pytest.mark.parametrize(("width", "above"), [(375, True), (1200, False)], ids=["phone", "desk"])
def test_it_is_readable_on_a_phone_and_on_a_desk(width: int, above: bool, window: Browser, tmp_path: Path) -> None:
    long = "word " * 300 + "w" * 2000
    with voting(ballot(tmp_path, [written_pair(long, "short", prompt="p" * 500)])) as server:
        window.open(server.addresses["anna"], width=width, height=700)
        window.until(SHOWN)
        left, right = (
            window.run(f"(b => [b.x, b.y])(document.getElementById({part!r}).getBoundingClientRect())")
            for part in ("left", "right")
        )
        assert (right[1] > left[1]) is above
        assert (right[0] > left[0]) is not above
        assert window.run("document.documentElement.scrollWidth <= innerWidth")
        sizes = window.run("[...document.querySelectorAll('button')].map(b => b.getBoundingClientRect().height)")
        assert min(sizes) >= 44
        assert window.run("parseFloat(getComputedStyle(document.getElementById('left')).fontSize)") >= 15


def test_a_screen_reader_is_told_what_each_thing_is(window: Browser, tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        window.open(server.addresses["anna"])
        window.until(SHOWN)
        nodes = window.send("Accessibility.getFullAXTree")["nodes"]
    named = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if "role" in node}
    buttons = {name for role, name in named if role == "button"}
    assert {re.sub(" ?[12tsu]$", "", name) for name in buttons} == {
        *("A is better", "B is better", "Tie", "Skip", "Undo", "End")
    }
    assert ("progressbar", "0 of 3 judged by anna") in named
    assert {"Prompt", "Answer A", "Answer B"} <= {name for role, name in named if role == "region"}


@contextmanager
def other_site(page: str) -> Iterator[str]:
    """A page of another origin."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_a_page_of_another_site_cannot_vote_though_it_knew_the_token(window: Browser, tmp_path: Path) -> None:
    with voting(ballot(tmp_path)) as server:
        address, _, token = server.addresses["anna"].partition("#")
        vote = json.dumps({"pair": state(server)["pair"]["id"], "choice": "left"})
        page = f"""<script>
            const send = (headers, mode) => fetch("{address}vote", {{method: "POST", mode, headers, body: {vote!r}}})
                .then(answer => answer.type + answer.status, () => "refused");
            window.all = Promise.all([send({{"X-Posttrain-Token": "{token}"}}, "cors"), send({{}}, "no-cors")]);
        </script><iframe src="{address}#{token}"></iframe>"""
        with other_site(page) as elsewhere:
            window.open(elsewhere)
            window.until("window.all")
            assert window.run("window.all") == ["refused", "refused"]
        assert state(server)["done"] == 0
    assert votes(tmp_path) == []
    window.said.clear()  # the browser's own complaints about that page
