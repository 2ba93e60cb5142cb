"""Sampling through decoder.c: several tokens of every row in one call.

Keys and values of a row are in pages, which rows with the same beginning share.  Full pages of a prompt are stored
once.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from posttrain.generation.request import Request
from posttrain.generation.steps import PrefilledPrompts, Prompts, Steps
from posttrain.models.native.native_decoder import (
    DrawnTokens,
    DrawRequest,
    NativeDecoder,
    Pages,
    ScoredSequence,
    page_table,
)
from posttrain.models.policy import Policy

MOST_STEPS = 16
"""Tokens of a row in one call: between calls rows end, others start, and signals are handled."""
CALL_SECONDS = 0.5
"""A call has fewer steps if they would take longer than about this."""
FLOPS = 2e10
"""Operations per second of one thread, a low estimate."""
SLAB_PAGES = 64
"""Pages that are allocated at a time."""


class PagePool:
    """Pages of one size, by their addresses; several rows may hold a page."""

    def __init__(self, decoder: NativeDecoder) -> None:
        self.decoder = decoder
        self._slabs: list[Pages] = []
        self._free: list[int] = []
        self._holders: Counter[int] = Counter()

    def take(self, count: int) -> list[int]:
        """Pages for one holder each."""
        if len(self._free) < count:
            self._slabs.append(self.decoder.new_slab(max(SLAB_PAGES, count - len(self._free))))
            self._free += reversed(self._slabs[-1].addresses)
        taken = [self._free.pop() for _ in range(count)]
        self._holders.update(taken)
        return taken

    def share(self, pages: Sequence[int]) -> list[int]:
        """The same pages for one more holder."""
        self._holders.update(pages)
        return list(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        self._holders.subtract(pages)
        for page in pages:
            if not self._holders[page]:
                del self._holders[page]
                self._free.append(page)


class NativeSlots:
    """Keys and values of the rows being decoded, in pages."""

    def __init__(self, decoder: NativeDecoder) -> None:
        self.decoder, self.pool = decoder, PagePool(decoder)
        self.lengths = torch.zeros(0, dtype=torch.long)
        """Tokens that each row holds."""
        self.pages: list[list[int]] = []

    def add(self, cached: Sequence[Tensor], lengths: Int64[Tensor, " row"], prompts: Prompts = None) -> None:
        """Append rows; those of one prompt share the pages that it fills.

        Cached are the addresses of each prompt's pages, and what they point into.
        """
        addresses, stored = cached[0].tolist(), dict[int, list[int]]()
        self.lengths = torch.cat([self.lengths, lengths])
        of_rows = range(len(lengths)) if prompts is None else prompts.tolist()
        for prompt, length in zip(of_rows, lengths.tolist(), strict=True):
            num_pages, num_full = self.decoder.num_pages(length), length // self.decoder.page_tokens
            shared = self.pool.share(stored[prompt][:num_full]) if prompt in stored else []
            own = self.pool.take(num_pages - len(shared))
            self.decoder.copy_pages(addresses[prompt][len(shared) : num_pages], own)
            self.pages.append([*shared, *own])
            stored.setdefault(prompt, list(self.pages[-1]))

    def row(self, row: int) -> list[Tensor]:
        copies = self.decoder.new_pages(int(self.lengths[row]))
        self.decoder.copy_pages(self.pages[row][: len(copies.addresses)], copies.addresses)
        return [torch.tensor([copies.addresses]), *copies.held]

    def move(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> None:
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.pages[old], self.pages[new] = self.pages[new], self.pages[old]
            self.lengths[new] = self.lengths[old]
        for pages in self.pages[num_left:]:
            self.pool.give_back(pages)
        del self.pages[num_left:]
        self.lengths = self.lengths[:num_left]

    def with_room(self, num_tokens: Int64[Tensor, " row"]) -> Int64[Tensor, "row page"]:
        """The addresses of each row's pages, with room for `num_tokens` more tokens."""
        for pages, length in zip(self.pages, (self.lengths + num_tokens).tolist(), strict=True):
            pages += self.pool.take(max(0, self.decoder.num_pages(length) - len(pages)))
        return page_table(self.pages)


class NativeSteps(Steps):
    """Sampling through decoder.c."""

    def __init__(self, policy: Policy) -> None:
        self.native, self.most_steps = NativeDecoder(policy), MOST_STEPS
        matrices = sum(parameter.numel() for parameter in policy.model.parameters())
        self.seconds_of_token = 2 * matrices / FLOPS

    def refresh(self) -> None:
        self.native.refresh()

    def release(self) -> None:
        self.native.release()

    def slots(self) -> NativeSlots:
        return NativeSlots(self.native)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> PrefilledPrompts:
        """Run whole prompts: all tokens but the last, and then the last ones, which give logits."""
        native, lengths = self.native, torch.tensor([len(prompt) for prompt in prompts])
        ends = [0, *accumulate(native.num_pages(len(prompt)) for prompt in prompts)]
        slab = native.new_slab(ends[-1])
        pages = [slab.addresses[start:end] for start, end in pairwise(ends)]
        begun = [
            ScoredSequence(tokens=tuple(prompt[:-1]), wanted=(), cached=0, pages=Pages(own, slab.held))
            for prompt, own in zip(prompts, pages, strict=True)
            if len(prompt) > 1
        ]
        if begun:
            native.score(begun, 1.0)
        table = page_table(pages)
        logits = native.logits(torch.tensor([prompt[-1] for prompt in prompts]), lengths - 1, table)
        return PrefilledPrompts(logits=logits, cached=[table, *slab.held], lengths=lengths)

    def step(self, tokens: Int64[Tensor, " row"], slots: NativeSlots) -> Float[Tensor, "row vocab"]:
        logits = self.native.logits(tokens, slots.lengths, slots.with_room(torch.ones_like(slots.lengths)))
        slots.lengths = slots.lengths + 1
        return logits

    def draws(self, request: Request) -> bool:
        """Whether `draw` can serve the request; else tokens are drawn one by one from the logits of `step`."""
        return not (request.sampling.cuts or request.stop_texts or request.keep_alternatives)

    def num_steps(self, num_rows: int) -> int:
        rows = -(-num_rows // torch.get_num_threads())
        return max(1, min(self.most_steps, int(CALL_SECONDS / (rows * self.seconds_of_token))))

    def draw(self, tokens: Int64[Tensor, " row"], slots: NativeSlots, request: DrawRequest) -> DrawnTokens:
        """Several tokens of each row, as many as there are uniform numbers."""
        num_steps = request.uniforms.shape[1]
        pages = slots.with_room((request.num_given + request.limits).clamp(max=num_steps))
        drawn = self.native.draw(tokens, slots.lengths, pages, request)
        slots.lengths = slots.lengths + (request.num_given + drawn.counts).clamp(max=num_steps)
        return drawn
