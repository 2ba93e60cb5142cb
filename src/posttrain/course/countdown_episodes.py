"""From sampled token ids of Countdown problems to what a GRPO update of a course takes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from posttrain.course.formulas import compute_grpo_advantages
from posttrain.errors import UserError
from posttrain.options.task import NumbersRule
from posttrain.rewards.countdown.grader import Outcome, countdown_outcome, puzzle
from posttrain.rewards.format import SCORES, arithmetic_structure


def create_grpo_training_episodes(
    samples: Sequence[Mapping[str, Any]],
    all_generations: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    generations_per_sample: int = 4,
    *,
    rule: NumbersRule = "all",
    prefill: str = "",
) -> tuple[dict[str, list[list[Any]]], dict[str, list[float]]]:
    """Grade the generations of Countdown problems, and give every token of each the advantage of its completion.

    A sample has `input_ids`, `nums` and `target`; its generations follow one another, in the order of the samples.  The
    reward is 1 for the format (.5 where the answer holds more than arithmetic) and 1 for an expression that makes the
    target.  Episodes are `all_query_token_ids`, `all_response_token_ids` and `all_advantages`; statistics are
    `rewards`, `format_rewards`, `equation_rewards` and `response_lengths`, one of each for every generation.

    The course's prompt says that each number can be used once at most, and its grader wants each used once exactly, so
    that nothing in its own example is right: `rule` is "all" as graded there, or "subset" as said there.  Its prompt
    ends in `<think>`, and its format asks for it in the response: `prefill` is what was already there.  It evaluates
    what the model wrote, where ours parses; and where generations are missing it pairs the rest with other prompts.
    """
    expected = len(samples) * generations_per_sample
    if len(all_generations) != expected:
        product = f"{len(samples)} samples × generations_per_sample = {generations_per_sample} make {expected}"
        raise UserError(f"all_generations: has {len(all_generations)}, and {product}.")
    episodes, stats = defaultdict[str, list[list[Any]]](list), defaultdict[str, list[float]](list)
    for index, sample in enumerate(samples):
        group = all_generations[index * generations_per_sample : (index + 1) * generations_per_sample]
        texts = [prefill + text for text in tokenizer.batch_decode([*map(list, group)], skip_special_tokens=True)]
        problem = puzzle(sample["nums"], sample["target"], rule)
        structure = [SCORES[arithmetic_structure(text, cut_off=False)] for text in texts]
        equation = [float(countdown_outcome(problem, text) is Outcome.CORRECT) for text in texts]
        rewards = [sum(both) for both in zip(structure, equation, strict=True)]
        advantages = compute_grpo_advantages(torch.tensor(rewards)).tolist()
        episodes["all_query_token_ids"] += [sample["input_ids"]] * len(group)
        episodes["all_response_token_ids"] += map(list, group)
        episodes["all_advantages"] += [[each] * len(ids) for each, ids in zip(advantages, group, strict=True)]
        stats["rewards"] += rewards
        stats["format_rewards"] += structure
        stats["equation_rewards"] += equation
        stats["response_lengths"] += map(len, group)
    return dict(episodes), dict(stats)
