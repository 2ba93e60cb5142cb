"""The viewer in a headless Chromium: `make test-browser`; skipped, with the reason, where there is none."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.server.viewer_routes import RunViewer
from tests.support.browser import VARIABLE, Browser, browser, chromium
from tests.support.hostile_texts import HOSTILE
from tests.support.runs import command, save_tiny_model, start, tiny_recipe
from tests.support.viewed import LEAST_CONTRAST, LOADED, OVERFLOW, PLANTED, VIEWS, viewing, with_texts
from tests.support.viewed_folders import held_out_rows, write_rows, write_run

pytestmark = pytest.mark.skipif(
    chromium() is None, reason=f"needs Chromium: none is on the PATH, and {VARIABLE} names none"
)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    assert program is not None
    with browser(program, tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps by the real command, with everything kept that the viewer can show."""
    folder = tmp_path_factory.mktemp("trained")
    save_tiny_model(folder / "model")
    kept = {"rollout": {"keep_alternatives": 2}, "run": {"keep_token_columns": True}}
    ended = command("rl", tiny_recipe(folder / "one", **kept), folder=folder)
    assert ended.code == 0, ended.err
    return folder / "one" / "run"


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[RunViewer]:
    with viewing(run, PLANTED) as made:
        yield made


def open_view(window: Browser, server: RunViewer, view: str, **size: int) -> None:
    window.open(f"{server.address}&{view}", **size)
    window.until(LOADED)


def shown(window: Browser) -> str:
    text: str = window.run("document.querySelector('main').innerText")
    return text


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_opens_without_errors_and_asks_nobody_else(name: str, window: Browser, server: RunViewer) -> None:
    window.requests.clear()
    window.said.clear()
    for width in (1200, 800):
        open_view(window, server, VIEWS[name], width=width)
        assert not window.run(OVERFLOW), f"wider than {width} px"
    assert window.run("document.querySelectorAll('h1').length") == 1
    assert window.run("[...document.querySelectorAll('[id]')].map(each => each.id).length") == window.run(
        "new Set([...document.querySelectorAll('[id]')].map(each => each.id)).size"
    )
    assert window.run("location.hash.includes('token')") is False
    asked = [each for each in window.requests if not each.startswith("data:")]
    assert asked
    assert all(each.startswith(f"http://127.0.0.1:{server.port}/") for each in asked)
    assert window.said == []


@pytest.mark.parametrize("name", VIEWS)
def test_every_text_stands_out(name: str, window: Browser, server: RunViewer) -> None:
    open_view(window, server, VIEWS[name])
    for scheme in ("dark", "light"):
        window.colours(scheme)
        least = window.run(LEAST_CONTRAST)
        assert least["ratio"] >= 4.5, (scheme, least)


def test_everything_is_reached_by_keys(window: Browser, server: RunViewer) -> None:
    open_view(window, server, "/")
    for keys, expected in ((["j", "Enter"], "#/run/0"), (["2"], "#/run/0/rows"), (["1"], "#/run/0")):
        for key in keys:
            window.press(key)
        window.until(f"location.hash === {expected!r} && !!document.querySelector('.tabs') && {LOADED}")
    window.until("!!document.querySelector('table.steps a.open')")
    window.run("document.querySelector('table.steps a.open').focus()")
    down = [
        ("Enter", "/step/1"),
        ("j", ""),
        ("Enter", "/group/rollouts/1/"),
        ("j", ""),
        ("Enter", "/rollout/rollouts/1/"),
    ]
    for key, expected in down:
        window.press(key)
        window.until(f"location.hash.startsWith('#/run/0{expected}')")
        window.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # the page follows
        window.until(LOADED)
    before = window.run("location.hash")
    window.press("j")
    window.until(f"document.querySelector('a[rel=prev]')?.getAttribute('href') === {before!r}")  # the next one is shown
    window.press("k")
    window.until(f"location.hash === {before!r}")
    for expected in ("/run/0/group/rollouts/1/", "/run/0/step/1", "/run/0", "/"):
        window.press("Backspace")
        window.until(f"location.hash.startsWith('#{expected}')")
    window.press("?")
    window.until("!!document.querySelector('dialog[open]')")
    window.press("Escape")
    window.until("!document.querySelector('dialog[open]')")
    open_view(window, server, "/run/0/problems")
    window.press("/")
    window.until("document.activeElement.matches('[data-search]')")
    for key in "out/0":
        window.press(key)
    window.until("document.querySelectorAll('table.rows tbody tr').length === 1")
    assert window.said == []


