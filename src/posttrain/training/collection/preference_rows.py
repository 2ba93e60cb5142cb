"""Judged pairs as rows that reward models and direct preference losses are trained on, here and elsewhere."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from posttrain.training.collection.sampled_prompts import SampledCompletion, SampledPrompt
from posttrain.training.collection.verdicts import Verdict


def row_of_verdict(verdict: Verdict) -> dict[str, object]:
    """One row: `prompt`, `chosen` and `rejected`, then how it came about.

    Of a tie the first completion stands as chosen, which means nothing.  Prompts that are conversations have answers
    that are lists of one message of the assistant's.
    """
    pair = verdict.pair
    chosen, rejected = (pair.second, pair.first) if verdict.share < 0.5 else (pair.first, pair.second)
    names = (
        {"chosen": "first", "rejected": "second"} if chosen is pair.first else {"chosen": "second", "rejected": "first"}
    )
    return {
        "prompt": pair.prompt.prompt,
        "chosen": answer_content(pair.prompt, chosen),
        "rejected": answer_content(pair.prompt, rejected),
        "tie": verdict.is_tie,
        "judge": ", ".join(verdict.judges),
        "margin": verdict.margin,
        "principle": "\n".join(verdict.principles) or None,
        "reasons": list(verdict.reasons),
        "votes": {name: verdict.votes[side] for name, side in {**names, "tie": "tie"}.items()}
        if verdict.votes
        else None,
        "pair": pair.id,
        "prompt_id": pair.prompt.prompt_id,
        "chosen_sample": chosen.sample,
        "rejected_sample": rejected.sample,
        "chosen_reward": chosen.reward,
        "rejected_reward": rejected.reward,
    }


def answer_content(prompt: SampledPrompt, completion: SampledCompletion) -> str | list[Mapping[str, str]]:
    """A completion in the shape of its prompt."""
    if isinstance(prompt.prompt, str):
        return completion.text
    return [{"role": "assistant", "content": completion.text}]


def length_summary(verdicts: Sequence[Verdict]) -> dict[str, float | None]:
    """Mean tokens of chosen and of rejected completions, and how often the longer one was chosen, ties left out.

    A judge that takes length for quality shows here.
    """
    lengths = [
        (pair.first.num_tokens, pair.second.num_tokens)[:: 1 if verdict.share > 0.5 else -1]
        for verdict in verdicts
        if not verdict.is_tie and (pair := verdict.pair)
    ]
    unequal = [chosen > rejected for chosen, rejected in lengths if chosen != rejected]
    return {
        "mean_chosen_tokens": fmean(chosen for chosen, _ in lengths) if lengths else None,
        "mean_rejected_tokens": fmean(rejected for _, rejected in lengths) if lengths else None,
        "longer_chosen_share": fmean(unequal) if unequal else None,
    }
