"""The functions that courses on RLHF and GRPO have their readers write, over this library and under the same names.

Each takes and gives what the course's function does, is a few lines over a function of ours that the loop uses too, and
says which mistake of the course it does not make.  docs/course.md has the table: document, function, ours, mistake.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.algorithms.advantages import group_zscore
from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.kl import k3
from posttrain.algorithms.losses import ClipRange, clipped_surrogate
from posttrain.algorithms.table import reinforce
from posttrain.batch import Batch, CreditedGroups, collate, sampled_columns
from posttrain.errors import UserError
from posttrain.generation.generate import MAX_ROWS, completions
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.forward import Completions
from posttrain.models.policy import as_policy
from posttrain.models.rendering import TokenizerRenderer, token_ids
from posttrain.options.rollout import SamplingOptions
from posttrain.options.task import NumbersRule
from posttrain.records import Group
from posttrain.rewards.countdown import Outcome, countdown_outcome, puzzle
from posttrain.rewards.parsing.tags import answer_text
from posttrain.rewards.shaping import SCORES, structured
from posttrain.training.update import Objective, Observations, micro_loss

__all__ = [
    "calc_kl_penalty",
    "compute_advantages",
    "compute_group_advantages",
    "compute_grpo_advantages",
    "compute_grpo_loss",
    "compute_log_probs",
    "create_grpo_training_episodes",
    "grpo_sequence_loss",
    "grpo_step",
]

ALGORITHM = reinforce(baseline="batch_mean", token_weights="sum_over_sequence")
"""The course's loss: of the one group that a step has, the mean is its baseline."""
TOKENS_PER_MICROBATCH = 16384


