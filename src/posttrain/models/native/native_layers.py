"""A policy's layers in layers.c and attention.c, forward and backward: updates on a CPU in float32.

Each function keeps what its gradient needs and nothing in between: a layer's input, its raw and rotated queries, keys
and values, what attention returns, and the MLP's gate and up.
"""

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import FunctionCtx

from posttrain.models.forward import ForwardPass, SharedPromptForward
from posttrain.models.model_outputs import output_layer_of
from posttrain.models.native.native_decoder import joined_layers, native_refusal, padded_bias, weight_panels
from posttrain.models.native.native_library import native_library, run_natively
from posttrain.models.native.native_output import native_token_logprobs
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt.attention import PackedAttention, PackedLayout
from posttrain.models.shared_prompt.decoder import Angles, Attend, Decoder, DecoderLayer

WIDTHS = 16
"""The kernel reads rows of matrices in vectors of at most this many floats."""


class MlpCall(Structure):
    """`Mlp` of layers.c."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "hidden", "inner")),
        ("eps", c_float),
        *((name, c_void_p) for name in ("x", "norm", "gate_up_panels", "down_panels", "gate_up_weight", "down_weight")),
        *((name, c_void_p) for name in ("gate_up", "y", "dy", "dx", "d_gate_up", "gated", "normed", "d_norm")),
    ]


class InputsCall(Structure):
    """`Inputs` of layers.c."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "hidden", "heads", "kv_heads", "width", "turned")),
        ("eps", c_float),
        *((name, c_void_p) for name in ("x", "norm", "head_norm", "panels", "bias", "weight", "cos", "sin")),
        *((name, c_void_p) for name in ("raw", "qkv", "d_qkv", "dx", "d_raw", "normed", "d_norm", "d_head_norm")),
    ]


class AddedCall(Structure):
    """`Added` of layers.c."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "inputs", "outputs")),
        *((name, c_void_p) for name in ("x", "a", "panels", "bias", "weight", "y", "dy", "da")),
    ]


class AttentionCall(Structure):
    """`Attention` of attention.c."""

    _fields_ = [
        *((name, c_int64) for name in ("heads", "kv_heads", "width", "num_roots", "longest_root", "longest")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("starts", "lengths", "branch_ends", "branches")),
        *((name, c_void_p) for name in ("qkv", "out", "d_out", "d_qkv")),
    ]


class WeightGradientCall(Structure):
    """`WeightGradient` of layers.c."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "outputs", "inputs")),
        *((name, c_void_p) for name in ("dy", "x", "dw", "db")),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How a layer's queries, keys and values are made and used."""

    heads: int
    kv_heads: int
    width: int
    scale: float
    eps: float
    cos: Float[Tensor, "token turned"]
    sin: Float[Tensor, "token turned"]
    """Negated in its first half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Where the sequences of a layout are: roots, then branches."""

    starts: Int64[Tensor, " sequence"]
    lengths: Int64[Tensor, " sequence"]
    branch_ends: Int64[Tensor, " root"]
    branches: Int64[Tensor, " branch"]
    """Those of the first root, then of the next; `branch_ends` says where a root's end."""
    longest_root: int
    longest: int

    @classmethod
    def of(cls, layout: PackedLayout) -> "Sequences":
        num_roots, lengths = len(layout.root_lengths), [*layout.root_lengths, *layout.branch_lengths]
        order = sorted(range(len(layout.branch_root)), key=layout.branch_root.__getitem__)
        counts = torch.bincount(torch.tensor(layout.branch_root, dtype=torch.long), minlength=num_roots)
        return cls(
            starts=torch.tensor([*layout.root_starts, *layout.branch_starts]),
            lengths=torch.tensor(lengths),
            branch_ends=counts.cumsum(0),
            branches=torch.tensor(order, dtype=torch.long) + num_roots,
            longest_root=max(layout.root_lengths),
            longest=max(lengths),
        )


def layers_refusal(policy: Policy) -> str | None:
    """Why torch runs the layers of this policy's updates; None if the kernel does."""
    if (refusal := native_refusal(policy)) is not None:
        return refusal
    config, decoder = policy.model.config, Decoder(policy.model)
    widths = (config.hidden_size, config.intermediate_size, decoder.heads * decoder.head_width)
    if any(width % WIDTHS for width in widths):
        return f"its widths {', '.join(map(str, widths))} are not all multiples of {WIDTHS}"
    return None


def training_forward(policy: Policy) -> ForwardPass:
    """The forward pass of updates: by the kernel, or the policy's own if `layers_refusal` has a reason."""
    if layers_refusal(policy) is not None:
        return policy.forward
    return NativeForward(policy.model, policy.compute_dtype)


class NativeForward(SharedPromptForward):
    """The shared-prompt forward pass with layers and output layer in C."""

    def __init__(self, model: torch.nn.Module, compute_dtype: torch.dtype) -> None:
        super().__init__(model, compute_dtype)  # type: ignore[arg-type]
        self.decoder = NativeLayers(self.model, compute_dtype)

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        matrix = output_layer_of(self.model, self.compute_dtype).matrix
        return native_token_logprobs(hidden, matrix, targets, temperature)


