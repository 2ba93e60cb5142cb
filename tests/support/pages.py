"""Pages whose blocks are programs, files and commands: reading and running them; and rules over many files."""

import importlib
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.runs import Ended, start, start_program

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"

Block = tuple[str, str, str]
"""Language, the file that it is given as (or nothing), and text."""


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    return re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


def attribute(path: str) -> object:
    """What a dotted name leads to."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"{path}: no such module")


def programs(found: Sequence[Block]) -> list[str]:
    """The blocks of Python that are no files."""
    return [text for language, name, text in found if language == "python" and not name]


def commands(page: str) -> list[str]:
    """The lines that are typed."""
    return [line.removeprefix("$ ") for line in re.findall(r"^\$ .*$", page, flags=re.MULTILINE)]


def write_files(found: Sequence[Block], folder: Path) -> None:
    """Write the files that a page gives, under the names it gives them; the blocks of one name are its parts."""
    for name in dict.fromkeys(name for _, name, _ in found if name):
        parts = [after_patch(text) if language == "diff" else text for language, each, text in found if each == name]
        (folder / name).write_text("\n\n".join(parts), encoding="utf-8")


def before_patch(text: str) -> str:
    """What a block of `diff` that shows a whole file was made from."""
    return "".join(line[1:] for line in text.splitlines(keepends=True) if line[0] in " -")


def after_patch(text: str) -> str:
    """What it makes of it."""
    return "".join(line[1:] for line in text.splitlines(keepends=True) if line[0] in " +")


def python(program: str, folder: Path) -> Ended:
    """Run a program in a folder."""
    with TemporaryDirectory() as logs:
        return start_program(program, folder=folder, logs=Path(logs)).ended()


def posttrain(arguments: Sequence[str], folder: Path) -> Ended:
    """Run the command in a folder."""
    with TemporaryDirectory() as logs:
        return start(*arguments, folder=folder, logs=Path(logs)).ended()


def documented(name: str, *, probes: Collection[str] = ()) -> bool:
    """Whether a table row of docs/metrics.md names this metric.

    `<fn>` stands for one part of a name, and `<probe>` for what the probes of a task of one's own read.
    """
    names = re.findall(r"^\| `([^`]+)`", METRICS_PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return any(re.fullmatch(pattern_of(row, probes), name) for row in names)


def pattern_of(row: str, probes: Collection[str]) -> str:
    """The names that a row stands for."""
    read = "|".join(map(re.escape, probes)) or "(?!)"  # without a probe, no name
    holes = {part: f"(?:{read})" if part == "<probe>" else "[^/]+" for part in re.findall(r"<\w+>", row)}
    return "".join(holes.get(part) or re.escape(part) for part in re.split(r"(<\w+>)", row))


ROOT = Path(__file__).parents[2]

Rule = Callable[[Path], None]


def one_test_of(paths: Sequence[Path]) -> Callable[[Rule], Callable[[], None]]:
    """The rule, which takes a path and fails where the file breaks it, as a test that names all the files that do."""

    def test_of(rule: Rule) -> Callable[[], None]:
        def test() -> None:
            broken = [told for path in paths if (told := breach(rule, path))]
            assert not broken, "\n\n".join(broken)

        test.__name__, test.__doc__, test.__module__ = rule.__name__, rule.__doc__, rule.__module__
        return test

    return test_of


def breach(rule: Rule, path: Path) -> str:
    """What the rule says against a file; nothing where the file keeps it."""
    try:
        rule(path)
    except (AssertionError, AttributeError, ImportError) as error:
        return f"{path.relative_to(ROOT)}: {type(error).__name__}: {error}"
    return ""
