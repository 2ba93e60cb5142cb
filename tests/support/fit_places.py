"""Folders for `posttrain sft`, `reward-model` and `dpo`: a small chat model, rows and a recipe; and a run in each."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import posttrain
from posttrain.config import DpoConfig, RewardModelConfig, SftConfig
from tests.support.conversations import save_chat_model, turns
from tests.support.runs import command


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A command on rows or pairs, with its recipe."""

    config: type
    train: Callable[..., posttrain.Run]
    section: str
    rows: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    """Of the section: two epochs of batches of `size`, measured every four steps."""
    size: str
    """The option that says how large a batch is."""
    metric: str
    """What is measured on held-out rows, as metrics have it and as summary.json does."""
    changed: tuple[str, str]
    """An answer in the rows, and another one."""
    last_words: str

    def score(self, line: Mapping[str, float]) -> float:
        """What ranks checkpoints: the most pairs in order for dpo, else the lowest loss."""
        return line["eval/pairs/accuracy"] if self.section == "dpo" else -line["eval/loss"]


KINDS = {
    "sft": Kind(
        config=SftConfig,
        train=posttrain.train_sft,
        section="sft",
        rows=[{"messages": turns(f"{n}+1=", f"<answer>{n + 1}</answer>")} for n in range(40)],
        options={"learning_rate": 1e-2, "rows_per_batch": 5, "num_epochs": 2, "eval_every": 4, "max_length": 40},
        size="rows_per_batch",
        metric="loss",
        changed=("<answer>38<", "<answer>77<"),
        last_words="talk to it   posttrain chat run\n",
    ),
    "reward-model": Kind(
        config=RewardModelConfig,
        train=posttrain.train_reward_model,
        section="reward_model",
        rows=[
            {"chosen": turns(f"{n}?", f"yes {n}"), "rejected": turns(f"{n}?", f"no {n}"), "margin": 0.5 * (n % 2)}
            for n in range(40)
        ],
        options={"learning_rate": 1e-2, "pairs_per_batch": 5, "num_epochs": 2, "eval_every": 4},
        size="pairs_per_batch",
        metric="accuracy",
        changed=("yes 38", "yes 77"),
        last_words="use it       posttrain rl RECIPE.yaml --rewards run/model\n",
    ),
    "dpo": Kind(
        config=DpoConfig,
        train=posttrain.train_dpo,
        section="dpo",
        rows=[
            {"prompt": turns(f"{n}+1="), "chosen": turns("", f"{n + 1}")[1:], "rejected": turns("", f"{n + 2}!")[1:]}
            for n in range(40)
        ],
        options={
            "learning_rate": 3e-3,
            "pairs_per_batch": 6,
            "num_epochs": 2,
            "eval_every": 4,
            "reference": "precomputed",
        },
        size="pairs_per_batch",
        metric="pairs/accuracy",
        changed=('"content": "38"', '"content": "77"'),
        last_words="talk to it   posttrain chat run\n",
    ),
}


def place(name: str, folder: Path, **sections: Any) -> Path:
    """A folder with model, rows and recipe."""
    kind = KINDS[name]
    folder.mkdir(exist_ok=True)
    save_chat_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kind.rows))
    recipe: dict[str, Any] = {
        "task": {"name": "dataset", "path": "rows.jsonl", "held_out_share": 0.2},
        "model": {"path": "model"},
        kind.section: dict(kind.options),
        "checkpoint": {"every_steps": 4},
        "run": {"folder": "run", "threads": 1},
    }
    recipe = {section: {**options, **sections.get(section, {})} for section, options in recipe.items()}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The place of a run of a command that was never stopped, made when it is first asked for."""
    made: dict[str, Path] = {}

    def finished_run(name: str) -> Path:
        if name not in made:
            folder = place(name, tmp_path_factory.mktemp(name) / "whole")
            ended = command(name, "recipe.yaml", folder=folder)
            assert ended.code == 0, ended.err
            assert ended.out.endswith(KINDS[name].last_words)
            made[name] = folder
        return made[name]

    return finished_run
