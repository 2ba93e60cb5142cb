"""GRPO on an adapter, as in the homework on inverse RL and GRPO: sample groups, score them, update, evaluate."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.course.countdown_episodes import format_reward
from posttrain.course.formulas import compute_group_advantages, grpo_sequence_loss
from posttrain.errors import UserError, require
from posttrain.generation.generate import MAX_ROWS, completions
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.adapters.in_force import adapter_off, adapter_parameters
from posttrain.models.forward import Completions
from posttrain.models.policy import as_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.rollout import SamplingOptions

LARGEST_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class HomeworkConfig:
    """The numbers of the homework's update."""

    group_size: int = 2
    beta: float = 0.05
    epsilon: float = 0.2
    max_new_tokens: int = 128
    temperature: float = 0.9

    def __post_init__(self) -> None:
        require(self.group_size >= 2, self, "group_size", "has no siblings to compare with.  Use 2 or more.")


def completion_log_probs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Int64[Tensor, "row length"],
    prompt_lengths: Int64[Tensor, " row"],
    temperature: float = 1.0,
) -> Float[Tensor, " row"]:
    """log π of each row's completion in nats, with its gradient: the sum over its tokens, stop token included.

    Rows are padded on the left before the prompt and on the right after the completion.  The homework takes the
    length of a prompt for its end, which is wrong in a row that is padded on the left; and it masks by token id, which
    drops the stop token where that is the padding too.  It also samples at a temperature of 0.9 and scores at 1: give
    the `temperature` that was sampled at.
    """
    policy = as_policy(model, tokenizer)
    padding = tokenizer.pad_token_id
    prompts, answers = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for row, length in zip(sequences.tolist(), prompt_lengths.tolist(), strict=True):
        start = next((place for place, token in enumerate(row) if token != padding), len(row)) + length
        prompts.append(tuple(row[start - length : start]))
        answers.append(until_stop(row[start:], policy.stop_ids, padding))
        if not answers[-1]:
            raise UserError(f"sequences: row {len(answers) - 1} has no completion after its prompt of {length} tokens.")
    logprobs = policy.completion_logprobs(Completions(prompts, answers, range(len(prompts))), temperature=temperature)
    row_of = torch.tensor([i for i, each in enumerate(answers) for _ in each], device=logprobs.device)
    return torch.zeros(len(answers), dtype=logprobs.dtype, device=logprobs.device).index_add(0, row_of, logprobs)


def until_stop(tokens: Sequence[int], stops: Sequence[int], padding: int | None) -> tuple[int, ...]:
    """The tokens up to the first stop token, which belongs to them, or up to the padding."""
    ends = [place + (token in stops) for place, token in enumerate(tokens) if token in stops or token == padding]
    return tuple(tokens[: min(ends, default=len(tokens))])


def sample_group(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    num_generations: int = 2,
    max_new_tokens: int = 128,
    temperature: float = 0.9,
) -> tuple[Int64[Tensor, "row length"], Int64[Tensor, " row"], list[str]]:
    """Sample completions of each prompt, group after group: (sequences, prompt lengths, texts); 0 is greedy.

    Rows are padded on both sides, as `completion_log_probs` takes them.  The homework cuts texts out at the prompt's
    length, so that a padded row's text begins in its prompt and loses its end.
    """
    policy = as_policy(model, tokenizer)
    renderer = TokenizerRenderer(tokenizer)
    asked = [renderer.render(prompt, id=f"prompts[{index}]") for index, prompt in enumerate(prompts)]
    options = SamplingOptions(max_completion_tokens=max_new_tokens, temperature=temperature)
    seed = int(torch.randint(2**31, ()).item())
    engine = InProcessEngine(policy, max_rows=MAX_ROWS)
    groups = completions(engine, asked, options, group_size=num_generations, seed=seed)
    pairs = [(group.prompt.tokens, rollout) for group in groups for rollout in group.rollouts]
    left, right = max(len(prompt) for prompt, _ in pairs), max(rollout.num_sampled for _, rollout in pairs)
    padding = tokenizer.pad_token_id
    rows = [
        [padding] * (left - len(prompt)) + [*prompt, *rollout.tokens] + [padding] * (right - rollout.num_sampled)
        for prompt, rollout in pairs
    ]
    lengths = torch.tensor([len(prompt) for prompt, _ in pairs])
    return torch.tensor(rows), lengths, [rollout.text for _, rollout in pairs]


def grpo_update(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_prompts: Sequence[str],
    optimizer: Optimizer,
    grad_accum: int = 1,
    config: HomeworkConfig = HomeworkConfig(),  # frozen
) -> dict[str, float]:
    """One optimiser step of the homework's GRPO on the adapter of a model: `loss`, `reward_mean`, `reward_std`.

        for each of grad_accum passes:  sample groups, A = group z-score of format_reward, and add
        grpo_sequence_loss(log π, log ref, A) / grad_accum to the gradient

    The reference is the model with its adapter off, *entered as a context*: the homework calls `disable_adapter()` and
    does not enter it, so that its reference is the policy.
    """
    if grad_accum < 1:
        raise UserError(f"grad_accum = {grad_accum}: must be at least 1.")
    if not adapter_parameters(model):
        raise UserError("model: has no adapter, so it cannot be its own reference.  Add one, for example with peft.")
    optimizer.zero_grad()
    losses, paid = list[float](), list[Tensor]()
    for _ in range(grad_accum):
        sequences, lengths, texts = sample_group(
            model, tokenizer, batch_prompts, config.group_size, config.max_new_tokens, config.temperature
        )
        rewards = format_reward(texts)
        logp_new = completion_log_probs(model, tokenizer, sequences, lengths, config.temperature)
        with torch.no_grad(), adapter_off(model):
            logp_ref = completion_log_probs(model, tokenizer, sequences, lengths, config.temperature)
        advantages = compute_group_advantages(rewards, config.group_size).to(logp_new)
        loss = grpo_sequence_loss(logp_new, logp_ref, advantages, config.beta, config.epsilon)
        (loss / grad_accum).backward()
        losses.append(loss.item())
        paid.append(rewards)
    torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    optimizer.step()
    every = torch.cat(paid)
    return {"loss": sum(losses) / grad_accum, "reward_mean": every.mean().item(), "reward_std": every.std().item()}


def evaluate_format_rate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_new_tokens: int = 128
) -> tuple[float, list[str]]:
    """The percentage of prompts whose greedy answer has the form, and the answers."""
    _, _, texts = sample_group(model, tokenizer, prompts, 1, max_new_tokens, 0.0)
    return format_reward(texts).mean().item() * 100, texts
