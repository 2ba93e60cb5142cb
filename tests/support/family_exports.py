"""What of a family can be read again: the model, an adapter and a merged model, by transformers, by peft and by us."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from posttrain.cli import main
from posttrain.errors import UserError
from posttrain.models.context import fix_angles
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.saving import save_adapter, save_policy
from posttrain.models.loading.text_part import is_wrapper
from posttrain.models.policy import Policy
from posttrain.options.model import AdapterOptions, ModelOptions
from tests.support.adapted import fill
from tests.support.families import CONTEXT
from tests.support.tiny import VOCAB

FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, Warning)
"""What reading may raise; UserError is a ValueError."""
TOKENS = torch.arange(60).reshape(3, 20) * 7 % (VOCAB - 4) + 2


@dataclass(frozen=True, slots=True)
class Exports:
    """Greatest |difference| of log-probs from the policy that was saved, in nats, or what was said instead."""

    model: float | str
    """RUN/model read by transformers."""
    adapter: float | str
    """RUN/adapter read by peft over the library's own model."""
    again: float | str
    """RUN/adapter read by us."""
    merged: float | str
    """RUN/model with the adapter merged into it, read by transformers."""


def exports(folder: Path, out: Path) -> Exports:
    """Save what a run saves over the model in a folder, with weights that are not those of the start, and read it."""
    whole = loaded(folder)
    save_policy(whole, out / "model")
    model = said_or(lambda: apart(whole.model, read_by_transformers(out / "model")))
    try:
        policy = loaded(folder, adapter=AdapterOptions(rank=2))
    except UserError as error:
        refusal = str(error).replace(str(folder), "FOLDER")
        return Exports(model, refusal, refusal, refusal)
    fill(policy.model, size=0.05)
    save_adapter(policy, out / "adapter")
    save_policy(policy, out / "merged")
    return Exports(
        model,
        said_or(lambda: apart(policy.model, read_by_peft(folder, out / "adapter"))),
        said_or(lambda: apart(policy.model, loaded(out / "adapter").model)),
        said_or(lambda: apart(policy.model, read_by_transformers(out / "merged"))),
    )


def loaded(folder: Path, **options: Any) -> Policy:
    """As a recipe would load it."""
    return load_policy(ModelOptions(path=str(folder), device="cpu", context=CONTEXT, **options))


def few_steps(base: Path, run: Path, *flags: str) -> int:
    """The real command: two steps of supervised training, at a learning rate that moves log-probs by tenths."""
    rows = run.parent / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "completion": "2"}\n{"prompt": "2+1", "completion": "3"}\n')
    command = ["sft", "--model.path", str(base), "--model.context", str(CONTEXT), "--task.path", str(rows)]
    command += ["--run.num-steps", "2", "--sft.rows-per-batch", "2", "--task.held-out-share", "0"]
    return main([*command, "--sft.learning-rate", ".1", "--run.threads", "1", "--run.folder", str(run), *flags])


def said_or(measure: Callable[[], float]) -> float | str:
    """A distance, or the first words of what was raised in its place."""
    try:
        return measure()
    except FAULTS as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def read_by_transformers(folder: Path) -> PreTrainedModel:
    """The model of a folder, known to have every weight in it and no other."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    others = {kind: sorted(names) for kind, names in found.items() if names}
    if others:
        raise AssertionError(f"{others}")
    return model


def read_by_peft(folder: Path, adapter: Path) -> nn.Module:
    """The library's own model of a folder, whole, under the adapter; a warning of peft is an error."""
    kind: Any = AutoModelForImageTextToText if is_wrapper(AutoConfig.from_pretrained(folder)) else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return peft.PeftModel.from_pretrained(model, adapter)


@torch.no_grad()
def apart(ours: nn.Module, theirs: nn.Module) -> float:
    """Greatest |difference| of log-probs, in nats."""
    some, others = logprobs(ours), logprobs(theirs)
    return (some - others).abs().nan_to_num(nan=torch.inf).max().item()


def logprobs(model: Any) -> Tensor:
    """log π of every token behind each of the rows."""
    model.eval()
    fix_angles(model.get_base_model() if isinstance(model, peft.PeftModel) else model, CONTEXT)
    made: Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return made.double().log_softmax(-1)
