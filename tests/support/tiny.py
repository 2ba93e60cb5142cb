"""Tiny random models of every family, exact in float64, and what the tests of sampling and training say about them.

Hugging Face computes norms and rotary angles in float32 whatever the model's type; here both are replaced by float64
ones, so that in float64 two ways to compute a number differ by rounding alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import MethodType

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import ALGORITHMS, build_algorithm
from posttrain.batch import Batch, CreditedGroups, collate, sampled_columns
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.models.forward import SharedPromptForward
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.policy import Policy, as_policy
from posttrain.options.rollout import SamplingParams
from posttrain.options.training import EvaluationOptions, UpdateOptions
from posttrain.records import Finish, Group, Prompt, Rollout, TokenSequence
from posttrain.training.metrics import update_metrics
from posttrain.training.update import Objective, update
from tests.support.decoders import DECODER_CLASSES, exact_norm, make_exact
from tests.support.sequences import evidence_of, known, view_of

VOCAB, STOP_IDS = 24, (5, 11)
DECODERS = ("qwen3", "llama", "qwen2")
ALL_DECODERS = (*DECODERS, *DECODER_CLASSES)
FAMILIES = (*DECODERS, "gpt2_plain")

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": list(STOP_IDS),
    "pad_token_id": None,
}
CLASSES = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True}),  # 4 × 8 is not 16
    "llama": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    **DECODER_CLASSES,
}


class ExactRotary(nn.Module):
    """Rotary angles in the model's own type: position · θ^(-2i/width), θ = 10,000."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        rates = 10_000.0 ** (-torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)
        angles = (position_ids[..., None].double() * rates).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def tiny_model(
    family: str, dtype: torch.dtype = torch.float64, *, seed: int = 0, exact: bool = True, **shape: object
) -> PreTrainedModel:
    """Weights are uniform numbers from numpy, the same on every machine; no norm is 1 and no bias 0.

    `shape` changes the config of a decoder.

    Without `exact` norms and rotary angles are the library's own, through float32.
    """
    if family == "gpt2_plain":
        config = GPT2Config(
            vocab_size=VOCAB,
            n_embd=16,
            n_layer=2,
            n_head=4,
            n_positions=64,
            scale_attn_by_inverse_layer_idx=True,  # which the shared-prompt pass refuses: the plain one serves it
            eos_token_id=list(STOP_IDS),
            bos_token_id=0,
        )
        model: PreTrainedModel = GPT2LMHeadModel(config)
    else:
        model_class, config_class, extra = CLASSES[family]
        model = model_class(config_class(**{**SHAPE, **extra, **shape}))
        if exact and family in DECODER_CLASSES:
            make_exact(model)
        elif exact:
            config = model.config
            width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            model.model.rotary_emb = ExactRotary(width)
            for module in model.modules():
                if type(module).__name__.endswith("RMSNorm"):
                    module.forward = MethodType(exact_norm, module)
    random = np.random.Generator(np.random.Philox(seed))
    model = model.to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            numbers = torch.from_numpy(random.random(parameter.shape) * 2 - 1)
            centre = 1.0 if ("norm.weight" in name and "gemma" not in family) or "ln_" in name else 0.0
            parameter.copy_(centre + 0.35 * numbers)
    return model


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Ids below VOCAB are <|end|>, <|pad|> and single characters; that of the model's stop ids are not special."""
    made = new_tokenizer()
    made.eos_token = None
    return made


def tiny_policy(
    family: str = "qwen3",
    dtype: torch.dtype = torch.float64,
    *,
    seed: int = 0,
    compute: str = "float32",
    **shape: object,
) -> Policy:
    """As the library makes it; `compute="bfloat16"` is its mixed precision."""
    policy = as_policy(tiny_model(family, dtype, seed=seed, **shape), tokenizer(), dtype=compute)
    if family not in ALL_DECODERS:
        return policy
    # The exact norms are none of the family's layers, and are refused as they should be; here we know what they do.
    return replace(policy, forward=TrustedForward(policy.model, policy.compute_dtype), forward_reason=None)


