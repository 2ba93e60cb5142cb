"""Which model to load, and how: the `model` section of a recipe."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Gt

from posttrain.errors import UserError, require
from posttrain.options.adapter import AdapterOptions, is_adapter_folder, run_model
from posttrain.options.bounds import Bounded

BUNDLED = "bundled"
"""The value of `path` that means the small model which comes with this package."""
BUNDLED_MODELS = {
    BUNDLED: "countdown-base",
    "bundled-instruct": "format-adherence-base",
    "bundled-prose": "period-count-base",
}
"""Values of `path` that mean models which come with this package; each is named after the recipe that makes it."""
HUB_ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Bounded):
    """The model that is trained, evaluated or asked."""

    path: str = BUNDLED
    """A local folder: of a model that transformers' `from_pretrained` reads, of an adapter in peft's format, or of a
    run; a model of the hub as `org/name` or `org/name@revision`, from the local cache or else downloaded once; or a
    model of this package: "bundled" (1.3 M parameters, searches for Countdown answers), "bundled-instruct" (.37 M,
    answers additions in chat form) or "bundled-prose" (.45 M, writes plain sentences)."""
    revision: str = ""
    """Of a model of the hub: its branch, tag or commit; empty is the main branch."""
    trust_remote_code: bool = False
    """Run the Python code that a model's folder brings, where transformers has none for it: anything that code can do
    on this machine, it may then do."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of matrix products and attention; auto is bfloat16 on CUDA and float32 on a CPU.  With bfloat16 the
    sampler's log-probs agree with the trainer's to about 1e-2 nats instead of 1e-5."""
    weights: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights in memory.  auto is float32, and for frozen matrices of linear layers bfloat16 where they are
    stored and computed with in it, which changes no number.  bfloat16 halves the memory of all; trained so, most
    weights stand still at the usual learning rates, and the plan says what share of them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; auto is cuda where there is one, else cpu."""
    attn_implementation: str = "auto"
    """Attention of the model's own forward pass, by transformers' names: eager, sdpa, flash_attention_2 ...; auto is
    the one that transformers takes.  The shared-prompt pass has its own."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it computed: less memory, about a third
    more time, the same gradients."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained, by name or pattern, such as `*embed_tokens*` or `*.layers.[0-3].*`; without an
    adapter, which leaves all of them frozen."""
    context: Annotated[int, Gt(1)] | None = None
    """Tokens of a prompt and its completion together; null is as many as the model was made for.  Rotary angles that
    depend on the length (`longrope`, `dynamic`) are those of this one."""
    stop_tokens: tuple[str, ...] = ()
    """Texts, one token each, that end a completion beside the stop tokens that the model names itself."""
    chat_template: str = ""
    """File of a chat template, in Jinja, in place of the model's own; it is saved with the trained model."""
    template_options: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the chat template, such as `{enable_thinking: false}`; one that it does not read is an error."""
    adapter: AdapterOptions | None = None
    """Train a low-rank adapter over the frozen model (LoRA); null trains the model itself, or goes on with the adapter
    that `path` holds."""
    quantization: Literal["nf4"] | None = None
    """Keep the frozen model's linear layers in 4 bits (QLoRA; extra `qlora`): NF4 with quantised scales, products in
    `dtype`.  Only with an adapter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        frozen = self.quantization is None or self.trains_adapter
        rule = "keeps weights in 4 bits, which cannot be trained; give an adapter as well, model.adapter"
        require(frozen, self, "quantization", rule)
        no_effect = "freezes what an adapter leaves frozen anyway; say by model.adapter.targets which layers learn"
        require(not (self.frozen and self.trains_adapter), self, "frozen", no_effect)
        if self.weights == "bfloat16" and self.dtype == "float32":
            raise UserError("weights = bfloat16 with dtype = float32 computes with what is not there; leave dtype out")
        if self.revision and self.hub_name is None:
            raise UserError(f"revision = {self.revision} is of a model of the hub, org/name, and path is {self.path}")

    @property
    def folder(self) -> Path:
        """The folder that `path` means: of a run, what it has saved."""
        return run_model(Path(self.path))

    @property
    def is_bundled(self) -> bool:
        """Whether it is a model that comes with this package."""
        return self.path in BUNDLED_MODELS

    @property
    def trains_adapter(self) -> bool:
        """Whether it is an adapter that is trained: a new one, or that of the folder."""
        return self.adapter is not None or (not self.is_bundled and is_adapter_folder(self.folder))

    @property
    def hub_name(self) -> str | None:
        """The model's name on the hub, org/name, where `path` is one: no folder's, and below none that is here."""
        match = HUB_ID.fullmatch(self.path)
        here = Path(self.path).is_dir() or (Path(self.path).parent.is_dir() and not self.hub_revision)
        return None if match is None or here else match["name"]

    @property
    def hub_revision(self) -> str:
        """The revision of a model of the hub: `revision`, or what follows the @; empty where neither is given."""
        match = HUB_ID.fullmatch(self.path)
        return self.revision or (match["revision"] or "" if match is not None else "")

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
        if self.is_bundled or self.hub_name is not None:
            return
        folder = self.folder
        if not folder.is_dir():
            raise UserError(
                f"model.path = {self.path}: no such folder.  Give the folder of a model that is on this machine"
                " (config.json, tokenizer and weights), a model of the hub as org/name, or one of this package:"
                f" {', '.join(BUNDLED_MODELS)}."
            )
        if is_adapter_folder(folder) or (folder / "config.json").is_file():
            return
        raise UserError(
            f"model.path = {self.path}: the folder holds no config.json, so it is no model that transformers can"
            " load.  A run keeps its trained model in RUN/model, or its adapter in RUN/adapter."
        )
