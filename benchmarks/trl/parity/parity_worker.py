"""TRL's worker of trl_parity.py, run by the interpreter of TRL's own environment.

.venv-trl/bin/python benchmarks/trl/parity/parity_worker.py OUTPUT.json [CASE ...]

With cases by name only those are made anew, and the others stay as the file has them.
Of each case two updates are taken on one batch of given completions, by gradient descent without momentum at rate 1:
the first where the policy is the one that "sampled", the second where it has left it, so that ratios, clips and the KL
act.  Of RLOO with a KL, which acts through the rewards, two more are taken on a second batch.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from parity_cases import FIELDS, GROUP_SIZE, SHAPE, WORDS, cases, given, scores_of
from parity_recording import Recording, encoded
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

METRICS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio", "kl", "entropy")
PACKAGES = ("trl", "torch", "transformers")


def main() -> None:
    torch.set_num_threads(1)
    data, output, asked = given(), Path(sys.argv[1]), sys.argv[2:]
    if unknown := [name for name in asked if name not in cases()]:
        sys.exit(f"no case {unknown[0]!r}; there are: {', '.join(cases())}")
    kept = json.loads(output.read_text(encoding="utf-8"))["cases"] if asked else {}
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model")
        results = {
            name: kept[name] if asked and name not in asked else result(name, fields, data, Path(folder))
            for name, fields in cases().items()
        }
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    written = {
        "made by": {name: version(name) for name in PACKAGES},
        "model": {"config": SHAPE, "shapes": shapes, "weights": encoded(dict(model.named_parameters()))},
        "given": data,
        "fields": FIELDS,
        "cases": results,
    }
    output.write_text(json.dumps(written, indent=0) + "\n", encoding="utf-8")


def save_model(folder: Path) -> nn.Module:
    """A Qwen3 of random weights; no norm is 1."""
    random = np.random.Generator(np.random.Philox(14))
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            numbers = torch.from_numpy(random.random(parameter.shape) * 2 - 1)
            parameter.copy_((1.0 if "norm" in name else 0.0) + 0.25 * numbers)
    model.save_pretrained(folder)
    words = models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    return model


def result(name: str, fields: dict[str, Any], data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What TRL computes in a case: of each of the two updates the loss, the gradients and the weights after it."""
    print(name, flush=True)
    rows = [{"prompt": text_of(prompt)} for prompt in data["prompts"]]
    given = {
        "model": str(folder / "model"),
        "reward_funcs": reward_functions(data, scores_of(name, data)),
        "train_dataset": Dataset.from_list(rows),
    }
    if name.startswith("rloo"):
        trainer = RecordingRloo(args=settings(RLOOConfig, fields, folder), **given)
        trainer.forced = forced(data)
    else:
        trainer = RecordingGrpo(args=settings(GRPOConfig, fields, folder), rollout_func=forced(data), **given)
    trainer.train()
    recorded = trainer.optimizer.optimizer
    updates = trainer.args.max_steps
    losses = np.array(trainer.losses).reshape(updates, -1).sum(axis=1).tolist()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "fields": fields,
        "advantages": list(trainer._logs["advantages"]),
        "updates": [
            {
                "loss": losses[i],
                "gradient": encoded(recorded.gradients[i]),
                "weights": encoded(recorded.weights[i]),
                "metrics": {key: logs[i][key] for key in METRICS if key in logs[i]},
            }
            for i in range(updates)
        ],
    }


def settings(kind: Any, fields: dict[str, Any], folder: Path) -> Any:
    return kind(
        output_dir=str(folder / "run"),
        **{**FIELDS, "model_init_kwargs": {"dtype": "float32"}, "dataloader_pin_memory": False, **fields},
    )


def text_of(tokens: Sequence[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def forced(data: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """A rollout function that answers with the given completions."""
    by_text = {text_of(prompt): i for i, prompt in enumerate(data["prompts"])}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        places = [by_text[prompt] for prompt in prompts]
        assert places == [i for i in range(len(by_text)) for _ in range(GROUP_SIZE)], places
        completions = [ids for group in data["completions"] for ids in group]
        return {
            "prompt_ids": [data["prompts"][place] for place in places],
            "completion_ids": completions,
            "logprobs": [[0.0] * len(ids) for ids in completions],  # read only with vLLM's correction
        }

    return rollout


def reward_functions(
    data: dict[str, Any], of_all: list[list[list[float | None]]]
) -> list[Callable[..., list[float | None]]]:
    """One for each list of scores, which finds a completion by its tokens."""
    keys = [tuple(ids) for group in data["completions"] for ids in group]
    assert len(set(keys)) == len(keys)

    def function(name: str, scores: list[list[float | None]]) -> Callable[..., list[float | None]]:
        known = dict(zip(keys, [score for group in scores for score in group], strict=True))

        def reward(completion_ids: list[list[int]], **others: Any) -> list[float | None]:
            return [known[tuple(ids)] for ids in completion_ids]

        reward.__name__ = name
        return reward

    return [function(name, scores) for name, scores in zip(("first", "second"), of_all, strict=True)]


class RecordingGrpo(Recording, GRPOTrainer):
    """GRPOTrainer."""


class RecordingRloo(Recording, RLOOTrainer):
    """RLOOTrainer, which has no rollout function to be given."""

    forced: Callable[..., dict[str, Any]]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *others: Any) -> list[list[int]]:
        answered: list[list[int]] = self.forced([text_of(prompt) for prompt in prompt_ids], self)["completion_ids"]
        return answered


if __name__ == "__main__":
    main()
