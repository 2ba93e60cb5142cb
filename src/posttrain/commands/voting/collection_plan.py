"""What a collection would be, and the pairs of its first prompt: `posttrain collect --dry-run`."""

from math import comb

from posttrain.commands.voting.terminal_ballot import barred
from posttrain.config import CollectConfig
from posttrain.options.collect import LlmJudgeOptions, RewardJudgeOptions
from posttrain.runs.progress import visible
from posttrain.tasks.dataset import count_text
from posttrain.training.collection.judge_answers import LlmJudge
from posttrain.training.collection.pair_choice import choose_pairs
from posttrain.training.collection.prompt_sampler import PairObjects, PromptSampler
from posttrain.training.collection.sampled_prompts import SampledCompletion, SampledPrompt


def show_collection_plan(config: CollectConfig) -> None:
    """Print the plan, and the first prompt's completions as they would be compared; nothing is kept, nobody asked."""
    calls = 0
    if isinstance(config.judge, LlmJudgeOptions):
        judge = LlmJudge(config.judge, seed=config.run.seed)
        calls = 2 * (len(judge.principles) if config.judge.principle == "all" else 1)
    with PromptSampler(config, PairObjects()) as sampler:
        print("\n".join(collection_plan_lines(config, calls)))
        (first,) = sampler.sampled(range(1))
    print("\n".join(first_prompt_lines(first, config)))


def most_pairs(config: CollectConfig) -> int:
    """Pairs of a prompt where no completion falls out."""
    every = comb(config.collect.group_size, 2)
    return {"all": every, "best_worst": 1, "random": min(every, config.collect.pairs_per_prompt)}[config.collect.pairs]


def collection_plan_lines(config: CollectConfig, calls_per_pair: int) -> list[str]:
    """What is sampled, how many pairs that makes at most, and what judging them takes."""
    options, pairs = config.collect, config.collect.num_prompts * most_pairs(config)
    return [
        f"model      {config.model.path}",
        (
            f"samples    {count_text(options.num_prompts, 'prompt')} × {count_text(options.group_size, 'completion')},"
            f" round {options.round}"
        ),
        f"pairs      {options.pairs}: at most {pairs}",
        f"judged     {judged_how(config)}" + (f": at most {pairs * calls_per_pair} calls" if calls_per_pair else ""),
        f"folder     {config.run.folder}",
    ]


def judged_how(config: CollectConfig) -> str:
    """By whom, in words."""
    judge = config.judge
    if isinstance(judge, LlmJudgeOptions):
        return f"by {judge.model} at {judge.endpoint}, in both orders"
    if isinstance(judge, RewardJudgeOptions):
        return f"by rewards; a difference of at most {judge.margin:g} is a tie"
    return "by people"


def first_prompt_lines(prompt: SampledPrompt, config: CollectConfig) -> list[str]:
    """A prompt, its completions, and which of them are compared."""
    pairs = choose_pairs([prompt], config.collect, seed=config.run.seed).pairs
    return [
        "",
        visible(f"prompt     {prompt.prompt_id}: {prompt.question.rstrip()}"),
        *(line for each in prompt.completions for line in completion_lines(each)),
        f"compared   {', '.join(f'{pair.first.sample} and {pair.second.sample}' for pair in pairs) or 'none of them'}",
    ]


def completion_lines(completion: SampledCompletion) -> list[str]:
    """One completion with its length, its end and its reward."""
    reward = "" if completion.reward is None else f", reward {completion.reward:g}"
    head = f"{completion.sample:<10} {completion.num_tokens} tokens, {completion.finish}{reward}"
    return [head, *barred(completion.text)]
