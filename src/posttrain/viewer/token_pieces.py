"""Tokens as text, with only the run's tokenizer.json and the `tokenizers` package: transformers would load torch.

Bytes that begin or end inside a character are shown as escapes, such as `\\xe2\\x82`, and the piece says so.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.viewer.folder_files import Stamp, Unreadable, mapping, stamp
from posttrain.viewer.rollout_responses import Piece

FILES = ("tokenizer/tokenizer.json", "model/tokenizer.json", "adapter/tokenizer.json")
"""Its places in a run's folder; `model/` is for runs of format 1."""
MOST_BYTES = 256 << 20
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (Radford et al. 2019, GPT-2)."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF = byte_of_character()


class TokenPieces:
    """The tokenizer of a run's folder."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._known: tuple[Path, Stamp, Vocabulary | Unreadable] | None = None

    def pieces(self, ids: Sequence[int], sampled: Sequence[bool] | None = None) -> list[Piece]:
        """The texts of some tokens.  Raises Unreadable without a tokenizer."""
        vocabulary = self._vocabulary()
        own = [True] * len(ids) if sampled is None else sampled
        return [vocabulary.piece(token, bool(is_own)) for token, is_own in zip(ids, own, strict=False)]

    def given(self, ids: Sequence[int]) -> list[Piece]:
        """The texts of tokens that were not sampled, such as a prompt's."""
        return self.pieces(ids, [False] * len(ids))

    def spelled(self, ids: Sequence[int]) -> list[tuple[bytes, bool]]:
        """The bytes of some tokens, and whether a text may omit them.  Raises Unreadable."""
        vocabulary = self._vocabulary()
        return [vocabulary.spelled(token) for token in ids]

    def _vocabulary(self) -> "Vocabulary":
        paths = [self.run / name for name in FILES]
        found = next(((path, now) for path in paths if (now := stamp(path)) is not None), None)
        if found is None:
            raise Unreadable("tokenizer/tokenizer.json", "is missing: token boundaries are not shown")
        if self._known is None or self._known[:2] != found:
            self._known = (*found, self._read(*found))
        if isinstance(self._known[2], Unreadable):
            raise self._known[2]
        return self._known[2]

    def _read(self, path: Path, now: Stamp) -> "Vocabulary | Unreadable":
        name = path.relative_to(self.run).as_posix()
        try:
            if now[0] > MOST_BYTES:
                raise ValueError(f"{now[0]} bytes")
            return Vocabulary(json.loads(path.read_bytes()))
        except (ValueError, OSError, RecursionError, TypeError, KeyError) as error:
            return Unreadable(name, f"damaged ({error}): token boundaries are not shown")


class Vocabulary:
    """The tokens of a tokenizer.json, and how its decoder turns them into bytes."""

    def __init__(self, content: Mapping[str, object]) -> None:
        model = mapping(content["model"])
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):  # BPE, WordPiece, WordLevel
            self.tokens = {int(token): str(text) for text, token in vocabulary.items()}
        elif isinstance(vocabulary, list):  # Unigram: pairs of a token and its log-prob
            self.tokens = {token: str(pair[0]) for token, pair in enumerate(vocabulary)}
        else:
            raise ValueError("its vocabulary is neither a mapping nor a list")
        added = content.get("added_tokens")
        self.added: dict[int, tuple[str, bool]] = {
            int(each["id"]): (str(each["content"]), bool(each["special"]))
            for each in (added if isinstance(added, list) else [])
        }
        decoder = json.dumps(content.get("decoder"))
        before = json.dumps(content.get("pre_tokenizer"))
        self.byte_level = '"ByteLevel"' in decoder or '"ByteLevel"' in before
        self.byte_fallback = '"ByteFallback"' in decoder
        self.spaces = "▁" if "▁" in decoder or "▁" in before or '"Metaspace"' in decoder + before else ""
        self._pieces: dict[tuple[int, bool], Piece] = {}

    def piece(self, token: int, sampled: bool) -> Piece:
        key = token, sampled
        if key not in self._pieces:
            content, special = self.spelled(token)
            try:
                text, partial = content.decode("utf-8", "surrogatepass"), False
            except UnicodeDecodeError:
                text, partial = "".join(f"\\x{byte:02x}" for byte in content), True
            self._pieces[key] = Piece(text=text, id=token, special=special, sampled=sampled, partial=partial)
        return self._pieces[key]

    def spelled(self, token: int) -> tuple[bytes, bool]:
        """A token's bytes, and whether it is special."""
        if token in self.added:
            text, special = self.added[token]
            return text.encode("utf-8", "surrogatepass"), special
        text = self.tokens.get(token, f"<token {token}>")
        if token not in self.tokens:
            return text.encode(), True
        if self.byte_level and all(character in BYTE_OF for character in text):
            return bytes(BYTE_OF[character] for character in text), False
        if self.byte_fallback and (byte := BYTE_TOKEN.fullmatch(text)):
            return bytes([int(byte[1], 16)]), False
        return (text.replace(self.spaces, " ") if self.spaces else text).encode("utf-8", "surrogatepass"), False
