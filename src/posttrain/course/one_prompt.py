"""The log-prob of a response, and a GRPO step on one prompt, as in chapters 4 and 5 of a course on GRPO."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.table import reinforce
from posttrain.batch import Batch, CreditedGroups, collate, sampled_columns
from posttrain.errors import UserError
from posttrain.generation.generate import MAX_ROWS, completions
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.forward import Completions
from posttrain.models.policy import as_policy
from posttrain.models.rendering import TokenizerRenderer, token_ids
from posttrain.options.rollout import SamplingOptions
from posttrain.records import Group
from posttrain.training.observations import Observations
from posttrain.training.update import Objective, micro_loss

ALGORITHM = reinforce(baseline="batch_mean", token_weights="sum_over_sequence")
"""The course's loss: of the one group that a step has, the mean is its baseline."""
TOKENS_PER_MICROBATCH = 16384


def compute_log_probs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, response: str | Sequence[int]
) -> Float[Tensor, ""]:
    """log π(response | prompt) in nats, with its gradient: the sum over the response's tokens.

    The response is text, or better the token ids that were sampled, stop token included: text does not say where it was
    cut into tokens, and without the stop token the policy never learns to stop.  The course's version computes the
    forward pass under `no_grad`, against its own comment, so its loss has no gradient.  It also tokenises prompt and
    response together, and then only the prompt, which is wrong if a token spans both.  Dropout is off: the model is put
    into eval mode.
    """
    policy = as_policy(model, tokenizer)
    tokens = tuple(token_ids(tokenizer, response, special=False) if isinstance(response, str) else response)
    if not tokens:
        raise UserError("response: is empty.  Give at least one token.")
    before = TokenizerRenderer(tokenizer).render(prompt, id="prompt").tokens
    return policy.completion_logprobs(Completions([before], [tokens], [0])).sum()


def grpo_step(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    ground_truth: Any,
    reward_fn: Callable[[str, Any], float],
    G: int = 4,
    temperature: float = 0.7,
    max_new_tokens: int = 256,
    *,
    seed: int | None = None,
) -> tuple[float, float, list[str]]:
    """Sample G responses, grade each by `reward_fn(response, ground_truth)`, and add to the gradient of the weights.

        L = -(1/G) Σ_i (r_i - mean r) Σ_t log π(y_it)

    Returns the loss, the mean reward and the responses.  The optimiser, its step and `zero_grad` are the caller's.  The
    prompt is a user's message, through the chat template.  Where all rewards are equal the loss is 0 and nothing is
    computed.  `seed` decides the responses; without one each call takes the next number of torch's own generator, so
    that `torch.manual_seed` decides all of them.

    The course's learns nothing (see `compute_log_probs`).  It also samples with top-p .9 and a temperature and scores
    with neither.  It tokenises the samples again, leaves out the stop token, and runs in training mode with dropout.
    Here the sampled tokens are scored, under one temperature and without a cut.
    """
    policy = as_policy(model, tokenizer)
    options = SamplingOptions(max_completion_tokens=max_new_tokens, temperature=temperature)
    if G < 2 or temperature == 0:
        named = f"G = {G}" if G < 2 else "temperature = 0"
        raise UserError(f"{named}: a group needs two different responses.  Use G >= 2 and temperature > 0.")
    drawn = int(torch.randint(2**31, ()).item()) if seed is None else seed
    asked = TokenizerRenderer(tokenizer).render([{"role": "user", "content": prompt}], id="prompt")
    (group,) = completions(InProcessEngine(policy, max_rows=MAX_ROWS), [asked], options, group_size=G, seed=drawn)
    responses = [rollout.text for rollout in group.rollouts]
    rewards = torch.tensor([[float(reward_fn(text, ground_truth)) for text in responses]], dtype=torch.float64)
    loss = 0.0
    for micro in batch_of(group, rewards, max_new_tokens).split(TOKENS_PER_MICROBATCH, padded=policy.forward.padded):
        share = micro_loss(policy, micro, Objective(algorithm=ALGORITHM, temperature=temperature), Observations())
        share.backward()
        loss += share.item()
    return loss, rewards.mean().item(), responses


def batch_of(group: Group, rewards: Tensor, max_completion_tokens: int) -> Batch:
    """The batch of a graded group; empty where its rewards are all equal."""
    lengths = torch.tensor([[rollout.num_sampled for rollout in group.rollouts]])
    evidence = Evidence(
        rewards=rewards,
        scores=rewards[None],
        weights=torch.ones(1, dtype=torch.float64),
        lengths=lengths,
        max_completion_tokens=max_completion_tokens,
    )
    columns = replace(sampled_columns([group]), advantages=ALGORITHM.credited(evidence, [group]).advantages)
    credited = CreditedGroups(groups=[group], scored=~rewards.isnan(), columns=columns)
    return collate(
        credited, ALGORITHM.weighted, max_completion_tokens=max_completion_tokens, keep_zero_advantages=False
    )
