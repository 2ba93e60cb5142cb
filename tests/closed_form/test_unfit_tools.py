"""Functions that cannot be tools are refused before the first step."""

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from posttrain.environments.protocol import Reply
from posttrain.environments.tool_environments import ToolsInText
from posttrain.environments.tools import toolbox_of
from posttrain.turns import ToolCall
from tests.support.refusals import refused


def yields(text: str) -> Iterator[str]:
    """Yields.

    Args:
        text: a text
    """
    yield text


async def yields_later(text: str) -> AsyncIterator[str]:
    """Yields.

    Args:
        text: a text
    """
    yield text


def any_number(*texts: str) -> str:
    """Takes texts.

    Args:
        texts: some texts
    """
    return " ".join(texts)


def by_place(text: str, /) -> str:
    """Takes a text.

    Args:
        text: a text
    """
    return text


UNFIT = {yields: "yields", yields_later: "yields", any_number: "`*texts: str`", by_place: "by name"}


@pytest.mark.parametrize("tool", UNFIT)
def test_a_function_that_no_call_fits_is_refused(tool: Callable[..., object]) -> None:
    with refused("tools", UNFIT[tool]):
        toolbox_of([tool])


def test_a_tool_in_text_may_take_its_text_by_keyword() -> None:
    def twice(*, text: str) -> str:
        """Twice.

        Args:
            text: a text
        """
        return text * 2

    (tool,) = toolbox_of([twice]).tools.values()
    assert ToolsInText({"=": tool}).reply("ab=") == Reply("abab", calls=(ToolCall("twice"),))
