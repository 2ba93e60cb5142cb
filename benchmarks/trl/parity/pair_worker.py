"""TRL's worker of trl_parity.py for pairs, run by the interpreter of TRL's own environment.

.venv-trl/bin/python benchmarks/trl/parity/pair_worker.py OUTPUT.json

Of each case two updates are taken on the same six pairs, by gradient descent without momentum: the first where policy
and reference agree, the second where they do not.  Then the pairs are evaluated.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from pair_cases import FIELDS, LORA, SHAPE, TEMPLATE, WORDS, cases, given
from parity_recording import Recording, encoded, trained_parameters
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

PACKAGES = ("trl", "torch", "transformers", "peft")
OF_THE_MACHINE = ("runtime", "samples_per_second", "steps_per_second", "epoch", "step", "grad_norm", "learning_rate")


def main() -> None:
    torch.set_num_threads(1)
    data = given()
    with tempfile.TemporaryDirectory() as folder:
        results = {name: result(name, case, data, Path(folder)) for name, case in cases().items()}
    written = {"made by": {name: version(name) for name in PACKAGES}, "given": data, "fields": FIELDS, "cases": results}
    Path(sys.argv[1]).write_text(json.dumps(written, indent=0) + "\n", encoding="utf-8")


def result(name: str, case: dict[str, Any], data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What TRL computes in a case: the weights it began with, of both updates loss, gradients and weights, its log."""
    print(name, flush=True)
    of_dpo = case["trainer"] == "dpo"
    model = drawn((Qwen3ForCausalLM if of_dpo else Qwen3ForSequenceClassification)(Qwen3Config(**SHAPE)), seed=14)
    tokenizer().save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")  # from where DPOTrainer loads its reference
    model.name_or_path = model.config._name_or_path = str(folder / "model")
    rows = data["rows"][case["rows"]]
    more: dict[str, Any] = {}
    if case["lora"]:
        more["peft_config"] = LoraConfig(**LORA, task_type="CAUSAL_LM" if of_dpo else "SEQ_CLS")
    if case["reference"]:
        more["ref_model"] = drawn(Qwen3ForCausalLM(Qwen3Config(**SHAPE)), seed=15)
    trainer = (RecordingDpo if of_dpo else RecordingReward)(
        model=model,
        args=(DPOConfig if of_dpo else RewardConfig)(
            output_dir=str(folder / "run"), **{**FIELDS, "dataloader_pin_memory": False, **case["fields"]}
        ),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        **more,
    )
    if case["lora"]:
        drawn(trainer.model, seed=16, only="lora_")
    began = encoded(trained_parameters(trainer.model))
    trainer.train()
    recorded = trainer.optimizer.optimizer
    losses = np.array(trainer.losses).reshape(2, -1).sum(axis=1).tolist()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    evaluated = {key.removeprefix("eval_"): value for key, value in trainer.evaluate().items()}
    return {
        **case,
        "shapes": {key: list(each.shape) for key, each in trained_parameters(trainer.model).items()},
        "began": began,
        "reference": encoded(dict(more["ref_model"].named_parameters())) if case["reference"] else None,
        "updates": [
            {"loss": losses[i], "gradient": encoded(recorded.gradients[i]), "log": numbers(logs[i])} for i in range(2)
        ],
        "weights": encoded(trained_parameters(trainer.model)),
        "evaluated": numbers(evaluated),
    }


def numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in entry.items() if key not in OF_THE_MACHINE}


def tokenizer() -> PreTrainedTokenizerFast:
    words = models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<end>",
        pad_token="<pad>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def drawn(model: nn.Module, *, seed: int, only: str = "") -> Any:
    """The model with random weights, those of some names alone; no norm is 1."""
    random = np.random.Generator(np.random.Philox(seed))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                spread = torch.from_numpy(random.random(parameter.shape) * 2 - 1)
                parameter.copy_((1.0 if "norm" in name else 0.0) + 0.25 * spread)
                if "lora_B" in name:
                    parameter.zero_()
    return model


class RecordingDpo(Recording, DPOTrainer):
    """DPOTrainer."""


class RecordingReward(Recording, RewardTrainer):
    """RewardTrainer."""


if __name__ == "__main__":
    main()
