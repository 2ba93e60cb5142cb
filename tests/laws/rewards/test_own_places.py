"""A function of one's own in a module, package.module:FUNCTION, beside those in files."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.binding import digest_of
from posttrain.config import Config
from posttrain.config.recipes import full_form
from posttrain.options.reward import RewardOptions
from posttrain.rewards.grading.grade import grade
from posttrain.rewards.grading.resources import default_resources
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.named_inputs import named_files
from tests.support.refusals import refused
from tests.support.reward_rows import group

NAME = "rewards_of_a_test"
SOURCE = """
from functools import partial

def solved(completions, worth=1.0, **columns):
    return [worth * (text == "yes") for text in completions]

class Later:
    async def __call__(self, completions):
        return solved(completions)

later, half, NUMBER = Later(), partial(solved, worth=0.5), 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in the working folder, which nothing else finds."""
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").write_text("from .inner import solved as outside\n")
    (folder / "inner.py").write_text(SOURCE)
    (folder / "broken.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]
    default_resources().close()


@pytest.mark.parametrize(
    ("function", "worth"), [("inner:solved", 1.0), ("inner:later", 1.0), ("inner:half", 0.5), ("outside", 1.0)]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_functions_objects_and_partials_of_a_module_score_here_and_in_workers(
    package: Path, function: str, worth: float, workers: int
) -> None:
    path = f"{NAME}.{function}" if ":" in function else f"{NAME}:{function}"
    reward = load_reward(RewardOptions(path=path, workers=workers))
    assert reward.name == function.rpartition(":")[2]
    assert grade([group(["yes", "no"])], [reward]).rewards.tolist() == [[worth, 0.0]]
    assert reward.source is not None
    if function != "half":  # of a partial's function only the module is known that names it, which is the same here
        assert reward.source.digest == digest_of(package / "inner.py")


def test_a_recipe_and_a_flag_name_it_as_they_name_a_file(package: Path) -> None:
    assert full_form("rewards", [f"{NAME}.inner:solved=0.5"]) == [{"path": f"{NAME}.inner:solved", "weight": 0.5}]
    config = Config(rewards=(RewardOptions(path=f"{NAME}.inner:solved"),))
    named = named_files(config)["rewards[0].path"]
    assert named.digest == digest_of(package / "inner.py")
    (package / "inner.py").write_text(SOURCE + "\n# another\n")
    assert named.differs(named_files(config)["rewards[0].path"])  # a resumed run is told


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (f"{NAME}.inner:solve", "inner has no function `solve`.  Did you mean `solved`?"),
        (f"{NAME}.inner:NUMBER", "`NUMBER` in … inner is a int and cannot score completions"),
        (f"{NAME}.inner:Later", "`Later` in … is a type and cannot score"),
        (f"{NAME}.outer:solved", "cannot be imported: ModuleNotFoundError … looked for in the folder you run in"),
        ("no_such_package_at_all.inner:solved", "looked for in the folder you run in and among what is installed"),
        (f"{NAME}.broken:solved", "No module named 'no_such_module_anywhere'."),
        (f"{NAME}/inner:solved", "is not FILE.py:FUNCTION or package.module:FUNCTION"),
        (f"{NAME}..inner:solved", "or package.module:FUNCTION"),
        (":solved", "or package.module:FUNCTION"),
    ],
)
def test_what_cannot_be_found_is_one_clear_message(package: Path, path: str, says: str) -> None:
    with refused(says):
        load_reward(RewardOptions(path=path))