class TrustedForward(SharedPromptForward):
    """For models that are known to be right with it, so that nothing is asked of their layers again."""


def twin(policy: Policy) -> Policy:
    """A copy that can be trained apart."""
    return policy.copy()


def through_its_own_forward(policy: Policy) -> Policy:
    """The same weights through the plain forward pass: what any model gets that the shared-prompt one does not know."""
    return as_policy(twin(policy).model, policy.tokenizer, forward="plain")


def some_prompts(lengths: Sequence[int], *, seed: int = 1) -> list[Prompt]:
    """Prompts of random tokens, of given lengths."""
    random = np.random.Generator(np.random.Philox(seed))
    return [
        Prompt(id=f"p{i}", text="", tokens=tuple(random.integers(VOCAB, size=length).tolist()))
        for i, length in enumerate(lengths)
    ]


def measures(samples: int) -> EvaluationOptions:
    """A full evaluation of so many completions per problem and no more of some."""
    return EvaluationOptions(samples=samples, pass_at_8_problems=0)


def request(
    group_size: int = 3,
    limit: int = 12,
    sampling: SamplingParams | None = None,
    *,
    key: StreamKey | None = None,
    suppressed: tuple[int, ...] = (),
    first_draw: int = 0,
    first_sample: int = 0,
) -> GroupRequest:
    return GroupRequest(
        group_size=group_size,
        max_completion_tokens=limit,
        sampling=sampling or SamplingParams(),
        key=key or StreamKey(0, "test", 1),
        suppressed=suppressed,
        first_draw=first_draw,
        first_sample=first_sample,
    )


@torch.no_grad()
def next_logprobs(model: PreTrainedModel, prefix: Sequence[int], temperature: float = 1.0) -> Tensor:
    """log π of every token after a prefix: one plain call of the Hugging Face model, no cache, no padding."""
    logits = model(input_ids=torch.tensor([list(prefix)]), use_cache=False).logits[0, -1]
    return torch.log_softmax(logits.double() / temperature, dim=-1)


def vocab_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """log π of every token at each place of a completion, with gradients: one unpadded row through the model."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


def plain_states(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Hidden states that predict a completion, the library's own: one unpadded row through the model."""
    row = torch.tensor([[*prompt, *completion[:-1]]])
    return model.base_model(input_ids=row, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]


def plain_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """log π of each completion token, with gradients: one unpadded row through the Hugging Face model."""
    return vocab_logprobs(model, prompt, completion, temperature).gather(1, torch.tensor(completion)[:, None])[:, 0]


