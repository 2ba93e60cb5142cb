"""A policy whose parameters, gradients and moments are split over ranks by torch FSDP2; only this file knows it.

    policy = loaded_by_first(ranks, load)[0]   # weights on the first rank, none on the others
    local = sharded(policy)                    # sends and splits layer by layer, before the optimiser is made
    other = parted_copy(local)                 # the same weights once more, in parts
    local.forward.completion_logprobs(…)       # gathers each layer when it begins and frees it when it ends
    loss.backward()                            # leaves this rank's part of the gradient, *summed* over all ranks
    with whole_weights(local) as policy: …     # ordinary weights on every rank, to sample or to measure
    policy = whole_copy(local)                 # ordinary weights in memory of the first rank, to send or to save

A pass over tokens, `whole_weights` and `whole_copy` are *collective*: every rank of the mesh calls them, as often and
in the same order.  A rank without tokens runs some micro-batch with token weights 0.  Gradients are sums over fixed
token weights, so they are summed over ranks and never averaged.  They are summed in every backward pass: nothing has to
be called after the last micro-batch, and no rank ever keeps a whole gradient.  See decision 021.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import swap_tensors
from transformers import PreTrainedModel

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import is_4_bit
from posttrain.models.forward import (
    CompletionBatch,
    ForwardNeeds,
    ModelForward,
    PlainForward,
    SharedPromptForward,
    TokenParts,
    sampled_tokens,
    token_parts,
)
from posttrain.models.model_outputs import recomputable_layers
from posttrain.models.policy import SHARDED, Policy, weights_digest
from posttrain.models.shared_prompt.decoder import Decoder
from posttrain.ranks.group import ONE_RANK, RankGroup

Beside = TypeVar("Beside")
Head = TypeVar("Head", bound=nn.Module)
Model = TypeVar("Model", bound=nn.Module)
SKELETON = "_skeleton"
"""Attribute of a sharded head: the same without weights."""
INSIDE = "run_inside"
"""A method of sharded modules: `run_inside(function, *args)` calls it while the module's weights are whole."""


def loaded_by_first(
    ranks: RankGroup, load: Callable[[], tuple[Policy, Beside]], *, may_send: bool = True
) -> tuple[Policy, Beside]:
    """The result of `load`, called on the first rank.  The others get the policy without weights until it is `sharded`.

    All ranks call it.  Models with 4-bit layers or classes outside transformers (of the model or its tokenizer) are
    loaded by every rank, and so is a caller's policy (`may_send=False`).  Raises RunError if these weights differ.
    """
    if ranks.size == 1:
        return load()
    loaded = None if ranks.rank else load()
    ranks.meet()  # a collective would limit the seconds of loading
    sent = None
    if loaded is not None and may_send and can_be_sent(loaded[0]):
        bare = without_weights(loaded[0].model, set())
        sent = loaded[0].device.type, replace(over(loaded[0], bare), ranks=ONE_RANK), loaded[1]
    sent = ranks.broadcast(sent)
    if sent is not None:
        device, bare_policy, beside = sent
        ranks.mesh(torch.device(device))  # on which the others will have their parts
        policy, beside = loaded or (bare_policy, beside)
    else:
        policy, beside = loaded or load()
        ranks.meet()
        ranks.agree("the weights", lambda: weights_digest(policy.model))
    return replace(policy, ranks=ranks), beside


def can_be_sent(policy: Policy) -> bool:
    """Whether another rank, which has not loaded the model's own code, can unpickle it; layers in 4 bits stay whole."""
    classes = type(policy.model), type(policy.tokenizer)
    known = all(each.__module__.startswith("transformers.") for each in classes)
    return known and not any(is_4_bit(each) for each in policy.model.modules())


