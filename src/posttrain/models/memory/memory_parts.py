"""Bytes of everything that a run holds, each an equation in the model's shape and the run's setup.

N: parameters; L: layers; d: hidden; q, k, f: channels of queries, of keys and of the MLP; V: vocabulary; r: rank.
b, c: bytes of a weight and of a number in matrix products.

`MemorySetup` is what decides them apart from the model's shape.
"""

from dataclasses import dataclass, replace
from typing import Literal

from posttrain.models.logprobs import CUDA_ELEMENTS, TILE_ELEMENTS
from posttrain.models.memory.model_shape import ModelShape

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetup:
    """How a model is held and trained, and how many tokens of it are in memory at one time."""

    weight_bytes: int = FLOAT32
    """Of a weight that is trained, and of its gradient and moments."""
    frozen_bytes: int = FLOAT32
    """Of a weight under an adapter, where it is not in 4 bits."""
    compute_bytes: int = FLOAT32
    """Of a number in matrix products and in the cache of keys and values."""
    adapter_rank: int | None = None
    """None trains all weights."""
    adapts_experts: bool = False
    """Whether the adapter is on the experts of a mixture too."""
    quantized: bool = False
    """Whether linear layers are in 4 bits (nf4)."""
    trained: int | None = None
    """How many weights are trained, where it is not all of them, or an adapter on all linear layers."""
    reference: bool = False
    """Whether there is a reference; with an adapter it is the same weights with the adapter off."""
    critic: bool = False
    """Whether there is a critic with a trunk of its own, a model of the policy's size."""
    value_head: Literal["none", "linear", "mlp"] = "none"
    """What expects the rewards, on that trunk or on the policy's."""
    reward_models: int = 0
    """Bytes of the weights of the reward models that live where the policy does."""
    teacher: int = 0
    """Bytes of the weights of another model that teaches this one."""
    recomputes: bool = False
    """Gradient checkpointing: a layer's activations are computed again in the backward pass."""
    shared_prompt: bool = True
    """Whether each prompt of a micro-batch is computed once, else once for each completion."""
    on_cuda: bool = False
    samples: bool = True
    """Whether the run samples here; a supervised one does not, nor one whose engine is elsewhere."""
    micro_batch_option: str = "update.tokens_per_microbatch"
    """What a recipe calls `tokens_per_microbatch`."""
    refused: tuple[str, ...] = ()
    """Options of other settings that save memory, which this recipe would refuse: they are not advised."""
    prompt_tokens: int = 256
    completion_tokens: int = 400
    """Where a completion is cut off: the plan takes all to be as long as that."""
    prompts_per_step: int = 32
    group_size: int = 8
    max_rows: int = 256
    tokens_per_microbatch: int = 16384

    @property
    def num_rows(self) -> int:
        """Completions that are decoded side by side."""
        return min(self.max_rows, self.prompts_per_step * self.group_size)

    @property
    def row_tokens(self) -> int:
        """Tokens of a prompt and its completion."""
        return self.prompt_tokens + self.completion_tokens

    def full_training(self) -> "MemorySetup":
        """The same run with all weights trained."""
        return replace(self, adapter_rank=None, adapts_experts=False, quantized=False, trained=None)

    def with_adapter(self, rank: int, *, quantized: bool = False) -> "MemorySetup":
        """The same run with an adapter over weights that are held in the type of matrix products, or in 4 bits."""
        trained = self.trained if rank == self.adapter_rank else None
        return replace(self, adapter_rank=rank, quantized=quantized, frozen_bytes=self.compute_bytes, trained=trained)


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """The largest micro-batch of an update."""

    prompts: int
    completions: int

    def tokens(self, setup: MemorySetup) -> int:
        """Tokens that go through the model: those of a shared prompt once, else once for each completion."""
        prompts = self.prompts if setup.shared_prompt else self.completions
        return prompts * setup.prompt_tokens + self.completions * setup.completion_tokens


