"""A completion ends behind the token that completes one of the request's stop texts, and is the same up to there."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.records import Finish
from tests.support.tiny import VOCAB, request, some_prompts, tiny_policy, tokenizer

PIECES = ["<|end|>", "<|pad|>", "▁", *"abcdefghijklmnopqrstu"][:VOCAB]


def spaces_as_pieces() -> PreTrainedTokenizerFast:
    """Single letters, and a piece that is a space; what is decoded loses the space that it begins with."""
    made = Tokenizer(WordLevel({piece: number for number, piece in enumerate(PIECES)}, unk_token="<|pad|>"))
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<|end|>", "<|pad|>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<|pad|>")


def cut(made: PreTrainedTokenizerBase, tokens: tuple[int, ...], texts: tuple[str, ...]) -> tuple[int, ...]:
    """The tokens up to the one that completes a text, by the definition."""
    for length in range(1, len(tokens) + 1):
        whole = made.decode(tokens[:length], skip_special_tokens=False)
        if any(text in whole for text in texts):
            return tokens[:length]
    return tokens


@pytest.mark.parametrize("made", [tokenizer(), spaces_as_pieces()], ids=["letters", "spaces as pieces"])
def test_a_completion_ends_behind_the_token_that_completes_a_stop_text(made: PreTrainedTokenizerBase) -> None:
    engine = InProcessEngine(replace(tiny_policy(), tokenizer=made))
    prompts, asked = some_prompts((3, 7, 1, 12, 5, 4)), request(8, 20)
    whole = [rollout for group in sample_groups(engine, prompts, asked) for rollout in group.rollouts]
    written = [made.decode(rollout.tokens, skip_special_tokens=False) for rollout in whole]
    pad = "<|pad|>"
    assert any(pad in text for text in written)
    pairs = {text[at : at + 2] for text in written for at in range(1, len(text) - 1) if "<" not in text[at : at + 2]}
    spaced = sorted(pair for pair in pairs if pair[0] == " " and pair[1] != " ")[:3]
    texts = (*sorted(pairs)[3:6], *spaced, "never written", f"{written[0][2:3]}{pad}", pad)
    again = [r for group in sample_groups(engine, prompts, replace(asked, stop_texts=texts)) for r in group.rollouts]
    expected = [cut(made, rollout.tokens, texts) for rollout in whole]
    assert [rollout.tokens for rollout in again] == expected
    shorter = [(now, before) for now, before in zip(again, whole, strict=True) if now.tokens != before.tokens]
    assert len(shorter) > 5
    assert len(shorter) < len(whole)
    assert {now.finish for now, _ in shorter} == {Finish.LENGTH}
    for now, before in shorter:
        assert now.logprobs == pytest.approx(before.logprobs[: len(now.tokens)], abs=1e-12)


def continuation_pieces() -> PreTrainedTokenizerFast:
    """Single letters that go on a word, which show their mark only where a text begins with one."""
    pieces = ["<|end|>", "<|pad|>", "a", *(f"##{letter}" for letter in "bcdefghijklmnopqrstuv")][:VOCAB]
    made = Tokenizer(WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<|pad|>"))
    made.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    made.add_special_tokens(["<|end|>", "<|pad|>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<|pad|>")


def letters(texts: list[str], size: int) -> str:
    """That many tokens of a letter each that some completion has in its middle."""
    runs = [text[at : at + size] for text in texts for at in range(2, len(text) - size)]
    return next(run for run in runs if "<" not in run and ">" not in run)


@pytest.mark.parametrize(
    ("made", "chosen"),
    [
        # A text of six tokens, alone and beside one of a byte: as far back as the longest text goes.
        (tokenizer(), lambda texts: (letters(texts, 6),)),
        (tokenizer(), lambda texts: (letters(texts, 6), "\x00")),
        # Decoded alone, the tokens of " x" lose their space: one more is looked at.
        (
            spaces_as_pieces(),
            lambda texts: (next(f" {text[text.index(' ', 1) + 1]}" for text in texts if " " in text[1:]),),
        ),
        # The last tokens, decoded alone, begin with a mark that is not in the whole.
        (continuation_pieces(), lambda texts: ("##d", "##m")),
    ],
    ids=["six tokens", "six beside one", "a space at first", "a mark at first"],
)
def test_what_the_last_tokens_show_is_what_the_whole_shows(
    made: PreTrainedTokenizerBase, chosen: Callable[[list[str]], tuple[str, ...]]
) -> None:
    engine = InProcessEngine(replace(tiny_policy(), tokenizer=made))
    prompts, asked = some_prompts((3, 7, 1, 12, 5, 4)), request(8, 20)
    whole = [rollout for group in sample_groups(engine, prompts, asked) for rollout in group.rollouts]
    texts = chosen([made.decode(rollout.tokens, skip_special_tokens=False) for rollout in whole])
    again = [r for group in sample_groups(engine, prompts, replace(asked, stop_texts=texts)) for r in group.rollouts]
    assert [rollout.tokens for rollout in again] == [cut(made, rollout.tokens, texts) for rollout in whole]
