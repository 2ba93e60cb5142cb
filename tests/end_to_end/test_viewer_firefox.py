"""The viewer in a headless Firefox: `make test-browser`; skipped, with the reason, where there is none."""

from collections.abc import Iterator

import pytest

from posttrain.server.viewer_routes import RunViewer
from tests.support.firefox import FIREFOX_VARIABLE, FirefoxWindow, firefox, firefox_window
from tests.support.viewed import LOADED, OVERFLOW, PLANTED, VIEWS, viewing

pytestmark = pytest.mark.skipif(
    firefox() is None, reason=f"needs Firefox: none is on the PATH, and {FIREFOX_VARIABLE} names none"
)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirefoxWindow]:
    program = firefox()
    assert program is not None
    with firefox_window(program, tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[RunViewer]:
    with viewing(PLANTED, PLANTED) as made:
        yield made


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_opens_in_firefox(name: str, window: FirefoxWindow, server: RunViewer) -> None:
    window.requests.clear()
    window.said.clear()
    window.open(f"{server.address}&{VIEWS[name]}", width=800)
    window.until(LOADED)
    assert window.run("document.querySelectorAll('h1').length") == 1
    assert not window.run(OVERFLOW)
    asked = [each for each in window.requests if not each.startswith(("data:", "about:"))]
    assert asked
    assert all(each.startswith(f"http://127.0.0.1:{server.port}/") for each in asked)
    assert window.said == []


def test_keys_open_a_run_in_firefox(window: FirefoxWindow, server: RunViewer) -> None:
    window.open(f"{server.address}&/")
    window.until(LOADED)
    window.press("j")
    window.press("\ue007")  # Enter
    window.until("location.hash === '#/run/0'")
    window.until(f"!!document.querySelector('.tabs') && {LOADED}")
    window.press("4")
    window.until("location.hash === '#/run/0/held-out'")