def sharded(policy: Policy) -> Policy:
    """The policy with each parameter split over its ranks, all of which get the numbers of the first one.

    Collective.  The model is changed in place, once.  Make its optimiser after.  4-bit layers stay whole on every rank.
    With one rank it is the policy itself.

    All policies of one model share one sharded pass.  Another, unsharded policy of the model sets its kind of pass
    (shared prompt or plain) for all of them, and what `whole_weights` yields: use one kind once training has begun.

    Raises UserError for a forward pass of your own, and for trained weights of several types.
    """
    mesh, forward = policy.ranks.mesh(policy.device), sharded_forward(policy)
    if mesh is None:
        return policy
    if forward is None:
        forward = ShardedForward(policy, mesh, partial(from_first, mesh))
    elif not isinstance(policy.forward, ShardedForward):
        forward.pass_as(policy)
    return replace(policy, forward=forward)


def parted_copy(policy: Policy, types: Mapping[int, torch.dtype] | None = None, *, trained: bool = True) -> Policy:
    """A sharded copy of this sharded policy, made layer by layer; collective.

    `types` are other types of some parameters, by their id.  With `trained=False` nothing requires a gradient.  Frozen
    parameters are copied too; only layers in 4 bits are shared.
    """
    forward, others = sharded_forward(policy), types or {}
    assert forward is not None, "copies of whole policies are whole"
    empty, sources = dict[int, nn.Parameter](), dict[nn.Parameter, nn.Parameter]()
    for bare, source in zip(forward.skeleton.parameters(), policy.model.parameters(), strict=True):
        if bare.is_meta:
            made = torch.empty_like(bare, dtype=others.get(id(source), bare.dtype))
            empty[id(bare)] = nn.Parameter(made, source.requires_grad and trained)
            sources[empty[id(bare)]] = source
        else:
            empty[id(bare)] = bare
    model = copy.deepcopy(forward.skeleton, cast(dict[int, Any], empty))
    copied = over(replace(policy, forward=forward.whole.forward), model)
    made_parts = ShardedForward(copied, forward.mesh, lambda each: whole(sources[each].detach()).to(each.dtype))
    return replace(copied, forward=made_parts)


def over(policy: Policy, model: PreTrainedModel) -> Policy:
    """The policy over another object of its model, through the same pass."""
    assert isinstance(policy.forward, SharedPromptForward | PlainForward), "others are never sharded"
    return replace(policy, model=model, forward=type(policy.forward)(model, policy.compute_dtype))


def from_first(mesh: DeviceMesh, parameter: nn.Parameter) -> Tensor:
    """The numbers of the mesh's first rank, on all of them."""
    tensor = torch.empty_like(parameter, device=mesh.device_type) if parameter.is_meta else parameter.detach()
    dist.broadcast(tensor, group=mesh.get_group(), group_src=0)
    return tensor


def sharded_forward(policy: Policy) -> "ShardedForward | None":
    """The pass of a sharded model, also for the policy that it was before; None for a whole one."""
    found: ShardedForward | None = vars(policy.model).get(SHARDED)
    return found


def shard_head(module: nn.Module, policy: Policy) -> None:
    """Split a small module over the ranks of a policy, in place, if there are several: one that is called as a head."""
    mesh = policy.ranks.mesh(policy.device)
    if mesh is not None and SKELETON not in vars(module):
        vars(module)[SKELETON] = (without_weights(module, set()),)  # in a tuple, as no part of the module
        _split(module, mesh, partial(from_first, mesh), reshard=True)


@contextmanager
def whole_weights(policy: Policy) -> Iterator[Policy]:
    """Inside, every rank holds the whole model: yields the policy for its weights now; collective.

    Yields the same object each time, for which an engine may be made once, until `sharded` gets another policy of the
    model.  A policy that is not sharded is yielded itself.  For inference: take no optimiser step and no
    `state_dict()` inside.
    """
    forward = sharded_forward(policy)
    if forward is None:
        yield policy
    else:
        with forward.gathered():
            yield forward.whole


def whole_copy(policy: Policy) -> Policy | None:
    """The policy with ordinary weights in CPU memory, on the mesh's first rank; None on others.

    Collective.  Goes tensor by tensor, so that the other ranks need room for one.  A policy that is not sharded is
    returned itself.
    """
    forward = sharded_forward(policy)
    return policy if forward is None else forward.copied()


