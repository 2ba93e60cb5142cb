"""A rule over many files as one test, for handing thousands of tests to workers takes longer than running them."""

from collections.abc import Callable, Sequence
from pathlib import Path

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
