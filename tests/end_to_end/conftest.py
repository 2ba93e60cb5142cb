"""What holds for every test of whole runs: their curves are left blank, but for inverse RL, whose pictures are read."""

from collections.abc import Iterator

import pytest
from matplotlib.figure import Figure

from tests.support.pictures import save_blank


@pytest.fixture(scope="module", autouse=True)
def blank_pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "irl" not in request.path.parts:
            patch.setattr(Figure, "savefig", save_blank)
        yield
