"""An error that must be raised, and what its message must name: an option, a value, a remedy, but not its wording."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from posttrain.errors import UserError


@contextmanager
def refused(*words: object, error: type[Exception] = UserError) -> Iterator["pytest.ExceptionInfo[Exception]"]:
    """Expect `error`, with each of `words` in its message."""
    with pytest.raises(error) as caught:
        yield caught
    missing = [word for word in words if str(word) not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
