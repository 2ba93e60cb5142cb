"""Which program a completion gives."""

import pytest

from posttrain.rewards.parsing.tags import program_in
from tests.support.timing import LINEAR, time_ratio


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("a\n```py\nx = 1\n```\nb\n```python3\ny = 2\n```\nc", "y = 2\n"),
        ("```Python title\nx\n```", "x\n"),
        ("   ```python\nx\n   ```", "x\n"),
        ("````python\n```\nx\n````", "```\nx\n"),
        ("```python\nx", None),
        ("```python\nx\n``` and more", None),
        ("```\nx\n```", "x\n"),
        ("```\nx\n```\n```\ny\n```", "y\n"),
        ("```python\nx\n```\nIt prints\n```\n3\n```", "x\n"),
        ("```\n3\n```\n<code>x</code>", "x"),
        ("<think>\n```python\nx\n```\n</think>\n```\ny\n```", "y\n"),
        ("<think>\n```\nx\n```\n</think>", None),
        ("```\nx", None),
        ("```json\n1\n```\n", None),
        ("```text\n```python\n```\n```python\nx\n```", "x\n"),
        ("```python\nx\n```\n<code>y</code>", "y"),
        ("<code>y</code>\n```python\nx\n```", "x\n"),
        ("<code>y", None),
        ("<think>\n```python\nx\n```\n</think>\n```python\ny\n```", "y\n"),
        ("<think>\n```python\nx\n```\n</think>", None),
        ("```python\nx\n```\n</think>", None),
        ("```python\nx\n```\n<think>\n```python\ny\n```", "x\n"),
        ("", None),
    ],
)
def test_the_last_closed_program_outside_of_thinking(text: str, expected: str | None) -> None:
    assert program_in(text) == expected


def test_a_fence_without_a_language_counts_only_where_it_may() -> None:
    assert program_in("```\nx\n```", "python") is None
    assert program_in("```\nx\n```\n```py\ny\n```", "python") == "y\n"


@pytest.mark.parametrize(
    "piece", ["```python\n", "<code>", "</code>", "<think>", "</think>", "`", "```\n", "\n ", "<think></think>"]
)
def test_hostile_text_takes_linear_time(piece: str) -> None:
    assert time_ratio(program_in, piece) < LINEAR
