"""A row with a text of megabytes is refused by its place before that text is made tokens, by every command."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.models import rendering
from posttrain.models.rendering import TooLongText, require_text_that_may_fit
from tests.support.commands import refusal
from tests.support.refusals import refused
from tests.support.runs import SHAPE, save_tiny_model

LONG = "1 + 2 " * 500_000
RUN = {"run": {"folder": "run", "threads": 1}}
ROWS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "rl": ({"prompt": LONG}, {"rewards": [{"path": "dice.py:dice"}]}),
    "sft": ({"prompt": "1", "completion": LONG}, {}),
    "dpo": ({"prompt": "1", "chosen": "2", "rejected": LONG}, {}),
    "reward-model": ({"prompt": LONG, "chosen": "2", "rejected": "3"}, {}),
}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of all that is made tokens."""
    found: list[int] = []
    make = rendering.token_ids

    def token_ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
        found.append(len(text))
        return make(tokenizer, text, special=special)

    monkeypatch.setattr(rendering, "token_ids", token_ids)
    return found


@pytest.mark.parametrize("command", ROWS)
def test_a_text_of_megabytes_is_refused_before_it_is_made_tokens(
    command: str, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    Path("dice.py").write_text("def dice(completions, **columns):\n    return [0.0] * len(completions)\n")
    row, sections = ROWS[command]
    short = {name: value[:6] if value is LONG else value for name, value in row.items()}
    lines = [{**short, next(iter(row)): f"{number}"} for number in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*lines, row]))
    task = {"name": "dataset", "path": "rows.jsonl", "held_out_share": 0.2}
    Path("recipe.yaml").write_text(yaml.safe_dump({"model": {"path": "model"}, "task": task, **sections, **RUN}))
    said = refusal(command, "recipe.yaml")
    assert "rows.jsonl:21" in said
    assert f"more than {SHAPE.max_positions} tokens" in said
    assert max(sizes) < 50 * SHAPE.max_positions


def test_a_text_is_refused_by_its_tokens_and_not_by_its_size() -> None:
    # A tokenizer to which a word that it does not know is one token, whatever its length, and white space none.
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    for fits in ("x" * 100_000, " " * 100_000 + "a", "a" + " " * 100_000 + "a"):
        require_text_that_may_fit(words, fits, 4, "a row")
    with refused("a row: its 100000 characters are more than 4 tokens", error=TooLongText):
        require_text_that_may_fit(words, "a " * 50_000, 4, "a row")
