"""Pages of runs that are not `rl`, and exported files, in a headless Chromium: `make test-browser`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import posttrain
from posttrain.irl_runs.run import recover
from posttrain.viewer.exported.export import export_runs
from posttrain.viewer.run_folders import run_folders
from posttrain.viewer.viewer_responses import OpenedRuns
from tests.support.browser import VARIABLE, Browser, browser, chromium
from tests.support.hostile_texts import HOSTILE
from tests.support.kind_folders import KINDS, reward_model
from tests.support.viewed import LEAST_CONTRAST, LOADED, OVERFLOW, viewing
from tests.support.viewed_folders import add_line, step_rows, write_rows, write_run

pytestmark = pytest.mark.skipif(
    chromium() is None, reason=f"needs Chromium: none is on the PATH, and {VARIABLE} names none"
)
Finished = Callable[[str], Path]
PAGES = {**{kind: page for kind, (_, page) in KINDS.items()}, "dpo": "pairs"}
REAL = ("sft", "reward-model", "dpo", "irl")


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    assert program is not None
    with browser(program, tmp_path_factory.mktemp("profile")) as made:
        yield made


def real_run(kind: str, finished: Finished, folder: Path) -> Path:
    """A run by the real command, or in this process."""
    if kind != "irl":
        return finished(kind) / "run"
    world = {"name": "icy_grid", "size": 3, "rewards": [[8, 1.0]], "ground": -1.0}
    recover(posttrain.load_recipe("irl-course", world=world, run={"folder": str(folder / "irl"), "plots": True}))
    return folder / "irl"


def checked(window: Browser, address: str, view: str) -> str:
    """Open a view in both widths and both themes; what it shows."""
    for width in (800, 1200):
        window.open(f"{address}{view}", width=width)
        window.until(LOADED)
        assert not window.run(OVERFLOW), f"{view} at {width}"
    for scheme in ("dark", "light"):
        window.colours(scheme)
        worst = window.run(LEAST_CONTRAST)
        assert worst["ratio"] >= 4.5, (scheme, worst)
    assert window.said == []
    text: str = window.run("document.querySelector('main').innerText")
    return text


@pytest.mark.parametrize("kind", [*KINDS, "dpo"])
def test_the_page_of_a_kind_opens_without_errors(
    kind: str, window: Browser, finished: Finished, tmp_path: Path
) -> None:
    run = real_run(kind, finished, tmp_path) if kind in REAL else KINDS[kind][0](tmp_path / "run")
    folders = run_folders(run)
    with viewing(*folders) as server:
        at = folders.index(run)
        window.requests.clear()
        text = checked(window, f"{server.address}&", f"/run/{at}/{PAGES[kind]}")
        base = f"http://127.0.0.1:{server.port}/"
        assert all(each.startswith((base, "data:")) for each in window.requests)
        assert not window.run("document.querySelector('main .fault')")
        checked(window, f"{server.address}&", f"/run/{at}")
    expected = {
        "sft": "mean loss",
        "reward-model": "Calibration",
        "dpo": "implicit rewards",
        "irl": "Learned policy",
        "collect": "judged by maths",
        "compare": "grpo, seed 0",
        "phases": "1. rows",
    }
    assert expected[kind] in text


def test_margins_of_0_are_ties_in_a_bin_of_their_own(window: Browser, tmp_path: Path) -> None:
    run = KINDS["collect"][0](tmp_path / "run")
    with viewing(run) as server:
        window.open(f"{server.address}&/run/0/pairs")
        window.until(LOADED)
        filled = "[...document.querySelectorAll('rect')].filter(each => +each.getAttribute('height'))"
        assert window.run(f"{filled}.map(each => each.classList[0])") == [
            "grey",
            "blue",
        ]  # the tie, and the pair in the right order


def test_runs_without_common_problems_are_compared_by_their_curves(window: Browser, tmp_path: Path) -> None:
    with viewing(reward_model(tmp_path / "a"), reward_model(tmp_path / "b")) as server:
        window.open(f"{server.address}&/compare?a=0&b=1")
        window.until(LOADED)
        window.until("document.querySelector('main').innerText.includes('Only the curves are compared')")
        assert window.run("document.querySelectorAll('table').length") == 0


def test_pairs_are_ordered_and_texts_in_them_stay_texts(window: Browser, tmp_path: Path) -> None:
    run = reward_model(tmp_path / "run")
    for name, text in HOSTILE.items():
        row = {"where": name, "chosen": 0.0, "rejected": 9.0, "prompt": text, "chosen_text": text}
        add_line(run, "held_out.jsonl", {**row, "rejected_text": text})
    with viewing(run) as server:
        window.open(f"{server.address}&/run/0/pairs?sort=margin")
        window.until(LOADED)
        assert window.run("document.querySelectorAll('.pair').length") == 3 + len(HOSTILE)
        assert "margin \u22129" in window.run("document.querySelector('.pair header').innerText")
        assert window.run("document.querySelectorAll('main form, main iframe, main script, main img').length") == 0
        assert window.run("document.title").endswith("posttrain")
        assert window.said == []


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with hostile texts as one file, from which something is left out."""
    folder = tmp_path_factory.mktemp("exported")
    run = write_run(folder / "run")
    texts = [text.encode("utf-8", "replace").decode() for text in HOSTILE.values()]
    write_rows(run / "rollouts/step-000003.parquet", step_rows(3, group=len(texts), texts=texts))
    made = export_runs(OpenedRuns.of([run]), 400_000)
    assert 0 < made.num_rollouts < made.of_rollouts
    (folder / "run.html").write_text(made.html)
    return folder / "run.html"


