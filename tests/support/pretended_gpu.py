"""A GPU that is only pretended: values are computed on the CPU, and mistakes about devices are found.

A tensor remembers the device that it was made for, by its storage.  `device` and `is_cuda` answer that.  An operator
with tensors of both devices fails as on CUDA.  Everything that would make the CPU wait for the GPU is counted by its
place in posttrain, and so is every blocking copy to the GPU.  It knows nothing of kernels, graphs or memory.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
SOURCE = str(Path(__file__).parents[2] / "src" / "posttrain") + "/"
COPIES = SOURCE + "models/transfers.py"
READS = frozenset(
    {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "bincount"}
    | {"_unique", "_unique2", "unique_dim", "unique_consecutive"}
)
"""Operators whose result depends on values: the CPU waits for them."""
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
TAKES_SCALARS = frozenset({"masked_fill", "masked_fill_", "fill", "fill_", "copy_"})
"""Operators that read a CPU tensor of no dimension beside tensors on the GPU; pointwise ones do too."""
MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda)
HOST_ONLY = (Tensor.numpy, Tensor.__array__)


class DeviceMismatch(RuntimeError):
    """An operator got tensors of two devices."""


class PretendedGpu(TorchFunctionMode):
    """While it is entered, this thread has a GPU, `cuda:0`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        """How often the CPU waited, by function of posttrain and what it called."""
        self.copies: Counter[str] = Counter()
        """Blocking copies from the CPU to the GPU, in the same way."""
        self.on_gpu: dict[int, StorageWeakRef] = {}
        """Storages on the GPU by address; a weak reference keeps an address from being used again."""
        self._stack = ExitStack()
        self._getters: Mapping[Any, Callable[[Tensor], object]] = {
            Tensor.device.__get__: self.device_of,
            Tensor.is_cuda.__get__: lambda tensor: self.device_of(tensor) == GPU,
            Tensor.is_cpu.__get__: lambda tensor: self.device_of(tensor) == CPU,
        }

        self._replaced: Mapping[str, Callable[..., Any]] = {
            "torch.cuda.synchronize": lambda *_: self.wait("synchronize"),
            "torch.cuda.get_rng_state": lambda *_: torch.get_rng_state(),
            "torch.cuda.set_rng_state": lambda *_: None,
            "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype": self._grouped,
            "torch.autograd._engine_run_backward": self._backward,
            "posttrain.generation.decoder_steps.captured": lambda compute: compute,
        }

    def __enter__(self) -> "PretendedGpu":
        super().__enter__()
        self._stack.enter_context(_Operators(self))
        for target, replacement in self._replaced.items():
            self._stack.enter_context(patch(target, replacement))
        # torch compares devices of what is computed again, once from inside an operator, where the GPU is not seen.
        shape_and_type = {"default": lambda tensor: {"shape": tensor.shape, "dtype": tensor.dtype}}
        self._stack.enter_context(patch.dict(checkpoint._allowed_determinism_checks_to_fns, shape_and_type))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        super().__exit__(*error)

    def in_thread(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The function of another thread, which has the same GPU."""

        def entered(*given: Any) -> Any:
            there = PretendedGpu()
            there.waits, there.copies, there.on_gpu, there._replaced = self.waits, self.copies, self.on_gpu, {}
            with there:
                return run(*given)

        return entered

    def device_of(self, tensor: Tensor) -> torch.device:
        return GPU if tensor.untyped_storage()._cdata in self.on_gpu else CPU

    def place(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor, which is on this device from now on."""
        storage = tensor.untyped_storage()
        if device.type == "cuda":
            self.on_gpu[storage._cdata] = StorageWeakRef(storage)
        else:
            self.on_gpu.pop(storage._cdata, None)
        return tensor

    def wait(self, what: str) -> None:
        self.waits[f"{place_in_posttrain()} {what}"] += 1

    def copied_in(self, what: str) -> None:
        self.copies[f"{place_in_posttrain()} {what}"] += 1

    def _backward(self, *given: Any, **more: Any) -> Any:
        """Functions of the backward pass that are written in Python see the GPU too."""
        with _Again(self):
            return _engine_run_backward(*given, **more)

    def _grouped(self, lists: Any, *more: Any) -> dict[Any, Any]:
        """torch's grouping asks for devices below Python."""
        groups = _group_tensors_by_device_and_dtype(lists, *more).items()
        return {(self.device_of(found[0][0][0]), dtype): found for (_, dtype), found in groups}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in self._getters:
            return self._getters[function](*args)
        if function in MOVES:
            return self._moved(function, *args, **kwargs)
        if function in HOST_ONLY and self.device_of(args[0]) == GPU:
            raise DeviceMismatch(f"{place_in_posttrain()}: {function.__name__} of a tensor on the GPU")
        if function is Tensor.tolist and self.device_of(args[0]) == GPU:
            self.wait("tolist")
        if function is Tensor.__deepcopy__:
            return self.place(function(*args, **kwargs), self.device_of(args[0]))
        device = kwargs.pop("device", None)
        result = function(*args, **kwargs)
        if device is None:
            return result
        device = torch.device(device)
        if function in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and device.type == "cuda":
            self.copied_in(function.__name__)  # of a list, or of what is on the CPU
        for each in tree_leaves(result):
            self.place(each, device)
        return result

    def _moved(self, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`to`, `cpu` or `cuda`: a copy on another device, or what the CPU would do."""
        dtype, non_blocking, device = None, bool(kwargs.pop("non_blocking", False)), CPU
        if function is Tensor.cuda:
            device = GPU
        elif function is Tensor.to:
            given, kwargs = args, {**kwargs, **({"device": None} if kwargs.get("device", CPU) is None else {})}
            if args and isinstance(args[0], Tensor):
                device, dtype = self.device_of(args[0]), args[0].dtype
                kwargs |= dict(zip(("non_blocking", "copy"), args[1:], strict=False))
                non_blocking |= bool(kwargs.pop("non_blocking", False))
            else:
                copy = kwargs.pop("copy", False)
                parsed, dtype, blocking, layout = torch._C._nn._parse_to(*given, **kwargs)
                device, non_blocking = parsed or self.device_of(tensor), non_blocking or blocking
                kwargs = {"copy": copy, **({} if layout is None else {"memory_format": layout})}
        target = GPU if device.type == "cuda" else CPU
        source = self.device_of(tensor)
        converted = tensor if dtype is None and not kwargs else Tensor.to(tensor, dtype=dtype or tensor.dtype, **kwargs)
        if target == source:
            return converted
        if target == CPU and not non_blocking:
            self.wait(function.__name__)
        if target == GPU and not non_blocking:
            self.copied_in(function.__name__)
        if converted.requires_grad and torch.is_grad_enabled():
            return _Moved.apply(converted, self, target, source)  # type: ignore[no-any-return, no-untyped-call]
        return self.place(converted.detach().clone(), target).requires_grad_(converted.requires_grad)


class _Again(TorchFunctionMode):
    """A mode within a function that it has been asked about."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.gpu.__torch_function__(function, types, args, kwargs)


class _Moved(torch.autograd.Function):
    """A copy on another device; its gradient goes back to the first one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gpu: PretendedGpu, target: torch.device, source: torch.device) -> Tensor:
        ctx.gpu, ctx.source = gpu, source
        return gpu.place(tensor.clone(), target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.gpu.place(gradient.clone(), ctx.source), None, None, None


class _Operators(TorchDispatchMode):
    """Looks at the devices of every operator, those of the backward pass included."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode a composite operator arrives whole
            result = operator.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name, device_of = operator.overloadpacket.__name__, self.gpu.device_of
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_gpu = any(device_of(each) == GPU for each in tensors)
        if on_gpu:
            self._check(name, operator, args, kwargs, tensors)
        result = operator(*args, **kwargs)
        if on_gpu and not (name == "copy_" and device_of(args[0]) == CPU):
            for each in tree_leaves(result):
                if isinstance(each, Tensor):
                    self.gpu.place(each, GPU)
        return result

    def _check(self, name: str, operator: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        device_of = self.gpu.device_of
        if name in READS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.gpu.wait(name)
        if name == "copy_" and device_of(args[0]) != device_of(args[1]):
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                (self.gpu.wait if device_of(args[0]) == CPU else self.gpu.copied_in)(name)
            return
        scalars = name in TAKES_SCALARS or torch.Tag.pointwise in operator.tags
        if name in INDEXING and device_of(args[0]) == GPU:
            self._check_index(name, args)
            tensors, scalars = [args[0], *args[2:3]], True
        written = name.endswith("_") and isinstance(args[0], Tensor)
        strange = [each for each in tensors if device_of(each) == CPU and not (scalars and each.ndim == 0)]
        strange += [args[0]] if written and device_of(args[0]) == CPU else []
        if strange:
            shapes = ", ".join(f"{[*each.shape]} on {device_of(each).type}" for each in tensors)
            raise DeviceMismatch(f"{place_in_posttrain()}: {name} of tensors {shapes}")

    def _check_index(self, name: str, args: Any) -> None:
        """Indices may be on the CPU, and are then copied; those of a mask are found by a wait, or by filling."""
        indices = [each for each in args[1] if each is not None]
        for index in indices:
            if self.gpu.device_of(index) == CPU:
                self.gpu.copied_in(f"{name} by a list or a CPU tensor")
            elif index.dtype == torch.bool and not (name != "index" and len(indices) == 1 and args[2].numel() == 1):
                self.gpu.wait(f"{name} by a mask")


def place_in_posttrain() -> str:
    """File and function of the innermost call of posttrain, apart from its copies; or else of the test."""
    frame, asking = sys._getframe(1), ""
    while frame is not None:
        found, function = frame.f_code.co_filename, frame.f_code.co_name
        if found.startswith(SOURCE) and found != COPIES:
            return f"{found.removeprefix(SOURCE)}:{function}"
        if "/tests/" in found and found != __file__ and not asking:
            asking = f"{Path(found).name}:{function}"
        frame = frame.f_back
    return asking or "elsewhere"
