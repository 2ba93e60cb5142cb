"""GRPO in plain torch as courses write it, with thirteen of their mistakes as switches.

`train` teaches an exercise to a bundled model with an adapter.  `mistake` is a number of the table in `mistakes.py`; 0
makes none.  A report also has what a correct trainer would have measured on the same completions.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.course.exercises import Exercise, Grader
from posttrain.models.adapters.in_force import adapter_off, adapter_parameters
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer

GROUP, CLIP, BETA = 4, 0.2, 0.3
"""Completions of a prompt, the clip range, and the weight of the KL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """What one step measured, before its update."""

    reward: float
    """Mean reward, as this trainer pays it."""
    honest_reward: float
    """The same completions by a correct grader."""
    kl: float
    """KL to the reference in nats per token, as this trainer computes it."""
    true_kl: float
    """KL to the model before training, over the tokens that were sampled."""
    length: float
    """Mean tokens of a completion, the stop token included."""
    cut_off: float
    """Share of completions that ran into the length limit."""
    grad_norm: float
    """Norm of the policy's gradient, before it is clipped to 1."""
    logprob_gap: float
    """Mean |log π - log μ| of a token: the trainer's number against the sampler's, under the same weights."""
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Rows of tokens, and which of them count as completions."""

    tokens: Int64[Tensor, "row length"]
    begin: Int64[Tensor, " row"]
    """Where completions begin."""
    mask: Bool[Tensor, "row time"]
    """Which tokens from there on count."""
    padding: int

    def all_logits(self, model: PreTrainedModel) -> Float[Tensor, "row length vocab"]:
        attention = (self.tokens != self.padding).long()
        positions = (attention.cumsum(dim=1) - 1).clamp(min=0)  # as the sampler gave them: padding has no position
        logits: Tensor = model(self.tokens, attention_mask=attention, position_ids=positions).logits
        return logits

    def places(self, late: int) -> Int64[Tensor, "row time"]:
        return (self.begin[:, None] + torch.arange(self.mask.shape[1]) + late).clamp(0, self.tokens.shape[1] - 1)

    def logits(self, everywhere: Float[Tensor, "row length vocab"], late: int = 0) -> Float[Tensor, "row time vocab"]:
        """Logits that predict the completions: each one position before its token, or `late` positions later."""
        return everywhere.gather(1, self.places(late - 1)[..., None].expand(-1, -1, everywhere.shape[-1]))

    def logprobs(self, everywhere: Float[Tensor, "row length vocab"]) -> Float[Tensor, "row time"]:
        tokens = self.tokens.gather(1, self.places(0))
        return self.logits(everywhere).log_softmax(-1).gather(2, tokens[..., None])[..., 0]

    def mean(self, values: Float[Tensor, "row time"]) -> Float[Tensor, ""]:
        return (values * self.mask).sum() / self.mask.sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The completions of a step."""

    prompts: list[str]
    texts: list[str]
    rows: ScoredRows
    log_mu: Float[Tensor, "row time"]
    """Each token's log-prob by the sampler."""
    prompt_lengths: Int64[Tensor, " row"]
    rewards: Float[Tensor, " row"]
    honest_reward: float
    stop: int


def train(
    exercise: Exercise,
    mistake: int = 0,
    pays: Grader | None = None,
    *,
    num_steps: int = 20,
    advance: Callable[[int], object] = int,
) -> list[MeasuredStep]:
    """Train the adapter and report every step; `pays` is the reward, if it is not the exercise's own grader.

    `advance(1)` is called after each step.
    """
    torch.manual_seed(0)
    policy = exercise.policy()
    model, tokenizer, reports = policy.model.eval(), policy.tokenizer, list[MeasuredStep]()
    weights = [*adapter_parameters(model).values()]
    critic = torch.zeros((), requires_grad=True)  # the value of every state, as one number
    optimizer = torch.optim.AdamW([{"params": weights, "lr": exercise.learning_rate}, {"params": [critic], "lr": 0.1}])
    for step in range(num_steps):
        sample = sample_step(exercise, policy, step, pays, top_p=0.9 if mistake == 9 else 1.0)
        rows = rows_taken(sample, tokenizer, mistake)
        with torch.set_grad_enabled(mistake not in (1, 2)):
            logits = rows.all_logits(model)
        with nullcontext(adapter_off(model)) if mistake == 4 else adapter_off(model), torch.no_grad():
            reference = rows.all_logits(model)

        logprobs = rows.logprobs(logits)
        old = rows.logprobs(reference) if mistake == 12 else logprobs.detach()
        ratio = ((logprobs - old) * rows.mask).sum(dim=1).exp()
        group = sample.rewards.view(-1, GROUP)
        centred = group - group.mean(dim=1, keepdim=True)
        deviation = group.std(dim=1, keepdim=True, unbiased=False)  # 0 for equal rewards: the mean of four is exact
        advantages = torch.where(deviation > 0, centred / deviation, 0.0).flatten()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        late = 1 if mistake == 6 else 0
        kl = rows.mean(full_kl(rows.logits(logits, late), rows.logits(reference, late)))
        value_loss = 0.5 * (sample.rewards - critic).square().mean()
        loss = value_loss + BETA * kl - (0.0 if mistake == 2 else surrogate)

        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(weights, 1.0)
        measured = {"kl": kl, "grad_norm": norm, "loss": loss}
        right = rows is sample.rows and mistake != 4
        passes = (logits.detach(), reference) if right else right_passes(sample.rows, model)
        reports.append(
            report(sample, logprobs.detach(), passes, **{name: each.item() for name, each in measured.items()})
        )
        advance(1)
        if not norm.isfinite():
            break
        optimizer.step()
    return reports


