"""A language model with a value head, one RLHF step on it, and a look at what the step did."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.algorithms.losses import ClipRange, clipped_surrogate
from posttrain.course.countdown_episodes import reward_fn_period_count
from posttrain.course.formulas import calc_kl_penalty, compute_advantages
from posttrain.errors import UserError, require
from posttrain.generation.generate import MAX_ROWS, completions
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.classifiers.heads import ValueHead
from posttrain.models.policy import as_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.rollout import SamplingOptions
from posttrain.records import Group

RewardOfTexts = Callable[[Sequence[str]], Sequence[float] | Tensor]


class TransformerWithValueHead(nn.Module):
    """A language model whose final hidden states also give a value: actor and critic on one trunk.

        V(s_t) = w · relu(W h_t + c) + b        W: 4d × d

    h_t is the final hidden state of token t, after the last norm.  The value head starts at V = 0, whatever the text;
    the course's starts at random, so that its first advantages are noise.  The course loads a model by its name; here a
    model object, a folder or a name will do.
    """

    def __init__(self, base_model: PreTrainedModel | str | Path, *, seed: int = 0) -> None:
        super().__init__()
        if isinstance(base_model, str | Path):
            base_model = AutoModelForCausalLM.from_pretrained(base_model)
        self.base_model: PreTrainedModel = base_model
        self.config = self.base_model.config
        width = self.config.get_text_config().hidden_size
        self.value_head = ValueHead(width, "mlp", seed=seed, dtype=self.base_model.dtype).to(self.base_model.device)

    def forward(
        self, input_ids: Int64[Tensor, "batch time"], attention_mask: Tensor | None = None
    ) -> tuple[Float[Tensor, "batch time vocab"], Float[Tensor, "batch time"]]:
        """Logits of the next token, and the value of the text up to each token."""
        outputs = self.base_model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        hidden = outputs.hidden_states[-1]
        return outputs.logits, self.value_head(hidden.flatten(0, 1)).view(input_ids.shape)


@dataclass(frozen=True, kw_only=True)
class RLHFConfig:
    """Settings of a step of RLHF: prompts, sampling, and the weights of its three losses."""

    prompts: Sequence[str] = ("The weather today is", "I think that", "Once upon a time", "In my opinion")
    max_gen_len: int = 20
    """Most tokens of a completion."""
    temperature: float = 1.0
    kl_coef: float = 0.1
    clip_coef: float = 0.2
    value_coef: float = 0.5

    def __post_init__(self) -> None:
        require(bool(self.prompts), self, "prompts", "is empty.  Give at least one prompt.")
        require(self.temperature > 0, self, "temperature", "must be greater than 0: a step needs samples.")


def rlhf_step(
    model: TransformerWithValueHead,
    ref_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: RLHFConfig,
    optimizer: Optimizer,
    reward_fn: RewardOfTexts = reward_fn_period_count,
) -> dict[str, float | list[str]]:
    """One step of RLHF on a model in memory: sample, pay, and one update of policy and value head.

        L = mean_t( -min(ρ_t A_t, clip(ρ_t, 1 ± clip_coef) A_t) + value_coef (V(s_t) - R_t)² + kl_coef KL_t )
        A_t = V(s_{t+1}) - V(s_t), and r - V(s_t) for the last token;   R_t = A_t + V(s_t), without a gradient

    KL_t is the KL of whole next-token distributions to `ref_model`.  The mean is over all generated tokens of the step;
    it has one update, so ρ = 1.  Returns `loss`, `policy_loss`, `value_loss`, `kl` in nats, `mean_reward` and
    `generated_texts`.

    The course's `simple_rlhf_step` has no policy term, and computes its other two losses under `no_grad`: nothing
    learns.  It takes the KL one position too late, and counts the prompt's full stops.
    """
    policy = as_policy(model.base_model, tokenizer)
    renderer = TokenizerRenderer(tokenizer)
    prompts = [renderer.render(text, id=f"prompts[{index}]") for index, text in enumerate(config.prompts)]
    options = SamplingOptions(max_completion_tokens=config.max_gen_len, temperature=config.temperature)
    seed = int(torch.randint(2**31, ()).item())
    groups = completions(InProcessEngine(policy, max_rows=MAX_ROWS), prompts, options, group_size=1, seed=seed)
    texts = [group.rollouts[0].text for group in groups]
    rewards = torch.as_tensor(reward_fn(texts), dtype=torch.float32)
    if rewards.shape != (len(texts),):
        raise UserError(
            f"reward_fn: returned {list(rewards.shape)} numbers for {len(texts)} texts.  Give one for each."
        )
    num_tokens = sum(group.rollouts[0].num_sampled for group in groups)
    totals = dict.fromkeys(("policy_loss", "value_loss", "kl", "loss"), 0.0)
    optimizer.zero_grad()
    for group, reward in zip(groups, rewards, strict=True):
        parts = losses_of(model, ref_model, group, reward, config)
        share = parts["policy_loss"] + config.value_coef * parts["value_loss"] + config.kl_coef * parts["kl"]
        weight = group.rollouts[0].num_sampled / num_tokens
        (share * weight).backward()
        for name, value in {**parts, "loss": share}.items():
            totals[name] += value.item() * weight
    optimizer.step()
    return {**totals, "mean_reward": rewards.mean().item(), "generated_texts": texts}


def losses_of(
    model: TransformerWithValueHead, ref_model: PreTrainedModel, group: Group, reward: Tensor, config: RLHFConfig
) -> dict[str, Tensor]:
    """The three losses of one completion, each a mean over its tokens."""
    (rollout,), before = group.rollouts, len(group.prompt.tokens)
    row = torch.tensor([[*group.prompt.tokens, *rollout.tokens]], device=model.base_model.device)
    logits, values = model(row)
    with torch.no_grad():
        reference = ref_model(row).logits[:, before - 1 : -1] / config.temperature
    predicting = logits[:, before - 1 : -1] / config.temperature
    logprobs = predicting.log_softmax(-1).gather(2, row[:, before:, None])[0, :, 0]
    advantages = compute_advantages(values, reward[None].to(values), before)[0]
    value = values[0, before - 1 : -1]
    each = torch.zeros_like(row[0, before:])
    clip = ClipRange(low=config.clip_coef, high=config.clip_coef)
    return {
        "policy_loss": clipped_surrogate(logprobs, logprobs.detach(), advantages, each, clip=clip).mean(),
        "value_loss": (value - (advantages + value.detach())).square().mean(),
        "kl": calc_kl_penalty(predicting, reference, 1.0),
    }


def compare_models(
    prompt: str,
    ref_model: PreTrainedModel,
    trained_model: TransformerWithValueHead | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 50,
    reward_fn: RewardOfTexts = reward_fn_period_count,
) -> dict[str, float]:
    """Print how two models complete a prompt, and return the mean reward of eight completions of each.

    Both models draw with the same random numbers, so that equal models write equal texts.  The course's draws one text
    of each, with different numbers, at temperature 0.8, and counts the prompt's full stops too.
    """
    trained = trained_model.base_model if isinstance(trained_model, TransformerWithValueHead) else trained_model
    options = SamplingOptions(max_completion_tokens=max_length)
    means: dict[str, float] = {}
    for name, model in (("reference", ref_model), ("trained", trained)):
        policy = as_policy(model, tokenizer)
        asked = TokenizerRenderer(tokenizer).render(prompt, id="prompt")
        (group,) = completions(InProcessEngine(policy, max_rows=MAX_ROWS), [asked], options, group_size=8, seed=0)
        texts = [rollout.text for rollout in group.rollouts]
        means[name] = torch.as_tensor(reward_fn(texts), dtype=torch.float32).mean().item()
        print(f"{name}, mean reward {means[name]:.2f}:\n{prompt}{texts[0]}\n")
    return means