class NativeLayers(Decoder):
    """A decoder with layers in C."""

    def _block(
        self,
        index: int,
        x: Float[Tensor, "token hidden"],
        *,
        angles: Angles,
        attend: Attend,
        layers: Sequence[DecoderLayer] | None,
        wanted: Int64[Tensor, " wanted"] | None,
    ) -> Float[Tensor, "wanted hidden"]:
        assert isinstance(attend, PackedAttention)
        layer = self.layer(index)
        ((cos, sin),) = angles.values()
        heads = Heads(
            heads=self.heads,
            kv_heads=self.kv_heads,
            width=self.head_width,
            scale=layer.kind.attention.scale or self.head_width**-0.5,
            eps=self.eps,
            cos=cos[:, 0],
            sin=sin[:, 0],
        )
        qkv, out, gate_up, down = map(joined_layers, (layer.qkv, layer.out, layer.gate_up, layer.down))
        norm, of_heads = layer.norms["input"].weight, layer.norms.get("heads")
        head_norm = None if of_heads is None else of_heads.weight
        turned = _Inputs.apply(heads, x, norm, head_norm, qkv.matrix, qkv.bias)  # type: ignore[no-untyped-call]
        attended = _Attention.apply(turned, Sequences.of(attend.layout), heads)  # type: ignore[no-untyped-call]
        if wanted is not None:
            x, attended = x.index_select(0, wanted), attended.index_select(0, wanted)
        x = _Added.apply(x, attended, out.matrix, out.bias)  # type: ignore[no-untyped-call]
        made: Tensor = _Mlp.apply(x, layer.norms["mlp_input"].weight, gate_up.matrix, down.matrix, self.eps)  # type: ignore[no-untyped-call]
        return made


class _Mlp(torch.autograd.Function):
    """x + down · (silu(gate) · up),  gate, up = gate_up · norm(x)."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float) -> Tensor:
        call = MlpCall(tokens=len(x), hidden=x.shape[1], inner=down.shape[1], eps=eps)
        kept, y = x.new_empty(len(x), len(gate_up)), torch.empty_like(x)
        given = {"x": x, "norm": norm, "gate_up_panels": _panels(gate_up), "down_panels": _panels(down)}
        run_natively("mlp_forward", call, given | {"gate_up": kept, "y": y})
        ctx.save_for_backward(x, norm, gate_up, down, kept)
        ctx.eps = eps  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, gate_up, down, kept = ctx.saved_tensors  # type: ignore[attr-defined]
        call = MlpCall(tokens=len(x), hidden=x.shape[1], inner=down.shape[1], eps=ctx.eps)  # type: ignore[attr-defined]
        dx, normed, d_gate_up = torch.empty_like(x), torch.empty_like(x), torch.empty_like(kept)
        gated, d_norm = x.new_empty(len(x), down.shape[1]), _by_block(x, x.shape[1])
        given = {"x": x, "norm": norm, "gate_up_weight": gate_up, "down_weight": down, "gate_up": kept, "dy": dy}
        made = {"dx": dx, "normed": normed, "d_gate_up": d_gate_up, "gated": gated, "d_norm": d_norm}
        run_natively("mlp_backward", call, given | made)
        _, of_norm, of_gate_up, of_down, _ = ctx.needs_input_grad  # type: ignore[attr-defined]
        return (
            dx,
            d_norm[0] if of_norm else None,
            _weight_gradient(d_gate_up, normed)[0] if of_gate_up else None,
            _weight_gradient(dy, gated)[0] if of_down else None,
            None,
        )


class _Inputs(torch.autograd.Function):
    """Queries and keys with norm and rotation, and values: rotate(norm(W · norm(x) + b)), side by side."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, heads: Heads, x: Tensor, norm: Tensor, head_norm: Tensor | None, *layer: Tensor | None
    ) -> Tensor:
        weight, bias = layer
        assert weight is not None
        qkv = x.new_empty(len(x), len(weight))
        raw = None if head_norm is None else torch.empty_like(qkv)
        given = {"x": x, "norm": norm, "head_norm": head_norm, "panels": _panels(weight)}
        given |= {"bias": _bias_panels(bias), "cos": heads.cos, "sin": heads.sin}
        run_natively("inputs_forward", _inputs_call(x, heads), given | {"raw": raw, "qkv": qkv})
        ctx.save_for_backward(x, norm, head_norm, weight, raw)  # type: ignore[arg-type]
        ctx.heads = heads  # type: ignore[attr-defined]
        return qkv

    @staticmethod
    def backward(ctx: FunctionCtx, d_qkv: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, head_norm, weight, raw = ctx.saved_tensors  # type: ignore[attr-defined]
        heads: Heads = ctx.heads  # type: ignore[attr-defined]
        dx, normed, d_raw = torch.empty_like(x), torch.empty_like(x), torch.empty_like(d_qkv)
        d_norm, d_head_norm = _by_block(x, x.shape[1]), None if head_norm is None else _by_block(x, head_norm.numel())
        given = {"x": x, "norm": norm, "head_norm": head_norm, "weight": weight, "raw": raw}
        given |= {"cos": heads.cos, "sin": heads.sin, "d_qkv": d_qkv}
        made = {"dx": dx, "normed": normed, "d_raw": d_raw, "d_norm": d_norm, "d_head_norm": d_head_norm}
        run_natively("inputs_backward", _inputs_call(x, heads), given | made)
        _, _, of_norm, of_heads, of_weight, of_bias = ctx.needs_input_grad  # type: ignore[attr-defined]
        dw, db = _weight_gradient(d_raw, normed, with_bias=of_bias) if of_weight or of_bias else (None, None)
        found_heads = d_head_norm[0].view_as(head_norm) if of_heads and d_head_norm is not None else None
        return None, dx, d_norm[0] if of_norm else None, found_heads, dw, db


class _Attention(torch.autograd.Function):
    """softmax(scale · q · kᵀ) · v of each sequence, a branch over its root and itself.  Shares are computed twice."""

    @staticmethod
    def forward(ctx: FunctionCtx, qkv: Tensor, sequences: Sequences, heads: Heads) -> Tensor:
        out = qkv.new_empty(len(qkv), heads.heads * heads.width)
        run_natively("attention", _attention_call(sequences, heads), {"qkv": qkv, "out": out})
        ctx.save_for_backward(qkv)
        ctx.sequences, ctx.heads = sequences, heads  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, d_out: Tensor) -> tuple[Tensor, None, None]:
        (qkv,) = ctx.saved_tensors  # type: ignore[attr-defined]
        d_qkv = torch.empty_like(qkv)
        call = _attention_call(ctx.sequences, ctx.heads)  # type: ignore[attr-defined]
        run_natively("attention", call, {"qkv": qkv, "d_out": d_out, "d_qkv": d_qkv})
        return d_qkv, None, None


