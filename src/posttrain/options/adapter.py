"""A low-rank adapter over a frozen model: the option `model.adapter` of a recipe."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from posttrain.options.bounds import Bounded, PositiveFloat, PositiveInt
from posttrain.options.rules import Rule

ALL_LINEAR = "all-linear"
"""The target for every linear layer but embeddings and output layer."""
EXPERTS = "experts"
"""The target for the experts of a mixture, which are not linear layers."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file that marks a folder as an adapter in peft's format."""


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(Bounded):
    """LoRA: y = W·x + s·B·(A·x) with W frozen and A, B trained.  Hu et al. 2021, arXiv:2106.09685, eq. 3."""

    rank: PositiveInt = 16
    """Rows of A and columns of B.  The adapter's size grows with it; the best learning rate does not."""
    alpha: PositiveFloat = 32.0
    """The adapter is scaled by s = alpha / rank."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the adapter's inputs that updates set to zero, the others scaled up.  Sampling and evaluation drop
    nothing, so ratios to the sampler are off 1 by that noise."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Layers that get an adapter: names such as q_proj, endings such as mlp.down_proj, patterns of whole names such as
    `*.layers.[01].*`; "all-linear" is every linear layer but embeddings and output layer; "experts" are the experts of
    a mixture, which all-linear does not include."""
    rslora: bool = False
    """Scale by s = alpha / √rank, which keeps the size of updates as the rank grows.  Kalajdzievski 2023,
    arXiv:2312.03732."""
    save: Literal["adapter", "merged", "both"] = "adapter"
    """What a finished run keeps: RUN/adapter in peft's format, RUN/model with the adapter merged in, or both."""

    rules = (
        Rule("dropout", lambda o: EXPERTS not in o.targets or o.dropout == 0, "is not supported on experts.  Use 0."),
        Rule("targets", lambda o: o.targets, f"names no layer.  Use [{ALL_LINEAR}] or names of layers."),
    )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def is_adapter_folder(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def is_run_folder(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and not (folder / "config.json").is_file()


def run_model(folder: Path) -> Path:
    """What the run in a folder has saved: its whole model, or else its adapter; any other folder as it is."""
    if not is_run_folder(folder) or is_adapter_folder(folder):
        return folder
    model, adapter = folder / "model", folder / "adapter"
    return adapter if is_adapter_folder(adapter) and not (model / "config.json").is_file() else model