def rows_of(groups: Sequence[Group]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompt and completion of each rollout."""
    return [(group.prompt.tokens, rollout.tokens) for group in groups for rollout in group.rollouts]


def gradient_of(policy: Policy, loss: Tensor) -> Tensor:
    """The gradient of a loss in all parameters, as one vector."""
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(policy.model.parameters()))])


def written_group(
    prompt: Sequence[int], completions: Sequence[Sequence[int]], *, name: str = "p", draw: int = 0
) -> Group:
    """A group of given completions whose behaviour log-probs are made up: -1, -1.1, -1.2, ..."""
    sequences = [
        TokenSequence.one_turn(
            tuple(tokens), logprobs=tuple(-1 - 0.1 * t for t in range(len(tokens))), finish=Finish.STOP
        )
        for tokens in completions
    ]
    rollouts = tuple(Rollout(sample=i, sequence=sequence, text="") for i, sequence in enumerate(sequences))
    return Group(prompt=Prompt(id=name, text="", tokens=tuple(prompt)), draw=draw, rollouts=rollouts)


SIX = [
    written_group((1, 2, 3), [(4, 5), (6,), (7, 8, 9, 5)], name="a"),
    written_group((10, 11), [(12, 13, 14), (15, 11), (16,)], name="b", draw=1),
]
"""Two groups of three completions, 13 tokens in all."""
SIX_ADVANTAGES = [[1.0, -0.5, 0.25], [-1.0, 0.5, 2.0]]


def batch_of(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], algorithm: Algorithm, **options: object
) -> Batch:
    """The batch of scored groups with given advantages."""
    numbers = torch.tensor(advantages, dtype=torch.float64)
    scored = options.pop("scored", torch.ones_like(numbers, dtype=torch.bool))
    reference = options.pop("reference_logprobs", None)
    lengths = torch.tensor([len(rollout.tokens) for group in groups for rollout in group.rollouts])
    columns = replace(
        sampled_columns(groups),
        advantages=numbers.flatten().repeat_interleave(lengths),
        known=known(reference_logprobs=reference),
    )
    credited = CreditedGroups(groups=groups, scored=scored, columns=columns)
    keep = {"keep_zero_advantages": algorithm.keeps_zero_advantages, **options}
    return collate(credited, algorithm.token_weights, max_completion_tokens=16, **keep)


BY_REWARD = [name for name in ALGORITHMS if name not in ("distill", "ppo")]
"""Rows of the table whose gradient comes of rewards alone: no teacher, no critic."""


def advantage(algorithm: Algorithm, rewards: Tensor) -> Tensor:
    """What the algorithm makes of rewards, [prompt group], where every completion has one token."""
    return algorithm.credit(evidence_of(rewards)).advantages.view_as(rewards)


def token_loss(
    algorithm: Algorithm,
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    rollout: Tensor,
    *,
    reference: Tensor | None = None,
    proximal: Tensor | None = None,
) -> Tensor:
    """The algorithm's loss of every token, [token], all its terms together."""
    columns = {"advantages": advantages, "behaviour_logprobs": behaviour, "weights": torch.ones_like(advantages)}
    columns |= {"reference_logprobs": reference, "proximal_logprobs": proximal}
    return algorithm.loss(view_of(logprobs, rollout, **columns))


def gradient_of_update(
    policy: Policy, batch: Batch, objective: Objective, *, tokens_per_microbatch: int = 10_000
) -> tuple[Tensor, dict[str, float]]:
    """The whole gradient that an update applies, as one vector, and the update's metrics; the policy stays as it is.

    A step of gradient descent at rate 1 without clipping moves the weights by exactly that.
    """
    moved = twin(policy)
    optimizer = torch.optim.SGD(moved.model.parameters(), lr=1.0)
    options = UpdateOptions(max_grad_norm=float("inf"), tokens_per_microbatch=tokens_per_microbatch)
    report = update(moved, optimizer, batch, objective, options, 1.0)
    return weights(policy) - weights(moved), update_metrics([report])


def weights(policy: Policy) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().double().flatten() for parameter in policy.model.parameters()])


def flat_gradient(policy: Policy) -> Tensor:
    """The gradients of all parameters as one vector, zero where there is none."""
    parameters = policy.model.parameters()
    gradients = (torch.zeros_like(each) if each.grad is None else each.grad for each in parameters)
    return torch.cat([each.double().flatten() for each in gradients])


def relative_distance(actual: Tensor, expected: Tensor) -> float:
    """‖a - e‖ / ‖e‖."""
    return ((actual - expected).norm() / expected.norm()).item()


def gradient(config: dict[str, object], ratios: list[float], advantages: list[float]) -> list[float]:
    """dL/dlogπ of tokens that are rollout 0 all together, at the given ratios to the denominator."""
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    zeros = torch.zeros(len(ratios), dtype=torch.int64)
    given = torch.tensor(advantages, dtype=torch.float64)
    token_loss(build_algorithm(config), logprobs, zeros.double(), given, zeros).sum().backward()
    return logprobs.grad.tolist()