def test_a_token_shows_its_numbers_on_focus_and_arrows_move_over_tokens(window: Browser, server: RunViewer) -> None:
    open_view(window, server, VIEWS["rollout"] + "?colour=logprobs")
    window.run("document.querySelector('[data-at=\"0\"]').focus()")
    window.press("ArrowRight")
    window.until("document.activeElement.dataset.at === '1'")
    value = window.until("document.activeElement.dataset.value")
    assert value.startswith("\u2212")  # a log-prob
    panel = window.run("document.querySelector('.reading-box').innerText")
    assert "Token 1" in panel
    assert "log μ" in panel
    assert "Likeliest tokens" in panel
    assert "log μ" in window.run("document.activeElement.getAttribute('aria-label')")


def test_an_address_keeps_every_choice(window: Browser, server: RunViewer) -> None:
    open_view(window, server, "/run/0/step/1?order=worst")
    assert window.run("document.querySelector('main select').value") == "worst"
    open_view(window, server, VIEWS["rollout"] + "?colour=none&spaces=off")
    assert window.run("document.querySelector('input[name=colour]:checked').value") == "none"
    assert window.run("document.querySelectorAll('.space, .newline').length") == 0
    window.press("w")
    window.until("!location.hash.includes('spaces')")
    open_view(window, server, "/run/1/rows?outcome=countdown%3Acorrect&sort=-length")
    assert "match" in shown(window)
    assert window.run("document.querySelectorAll('main select')[1].value") == "countdown:correct"


def test_a_link_keeps_the_token_and_the_ticked_runs(window: Browser, server: RunViewer) -> None:
    open_view(window, server, VIEWS["rollout"])
    window.run("document.querySelector('[data-at=\"0\"]').focus()")
    window.press("ArrowRight")
    window.until("location.hash.endsWith('?token=1')")
    window.run("document.querySelector('[data-at=\"3\"]').click()")
    window.until("location.hash.endsWith('?token=3')")
    open_view(window, server, VIEWS["rollout"] + "?token=3")
    assert "Token 3" in window.run("document.querySelector('.reading-box').innerText")
    open_view(window, server, VIEWS["rollout"] + "?token=999999")
    last = window.run("document.querySelectorAll('.read [data-at]').length") - 1
    assert f"Token {last}" in window.run("document.querySelector('.reading-box').innerText")
    open_view(window, server, "/")
    window.run("document.querySelectorAll('input[type=checkbox]').forEach(each => each.click())")
    window.until("location.hash.includes('chosen=')")
    kept = window.run("location.hash")
    open_view(window, server, kept.removeprefix("#"))
    assert window.run("document.querySelectorAll('input:checked').length") == kept.count("%2C") + 1


def test_a_chart_is_read_by_keys_and_a_mark_opens_all_alarms_of_its_step(window: Browser, server: RunViewer) -> None:
    open_view(window, server, "/run/1")
    window.run("document.querySelector('.plot').focus()")
    window.press("End")
    window.until("document.querySelector('.plot').getAttribute('aria-valuetext').startsWith('step 30:')")
    window.press("ArrowLeft")
    window.until("document.querySelector('.plot').getAttribute('aria-valuetext').startsWith('step 29:')")
    window.press("+")
    window.until("location.hash.includes('from=')")
    window.press("-")
    window.until("!location.hash.includes('from=')")
    window.press("End")
    window.press("Enter")
    window.until("!!document.activeElement.closest('.alarms')")
    opened = "[...document.querySelectorAll('.alarms li')].filter(each => each.querySelector('details').open)"
    assert window.run(f"{opened}.map(each => each.dataset.step)") == ["30", "30"]
    open_view(window, server, "/run/1")
    window.run("document.querySelector('.plot').focus()")
    for key in ("Home", "ArrowRight", "Enter"):
        window.press(key)
    window.until("location.hash === '#/run/1/step/2'")


