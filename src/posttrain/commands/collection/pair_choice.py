"""Sampled completions, as the journal keeps them, and which pairs are made of them."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from posttrain.options.collect import CollectOptions
from posttrain.records import Finish, Grades, Group, Prompt

Messages = tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledCompletion:
    """One completion, as text."""

    sample: int
    text: str
    """As rewards read it: the prefill, and what was sampled without its stop token."""
    finish: Finish
    num_tokens: int
    reward: float | None = None
    """The weighted sum of the scores; None if there is none."""
    scores: Mapping[str, float | None] | None = None
    """By reward function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPrompt:
    """A prompt with its completions: a line of the journal."""

    draw: int
    """Number of the prompt within its round."""
    prompt_id: str
    prompt: str | Messages
    """As in rows of data: text, or the messages of a conversation; without the beginning of the answer."""
    completions: tuple[SampledCompletion, ...]

    @property
    def question(self) -> str:
        """The prompt for a judge or a person to read."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1:
            return self.prompt[0]["content"]
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)


def sampled_prompt(record: Mapping[str, Any]) -> SampledPrompt:
    made = [SampledCompletion(**{**each, "finish": Finish(each["finish"])}) for each in record["completions"]]
    prompt = record["prompt"] if isinstance(record["prompt"], str) else tuple(record["prompt"])
    return SampledPrompt(**{**record, "prompt": prompt, "completions": tuple(made)})


def dataset_prompt(prompt: Prompt) -> str | Messages:
    return prompt.text.removesuffix(prompt.prefill) if prompt.messages is None else prompt.messages


def sampled_prompts(groups: Sequence[Group], grades: Grades | None) -> list[SampledPrompt]:

    def rewarded(row: int, column: int) -> dict[str, Any]:
        if grades is None:
            return {}
        scores = dict(zip(grades.names, grades.scores[:, row, column].tolist(), strict=True))
        reward = grades.rewards[row, column].item()
        known = {name: None if math.isnan(score) else score for name, score in {**scores, "": reward}.items()}
        return {"reward": known.pop(""), "scores": known}

    return [
        SampledPrompt(
            draw=group.draw,
            prompt_id=group.prompt.id,
            prompt=dataset_prompt(group.prompt),
            completions=tuple(
                SampledCompletion(
                    sample=rollout.sample,
                    text=group.graded_text(rollout),
                    finish=rollout.finish,
                    num_tokens=rollout.num_sampled,
                    **rewarded(row, column),
                )
                for column, rollout in enumerate(group.rollouts)
            ),
        )
        for row, group in enumerate(groups)
    ]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two different completions of a prompt; the first has the lower sample number."""

    prompt: SampledPrompt = field(repr=False)
    first: SampledCompletion = field(repr=False)
    second: SampledCompletion = field(repr=False)

    @property
    def id(self) -> str:
        """Draw and sample numbers: the same pair always has the same name."""
        return f"{self.prompt.draw}:{self.first.sample}-{self.second.sample}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPairs:
    """The pairs of all prompts, and how many completions are in none."""

    pairs: tuple[Pair, ...]
    num_cut_off: int = 0
    """Completions that the token limit ended, if those are dropped."""
    num_empty: int = 0
    num_identical: int = 0
    """Completions with the text of another one of their prompt."""
    num_unscored: int = 0
    """Completions without a reward, if rewards choose the pairs."""
    num_lone_prompts: int = 0
    """Prompts with fewer than two completions to compare."""


def choose_pairs(prompts: Sequence[SampledPrompt], options: CollectOptions, *, seed: int) -> ChosenPairs:
    """The pairs of these prompts: a function of them, of the options and of the seed."""
    pairs: list[Pair] = []
    counts: Counter[str] = Counter()
    for prompt in prompts:
        whole = [each for each in prompt.completions if options.cut_off == "keep" or not each.finish.cut_off]
        telling = [each for each in whole if each.text.strip()]
        different = list({each.text: each for each in reversed(telling)}.values())
        ranked = [each for each in different if options.pairs != "best_worst" or each.reward is not None]
        counts["num_cut_off"] += len(prompt.completions) - len(whole)
        counts["num_empty"] += len(whole) - len(telling)
        counts["num_identical"] += len(telling) - len(different)
        counts["num_unscored"] += len(different) - len(ranked)
        counts["num_lone_prompts"] += len(ranked) < 2
        pairs += chosen_pairs(prompt, sorted(ranked, key=lambda each: each.sample), options, seed=seed)
    return ChosenPairs(pairs=tuple(pairs), **counts)


def chosen_pairs(
    prompt: SampledPrompt, completions: Sequence[SampledCompletion], options: CollectOptions, *, seed: int
) -> Iterable[Pair]:
    """The pairs of one prompt's different completions, in the order of their samples."""
    every = [Pair(prompt, first, second) for first, second in combinations(completions, 2)]
    if options.pairs == "all" or not every:
        return every
    if options.pairs == "best_worst":
        # Python keeps the order of equals, so that of equal rewards the first is best and the last is worst.
        ranked = sorted(completions, key=lambda each: each.reward or 0.0, reverse=True)
        first, second = sorted((ranked[0], ranked[-1]), key=lambda each: each.sample)
        return [Pair(prompt, first, second)]
    drawn = sorted(every, key=lambda pair: lot(seed, f"pair of round {options.round}", pair.id))
    chosen = {pair.id for pair in drawn[: options.pairs_per_prompt]}
    return [pair for pair in every if pair.id in chosen]


def lot(seed: int, purpose: str, name: str) -> int:
    """A random number of 64 bits: a function of the seed, the purpose and the name of what it is drawn for."""
    digest = hashlib.blake2b(repr(("collect", seed, purpose, name)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
