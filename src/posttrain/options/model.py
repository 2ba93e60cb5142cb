"""Which model to load, and how: the `model` section of a recipe."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from posttrain.errors import UserError
from posttrain.options.bounds import Bounded, PositiveFloat, PositiveInt, Rule

ALL_LINEAR = "all-linear"
"""The target for every linear layer except embeddings and output layer."""
EXPERTS = "experts"
"""The target for the experts of a mixture, which are not linear layers."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file that marks a folder as an adapter in peft's format."""


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(Bounded):
    """LoRA: y = W·x + s·B·(A·x) with W frozen and A, B trained.  Hu et al. 2021, arXiv:2106.09685, eq. 3."""

    rank: PositiveInt = 16
    """Rows of A and columns of B.  A higher rank makes the adapter larger; the best learning rate stays the same."""
    alpha: PositiveFloat = 32.0
    """The adapter is scaled by s = alpha / rank."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout of the adapter's inputs, active only during updates.  Sampling and evaluation do not drop, so importance
    ratios differ from 1 by the dropout noise."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Layers that get an adapter: names such as q_proj, endings such as mlp.down_proj, patterns of whole names such as
    `*.layers.[01].*`.  "all-linear" is every linear layer except embeddings and output layer; "experts" are the experts
    of a mixture, which all-linear does not include."""
    rslora: bool = False
    """Scale by s = alpha / √rank, which keeps the size of updates as the rank grows.  Kalajdzievski 2023,
    arXiv:2312.03732."""
    save: Literal["adapter", "merged", "both"] = "adapter"
    """What a finished run saves: RUN/adapter in PEFT's format, RUN/model with the adapter merged in, or both."""

    rules = (
        Rule("dropout", lambda o: EXPERTS not in o.targets or o.dropout == 0, "is not supported on experts.  Use 0."),
        Rule("targets", lambda o: o.targets, f"is empty.  Use [{ALL_LINEAR}] or names of layers."),
    )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def is_adapter_folder(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def is_run_folder(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and not (folder / "config.json").is_file()


def run_model(folder: Path) -> Path:
    """What the run in a folder has saved: its whole model, or else its adapter; any other folder unchanged."""
    if not is_run_folder(folder) or is_adapter_folder(folder):
        return folder
    model, adapter = folder / "model", folder / "adapter"
    return adapter if is_adapter_folder(adapter) and not (model / "config.json").is_file() else model


BUNDLED = "bundled"
"""The value of `path` for this package's small model."""
BUNDLED_MODELS = {
    BUNDLED: "countdown-base",
    "bundled-instruct": "format-adherence-base",
    "bundled-prose": "period-count-base",
}
"""Values of `path` for the models of this package, and the recipes that make them."""
HUB_ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Bounded):
    """The model to train, evaluate or sample."""

    path: str = BUNDLED
    """The model: a local folder with a model that transformers' `from_pretrained` reads, an adapter in PEFT's format,
    or a run; a hub model as `org/name` or `org/name@revision`, downloaded once; or a model of this package: "bundled"
    (1.3 M parameters, searches for Countdown answers), "bundled-instruct" (.37 M, answers additions in chat form) or
    "bundled-prose" (.45 M, writes plain sentences)."""
    revision: str = ""
    """Branch, tag or commit of a hub model; empty: the main branch."""
    trust_remote_code: bool = False
    """Run the Python code in the model's folder if transformers does not support the model.  That code can do anything
    on this machine."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of matrix products and attention; auto: bfloat16 on CUDA and float32 on a CPU.  With bfloat16 the
    sampler's log-probs agree with the trainer's to about 1e-2 nats instead of 1e-5."""
    weights: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights in memory.  auto: float32, except that frozen linear layers stored and used in bfloat16
    stay in bfloat16, which does not change any number.  bfloat16 halves all memory, but at the usual learning rates
    most weights then do not move; the plan says what share."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto: cuda if available, else cpu."""
    attn_implementation: str = "auto"
    """Attention of the model's forward pass, by transformers' names: eager, sdpa, flash_attention_2 ...; auto:
    transformers chooses.  It does not change the shared-prompt pass."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time, the same gradients."""
    frozen: tuple[str, ...] = ()
    """Parameters to freeze, by name or pattern, such as `*embed_tokens*` or `*.layers.[0-3].*`.  Not for adapters,
    which freeze the whole model."""
    context: Annotated[int, Gt(1)] | None = None
    """Maximum tokens of a prompt and its completion; null: the model's limit.  Rotary embeddings that depend on the
    length (`longrope`, `dynamic`) use this one."""
    stop_tokens: tuple[str, ...] = ()
    """Texts, one token each, that end a completion, in addition to the model's stop tokens."""
    chat_template: str = ""
    """File of a Jinja chat template that replaces the model's; it is saved with the trained model."""
    template_options: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the chat template, such as `{enable_thinking: false}`; an argument that it does not read is an
    error."""
    adapter: AdapterOptions | None = None
    """Train a low-rank adapter on the frozen model (LoRA); null trains the model itself, or the adapter in `path`."""
    quantization: Literal["nf4"] | None = None
    """Keep the frozen model's linear layers in 4 bits (QLoRA; extra `qlora`): NF4 with quantised scales, matrix
    products in `dtype`.  Requires an adapter."""

    rules = (
        Rule(
            "quantization",
            lambda o: o.quantization is None or o.trains_adapter,
            "keeps weights in 4 bits, which cannot be trained.  Set model.adapter as well.",
        ),
        Rule(
            "frozen",
            lambda o: not (o.frozen and o.trains_adapter),
            "has no effect with an adapter, which freezes the whole model.  Choose layers with model.adapter.targets.",
        ),
        Rule(
            "weights",
            lambda o: (o.weights, o.dtype) != ("bfloat16", "float32"),
            "stores fewer digits than dtype = float32 computes with.  Leave dtype out.",
        ),
        Rule(
            "revision",
            lambda o: not o.revision or o.hub_name is not None,
            "is only for hub models (org/name), and path = {o.path}.  Leave it out.",
        ),
    )

    @property
    def folder(self) -> Path:
        return run_model(Path(self.path))

    @property
    def is_bundled(self) -> bool:
        return self.path in BUNDLED_MODELS

    @property
    def trains_adapter(self) -> bool:
        return self.adapter is not None or (not self.is_bundled and is_adapter_folder(self.folder))

    @property
    def hub_name(self) -> str | None:
        """The model's name on the hub, org/name; None if `path` is a local folder, or below one."""
        match = HUB_ID.fullmatch(self.path)
        here = Path(self.path).is_dir() or (Path(self.path).parent.is_dir() and not self.hub_revision)
        return None if match is None or here else match["name"]

    @property
    def hub_revision(self) -> str:
        """The revision of a hub model: `revision`, or the part after the @; empty if neither is given."""
        match = HUB_ID.fullmatch(self.path)
        return self.revision or (match["revision"] or "" if match is not None else "")

    def require_files(self) -> None:
        """Fail early, before any heavy import, if an option names something that cannot be loaded."""
        self.require_folder()
        if self.chat_template and not Path(self.chat_template).is_file():
            raise UserError(
                f"model.chat_template = {self.chat_template}: no such file.  Give a Jinja template, such as the"
                " chat_template.jinja of a model's folder; paths are relative to the folder you run in."
            )

    def require_folder(self) -> None:
        """Reject a `path` that cannot be loaded."""
        if self.is_bundled or self.hub_name is not None:
            return
        folder = self.folder
        if not folder.is_dir():
            raise UserError(
                f"model.path = {self.path}: no such folder.  Give a folder with config.json, tokenizer and weights,"
                f" org/name from the hub, or one of {', '.join(BUNDLED_MODELS)}."
            )
        if not is_adapter_folder(folder) and not (folder / "config.json").is_file():
            raise UserError(
                f"model.path = {self.path}: the folder has no config.json, so transformers cannot load it.  A run keeps"
                " its trained model in RUN/model, or its adapter in RUN/adapter."
            )


@dataclass(frozen=True, kw_only=True)
class NewModelOptions(Bounded):
    """A small decoder; the defaults are the bundled model's 1.3 M parameters in the Qwen3 architecture."""

    family: Literal["qwen3", "gpt2"] = "qwen3"
    """The architecture.  `qwen3`: rotary positions, root-mean-square norms, a gated feed-forward layer, shared keys.
    `gpt2`: learned absolute positions, layer norms, biases, GELU, keys and values for every head; without dropout."""
    hidden_size: int = 160
    """Width of the residual stream; a multiple of `num_heads`."""
    mlp_size: int = 480
    """Width of the feed-forward layer, which is gated in `qwen3`."""
    num_layers: int = 4
    """Decoder layers."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key and value heads of `qwen3`; must divide `num_heads`.  `gpt2` has one per head."""
    max_positions: int = 1024
    """Maximum tokens of a prompt and its completion."""
    template: Literal["question", "turns", "text"] = "question"
    """The chat template of its tokenizer.  `question`: a single message, on one line.  `turns`: system, user and
    assistant in turn, as in instruction-tuned models.  `text`: like `question`, plus tokens for about 300 plain words,
    so that a token of plain text has about four characters, as in GPT-2."""

    rules = (
        Rule(
            "num_kv_heads",
            lambda o: o.family == "qwen3" or o.num_kv_heads in (type(o).num_kv_heads, o.num_heads),
            "is only for family = qwen3; in gpt2 every head has one.  Leave it out.",
        ),
    )
