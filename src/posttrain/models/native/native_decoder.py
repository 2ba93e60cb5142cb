"""The forward pass of decoder.c over a policy's weights: decoding and scoring in one call, on a CPU in float32.

Weights are copied into panels, the layout that decoder.c multiplies by, whenever they have changed.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from posttrain.models.adapters.adaptable import is_4_bit
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.forward import SharedPromptForward
from posttrain.models.native.native_library import NativeUnavailable, native_library
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt.decoder import DecoderLayer
from posttrain.models.shared_prompt.families import SAME_ANGLES
from posttrain.models.shared_prompt.linear import DenseWeight, Part, Weight

READ_BEHIND = 64
"""Floats after a page that the kernel may read; they change nothing."""
MOST_WIDTH = 128
"""Largest width of a head: the kernel was tried up to this one."""
MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Families that the kernel was tried with."""


class LayerWeights(Structure):
    """`Layer` of decoder.c."""

    _fields_ = [
        (name, c_void_p)
        for name in ("input_norm", "mlp_norm", "head_norm", "qkv", "qkv_bias", "out", "out_bias", "gate_up", "down")
    ]


class ModelWeights(Structure):
    """`Model` of decoder.c."""

    _fields_ = [
        ("layers", POINTER(LayerWeights)),
        *((name, c_void_p) for name in ("embedding", "last_norm", "head", "cos", "sin")),
        *((name, c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads", "width", "padded", "turned")),
        *((name, c_int64) for name in ("inner", "vocab")),
        ("eps", c_float),
        ("scale", c_float),
    ]


class DecodingCall(Structure):
    """`Decoding` of decoder.c."""

    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "num_steps", "max_pages", "greedy", "num_stops", "num_suppressed")),
        *((name, c_void_p) for name in ("tokens", "lengths", "given", "num_given", "pages")),
        *((name, c_void_p) for name in ("uniforms", "limits", "stops", "suppressed")),
        ("temperature", c_float),
        *((name, c_void_p) for name in ("drawn", "logprobs", "counts", "logits")),
    ]