def compute_log_probs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, response: str | Sequence[int]
) -> Float[Tensor, ""]:
    """log π(response | prompt) in nats, with its gradient: the sum over the response's tokens.

    The response is text, or better the token ids that were sampled, stop token included: text does not say where it
    was cut into tokens, and the policy is never taught to stop without it.  The course's computes the forward pass
    under `no_grad`, against its own comment, so that its loss has no gradient; and it tokenises prompt and response
    together and the prompt alone, which is wrong if a token spans both.  Dropout is off: the model is put into
    eval mode.
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

    The course's learns nothing (see `compute_log_probs`).  It also samples with top-p .9 and at its temperature and
    scores under neither, tokenises again what was sampled, leaves the stop token out, and runs in training mode with
    dropout.  Here what is sampled is what is scored, token by token, under one temperature, with no cut.
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


IGNORED = -100
"""The label of a position that carries no loss."""
EPSILON = 1e-4
"""What the course, and TRL, add to the deviation, in units of reward."""


@torch.no_grad()
def compute_advantages(
    values: Float[Tensor, "batch time"], rewards: Float[Tensor, " batch"], prefix_len: int
) -> Float[Tensor, "batch generated"]:
    """How much better each generated token was than a value head had expected, one step ahead.

        A_t = V(s_{t+1}) - V(s_t),  and  r - V(s_t) for the last token        (γ = 1, λ = 0)

    V(s_t) is the value at the token before t; the first `prefix_len` tokens are the prompt's.  No gradient.  The
    course's own takes `values[:, prefix_len:]` with the reward, one column too many, and ends in an error of shapes;
    its value loss is the square of the result, without a gradient.
    """
    if not 1 <= prefix_len < values.shape[1]:
        rule = f"a row of {values.shape[1]} tokens has a prompt and a completion"
        raise UserError(f"prefix_len = {prefix_len}: {rule}.  Use 1 to {values.shape[1] - 1}.")
    return torch.cat([values[:, prefix_len:-1], rewards[:, None]], dim=1) - values[:, prefix_len - 1 : -1]


def calc_kl_penalty(
    logits: Float[Tensor, "batch time vocab"],
    ref_logits: Float[Tensor, "batch time vocab"],
    kl_coef: float = 0.1,
    *,
    mask: Bool[Tensor, "batch time"] | None = None,
) -> Float[Tensor, ""]:
    """The KL of whole next-token distributions to the reference, times its coefficient: the mean over positions.

        kl_coef · mean_t Σ_v π(v) (log π(v) - log ref(v)),   in nats

    `mask` says which positions count, those that predict a generated token; without one all do.  Only the policy has a
    gradient.  The course uses the same formula wrongly: it slices from the first generated token and not from the one
    before, which predicts it; it counts padding; and its logits are computed under `no_grad`.  In a recipe:
    `algorithm.kl.estimator = full`.
    """
    logprobs, reference = logits.log_softmax(dim=-1), ref_logits.detach().log_softmax(dim=-1)
    divergence = (logprobs.exp() * (logprobs - reference)).sum(dim=-1)
    counted = divergence.flatten() if mask is None else divergence[mask]
    require_not_empty(counted, "mask")
    return kl_coef * counted.mean()


def compute_grpo_advantages(rewards: Float[Tensor, " group"]) -> Float[Tensor, " group"]:
    """Advantages of the completions of one prompt: above their mean, in units of the sample's deviation.

        A_i = (r_i - mean r) / (std r + 1e-4),   std with G - 1

    Equal rewards give exactly 0.  The course's gives the rounding error of the mean over 1e-4, and NaN for a group of
    one.  In a recipe: `algorithm.deviation = sample`, `algorithm.deviation_epsilon = 1e-4`.
    """
    return group_zscore(rewards[None], deviation="sample", epsilon=EPSILON)[0]


def compute_group_advantages(rewards: Float[Tensor, " rollout"], group_size: int) -> Float[Tensor, " rollout"]:
    """Advantages of the completions of several prompts, group after group: in units of the population's deviation.

        A_i = (r_i - mean r) / std r,   std with G; equal rewards are exactly 0

    The course's bounds the deviation from below by 1e-6 instead, so that rewards that differ only by rounding, as three
    of .9 do from their mean, get an advantage.  In a recipe: `algorithm.name = grpo`.
    """
    if group_size < 1 or len(rewards) % group_size:
        raise UserError(f"group_size = {group_size}: must divide the number of rewards, {len(rewards)}.")
    return group_zscore(rewards.view(-1, group_size)).flatten()


def compute_grpo_loss(
    logits: Float[Tensor, "batch time vocab"],
    ref_logits: Float[Tensor, "batch time vocab"],
    advantages: Float[Tensor, "batch time"],
    labels: Int64[Tensor, "batch time"],
    kl_coef: float = 0.001,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """The loss of a fully online GRPO update, and its parts: the mean over all tokens that have a label.

        L = mean_t(-A_t log π(y_t)) + kl_coef · mean_t k3(log π(y_t), log ref(y_t))

    `labels[:, t]` is the token that `logits[:, t]` predict, so a row of tokens is shifted by one first; -100 has none.
    The parts are `pg_loss`, `kl_penalty` in nats and `kl_loss`, the penalty times its coefficient.  The course's looks
    log-probs up before it masks: -100 is not an index, so its example ends in an error.  It divides the KL by its
    coefficient to report it, which 0 ends too, and lets the gradient into the reference.
    """
    kept = labels != IGNORED
    require_not_empty(labels[kept], "labels")

    def of_labels(some: Tensor) -> Float[Tensor, " token"]:
        return some[kept].log_softmax(dim=-1).gather(1, labels[kept][:, None])[:, 0]

    logprobs, reference = of_labels(logits), of_labels(ref_logits).detach()
    policy_loss, penalty = -(advantages[kept] * logprobs).mean(), k3(logprobs, reference).mean()
    parts = {"pg_loss": policy_loss, "kl_penalty": penalty, "kl_loss": kl_coef * penalty}
    return policy_loss + kl_coef * penalty, {name: part.item() for name, part in parts.items()}


def grpo_sequence_loss(
    logp_new: Float[Tensor, " rollout"],
    logp_ref: Float[Tensor, " rollout"],
    advantages: Float[Tensor, " rollout"],
    beta: float,
    epsilon: float,
) -> Float[Tensor, ""]:
    """The course's loss of whole completions, whose ratio is to the *reference*: a mean over completions.

        L = mean_i( -min(ρ_i A_i, clip(ρ_i, 1 ± ε) A_i) + β (e^{-x_i} - 1 + x_i) )
        x = Σ_t log π - Σ_t log ref,   ρ = e^x

    Summed over a completion, x leaves log(1 ± ε) after a few updates, and the clip then stops all learning in the
    direction of the advantage.  The course does not see it: it calls `model.disable_adapter()`, a context manager,
    without entering it, so that its reference is the policy itself and ρ is always 1.  In a recipe: `algorithm = {name:
    gspo, sequence_ratio: product, ratio_to: reference, clip_low: 0.2, clip_high: 0.2, kl: {coefficient: 0.05, level:
    completion}}`.
    """
    require_not_empty(logp_new, "logp_new")
    each = torch.arange(len(logp_new), device=logp_new.device)
    reference = logp_ref.detach()
    surrogate = clipped_surrogate(logp_new, reference, advantages, each, clip=ClipRange(low=epsilon, high=epsilon))
    return (surrogate + beta * k3(logp_new, reference)).mean()


def require_not_empty(counted: Tensor, name: str) -> None:
    if not counted.numel():
        raise UserError(f"{name}: no position counts, so there is no mean.  Skip such a batch.")


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
        structure = [SCORES[structured(answer_text(text, "strict"), False, arithmetic=True)] for text in texts]
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
