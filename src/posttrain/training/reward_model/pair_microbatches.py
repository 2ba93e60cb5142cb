"""Pairs that go through the model together."""

from collections.abc import Callable, Iterator, Sequence

from posttrain.records import Preference

AnswerLengths = Callable[[Preference], tuple[int, int]]
"""Tokens of the chosen and of the rejected answer that go through the model."""


def pair_microbatches(
    pairs: Sequence[Preference], max_tokens: int, *, lengths: AnswerLengths, padded: bool = False
) -> Iterator[list[int]]:
    """Indices of pairs of similar length, of at most `max_tokens` tokens together as the forward pass computes them.

    Pairs of one prompt are adjacent, and their prompt counts once.  With padded rows a pair counts as two rows, as wide
    as the widest of the micro-batch.  A pair that is too long is a micro-batch by itself.
    """
    answers = [lengths(pair) for pair in pairs]
    widths = [len(pair.prompt.tokens) + max(both) for pair, both in zip(pairs, answers, strict=True)]
    longest: dict[tuple[int, ...], int] = {}
    for pair, width in zip(pairs, widths, strict=True):
        longest[pair.prompt.tokens] = max(width, longest.get(pair.prompt.tokens, 0))
    order = sorted(
        range(len(pairs)), key=lambda row: (longest[pairs[row].prompt.tokens], pairs[row].prompt.tokens, widths[row])
    )
    batch: list[int] = []
    held, widest = 0, 0
    prompts: set[tuple[int, ...]] = set()
    for row in order:
        prompt = pairs[row].prompt.tokens
        more = sum(answers[row]) + (0 if prompt in prompts else len(prompt))
        would = 2 * (len(batch) + 1) * max(widest, widths[row]) if padded else held + more
        if batch and would > max_tokens:
            yield batch
            batch, held, widest, prompts = [], 0, 0, set()
            more = sum(answers[row]) + len(prompt)
        batch.append(row)
        held, widest = held + more, max(widest, widths[row])
        prompts.add(prompt)
    if batch:
        yield batch