class _Added(torch.autograd.Function):
    """x + W · a + b."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y, call = torch.empty_like(x), AddedCall(tokens=len(x), inputs=a.shape[1], outputs=x.shape[1])
        run_natively(
            "added_forward", call, {"x": x, "a": a, "panels": _panels(weight), "bias": _bias_panels(bias), "y": y}
        )
        ctx.save_for_backward(a, weight)
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        da, call = torch.empty_like(a), AddedCall(tokens=len(a), inputs=a.shape[1], outputs=len(weight))
        run_natively("added_backward", call, {"weight": weight, "dy": dy, "da": da})
        _, _, of_weight, of_bias = ctx.needs_input_grad  # type: ignore[attr-defined]
        return dy, da, *(_weight_gradient(dy, a, with_bias=of_bias) if of_weight or of_bias else (None, None))


def _inputs_call(x: Tensor, heads: Heads) -> InputsCall:
    return InputsCall(
        tokens=len(x),
        hidden=x.shape[1],
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        width=heads.width,
        turned=heads.cos.shape[-1],
        eps=heads.eps,
    )


def _attention_call(sequences: Sequences, heads: Heads) -> AttentionCall:
    call = AttentionCall(heads=heads.heads, kv_heads=heads.kv_heads, width=heads.width, scale=heads.scale)
    call.num_roots = len(sequences.branch_ends)
    call.longest_root, call.longest = sequences.longest_root, sequences.longest
    for name in ("starts", "lengths", "branch_ends", "branches"):
        setattr(call, name, getattr(sequences, name).data_ptr())
    return call


def _weight_gradient(
    dy: Float[Tensor, "token outputs"], x: Float[Tensor, "token inputs"], *, with_bias: bool = False
) -> tuple[Float[Tensor, "outputs inputs"], Float[Tensor, " outputs"] | None]:
    """The gradients of W and b in W · x + b."""
    dw, db = dy.new_zeros(dy.shape[1], x.shape[1]), dy.new_zeros(dy.shape[1]) if with_bias else None
    call = WeightGradientCall(tokens=len(x), outputs=dy.shape[1], inputs=x.shape[1])
    run_natively("weight_gradient", call, {"dy": dy, "x": x, "dw": dw, "db": db})
    return dw, db


def _panels(matrix: Tensor) -> Tensor:
    return weight_panels(matrix.detach(), int(native_library().panel_columns())).contiguous()


def _bias_panels(bias: Tensor | None) -> Tensor | None:
    return padded_bias(None if bias is None else bias.detach(), int(native_library().panel_columns()))


def _by_block(x: Float[Tensor, "token hidden"], width: int) -> Float[Tensor, "block width"]:
    """Room for a gradient's sums over blocks of tokens."""
    return x.new_zeros(max(1, -(-len(x) // int(native_library().block_tokens()))), width)
