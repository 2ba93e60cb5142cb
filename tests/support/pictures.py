"""What tests of runs go without: pictures take half the time of a short run, checks of shapes half of a tiny step."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from jaxtyping import config
from matplotlib.figure import Figure

BLANK = b"\x89PNG\r\n\x1a\n"


def save_blank(figure: Figure, picture: IO[bytes], **options: Any) -> None:
    """In place of `Figure.savefig`: all panels have been filled by then, and none is laid out or painted."""
    picture.write(BLANK)


@pytest.fixture(scope="module", autouse=True)
def blank_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """For a `conftest.py`: no test of its folder draws, but those of a file that says `DRAWS = True`."""
    with pytest.MonkeyPatch.context() as patch:
        if "DRAWS" not in vars(request.module):
            patch.setattr(Figure, "savefig", save_blank)
        yield


def width_and_height(picture: Path) -> tuple[int, int]:
    """Of a PNG, in pixels; fails on a blank one."""
    head = picture.read_bytes()[:24]
    assert head.startswith(BLANK + b"\0\0\0\x0dIHDR"), "this picture was not drawn"
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


@pytest.fixture(scope="module", autouse=True)
def unchecked_shapes(request: pytest.FixtureRequest) -> Iterator[None]:
    """For a `conftest.py`: the tests of its folder run as a user's program does, but those of a file that says
    `SHAPES = True`."""
    config.update("jaxtyping_disable", "SHAPES" not in vars(request.module))
    yield
    config.update("jaxtyping_disable", False)
