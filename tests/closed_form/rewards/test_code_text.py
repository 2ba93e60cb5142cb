"""Which program a completion gives."""

import pytest

from posttrain.rewards.code.program_text import MAX_CHARACTERS, program_in
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
        ("```\nx\n```", None),
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
        (f"<code>{'x' * (MAX_CHARACTERS + 1)}</code>", None),
    ],
)
def test_the_last_closed_program_outside_of_thinking(text: str, expected: str | None) -> None:
    assert program_in(text) == expected


@pytest.mark.parametrize(
    "piece", ["```python\n", "<code>", "</code>", "<think>", "</think>", "`", "```\n", "\n ", "<think></think>"]
)
def test_hostile_text_takes_linear_time(piece: str) -> None:
    assert time_ratio(program_in, piece) < LINEAR
