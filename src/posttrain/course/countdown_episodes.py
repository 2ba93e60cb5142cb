"""Countdown as courses write it: problems, prompts, rewards and episodes; and two rewards for other toys."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from posttrain.course.formulas import compute_grpo_advantages
from posttrain.errors import UserError
from posttrain.options.task import NumbersRule
from posttrain.rewards.countdown import Outcome, countdown_outcome, puzzle
from posttrain.rewards.parsing.tags import answer_lines, answer_text
from posttrain.rewards.shaping import SCORES, PeriodCount, structured
from posttrain.tasks.countdown_problems import COURSE, training_problem

THINK = "<think>"


def reward_fn_period_count(texts: Sequence[str]) -> Float[Tensor, " text"]:
    """The number of full stops of each text.

    The course counts those of the prompt as well, since it decodes the whole row.  In a recipe: `rewards: [{name:
    period_count, most: null}]`.
    """
    return torch.tensor(PeriodCount(most=None)(completions=texts))


def format_reward(responses: Sequence[str]) -> Float[Tensor, " response"]:
    """1 for each response of the form <think>, lines, </think>, <answer>, lines, </answer>, each tag on its own line.

    The homework's pattern ends in `$` under MULTILINE, which any line end matches: text after `</answer>` earns 1 there
    and 0 here.  In a recipe: `rewards: [line_format]`.
    """
    return torch.tensor([float(answer_lines(text) is not None) for text in responses])


def format_reward_func(completion: str, *, prefill: str = "") -> float:
    """1 for thinking and an answer of arithmetic in their tags, 0.5 for an answer of anything else, else 0.

    The course's prompt ends in `<think>` and its pattern wants it in the response: `prefill` is what was already there.
    Its pattern also accepts text before and after the structure.  In a recipe: `rewards: [graded_format]`.
    """
    return SCORES[structured(answer_text(prefill + completion, "strict"), False, arithmetic=True)]


def equation_reward_func(
    completion: str, nums: Sequence[int], target: int, *, rule: NumbersRule = "all", prefill: str = ""
) -> float:
    """1 if the answer makes the target from the numbers, else 0.

    `rule` is "all" where each number must be used once, as the course grades, or "subset" where each may be used once
    at most, as its prompt says.  The course runs the answer through `eval`: `9**9**9` hangs it.  Here it is parsed.
    """
    outcome = countdown_outcome(puzzle(list(nums), target, rule), prefill + completion)
    return float(outcome is Outcome.CORRECT)


def compute_total_reward(
    completion: str, nums: Sequence[int], target: int, *, rule: NumbersRule = "all", prefill: str = ""
) -> float:
    """The format's reward plus the equation's, from 0 to 2."""
    solved = equation_reward_func(completion, nums, target, rule=rule, prefill=prefill)
    return format_reward_func(completion, prefill=prefill) + solved


def simple_math_reward_func(
    completions: Sequence[str], target: Sequence[object], nums: Sequence[Sequence[int]], **columns: object
) -> list[float]:
    """1 for each completion whose answer makes the target from some of the numbers, each used once at most.

    The prompt has begun with `<think>`, as the page on TRL has it; a completion may repeat it.  The page compares
    numbers by membership, so that one number may be used many times.  Here they are counted.
    """
    rows = zip(completions, target, nums, strict=True)
    return [
        equation_reward_func(text.removeprefix(THINK), numbers, int(str(goal)), rule="subset", prefill=THINK)
        for text, goal, numbers in rows
    ]


def generate_countdown_problem(seed: int | None = None) -> tuple[list[int], int]:
    """Four numbers and a target that three of them make: (numbers, target).

    Without a `seed` each call takes the next number of torch's own generator.  The course draws targets of 0 and
    targets that are among the numbers; here both are drawn again.
    """
    drawn = int(torch.randint(2**31, ()).item()) if seed is None else seed
    problem = training_problem(COURSE, "subset", seed=drawn, index=0)
    return list(problem.numbers), problem.target


SAID = {"all": "each number must be used exactly once", "subset": "each number can be used at most once"}


def create_countdown_prompt(nums: Sequence[int], target: int, *, rule: NumbersRule = "all") -> str:
    """The text that asks for an equation; it ends in `<think>`, so the completion continues from there.

    The course's says "can only be used once" and its grader wants every number used.  Here `rule` decides what the
    prompt says, and the same `rule` given to `equation_reward_func` grades it so.
    """
    return (
        f"Using the numbers {[*nums]}, create an equation that equals {target}.\n"
        f"You can use + - * / and parentheses, and {SAID[rule]}.\n"
        "Show your work in <think> </think> tags, and return the equation in <answer> </answer> tags.\n\n"
        f"Let me solve this step by step.\n{THINK}"
    )


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

    The course's prompt allows each number at most once, and its grader wants each exactly once, so nothing in its own
    example is right.  Here `rule` is "all" (as it grades) or "subset" (as its prompt says).  Its prompt ends in
    `<think>`, and its format asks for it in the response: `prefill` is what was already there.  It evaluates what the
    model wrote; ours parses it.  If generations are missing, it pairs the rest with other prompts.
    """
    expected = len(samples) * generations_per_sample
    if len(all_generations) != expected:
        product = f"{len(samples)} samples × generations_per_sample = {generations_per_sample} make {expected}"
        raise UserError(f"all_generations: has {len(all_generations)}, and {product}.")
    episodes, stats = defaultdict[str, list[list[Any]]](list), defaultdict[str, list[float]](list)
    for index, sample in enumerate(samples):
        group = all_generations[index * generations_per_sample : (index + 1) * generations_per_sample]
        texts = [prefill + text for text in tokenizer.batch_decode([*map(list, group)], skip_special_tokens=True)]
        structure = [format_reward_func(text) for text in texts]
        equation = [equation_reward_func(text, sample["nums"], sample["target"], rule=rule) for text in texts]
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
