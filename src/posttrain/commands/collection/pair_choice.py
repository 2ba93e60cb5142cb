"""Which pairs are made of a prompt's completions, and which completions make none."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from posttrain.commands.collection.sampled_prompts import SampledCompletion, SampledPrompt
from posttrain.options.collect import CollectOptions


@dataclass(frozen=True, slots=True)
class Pair:
    """Two different completions of a prompt; the first has the lower sample number."""

    prompt: SampledPrompt = field(repr=False)
    first: SampledCompletion = field(repr=False)
    second: SampledCompletion = field(repr=False)

    @property
    def id(self) -> str:
        """Draw and sample numbers: the same pair has the same name whenever it is made."""
        return f"{self.prompt.draw}:{self.first.sample}-{self.second.sample}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPairs:
    """The pairs of all prompts, and how many completions are in none."""

    pairs: tuple[Pair, ...]
    num_cut_off: int = 0
    """Completions that the token limit ended, where those are dropped."""
    num_empty: int = 0
    """Completions that say nothing."""
    num_identical: int = 0
    """Completions with the text of another one of their prompt."""
    num_unscored: int = 0
    """Completions without a reward, where rewards choose the pairs."""
    num_lone_prompts: int = 0
    """Prompts of which fewer than two completions are left."""


def choose_pairs(prompts: Sequence[SampledPrompt], options: CollectOptions, *, seed: int) -> ChosenPairs:
    """The pairs of these prompts: a function of them, of the options and of the seed."""
    pairs: list[Pair] = []
    num_cut_off = num_empty = num_identical = num_unscored = num_lone = 0
    for prompt in prompts:
        whole = [each for each in prompt.completions if options.cut_off == "keep" or not each.finish.cut_off]
        telling = [each for each in whole if each.text.strip()]
        different = list({each.text: each for each in reversed(telling)}.values())
        ranked = [each for each in different if options.pairs != "best_worst" or each.reward is not None]
        num_cut_off += len(prompt.completions) - len(whole)
        num_empty += len(whole) - len(telling)
        num_identical += len(telling) - len(different)
        num_unscored += len(different) - len(ranked)
        num_lone += len(ranked) < 2
        pairs += chosen_pairs(prompt, sorted(ranked, key=lambda each: each.sample), options, seed=seed)
    return ChosenPairs(
        pairs=tuple(pairs),
        num_cut_off=num_cut_off,
        num_empty=num_empty,
        num_identical=num_identical,
        num_unscored=num_unscored,
        num_lone_prompts=num_lone,
    )


def chosen_pairs(
    prompt: SampledPrompt, completions: Sequence[SampledCompletion], options: CollectOptions, *, seed: int
) -> Iterable[Pair]:
    """The pairs of one prompt's different completions, in the order of their samples."""
    if len(completions) < 2:
        return []
    if options.pairs == "best_worst":
        # Python keeps the order of equals, so that of equal rewards the first is best and the last is worst.
        ranked = sorted(completions, key=lambda each: each.reward or 0.0, reverse=True)
        first, second = sorted((ranked[0], ranked[-1]), key=lambda each: each.sample)
        return [Pair(prompt, first, second)]
    every = [Pair(prompt, first, second) for first, second in combinations(completions, 2)]
    if options.pairs == "all":
        return every
    drawn = sorted(every, key=lambda pair: lot(seed, f"pair of round {options.round}", pair.id))
    chosen = {pair.id for pair in drawn[: options.pairs_per_prompt]}
    return [pair for pair in every if pair.id in chosen]


def lot(seed: int, purpose: str, name: str) -> int:
    """A number drawn by lot, of 64 bits: a function of the seed, of what it is for and of what it is drawn for."""
    digest = hashlib.blake2b(repr(("collect", seed, purpose, name)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
