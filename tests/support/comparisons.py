"""Prompts with written completions, pairs of them, and ballots on those: what tests of preferences begin with."""

from collections.abc import Sequence
from pathlib import Path

from posttrain.commands.collection.ballot import Ballot
from posttrain.commands.collection.pairs import Pair, SampledCompletion, SampledPrompt, choose_pairs
from posttrain.options.collect import CollectOptions
from posttrain.records import Finish
from posttrain.runs.files import LineJournal


def written_prompt(
    texts: Sequence[str],
    rewards: Sequence[float | None] = (),
    *,
    draw: int = 0,
    prompt: str | tuple[dict[str, str], ...] = "What is 3 + 4?",
    cut_off: Sequence[int] = (),
) -> SampledPrompt:
    """Completions with these texts, and rewards where there are any."""
    given = list(rewards) or [None] * len(texts)
    return SampledPrompt(
        draw=draw,
        prompt_id=f"p{draw}",
        prompt=prompt,
        completions=tuple(
            SampledCompletion(
                sample=sample,
                text=text,
                finish=Finish.LENGTH if sample in cut_off else Finish.STOP,
                num_tokens=len(text) + 1,
                reward=reward,
                scores=None if reward is None else {"solved": reward},
            )
            for sample, (text, reward) in enumerate(zip(texts, given, strict=True))
        ),
    )


def written_pair(
    first: str = "It is 7.", second: str = "It is 8.", rewards: Sequence[float | None] = (), *, prompt: str = "3 + 4?"
) -> Pair:
    """A pair of completions."""
    made = written_prompt([first, second], rewards, prompt=prompt)
    return Pair(made, *made.completions)


def written_pairs(count: int) -> tuple[Pair, ...]:
    """One pair of each of so many prompts."""
    prompts = [written_prompt([f"left {draw}", f"right {draw}"], draw=draw) for draw in range(count)]
    return choose_pairs(prompts, CollectOptions(), seed=0).pairs


def ballot(folder: Path, pairs: Sequence[Pair] | int = 3, *, rater: str = "anna", seed: int = 0) -> Ballot:
    """A rater's ballot, whose votes go to `folder/votes.jsonl`."""
    made = written_pairs(pairs) if isinstance(pairs, int) else pairs
    return Ballot(made, LineJournal(folder / "votes.jsonl"), rater=rater, seed=seed)