class ScoringCall(Structure):
    """`Scoring` of decoder.c."""

    _fields_ = [
        *((name, c_int64) for name in ("num_sequences", "max_pages")),
        *((name, c_void_p) for name in ("tokens", "starts", "cached", "wanted", "pages")),
        ("temperature", c_float),
        ("logprobs", c_void_p),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """Tokens drawn one after the other; those after `counts` have no meaning."""

    tokens: Int64[Tensor, "row step"]
    logprobs: Float64[Tensor, "row step"]
    """In nats, after temperature; NaN where logits are not finite."""
    counts: Int64[Tensor, " row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRequest:
    """How tokens are drawn after the given ones."""

    given: Int64[Tensor, "row step"]
    num_given: Int64[Tensor, " row"]
    """How many tokens of `given` a row reads before it draws; as many as there are steps if it draws none."""

    uniforms: Float64[Tensor, "row step"]
    limits: Int64[Tensor, " row"]
    """How many tokens each row may get."""
    stops: Int64[Tensor, " stop"]
    temperature: float
    greedy: bool
    suppressed: Int64[Tensor, " token"]
    """Tokens that are never drawn."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Room for keys and values, by the addresses of its pages."""

    addresses: tuple[int, ...]
    held: tuple[Tensor, ...]
    """What the addresses point into."""

    def followed_by(self, count: int, others: "Pages") -> "Pages":
        """The first `count` of these, and the rest."""
        return Pages((*self.addresses[:count], *others.addresses), (*self.held, *others.held))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSequence:
    """Tokens after the cached ones."""

    tokens: tuple[int, ...]
    wanted: tuple[int, ...]
    """The token after each, whose log-prob is wanted; empty to fill the pages only."""
    cached: int
    """Tokens in the pages."""
    pages: Pages


@dataclass(slots=True)
class Prepared:
    """Weights as the library reads them."""

    model: ModelWeights
    held: list[object] = field(default_factory=list)
    """What its pointers point to."""


def native_refusal(policy: Policy) -> str | None:
    """Why this policy is not decoded natively; None if it can be."""
    if policy.native_reason is not None:
        return policy.native_reason
    if not isinstance(policy.forward, SharedPromptForward):
        return "the model does not use the shared-prompt forward pass"
    if policy.device.type != "cpu" or policy.compute_dtype != torch.float32 or policy.model.dtype != torch.float32:
        return f"the kernel needs a CPU and float32, and the policy is {policy.compute_dtype} on {policy.device.type}"
    decoder, output = policy.forward.decoder, policy.output_layer
    if (name := policy.model.config.model_type) not in MODEL_TYPES:
        return f"the kernel was only tried with {', '.join(MODEL_TYPES)}, and this is {name}"
    if policy.ranks.size > 1:
        return "the weights are split over ranks"
    if decoder.head_width > MOST_WIDTH:
        return f"a head is {decoder.head_width} wide, and the kernel supports widths up to {MOST_WIDTH}"
    if output.bias is not None or output.soft_cap is not None or output.scale != 1.0:
        return "the output layer has a bias, a cap or a scale"
    for kind in decoder.kinds:
        attention = kind.attention
        if attention.window is not None or attention.soft_cap is not None or kind.angles != SAME_ANGLES:
            return "its layers differ, or attend within a window"
    if policy.forward.adapted or lora_layers(policy.model) or any(map(is_4_bit, policy.model.modules())):
        return "it has an adapter or weights in 4 bits"
    for index in range(decoder.num_layers):
        block, family = decoder.block(index), decoder.family
        if any(block.mlp.get_submodule(name).bias is not None for name in (*family.gate_up, family.down)):
            return "its MLP has a bias"
    try:
        native_library()
    except NativeUnavailable as missing:
        return str(missing)
    return None


def native_decoder(policy: Policy) -> "NativeDecoder | None":
    """A decoder with the policy's current weights; None if the policy is not decoded natively."""
    if native_refusal(policy) is not None:
        return None
    decoder = NativeDecoder(policy)
    decoder.refresh()
    return decoder


class NativeDecoder:
    """A policy's decoder in C."""

    def __init__(self, policy: Policy) -> None:
        assert isinstance(policy.forward, SharedPromptForward)
        self.policy, self.decoder = policy, policy.forward.decoder
        self.library = native_library()
        self.panel, self.page_tokens = int(self.library.panel_columns()), int(self.library.page_tokens())
        self.prepared: Prepared | None = None

    @property
    def page_floats(self) -> int:
        """Room of a page: keys and values of `page_tokens` tokens in all layers."""
        decoder = self.decoder
        return decoder.num_layers * decoder.kv_heads * self.page_tokens * (decoder.head_width + self.padded_width)

    @property
    def padded_width(self) -> int:
        return -(-self.decoder.head_width // self.page_tokens) * self.page_tokens

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the policy's current weights."""
        decoder, prepared = self.decoder, Prepared(ModelWeights())
        layers = (LayerWeights * decoder.num_layers)()
        for index in range(decoder.num_layers):
            self._fill_layer(layers[index], decoder.layer(index), prepared)
        positions = torch.arange(self.policy.max_positions)
        ((cos, sin),) = decoder.angles(positions).values()
        embedding = cast(nn.Embedding, self.policy.model.get_input_embeddings()).weight
        last_norm = cast(Any, decoder.body.get_submodule(decoder.family.last_norm))
        head = self.policy.output_layer.matrix
        model = prepared.model
        model.layers = ctypes.cast(layers, POINTER(LayerWeights))
        prepared.held.append(layers)
        tensors = {
            "embedding": embedding,
            "last_norm": last_norm.weight,
            "head": weight_panels(head, self.panel),
            "cos": cos[:, 0],
            "sin": sin[:, 0],
        }
        for name, tensor in tensors.items():
            setattr(model, name, tensor_address(tensor, prepared))
        model.num_layers, model.hidden, model.vocab = decoder.num_layers, embedding.shape[1], len(head)
        model.heads, model.kv_heads = decoder.heads, decoder.kv_heads
        model.width, model.padded, model.turned = decoder.head_width, self.padded_width, cos.shape[-1]
        model.inner = self.policy.model.config.intermediate_size
        model.eps, model.scale = decoder.eps, decoder.kinds[0].attention.scale or decoder.head_width**-0.5
        self.prepared = prepared

    def _fill_layer(self, target: LayerWeights, layer: DecoderLayer, prepared: Prepared) -> None:
        qkv, out, gate_up, down = map(joined_layers, (layer.qkv, layer.out, layer.gate_up, layer.down))
        gate, up = gate_up.tensors()[0].chunk(2)
        half = self.panel // 2
        heads = layer.norms.get("heads")
        tensors = {
            "input_norm": layer.norms["input"].weight,
            "mlp_norm": layer.norms["mlp_input"].weight,
            "head_norm": None if heads is None else heads.weight,
            "qkv": weight_panels(qkv.tensors()[0], self.panel),
            "qkv_bias": padded_bias(qkv.bias, self.panel),
            "out": weight_panels(out.tensors()[0], self.panel),
            "out_bias": padded_bias(out.bias, self.panel),
            "gate_up": torch.cat([weight_panels(gate, half), weight_panels(up, half)], dim=2),
            "down": weight_panels(down.tensors()[0], self.panel),
        }
        for name, tensor in tensors.items():
            setattr(target, name, tensor_address(tensor, prepared))

    def release(self) -> None:
        """Free the copies."""
        self.prepared = None

    def logits(
        self, tokens: Int64[Tensor, " row"], lengths: Int64[Tensor, " row"], pages: Int64[Tensor, "row page"]
    ) -> Float[Tensor, "row vocab"]:
        """Run one token of each row; logits of the next.  `pages` are addresses, with room for the token."""
        found = torch.empty(len(tokens), self.policy.output_layer.num_logits)
        call = DecodingCall(num_rows=len(tokens), num_steps=1, max_pages=pages.shape[1], temperature=1.0)
        counts = torch.empty_like(tokens)
        self._decode(call, {"tokens": tokens, "lengths": lengths, "pages": pages, "counts": counts, "logits": found})
        return found

    def draw(
        self,
        tokens: Int64[Tensor, " row"],
        lengths: Int64[Tensor, " row"],
        pages: Int64[Tensor, "row page"],
        request: DrawRequest,
    ) -> DrawnTokens:
        """Run a token of each row and draw the next, as often as there are uniform numbers or until a row ends."""
        shape = request.uniforms.shape
        drawn = DrawnTokens(
            tokens=torch.zeros(shape, dtype=torch.long),
            logprobs=torch.zeros(shape, dtype=torch.float64),
            counts=torch.zeros(shape[0], dtype=torch.long),
        )
        call = DecodingCall(
            num_rows=shape[0],
            num_steps=shape[1],
            max_pages=pages.shape[1],
            greedy=request.greedy,
            num_stops=len(request.stops),
            num_suppressed=len(request.suppressed),
            temperature=request.temperature,
        )
        given = {"tokens": tokens, "lengths": lengths, "pages": pages, "uniforms": request.uniforms}
        given |= {"given": request.given, "num_given": request.num_given}
        given |= {"limits": request.limits, "stops": request.stops, "suppressed": request.suppressed}
        made = {"drawn": drawn.tokens, "logprobs": drawn.logprobs, "counts": drawn.counts}
        self._decode(call, {**given, **made})
        return drawn

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def new_slab(self, num_pages: int) -> Pages:
        """Room for `num_pages` pages, in one piece."""
        slab = torch.empty(num_pages * self.page_floats + READ_BEHIND)
        return Pages(tuple(slab.data_ptr() + 4 * self.page_floats * page for page in range(num_pages)), (slab,))

    def new_pages(self, num_tokens: int) -> Pages:
        """Room for `num_tokens` tokens."""
        return self.new_slab(self.num_pages(num_tokens))

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages from some addresses to others."""
        for old, new in zip(source, target, strict=True):
            ctypes.memmove(new, old, 4 * self.page_floats)

    def score(self, sequences: Sequence[ScoredSequence], temperature: float) -> Float64[Tensor, " token"]:
        """Run the tokens of sequences, and return the log-probs of the wanted ones in nats, in order."""
        lengths = [len(each.tokens) for each in sequences]
        most = max(len(each.pages.addresses) for each in sequences)
        wanted = torch.tensor([token for each in sequences for token in each.wanted or (-1,) * len(each.tokens)])
        held = {
            "tokens": torch.tensor([token for each in sequences for token in each.tokens]),
            "starts": torch.tensor([0, *accumulate(lengths)]),
            "cached": torch.tensor([each.cached for each in sequences]),
            "wanted": wanted,
            "pages": page_table([each.pages.addresses for each in sequences]),
            "logprobs": torch.zeros(sum(lengths), dtype=torch.float64),
        }
        call = ScoringCall(num_sequences=len(sequences), max_pages=most, temperature=temperature)
        for name, tensor in held.items():
            setattr(call, name, tensor.data_ptr())
        longest, threads = c_int64(most * self.page_tokens), c_int64(torch.get_num_threads())
        if self.library.score(byref(self._ready.model), byref(call), longest, threads):
            raise MemoryError("not enough memory for native scoring")
        return held["logprobs"][wanted >= 0]

    @property
    def _ready(self) -> Prepared:
        assert self.prepared is not None, "refresh was not called"
        return self.prepared

    def _decode(self, call: DecodingCall, tensors: dict[str, Tensor | None]) -> None:
        held = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        for name, tensor in held.items():
            setattr(call, name, tensor.data_ptr())
        longest = c_int64(call.max_pages * self.page_tokens)
        threads = c_int64(torch.get_num_threads())
        if self.library.decode(byref(self._ready.model), byref(call), longest, threads):
            raise MemoryError("not enough memory for the rows of native decoding")


def page_table(rows: Sequence[Sequence[int]]) -> Int64[Tensor, "row page"]:
    """Addresses of rows of pages, with 0 after the last ones."""
    most = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (most - len(row))] for row in rows])


def weight_panels(matrix: Float[Tensor, "outputs inputs"], columns: int) -> Float[Tensor, "panel inputs columns"]:
    """A matrix in the order in which products read it: `columns` outputs of all inputs, then the next outputs."""
    outputs, inputs = matrix.shape
    count = -(-outputs // columns)
    padded = matrix.new_zeros(count * columns, inputs)
    padded[:outputs] = matrix
    return padded.view(count, columns, inputs).transpose(1, 2)


def joined_layers(weight: Weight) -> Part:
    """The layers of a weight as one."""
    assert isinstance(weight, DenseWeight), "others are refused"
    biases = [part.bias for part in weight.parts if part.bias is not None]
    return Part(torch.cat([part.tensors()[0] for part in weight.parts]), torch.cat(biases) if biases else None)


def padded_bias(bias: Float[Tensor, " output"] | None, columns: int) -> Float[Tensor, " output"] | None:
    """A bias with room for a whole panel after it."""
    return None if bias is None else torch.cat([bias, bias.new_zeros(columns)])


def tensor_address(tensor: Tensor | None, prepared: Prepared) -> int | None:
    """The address of a tensor's numbers, which stay there while `prepared` is in use."""
    if tensor is None:
        return None
    own = tensor.detach().to(torch.float32).contiguous()
    prepared.held.append(own)
    return own.data_ptr()
