"""A low-rank adapter over a frozen model: the option `model.adapter` of a recipe."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from posttrain.errors import require
from posttrain.options.bounds import Bounded, PositiveFloat, PositiveInt

ALL_LINEAR = "all-linear"
"""The target that stands for every linear layer but embeddings and output layer."""
EXPERTS = "experts"
"""The target that stands for the experts of a mixture, which are no linear layers."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file by which the folder of an adapter, in peft's format, is told."""


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(Bounded):
    """LoRA: y = W·x + s·B·(A·x) with W frozen and A, B trained.  Hu et al. 2021, arXiv:2106.09685, eq. 3."""

    rank: PositiveInt = 16
    """Rows of A and columns of B; the adapter's size grows with it, the best learning rate does not."""
    alpha: PositiveFloat = 32.0
    """The adapter is scaled by s = alpha / rank."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the adapter's inputs that is zeroed in updates, the others scaled up; sampling and evaluation drop
    nothing.  The update's ratios to what sampled are then off 1 by that noise."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Layers that get an adapter: names such as q_proj, endings such as mlp.down_proj, patterns of whole names such as
    `*.layers.[01].*`; "all-linear" is every linear layer but embeddings and output layer, "experts" are those of a
    mixture, which all-linear does not reach."""
    rslora: bool = False
    """Scale by s = alpha / √rank instead, which keeps the size of updates as the rank grows.  Kalajdzievski 2023,
    arXiv:2312.03732."""
    save: Literal["adapter", "merged", "both"] = "adapter"
    """What a finished run keeps: RUN/adapter, in peft's format, or RUN/model, the base with the adapter added into its
    weights in float32, or both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = EXPERTS not in self.targets or self.dropout == 0
        require(
            plain, self, "dropout", "is not supported on experts, as in peft; use 0, or leave experts out of targets"
        )
        require(len(self.targets) > 0, self, "targets", f"name no layer; use [{ALL_LINEAR}] or names of layers")

    @property
    def scale(self) -> float:
        """s, by which the product of the two matrices is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds an adapter in peft's format and no whole model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def is_run_folder(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and not (folder / "config.json").is_file()


def run_model(folder: Path) -> Path:
    """What the run in a folder has saved: its whole model, or else its adapter; any other folder as it is."""
    if not is_run_folder(folder) or is_adapter_folder(folder):
        return folder
    model, adapter = folder / "model", folder / "adapter"
    return adapter if is_adapter_folder(adapter) and not (model / "config.json").is_file() else model