def test_an_exported_file_opens_from_a_disk_and_asks_nobody(window: Browser, file: Path) -> None:
    window.requests.clear()
    for view in ("", "#/run/0", "#/run/0/rows", "#/run/0/step/3", "#/run/0/held-out", "#/run/0/problems"):
        window.open(f"file://{file}{view}")
        window.until(LOADED)
        assert "This file has" in window.run("document.querySelector('main').innerText")
        assert window.run("document.querySelectorAll('main .fault').length") == 0, view
    window.open(f"file://{file}")
    window.until("!!document.querySelector('.alarms .links a')")
    window.run("document.querySelector('.alarms .links a').click()")
    window.until("document.querySelector('main h1')?.innerText.startsWith('Rollout')")
    assert window.run("document.querySelectorAll('.read .token').length") > 0
    assert window.run("document.querySelectorAll('main form, main iframe, main script, main img').length") == 0
    assert {each.partition(":")[0] for each in window.requests} <= {"file", "data"}
    assert window.said == []


def test_what_an_exported_file_leaves_out_is_one_line(window: Browser, file: Path) -> None:
    window.open(f"file://{file}#/run/0/rollout/rollouts/9/9/9")
    window.until("document.querySelector('main .fault')?.innerText.includes('posttrain view')")
    assert window.said == []


def test_a_notebook_shows_a_run_in_a_frame_whose_links_stay_inside(window: Browser, tmp_path: Path) -> None:
    block = posttrain.open_run(write_run(tmp_path / "run")).show(size="600KB")._repr_html_()
    page = tmp_path / "notebook.html"
    page.write_text(f"<!doctype html><title>notebook</title>{block}")
    window.requests.clear()
    window.open(f"file://{page}")
    assert window.run("document.title") == "notebook"
    window.enter_frame()
    window.until("!!document.querySelector('.alarms .links a')")
    window.run("document.querySelector('.alarms .links a').click()")
    window.until("document.querySelector('main h1')?.innerText.startsWith('Rollout')")
    window.run("document.querySelector('.tick input').click()")
    window.until("location.hash.includes('spaces=off')")
    assert window.run("location.protocol") == "about:"
    assert window.run("origin") == "null", "nothing of the notebook is within reach"
    assert {each.partition(":")[0] for each in window.requests} <= {"file", "data", "about"}
    assert window.said == []
