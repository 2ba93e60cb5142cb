"""An error that must be raised, and what its message must name: an option, a value, a remedy, but not its wording."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from posttrain.errors import UserError


@contextmanager
def refused(*words: object, error: type[Exception] = UserError) -> Iterator["pytest.ExceptionInfo[Exception]"]:
    """Expect `error`, with each of `words` in its message; a text may hold several, with … between them."""
    with pytest.raises(error) as caught:
        yield caught
    mentions(str(caught.value), *words)


@contextmanager
def warned(*words: object, kind: type[Warning] = UserWarning) -> Iterator[None]:
    """Expect a warning of the kind with each of `words` in its message."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        yield
    said = [str(each.message) for each in given if issubclass(each.category, kind)]
    assert any(not missing_words(words, each) for each in said), f"{words} not in one of: {said}"


def mentions(text: str, *words: object) -> None:
    """A text must have each of `words`."""
    missing = missing_words(words, text)
    assert not missing, f"{missing} not in: {text}"


def missing_words(words: tuple[object, ...], message: str) -> list[str]:
    return [each for word in words for each in map(str.strip, str(word).split("…")) if each not in message]
