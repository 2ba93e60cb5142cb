"""Log-probs of completions by decoder.c, for models that get no gradient: references and teachers.

A prompt goes through the model once.  Its pages but the last are read by all of its completions.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.models.forward import CompletionBatch
from posttrain.models.native.native_decoder import NativeDecoder, ScoredSequence

PAGE_BYTES_AT_ONCE = 2**24
"""Memory for the pages of completions that are scored at a time."""


def native_logprobs(decoder: NativeDecoder, batch: CompletionBatch, temperature: float) -> Float64[Tensor, " token"]:
    """log π of each sampled token in nats, completion after completion."""
    prompts = PromptPages(decoder, batch.prompts)
    found: list[Tensor] = []
    for some in portions(decoder, batch):
        sequences = [prompts.behind(batch.prompt_of[each], batch.completions[each]) for each in some]
        found.append(decoder.score(sequences, temperature))
    every = torch.cat(found)
    return every if batch.sampled is None else every[batch.sampled.cpu()]


def portions(decoder: NativeDecoder, batch: CompletionBatch) -> Iterator[Sequence[int]]:
    """Completions that are scored together, by their numbers."""
    page_bytes, some, size = 4 * decoder.page_floats, list[int](), 0
    for each, tokens in enumerate(batch.completions):
        more = page_bytes * (len(tokens) // decoder.page_tokens + 2)
        if some and size + more > PAGE_BYTES_AT_ONCE:
            yield some
            some, size = [], 0
        some.append(each)
        size += more
    yield some


class PromptPages:
    """Keys and values of prompts without their last token, which each completion runs itself."""

    def __init__(self, decoder: NativeDecoder, prompts: Sequence[Sequence[int]]) -> None:
        self.decoder, self.prompts = decoder, prompts
        self.pages = [decoder.new_pages(len(prompt)) for prompt in prompts]
        began = [(prompt[:-1], pages) for prompt, pages in zip(prompts, self.pages, strict=True) if len(prompt) > 1]
        if began:
            decoder.score(
                [ScoredSequence(tokens=tuple(p), wanted=(), cached=0, pages=pages) for p, pages in began], 1.0
            )

    def behind(self, prompt: int, completion: Sequence[int]) -> ScoredSequence:
        """A completion of a prompt."""
        decoder, cached = self.decoder, len(self.prompts[prompt]) - 1
        num_full = cached // decoder.page_tokens
        own = decoder.new_pages(cached - num_full * decoder.page_tokens + len(completion))
        if cached % decoder.page_tokens:
            decoder.copy_pages(self.pages[prompt].addresses[num_full : num_full + 1], own.addresses[:1])
        return ScoredSequence(
            tokens=(self.prompts[prompt][-1], *completion[:-1]),
            wanted=tuple(completion),
            cached=cached,
            pages=self.pages[prompt].followed_by(num_full, own),
        )
