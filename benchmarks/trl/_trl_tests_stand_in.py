"""What TRL's tests import and load, out of what is here: `trl` is posttrain.trl, hub names are small local folders."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

import posttrain.trl
from posttrain.errors import UserError
from posttrain.models.loading.new_model import new_tokenizer

HUB = "trl-internal-testing"
ADAGES = (
    ("A stitch in time saves", "nine."),
    ("Look before you", "leap."),
    ("Many hands make light", "work."),
    ("The early bird catches the", "worm."),
    ("Still waters run", "deep."),
    ("A watched pot never", "boils."),
)
"""Prompts and their ends, in place of TRL's: as many as show an epoch with a rest."""


def stand_in(name: str, known: Mapping[str, object]) -> ModuleType:
    """A module of this name with what is known; whatever else is asked of it can be imported, and not used."""
    module = ModuleType(name)
    module.__dict__.update(known)
    module.__path__ = []  # type: ignore[attr-defined]

    def missing(attribute: str) -> object:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if attribute.startswith("is_") and attribute.endswith("_available"):
            return lambda *_: False

        def refuse(self: object, *_: object, **__: object) -> None:
            raise UserError(f"{name}.{attribute} is not here.")

        return type(attribute, (), {"__init__": refuse})

    module.__getattr__ = missing  # type: ignore[method-assign]
    return module


class TrlModules:
    """Finds `trl` and everything under it, before any TRL that is installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != "trl" and not name.startswith("trl."):
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        ours = {each: getattr(posttrain.trl, each) for each in posttrain.trl.__all__}
        return stand_in(spec.name, ours)

    def exec_module(self, module: ModuleType) -> None:
        """All is there already."""


def expand(cases: Iterable[Any]) -> Callable[[Callable[..., None]], None]:
    """`parameterized.expand`, in the few lines that these tests need: a method for each case."""

    def decorate(function: Callable[..., None]) -> None:
        namespace = sys._getframe(1).f_locals
        for number, case in enumerate(cases):
            arguments = case if isinstance(case, tuple | list) else (case,)

            def method(self: object, arguments: Any = tuple(arguments)) -> None:
                function(self, *arguments)

            method.__name__ = f"{function.__name__}_{number}_{arguments[0]}"
            namespace[method.__name__] = method

    return decorate


def install() -> None:
    """From now on tests find these modules."""
    sys.meta_path.insert(0, TrlModules())  # type: ignore[arg-type]
    parameterized = ModuleType("parameterized")
    parameterized.parameterized = type("parameterized", (), {"expand": staticmethod(expand)})  # type: ignore[attr-defined]
    sys.modules.setdefault("parameterized", parameterized)


def make_hub(folder: Path) -> None:
    """Folders under the names that tests load from the hub, as paths relative to `folder`, where tests are run."""
    for name, kind, config in (
        ("tiny-Qwen2ForCausalLM-2.5", Qwen2ForCausalLM, Qwen2Config),
        ("tiny-Qwen2ForSequenceClassification-2.5", Qwen2ForSequenceClassification, Qwen2Config),
        ("tiny-Qwen3ForSequenceClassification", Qwen3ForSequenceClassification, Qwen3Config),
        ("tiny-LlamaForSequenceClassification-3.2", LlamaForSequenceClassification, LlamaConfig),
    ):
        save_model(folder / HUB / name, kind, config)
    prompts = [{"prompt": start} for start, _ in ADAGES]
    asked = [{"prompt": [{"role": "user", "content": f"How does it go on: {start}"}]} for start, _ in ADAGES]
    save_rows(folder / HUB / "zen", {"standard_prompt_only": prompts, "conversational_prompt_only": asked})


def save_model(folder: Path, kind: Any, config_kind: Any = Qwen2Config) -> None:
    """A model of 2 layers with a tokenizer of bytes and a chat template."""
    tokenizer = new_tokenizer("turns")
    config = config_kind(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_rows(folder: Path, configs: Mapping[str, list[dict[str, Any]]]) -> None:
    """A folder that `datasets.load_dataset(folder, config, split=...)` reads."""
    lines = ["---", "configs:"]
    for config, rows in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in ("train", "test"):
            file = folder / config / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            lines += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")