def rows_taken(sample: Sample, tokenizer: PreTrainedTokenizerBase, mistake: int) -> ScoredRows:
    """The rows that the trainer scores."""
    match mistake:
        case 3:  # the number of the prompt's tokens, as if there were no padding before them
            return replace(sample.rows, begin=sample.prompt_lengths)
        case 7:
            return tokenised_again(tokenizer, sample)
        case 8:  # with pad = eos, "not padding" hides the stop token too
            width = sample.rows.tokens.shape[1] - sample.rows.mask.shape[1]
            return replace(
                sample.rows, mask=sample.rows.mask & sample.rows.tokens[:, width:].ne(tokenizer.eos_token_id)
            )
    return sample.rows


def tokenised_again(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> ScoredRows:
    """Prompt and text tokenised together, and cut at the length of the prompt tokenised separately."""
    begin = [len(tokenizer.encode(prompt, add_special_tokens=False)) for prompt in sample.prompts]
    ended = sample.rows.tokens[:, -sample.rows.mask.shape[1] :].eq(sample.stop).any(dim=1).tolist()
    together = [
        torch.tensor([*tokenizer.encode(prompt + text.strip(), add_special_tokens=False), *[sample.stop] * stopped])
        for prompt, text, stopped in zip(sample.prompts, sample.texts, ended, strict=True)
    ]
    tokens = pad_sequence(together, batch_first=True, padding_value=sample.rows.padding)
    lengths = torch.tensor([len(each) - first for each, first in zip(together, begin, strict=True)])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return ScoredRows(tokens=tokens, begin=torch.tensor(begin), mask=mask, padding=sample.rows.padding)


@torch.no_grad()
def sample_step(exercise: Exercise, policy: Policy, step: int, pays: Grader | None, *, top_p: float) -> Sample:
    """Sample a group for each of a step's questions, and grade them."""
    model, tokenizer = policy.model, policy.tokenizer
    questions = [each for each in exercise.questions(step) for _ in range(GROUP)]
    renderer = TokenizerRenderer(tokenizer)
    prompts = [renderer.render(each.asked, id="").text for each in questions]
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt", add_special_tokens=False)
    width, padding = batch.input_ids.shape[1], tokenizer.pad_token_id
    made = cast(Callable[..., Any], model.generate)(
        **batch,
        do_sample=True,
        top_k=0,
        top_p=top_p,
        max_new_tokens=exercise.limit,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = made.sequences[:, width:]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    honest, paid = (
        torch.tensor([grade(*each) for each in zip(questions, texts, strict=True)])
        for grade in (exercise.grade, pays or exercise.grade)
    )
    return Sample(
        prompts=prompts,
        texts=texts,
        rows=ScoredRows(
            tokens=made.sequences, begin=torch.full((len(tokens),), width), mask=tokens != padding, padding=padding
        ),
        log_mu=torch.stack(made.scores, dim=1).log_softmax(-1).gather(2, tokens[..., None])[..., 0],
        prompt_lengths=batch.attention_mask.sum(dim=1),
        rewards=paid,
        honest_reward=honest.mean().item(),
        stop=tokenizer.eos_token_id,
    )


def full_kl(
    logits: Float[Tensor, "row time vocab"], reference: Float[Tensor, "row time vocab"]
) -> Float[Tensor, "row time"]:
    """KL of the whole next-token distributions, in nats."""
    logprobs, other = logits.log_softmax(-1), reference.log_softmax(-1)
    return (logprobs.exp() * (logprobs - other)).sum(dim=-1)


@torch.no_grad()
def right_passes(rows: ScoredRows, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Logits of the sampled rows, and the reference's."""
    logits = rows.all_logits(model)
    with adapter_off(model):
        return logits, rows.all_logits(model)


def report(
    sample: Sample, logprobs: Tensor, passes: tuple[Tensor, Tensor], *, kl: float, grad_norm: float, loss: float
) -> MeasuredStep:
    """The step's numbers, and the correct ones from the sampled tokens and the true reference."""
    right, (logits, reference) = sample.rows, passes
    both = min(logprobs.shape[1], sample.log_mu.shape[1])
    gaps = (logprobs[:, :both] - sample.log_mu[:, :both]).abs()
    return MeasuredStep(
        reward=sample.rewards.mean().item(),
        honest_reward=sample.honest_reward,
        kl=kl,
        true_kl=right.mean(full_kl(right.logits(logits), right.logits(reference))).item(),
        length=right.mask.sum(dim=1).float().mean().item(),
        cut_off=(right.mask.all(dim=1) & right.tokens[:, -1].ne(sample.stop)).float().mean().item(),
        grad_norm=grad_norm,
        logprob_gap=gaps[right.mask[:, :both]].mean().item(),
        loss=loss,
    )
