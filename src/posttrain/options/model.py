"""Which model to load, and how: the `model` section of a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from posttrain.errors import UserError

BUNDLED = "bundled"
"""The value of `path` that means the small model which comes with this package."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model that is trained, evaluated or asked."""

    path: str = BUNDLED
    """A local folder that transformers' `from_pretrained` reads, or "bundled": the 1.3 M-parameter Countdown model of
    this package."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the forward pass.  bfloat16 is autocast over float32 weights: faster, and the sampler's log-probs
    then agree with the trainer's to about 1e-2 nats instead of 1e-5."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; auto is cuda where there is one, else cpu."""
    chat_template: str = ""
    """File of a chat template, in Jinja, in place of the model's own; it is saved with the trained model."""
    template_options: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the chat template, such as `{enable_thinking: false}`; one that it does not read is an error."""

    def require_files(self) -> None:
        """Fail early, before anything heavy is imported, when an option names nothing that can be loaded."""
        self.require_folder()
        if self.chat_template and not Path(self.chat_template).is_file():
            raise UserError(
                f"model.chat_template = {self.chat_template}: no such file.  Give the file of a Jinja template, such as"
                " the chat_template.jinja of a model's folder; paths are relative to the folder you run in."
            )

    def require_folder(self) -> None:
        """Refuse a `path` that names nothing that can be loaded."""
        if self.path == BUNDLED:
            return
        folder = Path(self.path)
        if not folder.is_dir():
            raise UserError(
                f"model.path = {self.path}: no such folder.  Give the folder of a model that is on this machine"
                f' (config.json, tokenizer and weights), or "{BUNDLED}".'
            )
        if not (folder / "config.json").is_file():
            raise UserError(
                f"model.path = {self.path}: the folder holds no config.json, so it is no model that transformers can"
                " load.  A run keeps its trained model in RUN/model."
            )