def led_copy(policy: Policy) -> Policy:
    """`whole_copy` on rank 0, which has the others call it too; a policy that is not sharded is returned itself."""
    if sharded_forward(policy) is None:
        return policy
    with policy.ranks.leading("whole_copy"):
        copied = whole_copy(policy)
    assert copied is not None, "only rank 0 leads"
    return copied


def own_part(tensor: Tensor) -> Tensor:
    """This rank's numbers of a tensor: all of them unless it is split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_head(module: Head) -> Head:
    """A small module with whole weights, on all ranks; collective if it is sharded, else the module itself."""
    (skeleton,) = vars(module).get(SKELETON, (None,))
    if skeleton is None:
        return module
    pairs = zip(skeleton.parameters(), module.parameters(), strict=True)
    filled = {id(empty): nn.Parameter(whole(each.detach()), each.requires_grad) for empty, each in pairs}
    made: Head = copy.deepcopy(skeleton, cast(dict[int, Any], filled))
    return made


def whole(tensor: Tensor) -> Tensor:
    """A tensor or the whole one of which it is this rank's part; collective for such a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, if `like` is a part; otherwise the tensor itself."""
    if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor
    # Every rank has the whole tensor, so none is sent.
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


class ShardedForward:
    """A forward pass that gathers the weights of each layer for as long as it runs, forward and backward.

    Embeddings, last norm and output layer are gathered from the beginning of a pass to the end of its backward pass.
    """

    def __init__(self, policy: Policy, mesh: DeviceMesh, numbers: Callable[[nn.Parameter], Tensor]) -> None:
        """`numbers` gives those of each parameter on all ranks, one parameter after the other."""
        self.pass_as(policy)
        policy.require_as_made()
        require_shardable(policy.model)
        self.mesh, self.is_whole = mesh, False
        kept = {each for module in policy.model.modules() if is_4_bit(module) for each in module.parameters()}
        self.skeleton = without_weights(policy.model, kept)
        self.layers = recomputable_layers(policy.model)
        for module in (*reversed(self.layers), policy.model):  # from the inside out
            _split(module, mesh, numbers, reshard=module is not policy.model, ignored=kept)
        vars(policy.model)[SHARDED] = self
        assert all(isinstance(each, DTensor) for each in policy.model.parameters() if each.requires_grad)
        run_inside(policy.model, lambda: None)  # so that FSDP knows its root before any layer runs
        for part in self._modules:  # so that it knows what is trained, even if a first pass runs without adapters
            part.unshard()
            part.reshard()

    def pass_as(self, policy: Policy) -> None:
        """Take the way of this policy's pass."""
        if isinstance(policy.forward, SharedPromptForward):
            self.inner: ModelForward = ShardedSharedPrompt(policy.model, policy.compute_dtype)
        elif isinstance(policy.forward, PlainForward):
            self.inner = PlainForward(policy.model, policy.compute_dtype)
        else:
            fault = f"policy: its forward pass is a {type(policy.forward).__name__}, which cannot be sharded"
            raise UserError(f"{fault}.  Use one rank, or make the policy by posttrain.as_policy.")
        self.whole, self.padded = policy, policy.forward.padded

    def completion_logprobs(self, batch: CompletionBatch, needs: ForwardNeeds) -> TokenParts:
        assert not self.is_whole, "inside whole_weights, use the policy that it yields"
        has_graph = needs.gradient and torch.is_grad_enabled()
        with torch.set_grad_enabled(has_graph):
            hidden = cast(Tensor, run_inside(self.whole.model, partial(self.inner.completion_hidden, batch)))
        parts = token_parts(self.inner, hidden, sampled_tokens(batch).to(hidden.device), needs)
        if not has_graph:  # no backward pass will free the output layer, which the distributions still need
            if parts.distributions is not None:
                layer = parts.distributions.output_layer.copy()
                parts = replace(parts, distributions=replace(parts.distributions, output_layer=layer))
            self._free()
        return parts

    @contextmanager
    def gathered(self) -> Iterator[None]:
        if self.is_whole:  # by an outer context
            yield
            return
        root = cast(FSDPModule, self.whole.model)
        self.is_whole = True
        root.set_reshard_after_forward(False)
        for module in self._modules:
            module.unshard()
        try:
            yield
        finally:
            for layer in self._modules[1:]:
                layer.set_reshard_after_forward(True, recurse=False)
            self._free()
            self.is_whole = False

    @torch.no_grad()
    def copied(self) -> Policy | None:
        keeps = self.mesh.get_local_rank() == 0
        filled: dict[int, nn.Parameter] = {}
        pairs = zip(self.skeleton.parameters(), self.whole.model.parameters(), strict=True)
        for empty, parameter in pairs:
            if isinstance(parameter, DTensor):
                tensor = whole(parameter.detach())
                if keeps:
                    filled[id(empty)] = nn.Parameter(tensor.cpu(), parameter.requires_grad)
            else:
                filled[id(empty)] = parameter
        if not keeps:
            return None
        return over(self.whole, copy.deepcopy(self.skeleton, cast(dict[int, Any], filled)))

    @property
    def _modules(self) -> list[FSDPModule]:
        return [cast(FSDPModule, module) for module in (self.whole.model, *self.layers)]

    def _free(self) -> None:
        for module in self._modules:
            module.reshard()


