"""Which model to load, and how: the `model` section of a recipe."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain.errors import UserError, require
from posttrain.options.adapter import AdapterOptions, is_adapter_folder, run_model

BUNDLED = "bundled"
"""The value of `path` that means the small model which comes with this package."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model that is trained, evaluated or asked."""

    path: str = BUNDLED
    """A local folder that transformers' `from_pretrained` reads, that of an adapter in peft's format or of a run, or
    "bundled": the 1.3 M-parameter Countdown model of this package."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the forward pass.  bfloat16 is autocast over float32 weights: faster, and the sampler's log-probs
    then agree with the trainer's to about 1e-2 nats instead of 1e-5."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; auto is cuda where there is one, else cpu."""

    adapter: AdapterOptions | None = None
    """Train a low-rank adapter over the frozen model (LoRA); null trains the model itself, or goes on with the adapter
    that `path` holds."""
    quantization: Literal["nf4"] | None = None
    """Keep the frozen model's linear layers in 4 bits (QLoRA; extra `qlora`): NF4 with quantised scales, products in
    `dtype`.  Only with an adapter."""

    def __post_init__(self) -> None:
        frozen = self.quantization is None or self.trains_adapter
        rule = "keeps weights in 4 bits, which cannot be trained; give an adapter as well, model.adapter"
        require(frozen, self, "quantization", rule)

    @property
    def folder(self) -> Path:
        """The folder that `path` means: of a run, what it has saved."""
        return run_model(Path(self.path))

    @property
    def trains_adapter(self) -> bool:
        """Whether it is an adapter that is trained: a new one, or that of the folder."""
        return self.adapter is not None or (self.path != BUNDLED and is_adapter_folder(self.folder))

    def require_folder(self) -> None:
        """Fail early, before anything heavy is imported, when `path` names nothing that can be loaded."""
        if self.path == BUNDLED:
            return
        folder = self.folder
        if not folder.is_dir():
            raise UserError(
                f"model.path = {self.path}: no such folder.  Give the folder of a model that is on this machine"
                f' (config.json, tokenizer and weights), or "{BUNDLED}".'
            )
        if not (folder / "config.json").is_file() and not is_adapter_folder(folder):
            raise UserError(
                f"model.path = {self.path}: the folder holds no config.json, so it is no model that transformers can"
                " load.  A run keeps its trained model in RUN/model, or its adapter in RUN/adapter."
            )