def largest_micro_batch(setup: MemorySetup) -> MicroBatchSize:
    """What `tokens_per_microbatch` allows, or all of a step where that is less.

    Groups that lost completions without an advantage fill it up, so it may hold parts of one group more than fit whole.
    """
    if not setup.shared_prompt:
        rows = max(1, min(setup.tokens_per_microbatch // setup.row_tokens, setup.prompts_per_step * setup.group_size))
        return MicroBatchSize(-(-rows // setup.group_size), rows)
    group_tokens = setup.prompt_tokens + setup.group_size * setup.completion_tokens
    prompts = min(-(-setup.tokens_per_microbatch // group_tokens), setup.prompts_per_step)
    fitting = (setup.tokens_per_microbatch - prompts * setup.prompt_tokens) // setup.completion_tokens
    return MicroBatchSize(prompts, max(1, min(fitting, prompts * setup.group_size)))


NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a weight in 4 bits: beside them each block of 64 has a scale of a byte, and each 256 of those one of 4 bytes.
Dettmers et al. 2023 (QLoRA), arXiv:2305.14314, §3: 4.127 bits."""
CACHE_BLOCK, CUDA_CACHE_BLOCK = 64, 256
"""Tokens by which a row's room in the cache grows."""
MALLOC_KEEPS = 32 * 2**20
"""Bytes of the largest tensor that glibc's malloc keeps when it is freed: its limit for the threshold above which it
maps memory (DEFAULT_MMAP_THRESHOLD_MAX, on 64 bits)."""
CUDA_LOGITS_COPIES = 3
"""Of the logits of all rows while one token of each is sampled: those of the model, and what is made of them."""
SAMPLED_AT_ONCE = 2**20
"""Logits of which a CPU makes probabilities at one time: `generation.sampling.ENTRIES_AT_ONCE`."""


def trained_parameters(shape: ModelShape, setup: MemorySetup) -> int:
    """How many weights an update changes, unless the setup knows.

    N;   of an adapter on all linear layers   r · Σ (inputs + outputs);   on experts too, the same of each expert
    """
    if setup.trained is not None:
        return setup.trained
    if setup.adapter_rank is None:
        return shape.parameters
    experts = shape.expert_arrays if setup.adapts_experts else ()
    sides = sum(inputs + outputs for inputs, outputs in shape.linear_layers)
    return setup.adapter_rank * (sides + sum(number * (rows + columns) for number, rows, columns in experts))


def trained_bytes(setup: MemorySetup) -> int:
    """Bytes of one trained weight; an adapter's are float32 whatever is below it."""
    return setup.weight_bytes if setup.adapter_rank is None else FLOAT32


def weights(shape: ModelShape, setup: MemorySetup) -> int:
    """Weights in memory, those of linear layers (M) under an adapter in the type of matrix products or in 4 bits.

    An output matrix of its own and experts are frozen too, and never in 4 bits.

    b · N;   with an adapter   c · M + b · (N - M) + 4 · r Σ (inputs + outputs);   in 4 bits 4.127 / 8 for c
    """
    if setup.adapter_rank is None:
        return setup.weight_bytes * shape.parameters
    matrices = shape.linear_parameters
    head = shape.expert_parameters + (0 if shape.tied else shape.head_parameters)
    packed = NF4_BYTES if setup.quantized else setup.frozen_bytes
    rest = setup.weight_bytes * (shape.parameters - matrices - head) + setup.frozen_bytes * head
    return round(packed * matrices) + rest + FLOAT32 * trained_parameters(shape, setup)


def bytes_while_loading(shape: ModelShape, setup: MemorySetup) -> int:
    """Weights as they are read: all before any is put into 4 bits, one by one.  M: `frozen_matrices`.

        b · N;   of a frozen base that ends in a smaller type   b · (N - M) + s · M     s: bytes of a weight on the disk
        on a GPU, where layers come one by one                  weights

    and in 4 bits b · the largest layer beside them.  A base that is not in bfloat16 on the disk is read in b.
    """
    if setup.adapter_rank is None:
        return setup.weight_bytes * shape.parameters
    largest = max((inputs * outputs for inputs, outputs in shape.linear_layers), default=0)
    one_layer = setup.weight_bytes * largest if setup.quantized else 0
    if setup.on_cuda:
        return weights(shape, setup) + one_layer
    matrices = shape.frozen_matrices
    narrowed = setup.quantized or setup.frozen_bytes < setup.weight_bytes
    read_as = min(setup.weight_bytes, shape.stored_bytes) if narrowed else setup.weight_bytes
    return setup.weight_bytes * (shape.parameters - matrices) + read_as * matrices + one_layer


def gradients(shape: ModelShape, setup: MemorySetup) -> int:
    """b · trained parameters."""
    return trained_bytes(setup) * trained_parameters(shape, setup)


def optimizer(shape: ModelShape, setup: MemorySetup) -> int:
    """AdamW's two moments: 2 b · trained parameters."""
    return 2 * gradients(shape, setup)


def reference(shape: ModelShape, setup: MemorySetup) -> int:
    """A frozen copy of the weights; nothing under an adapter, whose reference is the same with it off.

        b · (N - M) + c · M     M: linear layers, and V·d where the embedding is another matrix

    In the model's own forward pass b · N.
    """
    if not setup.reference or setup.adapter_rank is not None:
        return 0
    matrices = shape.frozen_matrices
    held_as = setup.compute_bytes if setup.shared_prompt else setup.weight_bytes
    return setup.weight_bytes * (shape.parameters - matrices) + held_as * matrices


def value_head_parameters(shape: ModelShape, setup: MemorySetup) -> int:
    """Of an MLP 4 d · d + 4 d + 4 d + 1, of a linear head d + 1."""
    d, channels = shape.hidden, 4 * shape.hidden
    return {"none": 0, "linear": d + 1, "mlp": channels * d + 2 * channels + 1}[setup.value_head]


def critic_bytes(shape: ModelShape, setup: MemorySetup) -> int:
    """Weights, gradient and two moments of a value head, in float32, and of a trunk of its own without output matrix.

        16 · head;   with a trunk   + 4 b · (N - V·d)     where the output matrix is one of its own; else 4 b · N

    A copy of an adapted policy shares what is frozen: 16 · trained for 4 b · N.
    """
    head = 4 * FLOAT32 * value_head_parameters(shape, setup)
    if not setup.critic:
        return head
    if setup.adapter_rank is not None:
        return head + 4 * FLOAT32 * trained_parameters(shape, setup)
    trunk = shape.parameters - (0 if shape.tied else shape.head_parameters)
    return head + 4 * setup.weight_bytes * trunk


def value_activations(shape: ModelShape, setup: MemorySetup) -> int:
    """Of the largest micro-batch: the head's hidden layer before and after its ReLU, and its gradient, in float32."""
    tokens = largest_micro_batch(setup).completions * setup.completion_tokens
    return 3 * FLOAT32 * tokens * 4 * shape.hidden if setup.value_head == "mlp" else 0


def key_value_cache(shape: ModelShape, setup: MemorySetup) -> int:
    """Keys and values of all rows at their longest: 2 L k c · rows · (P + T), in whole blocks of tokens."""
    return _cached(shape, setup, setup.row_tokens)


def cache_growth(shape: ModelShape, setup: MemorySetup) -> int:
    """What is there beside the full cache while it grows, or while rows begin, as far as the cache is small then.

        grows    2 k c · rows · (P + T - block)     a layer of one block of tokens ago, for layers grow one by one
        begins   2 L k c · (rows + prompts) · P     what is cached of prompts, and a copy for each row that begins

    On a GPU the cache is as large then as it has been before.
    """
    full = _room(setup, setup.row_tokens)
    begun = full if setup.on_cuda else _room(setup, setup.prompt_tokens + 1)
    token = 2 * shape.layers * shape.kv_width * setup.compute_bytes
    grows = full > _room(setup, setup.prompt_tokens + 1)
    outgrown = _cached(shape, setup, setup.row_tokens - _block(setup)) // shape.layers if grows else 0
    prompts = -(-setup.num_rows // setup.group_size)
    begins = token * ((setup.num_rows + prompts) * setup.prompt_tokens - setup.num_rows * (full - begun))
    return max(outgrown, begins)


def returned_cache(shape: ModelShape, setup: MemorySetup) -> int:
    """The cache where a layer of it is so large that malloc gives it back to the system when it is freed."""
    cache = key_value_cache(shape, setup)
    return cache if cache > shape.layers * MALLOC_KEEPS else 0


def _cached(shape: ModelShape, setup: MemorySetup, tokens: int) -> int:
    return 2 * shape.layers * shape.kv_width * setup.compute_bytes * setup.num_rows * _room(setup, tokens)


def _room(setup: MemorySetup, tokens: int) -> int:
    """So many tokens in whole blocks."""
    return -(-tokens // _block(setup)) * _block(setup)


def _block(setup: MemorySetup) -> int:
    return CUDA_CACHE_BLOCK if setup.on_cuda else CACHE_BLOCK


def sampled_logits(shape: ModelShape, setup: MemorySetup) -> int:
    """Logits of the next token of all rows, and what is made of them, on a CPU a few rows at a time.

    4 · (rows · V + 2 · min(rows · V, 2^20));   on CUDA 3 · 4 · rows · V
    """
    logits = setup.num_rows * shape.vocab
    if setup.on_cuda:
        return CUDA_LOGITS_COPIES * FLOAT32 * logits
    return FLOAT32 * (logits + 2 * min(logits, SAMPLED_AT_ONCE))


def trained_logits(shape: ModelShape, setup: MemorySetup) -> int:
    """One tile of logits in the update, never rows × V of them, and hidden states of the tokens with their gradient.

    4 · min(tile, T·V) + 3 · 4 · T · d
    """
    tokens = largest_micro_batch(setup).completions * setup.completion_tokens
    tile = CUDA_ELEMENTS if setup.on_cuda else TILE_ELEMENTS
    return FLOAT32 * min(tile, tokens * shape.vocab) + 3 * FLOAT32 * tokens * shape.hidden


def sampler_copies(shape: ModelShape, setup: MemorySetup) -> int:
    """Matrices made ready for decoding: in the order that products read them fastest, or in their type.

    Of experts with an adapter those of one layer at a time, W + s·B·A in float32.

        c · (linear layers + V·d);   the output matrix alone where the others are read where they are

    Frozen ones are, on a GPU or in 4 bits or in bfloat16; all are where the model's own forward pass samples.
    """
    if not setup.shared_prompt:
        return FLOAT32 * shape.expert_parameters // shape.layers if setup.adapts_experts else 0
    in_place = setup.adapter_rank is not None and (setup.quantized or setup.on_cuda or setup.compute_bytes < FLOAT32)
    return setup.compute_bytes * (shape.head_parameters + (0 if in_place else shape.linear_parameters))


def update_copies(shape: ModelShape, setup: MemorySetup) -> int:
    """Matrices that an update keeps for its backward pass beside the weights.

        c · joined projections of the shared-prompt pass;   c · (linear layers + V·d) where c ≠ b

    Of frozen matrices one at a time is made ready: c · the largest, and c · V·d where c ≠ b.  Experts with an adapter
    are kept as W + s·B·A in float32, those of one layer where layers are computed again.
    """
    c, casts = setup.compute_bytes, setup.weight_bytes != setup.compute_bytes
    head = shape.head_parameters if casts else 0
    if setup.adapter_rank is not None:
        whole = setup.quantized or setup.frozen_bytes != c
        experts = shape.expert_parameters // (shape.layers if setup.recomputes else 1) if setup.adapts_experts else 0
        largest = max((i * o for i, o in shape.linear_layers), default=0) if whole else 0
        return c * (head + largest) + FLOAT32 * experts
    if casts:
        return c * (shape.linear_parameters + head)
    return c * shape.joined_parameters if setup.shared_prompt else 0


def token_activations(shape: ModelShape, setup: MemorySetup) -> int:
    """What one layer keeps of one token for its backward pass.

    shared prompt:  d (8 + 2c) + c (q + 2k) + 2 c q + 3 c f (+ 4 (q + k) for norms of heads;  2 c f without a gate)
    model's own:    d (20 + 4c) + c (3 q + 2 k) + 4 c f
    """
    c, mlp = setup.compute_bytes, shape.mlp_width
    query, key, hidden = shape.query_width, shape.kv_width, shape.hidden
    norms = FLOAT32 * (query + key) if shape.normed_heads else 0
    if setup.shared_prompt:
        inner = (3 if shape.gated else 2) * c * mlp
        return hidden * (8 + 2 * c) + c * (query + 2 * key) + 2 * c * query + inner + norms
    return hidden * (20 + 4 * c) + c * (3 * query + 2 * key) + 4 * c * mlp + 2 * norms


def attention_activations(shape: ModelShape, setup: MemorySetup) -> int:
    """What one layer's attention keeps of a completion beside that: the keys and values that its tokens see, its mask.

    2 c k (P + T) + c T (P + T)     on CUDA with q for k: there heads that share keys get copies of their own
    """
    if not setup.shared_prompt or setup.group_size == 1:
        return 0
    c, seen = setup.compute_bytes, setup.row_tokens
    copies = shape.query_width if setup.on_cuda else shape.kv_width
    return 2 * c * copies * seen + c * setup.completion_tokens * seen


def attention_in_course(shape: ModelShape, setup: MemorySetup) -> int:
    """What the last layer's attention holds of one token, beside what layers keep, and before its MLP keeps anything.

        c (4 q + 5 k) - 3 c f - d (4 + 2 c)     projections, turned heads, both as one array, and what it gives

    Nothing where that is less than what the MLP will keep; of heads that are many for the hidden size it is not.
    """
    c = setup.compute_bytes
    if not setup.shared_prompt:
        return 0
    held = c * (4 * shape.query_width + 5 * shape.kv_width)
    return max(0, held - 3 * c * shape.mlp_width - shape.hidden * (FLOAT32 + 2 * c))


def activations(shape: ModelShape, setup: MemorySetup) -> int:
    """Of the largest micro-batch: what each layer keeps of each token, all L layers at once.

        L · (tokens · token_activations + completions · attention_activations) + tokens · attention_in_course

    With gradient checkpointing each layer keeps its input alone, 4 d a token, and one layer at a time the rest.
    """
    micro = largest_micro_batch(setup)
    tokens = micro.tokens(setup)
    layer = tokens * token_activations(shape, setup) + micro.completions * attention_activations(shape, setup)
    if setup.adapter_rank is not None:  # A·x is kept for each linear layer, and x itself by them all
        layer += tokens * FLOAT32 * setup.adapter_rank * len(shape.linear_layers) // shape.layers
    passing = tokens * attention_in_course(shape, setup)
    if setup.recomputes:
        return passing + layer + shape.layers * tokens * FLOAT32 * shape.hidden
    return passing + layer * shape.layers