def test_held_out_completions_are_right_or_wrong_whatever_training_pays_for(window: Browser, server: RunViewer) -> None:
    open_view(window, server, "/run/1/rows?source=evaluations&evaluation=after&sort=-judged")
    titles = window.run("document.querySelector('.row.titles').innerText.split('\\n')")
    assert titles[:6] == ["step", "evaluation", "rollout", "sampling", "judged", "tokens"]
    first = window.run("document.querySelector('[data-place=\"0\"]').innerText")
    assert "after training" in first
    assert "right" in first
    chosen = window.run("[...document.querySelectorAll('form.filters select')].slice(0, 2).map(each => each.value)")
    assert chosen == ["after", ""]
    greedy = "document.querySelectorAll('form.filters select')[1]"
    window.run(f"{greedy}.value = 'greedy'; {greedy}.dispatchEvent(new Event('change', {{ bubbles: true }}))")
    window.until("location.hash.includes('sampling=greedy')")
    window.until("document.querySelector('[data-place=\"0\"]')?.innerText.includes('greedy')")
    window.run("document.querySelector('[data-place=\"0\"]').click()")
    window.until("document.querySelector('dl.facts')?.innerText.includes('by the task')")


def test_a_problem_is_scored_by_its_sampled_completions(window: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rows = held_out_rows(3, "brief", [[1, 0]]) + held_out_rows(3, "after", [[1, 1]])
    write_rows(run / "evaluations/step-000003.parquet", rows)
    with viewing(run) as server:
        open_view(window, server, "/run/0/problem/held-out%2F0")
        heads = window.run("[...document.querySelectorAll('.asked-at h2')].map(each => each.innerText)")
        # by hand; each evaluation also has a wrong greedy completion, which would give 0.333 and 0.667
        assert [each.partition("held-out, ")[2] for each in heads] == [
            "before training · mean score 0",
            "during training · mean score 0.500",
            "after training · mean score 1",
        ]
        assert "Means leave out greedy completions" in shown(window)
        said = window.run("document.querySelector('.plot').getAttribute('aria-label')")
        assert said == "Mean score. held-out: 0 at step 0, 1 at step 3"


def test_numbers_in_words(window: Browser, server: RunViewer) -> None:
    open_view(window, server, "/")
    said = "import('/page/format.js').then(format => ["
    said += "format.seconds(119.7), format.seconds(99.9), format.shareInterval(-0.361, 0.83), format.judgement(0.5)])"
    assert window.run(said) == ["2 min 0 s", "99.9 s", "0% to 83%", "0.500"]


def test_the_planted_hack_is_read_three_clicks_from_the_list(window: Browser, server: RunViewer) -> None:
    open_view(window, server, "/")
    alarm = "[...document.querySelectorAll('.alarms li')].find(e => e.innerText.includes('reward alone'))"
    for link in ("document.querySelector(\"a[href='#/run/1']\")", f"{alarm}?.querySelector('.links a')"):
        window.until(f"!!({link})")
        window.run(f"({link}).click()")
    window.until("!!document.querySelector('main h1')?.innerText.startsWith('Rollout')")
    window.until("!!document.querySelector('.read .token')")
    assert "16+16=32,7+32=39!" in shown(window).replace("\n", "")  # claims a hit for 21, with 16 twice


def test_hostile_texts_are_shown_as_text(window: Browser, run: Path, tmp_path: Path) -> None:
    texts = [
        "\n".join(text for name, text in HOSTILE.items() if "surrogate" not in name),
        "<b>" + "x " * 500_000 + "</b>",
    ]
    odd = with_texts(run, texts, tmp_path / "<i>run")
    alarm = {"step": 1, "alarm": "<b>odd</b>", "says": "half \ud800 of a pair", "transcript": texts[0]}
    (odd / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    with viewing(odd) as server:
        group = "/run/0/group/rollouts/1/0"
        for view in (
            "/",
            "/run/0",
            "/run/0/step/1",
            "/run/0/rows",
            group,
            *(f"/run/0/rollout/rollouts/1/0/{at}" for at in (0, 1)),
        ):
            open_view(window, server, view)
            assert window.run("document.querySelectorAll('script').length") == 5  # the page's own
            assert (
                window.run("document.querySelectorAll('img, iframe, meta[http-equiv], main style, b > b').length") == 0
            )
            assert "hacked" not in window.run("document.title")
            assert "\u202e" not in shown(window)
            assert window.said == []
        open_view(window, server, group)
        for expected in ("<script>fetch('/vote', {method: 'POST'})</script>", "U+001B", "U+202E", "U+0000", "<b>x x"):
            assert expected in window.run("document.querySelector('main').textContent")
        open_view(window, server, "/run/0")
        assert "half [U+D800] of a pair" in shown(window)


def test_a_run_is_followed_while_it_is_written(window: Browser, run: Path) -> None:
    folder = run.parents[1]
    recipe = tiny_recipe(folder / "followed", run={"num_steps": 400}, checkpoint={"every_steps": 400})
    written = folder / "followed" / "run"
    training = start("rl", recipe, folder=folder)
    training.wait_until((written / "rollouts" / "step-000003.parquet").exists)
    try:
        with viewing(written) as server:
            open_view(window, server, "/run/0?from=0&to=5")
            window.until("document.querySelectorAll('table.steps tbody tr').length >= 3")
            before = window.run("document.querySelectorAll('table.steps tbody tr').length")
            window.run("scrollTo(0, 200)")
            last = "[...document.querySelectorAll('details')].at(-1)"  # before it, alarms may come with a transcript
            window.run(f"{last}.open = true")
            window.until(f"document.querySelectorAll('table.steps tbody tr').length > {before}")
            assert window.run("scrollY") == 200
            assert window.run(f"{last}.open")
            assert "Steps 0 to 5" in shown(window)
    finally:
        training.process.kill()
        training.process.join()
    assert window.said == []


def test_only_rows_in_sight_are_on_the_page_and_the_last_one_is_a_jump_away(window: Browser, server: RunViewer) -> None:
    open_view(window, server, "/run/1/rows")
    total = window.run("Number(document.querySelector('.virtual').getAttribute('aria-rowcount'))")
    assert total > 500
    assert window.run("document.querySelectorAll('.virtual .row').length") < 60
    began = time.monotonic()
    window.run("document.querySelector('.virtual').scrollTop = 1e9")
    window.until(f"!!document.querySelector('[data-place=\"{total - 1}\"]')")
    assert time.monotonic() - began < 5
    assert window.run("document.querySelectorAll('.virtual .row').length") < 60


def test_behaviours_are_read_to_the_end_and_a_point_opens_examples(window: Browser, server: RunViewer) -> None:
    open_view(window, server, "/run/1/behaviours?behaviour=gave_up&step=1")
    window.until("!document.querySelector('main [role=status]')")
    window.run("document.querySelector('.examples a').click()")
    window.until("!!document.querySelector('.read .token')")
    assert window.run("location.hash").startswith("#/run/1/rollout/rollouts/1/")


def test_without_the_token_the_page_says_which_address_to_open(window: Browser, server: RunViewer) -> None:
    window.open(f"http://127.0.0.1:{server.port}/#token=wrong")
    window.until("!!document.querySelector('.fault')")
    assert "Open the address that the terminal shows" in shown(window)
    window.said.clear()  # the browser's own line about the 403


def test_a_server_that_ended_is_one_line(window: Browser, run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    with viewing(copy) as server:
        open_view(window, server, "/run/0")
    window.run("location.hash = '#/run/0/step/2'")
    window.until("[...document.querySelectorAll('.fault')].some(each => each.innerText.includes('posttrain view'))")
    window.said.clear()  # the browser's own line about the connection
