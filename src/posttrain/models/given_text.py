"""Text that a policy is given in the middle of its answer, such as a tool's reply, as tokens.

The author of such text must not be able to write a control token: `<|im_end|>` in a web page would end the reply and
begin a false turn.  So every text of an added token is cut in two after its first character, and the parts are
tokenised separately.  The text stays the same; its tokens are those of plain text.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.models.rendering import token_ids

CUT, MARK = "\ufdd0", "\ufdd1"
"""Unicode noncharacters, which no text contains: where a text is cut, and a place to find again."""
REPLACEMENT = "\ufffd"
ANCHOR = "\n"
"""Text before a part, for tokenizers that begin every text with a space."""


class GivenText:
    """Encodes what a tokenizer's model is given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        # Runs of spaces are tokens of some vocabularies, and control nothing.
        names = sorted((name for name in added if len(name) > 1 and not name.isspace()), key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, names))) if names else None
        first, second = (token_ids(tokenizer, text, special=False) for text in "ab")
        self.begins_with_space = tokenizer.decode([*first, *second]) != "ab"

    def cut(self, text: str) -> str:
        """The text with `CUT` within everything that would be an added token; half surrogates are replaced."""
        text = text.encode("utf-8", "replace").decode().replace(CUT, REPLACEMENT).replace(MARK, REPLACEMENT)
        if self.control is None:
            return text
        parts, begin = [], 0
        while (found := self.control.search(text, begin)) is not None:
            parts.append(text[begin : found.start() + 1])
            begin = found.start() + 1
        return CUT.join([*parts, text[begin:]])

    def cut_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with all their texts cut, except their roles."""
        return [
            {key: self.cut(value) if key != "role" and isinstance(value, str) else value for key, value in each.items()}
            for each in messages
        ]

    def tokens(self, text: str, *, continues: bool) -> list[int]:
        """The tokens of a text that was cut; `continues` says that it follows other text."""
        first, *others = text.split(CUT)
        tokens = self.behind(first) if continues else token_ids(self.tokenizer, first, special=False)
        for part in others:
            tokens += self.behind(part)
        return tokens

    def behind(self, text: str) -> list[int]:
        """The tokens of a text that follows another, without the space that some tokenizers put before every text."""
        if not text:
            return []
        if self.begins_with_space:
            anchor, whole = (token_ids(self.tokenizer, each, special=False) for each in (ANCHOR, ANCHOR + text))
            if whole[: len(anchor)] == anchor:
                return whole[len(anchor) :]
        return token_ids(self.tokenizer, text, special=False)
