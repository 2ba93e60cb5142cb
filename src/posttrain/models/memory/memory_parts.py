"""Bytes of what a run holds, by an equation in the model's shape and the run's setup for each; see `plan_parts.PARTS`.

N: parameters; L: layers; d: hidden; q, k, f: channels of queries, of keys and of the MLP; V: vocabulary; r: rank.
P, T: tokens of a prompt and of a completion.  b, c: bytes of a weight and of a number in matrix products.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from posttrain.models.logprobs import CUDA_ELEMENTS, TILE_ELEMENTS
from posttrain.models.memory.model_shape import ModelShape

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetup:
    """How a model is stored and trained, and how many tokens are in memory at a time."""

    weight_bytes: int = FLOAT32
    """Bytes of a trained weight, of its gradient and of each moment."""
    frozen_bytes: int = FLOAT32
    """Bytes of a weight under an adapter, if not in 4 bits."""
    compute_bytes: int = FLOAT32
    """Bytes of a number in matrix products and in the cache of keys and values."""
    adapter_rank: int | None = None
    """None trains all weights."""
    adapts_experts: bool = False
    """Whether the adapter covers the experts of a mixture too."""
    quantized: bool = False
    """Whether linear layers are in 4 bits (nf4)."""
    trained: int | None = None
    """Number of trained weights; None means all, or an adapter on all linear layers."""
    reference: bool = False
    """Whether there is a reference; with an adapter it is the same weights with the adapter off."""
    critic: bool = False
    """Whether the critic has its own trunk, a model of the policy's size."""
    value_head: Literal["none", "linear", "mlp"] = "none"
    """The critic's head, on its trunk or on the policy's."""
    reward_models: int = 0
    """Bytes of the reward models on the policy's device."""
    teacher: int = 0
    """Bytes of other models: a teacher, or a reference from another folder."""
    recomputes: bool = False
    """Gradient checkpointing: the backward pass computes each layer's activations again."""
    shared_prompt: bool = True
    """Whether each prompt of a micro-batch is computed once; otherwise once for each completion."""
    on_cuda: bool = False
    samples: bool = True
    """False for supervised runs, and where another process samples."""
    micro_batch_option: str = "update.tokens_per_microbatch"
    """The recipe's name for `tokens_per_microbatch`."""
    refused: tuple[str, ...] = ()
    """Memory-saving options that this recipe would refuse, so the plan does not suggest them."""
    prompt_tokens: int = 256
    completion_tokens: int = 400
    """Longest completion; the plan assumes this length for all."""
    prompts_per_step: int = 32
    group_size: int = 8
    max_rows: int = 256
    steps_ahead: int = 0
    """Steps that are collected while another is trained on: what samples them is held during updates too."""
    evaluates_amid: bool = False
    """Whether there are evaluations while such steps are in progress."""
    tokens_per_microbatch: int = 16384
    ranks: int = 1
    """Processes that share the run; the plan is of one of them."""

    @property
    def num_rows(self) -> int:
        """Completions that are decoded together."""
        completions = (1 + self.steps_ahead) * self.prompts_per_step * self.group_size
        return min(self.max_rows, -(-completions // self.ranks))

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def in_blocks(self, tokens: int) -> int:
        """Tokens of a row's part of the cache, which grows by blocks."""
        block = CUDA_CACHE_BLOCK if self.on_cuda else CACHE_BLOCK
        return -(-tokens // block) * block

    def with_adapter(self, rank: int, *, quantized: bool = False) -> "MemorySetup":
        """The same run with an adapter over weights in the type of matrix products, or in 4 bits."""
        trained = self.trained if rank == self.adapter_rank else None
        return replace(self, adapter_rank=rank, quantized=quantized, frozen_bytes=self.compute_bytes, trained=trained)


class MicroBatchSize(NamedTuple):
    """The largest micro-batch of an update."""

    prompts: int
    completions: int
    tokens: int
    """Tokens that go through the model: a shared prompt counts once, otherwise once for each completion."""


def largest_micro_batch(setup: MemorySetup) -> MicroBatchSize:
    """What `tokens_per_microbatch` allows, or the whole step if that is smaller.

    Groups that lost completions without an advantage fill it up, so it may hold parts of one group more than fit whole.
    """
    budget, size = setup.tokens_per_microbatch, setup.group_size
    share = -(-setup.prompts_per_step // setup.ranks)  # of one of several ranks
    prompt, completion = setup.prompt_tokens, setup.completion_tokens
    if not setup.shared_prompt:
        rows = max(1, min(budget // setup.row_tokens, share * size))
        return MicroBatchSize(-(-rows // size), rows, rows * setup.row_tokens)
    prompts = min(-(-budget // (prompt + size * completion)), share)
    rows = max(1, min((budget - prompts * prompt) // completion, prompts * size))
    return MicroBatchSize(prompts, rows, prompts * prompt + rows * completion)


NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: each block of 64 has a scale of 1 byte, and each 256 scales share one of 4 bytes.
Dettmers et al. 2023 (QLoRA), arXiv:2305.14314, §3: 4.127 bits."""
CACHE_BLOCK, CUDA_CACHE_BLOCK = 64, 256
MALLOC_KEEPS = 32 * 2**20
"""Bytes of the largest freed tensor that glibc's malloc keeps (DEFAULT_MMAP_THRESHOLD_MAX, on 64 bits)."""
CUDA_LOGITS_COPIES = 3
"""Copies of all rows' logits while one token of each is sampled."""
SAMPLED_AT_ONCE = 2**20
"""Logits that a CPU turns into probabilities at a time: `generation.sampling.ENTRIES_AT_ONCE`."""


def trained_parameters(shape: ModelShape, setup: MemorySetup) -> int:
    """N;   of an adapter on all linear layers   r · Σ (inputs + outputs);   on experts too, the same of each expert."""
    if setup.trained is not None:
        return setup.trained
    if setup.adapter_rank is None:
        return shape.parameters
    experts = shape.expert_arrays if setup.adapts_experts else ()
    sides = sum(inputs + outputs for inputs, outputs in shape.linear_layers)
    return setup.adapter_rank * (sides + sum(number * (rows + columns) for number, rows, columns in experts))


def weights(shape: ModelShape, setup: MemorySetup) -> int:
    """Under an adapter, linear layers (M) are in the type of matrix products or in 4 bits.

    b · N;   with an adapter   c · M + b · (N - M) + 4 · r Σ (inputs + outputs);   in 4 bits 4.127 / 8 for c

    An untied output matrix and experts are frozen too, and never in 4 bits.
    """
    if setup.adapter_rank is None:
        return setup.weight_bytes * shape.parameters
    matrices = shape.linear_parameters
    head = shape.expert_parameters + (0 if shape.tied else shape.head_parameters)
    packed = NF4_BYTES if setup.quantized else setup.frozen_bytes
    rest = setup.weight_bytes * (shape.parameters - matrices - head) + setup.frozen_bytes * head
    return round(packed * matrices) + rest + FLOAT32 * trained_parameters(shape, setup)


def bytes_while_loading(shape: ModelShape, setup: MemorySetup) -> int:
    """Weights as they are read, before any is put into 4 bits.  M: `frozen_matrices`.

        b · N;   of a frozen base that ends in a smaller type   b · (N - M) + s · M     s: bytes of a weight on the disk
        on a GPU, where layers come one by one                  weights

    In 4 bits add b · the largest layer.  A base that is not in bfloat16 on the disk is read in b.
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
    """b · trained parameters; an adapter's are always float32."""
    b = setup.weight_bytes if setup.adapter_rank is None else FLOAT32
    return b * trained_parameters(shape, setup)


def optimizer(shape: ModelShape, setup: MemorySetup) -> int:
    """AdamW's two moments: 2 b · trained parameters."""
    return 2 * gradients(shape, setup)


def reference(shape: ModelShape, setup: MemorySetup) -> int:
    """A frozen copy of the weights; nothing under an adapter, whose reference is the same weights with it off.

    b · (N - M) + c · M     M: `frozen_matrices`;   in the model's own forward pass b · N
    """
    if not setup.reference or setup.adapter_rank is not None:
        return 0
    matrices = shape.frozen_matrices
    held_as = setup.compute_bytes if setup.shared_prompt else setup.weight_bytes
    return setup.weight_bytes * (shape.parameters - matrices) + held_as * matrices


def critic_bytes(shape: ModelShape, setup: MemorySetup) -> int:
    """Weights, gradient and two moments of a value head in float32, and of the critic's trunk without output matrix.

        16 · head;   with a trunk   + 4 b · (N - V·d)     if the output matrix is untied; else 4 b · N

    A linear head has d + 1 weights, an MLP 4 d · d + 4 d + 4 d + 1.  A copy of an adapted policy shares what is frozen:
    16 · trained for 4 b · N.  With several ranks a copy shares only layers in 4 bits: add the other frozen weights, or
    b · V·d if the output matrix is untied.
    """
    d, channels = shape.hidden, 4 * shape.hidden
    heads = {"none": 0, "linear": d + 1, "mlp": channels * d + 2 * channels + 1}
    head = 4 * FLOAT32 * heads[setup.value_head]
    if not setup.critic:
        return head
    if setup.adapter_rank is not None:
        adapter = FLOAT32 * trained_parameters(shape, setup)
        shared = round(NF4_BYTES * shape.linear_parameters) if setup.quantized else 0
        frozen = weights(shape, setup) - adapter - shared
        return head + 4 * adapter + (frozen if setup.ranks > 1 else 0)
    output = 0 if shape.tied else shape.head_parameters
    trunk = 4 * setup.weight_bytes * (shape.parameters - output)
    return head + trunk + (setup.weight_bytes * output if setup.ranks > 1 else 0)


def value_activations(shape: ModelShape, setup: MemorySetup) -> int:
    """The head's hidden layer before and after its ReLU, and its gradient, in float32: 3 · 4 · T · 4 d."""
    tokens = largest_micro_batch(setup).completions * setup.completion_tokens
    return 3 * FLOAT32 * tokens * 4 * shape.hidden if setup.value_head == "mlp" else 0


def key_value_cache(shape: ModelShape, setup: MemorySetup) -> int:
    """Keys and values of all rows at their longest: 2 L k c · rows · (P + T), in whole blocks of tokens."""
    token = 2 * shape.layers * shape.kv_width * setup.compute_bytes
    return token * setup.num_rows * setup.in_blocks(setup.row_tokens)


def evaluation_cache(shape: ModelShape, setup: MemorySetup) -> int:
    """The cache of an evaluation during steps in progress, which keep theirs: 2 L k c · max_rows · (P + T)."""
    if not (setup.steps_ahead and setup.evaluates_amid):
        return 0
    return 2 * shape.layers * shape.kv_width * setup.compute_bytes * setup.max_rows * setup.in_blocks(setup.row_tokens)


def cache_growth(shape: ModelShape, setup: MemorySetup) -> int:
    """What is held in addition to the full cache while it grows, or while rows begin, whichever is more.

        grows    2 k c · rows · (P + T - block)     the old cache of one layer: layers grow one by one
        begins   2 L k c · (rows + prompts) · P     the cached prompts, and a copy for each row that begins

    On a CPU the cache is still small when rows begin, which is subtracted.
    """
    token, rows = 2 * shape.layers * shape.kv_width * setup.compute_bytes, setup.num_rows
    full, begun = setup.in_blocks(setup.row_tokens), setup.in_blocks(setup.prompt_tokens + 1)
    outgrown = token * rows * (full - setup.in_blocks(1)) // shape.layers if full > begun else 0
    prompts = -(-rows // setup.group_size)
    missing = 0 if setup.on_cuda else rows * (full - begun)
    return max(outgrown, token * ((rows + prompts) * setup.prompt_tokens - missing))


def returned_cache(shape: ModelShape, setup: MemorySetup) -> int:
    """The cache that is freed, if its layers are so large that malloc returns them to the system then."""
    cache = evaluation_cache(shape, setup) if setup.steps_ahead else key_value_cache(shape, setup)
    return cache if cache > shape.layers * MALLOC_KEEPS else 0


def sampled_logits(shape: ModelShape, setup: MemorySetup) -> int:
    """Logits of the next token of all rows: 4 · (rows · V + 2 · min(rows · V, 2^20));   on CUDA 3 · 4 · rows · V."""
    logits = setup.num_rows * shape.vocab
    if setup.on_cuda:
        return CUDA_LOGITS_COPIES * FLOAT32 * logits
    return FLOAT32 * (logits + 2 * min(logits, SAMPLED_AT_ONCE))


def trained_logits(shape: ModelShape, setup: MemorySetup) -> int:
    """One tile of logits, and the tokens' hidden states with their gradient: 4 · min(tile, T·V) + 3 · 4 · T · d."""
    tokens = largest_micro_batch(setup).completions * setup.completion_tokens
    tile = CUDA_ELEMENTS if setup.on_cuda else TILE_ELEMENTS
    return FLOAT32 * min(tile, tokens * shape.vocab) + 3 * FLOAT32 * tokens * shape.hidden


def sampler_copies(shape: ModelShape, setup: MemorySetup) -> int:
    """Matrices prepared for decoding, in their fastest order or in the type of products.

        c · (linear layers + V·d);   only V·d for frozen layers on a GPU, in 4 bits or in bfloat16

    The model's own forward pass only has the W + s·B·A of one layer's adapted experts, in float32.
    """
    if not setup.shared_prompt:
        return FLOAT32 * shape.expert_parameters // shape.layers if setup.adapts_experts else 0
    in_place = setup.adapter_rank is not None and (setup.quantized or setup.on_cuda or setup.compute_bytes < FLOAT32)
    return setup.compute_bytes * (shape.head_parameters + (0 if in_place else shape.linear_parameters))


def update_copies(shape: ModelShape, setup: MemorySetup) -> int:
    """Copies of matrices that an update keeps for its backward pass.

        c · joined projections of the shared-prompt pass;   c · (linear layers + V·d) if c ≠ b

    Frozen matrices are converted one at a time: c · the largest, and c · V·d if c ≠ b.  Adapted experts are kept as
    W + s·B·A in float32; with gradient checkpointing only those of one layer.
    """
    c, casts = setup.compute_bytes, setup.weight_bytes != setup.compute_bytes
    head = shape.head_parameters if casts else 0
    if setup.adapter_rank is not None:
        whole = setup.quantized or setup.frozen_bytes != c
        experts = shape.expert_parameters // (shape.layers if setup.recomputes else 1) if setup.adapts_experts else 0
        largest = max((i * o for i, o in shape.linear_layers), default=0) if whole else 0
        return c * (head + largest) + FLOAT32 * experts
    kept = shape.layers if setup.ranks > 1 else 1  # sharded layers keep none: one at a time
    if casts:
        return c * (shape.linear_parameters // kept + head)
    return c * shape.joined_parameters // kept if setup.shared_prompt else 0


def token_activations(shape: ModelShape, setup: MemorySetup) -> int:
    """Bytes that one layer keeps of one token for its backward pass.

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
    """Bytes that one layer's attention keeps of a completion: the keys and values that its tokens see, and its mask.

    2 c k (P + T) + c T (P + T)     on CUDA with q for k: each query head gets a copy of its keys
    """
    if not setup.shared_prompt or setup.group_size == 1:
        return 0
    c, seen = setup.compute_bytes, setup.row_tokens
    copies = shape.query_width if setup.on_cuda else shape.kv_width
    return 2 * c * copies * seen + c * setup.completion_tokens * seen


def attention_in_course(shape: ModelShape, setup: MemorySetup) -> int:
    """What the last layer's attention holds of one token before its MLP keeps anything, if that is more.

    c (4 q + 5 k) - 3 c f - d (4 + 2 c)     projections, rotated heads, both as one array, and the result
    """
    c = setup.compute_bytes
    if not setup.shared_prompt:
        return 0
    held = c * (4 * shape.query_width + 5 * shape.kv_width)
    return max(0, held - 3 * c * shape.mlp_width - shape.hidden * (FLOAT32 + 2 * c))


def activations(shape: ModelShape, setup: MemorySetup) -> int:
    """What all layers keep of the largest micro-batch, and what the value head keeps.

        L · (tokens · token_activations + completions · attention_activations) + tokens · attention_in_course

    With gradient checkpointing each layer keeps only its input, 4 d a token, and one layer at a time the rest.
    """
    micro = largest_micro_batch(setup)
    tokens = micro.tokens
    layer = tokens * token_activations(shape, setup) + micro.completions * attention_activations(shape, setup)
    if setup.adapter_rank is not None:  # A·x is kept for each linear layer, and x itself by them all
        layer += tokens * FLOAT32 * setup.adapter_rank * len(shape.linear_layers) // shape.layers
    passing = tokens * attention_in_course(shape, setup) + value_activations(shape, setup)
    if setup.recomputes:
        return passing + layer + shape.layers * tokens * FLOAT32 * shape.hidden
    return passing + layer * shape.layers