class ShardedDecoder(Decoder):
    """Each layer runs while its weights are whole, and keeps no copy of them for the backward pass."""

    keeps_copies = False

    def _block(self, index: int, x: Tensor, **rest: Any) -> Tensor:
        # x is an argument, because FSDP hooks its backward pass to tensors among arguments and results.
        return cast(Tensor, run_inside(self.block(index), partial(super()._block, index, **rest), x))


class ShardedSharedPrompt(SharedPromptForward):
    """The shared-prompt pass over a sharded model."""

    def __init__(self, model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
        super().__init__(model, compute_dtype)
        self.decoder = ShardedDecoder(model, compute_dtype)


def run_inside(module: nn.Module, function: Callable[..., Tensor | None], *args: Tensor) -> Tensor | None:
    """The function's result, called while the weights of a sharded module are whole."""
    return cast(Tensor | None, getattr(module, INSIDE)(function, *args))


def require_shardable(model: nn.Module) -> None:
    """Refuse trained weights of several types, and weights that are a single number."""
    types = sorted({str(each.dtype).removeprefix("torch.") for each in model.parameters() if each.requires_grad})
    if len(types) > 1:
        fault = f"model: its trained weights have {len(types)} types ({', '.join(types)}), which cannot be sharded"
        raise UserError(f"{fault}.  Set model.weights = float32, or use one rank.")
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise UserError(f"model: its weight {name} is one number, which cannot be sharded.  Use one rank.")


def without_weights(model: Model, kept: set[nn.Parameter]) -> Model:
    """The model with empty weights on the meta device, except the kept ones, which are shared."""
    empty = {
        id(each): each if each in kept else nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
        for each in model.parameters()
    }
    return copy.deepcopy(model, empty)


def _split(
    module: nn.Module,
    mesh: DeviceMesh,
    numbers: Callable[[nn.Parameter], Tensor],
    *,
    reshard: bool,
    ignored: Set[nn.Parameter] = frozenset(),
) -> None:
    for parameter in module.parameters():
        if parameter not in ignored and not isinstance(parameter, DTensor):  # or it is a part already
            found = numbers(parameter)
            if parameter.is_meta:
                swap_tensors(parameter, nn.Parameter(found, parameter.requires_grad))
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, ignored_params=set(ignored))
    split = cast(FSDPModule, module)
    split.set_gradient_divide_factor(1.0)  # a sum, not a mean;
    split.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    setattr(module, INSIDE, lambda function, *args: function(*args))
    register_fsdp_forward_method(module, INSIDE)
