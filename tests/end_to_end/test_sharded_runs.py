"""Each kind of run by two ranks, which split all weights, ends with the files of a run by one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from tests.support.fit_places import place
from tests.support.rank_runs import by_ranks
from tests.support.runs import command, save_tiny_model, tiny_recipe

SHORT = {"num_steps": 2, "curves": False}


def by_reward(folder: Path, **sections: Any) -> Path:
    if not (folder.parent / "model").is_dir():
        save_tiny_model(folder.parent / "model")
    few = {"rollout": {"prompts_per_step": 2}, "evaluation": {"every_steps": 0}}
    slow = {"learning_rate": 1e-4, "tokens_per_microbatch": 64}
    return tiny_recipe(folder, **few, update=slow, run=SHORT, **sections)


def with_critic(folder: Path) -> Path:
    critic = {"trunk": "own", "fit_steps": 0}
    kl = {"coefficient": 0.1, "estimator": "k1", "place": "reward"}
    return by_reward(folder, algorithm={"name": "ppo", "critic": critic, "kl": kl}, reference={"refresh_every": 1})


def with_adapter(folder: Path) -> Path:
    recipe = by_reward(folder, algorithm={"kl": {"coefficient": 0.1}})
    content = yaml.safe_load(recipe.read_text())
    content["model"]["adapter"] = {"rank": 4, "alpha": 8, "dropout": 0.1, "save": "both"}
    recipe.write_text(yaml.safe_dump(content))
    return recipe


def in_rounds(folder: Path) -> Path:
    recipe = by_reward(folder)
    content = yaml.safe_load(recipe.read_text())
    del content["algorithm"], content["update"], content["rollout"]["prompts_per_step"], content["run"]["num_steps"]
    rounds = {"rounds": 2, "steps_per_round": 1, "prompts_per_round": 3, "pairs_per_batch": 3}
    content["dpo"] = {**rounds, "refresh_reference": True, "learning_rate": 1e-3}
    recipe.write_text(yaml.safe_dump(content))
    return recipe


def fitted(name: str, section: str, **options: Any) -> Callable[[Path], Path]:
    def recipe(folder: Path) -> Path:
        short = {section: {"num_epochs": 1, "tokens_per_microbatch": 128, **options}, "run": {"curves": False}}
        return place(name, folder, **short) / "recipe.yaml"

    return recipe


RUNS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "ppo with a trunk of the critic and a refreshed reference": ("rl", with_critic),
    "an adapter with dropout": ("rl", with_adapter),
    "rows": ("sft", fitted("sft", "sft")),
    "a reward model": ("reward-model", fitted("reward-model", "reward_model")),
    "pairs": ("dpo", fitted("dpo", "dpo", reference="live")),
    "rounds of pairs": ("dpo", in_rounds),
}


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_that_split_the_weights_train_what_one_does(name: str, tmp_path: Path) -> None:
    kind, recipe = RUNS[name]
    one, two = (recipe(tmp_path / each) for each in ("one", "two"))
    ended = command(kind, one, folder=one.parent)
    assert ended.code == 0, ended.err
    ended = by_ranks(kind, two, folder=two.parent)
    assert ended.code == 0, ended.err
    files = sorted(each.relative_to(one.parent / "run") for each in (one.parent / "run").glob("*/*.safetensors"))
    assert files
    for file in files:
        ours, theirs = (load_file(each.parent / "run" / file) for each in (one, two))
        assert ours.keys() == theirs.keys(), file
        for tensor, numbers in ours.items():
            # In float32 AdamW takes whole steps, here of up to 1e-2, along gradients that are little but rounding, as
            # that of a value's bias is at first: it starts as the mean reward.  In float64 weights after many updates
            # are equal (tests/laws/test_sharding.py).
            limit = 2e-3 if file.parts[0] == "critic" else 1e-4
            assert (numbers - theirs[tensor]).abs().mean() <= limit, f"{file}: {tensor}"


def test_ranks_resume_from_the_checkpoint_before_the_first_update(tmp_path: Path) -> None:
    recipe = by_reward(tmp_path / "whole", checkpoint={"keep_last": 3})
    run = tmp_path / "whole" / "run"
    ended = by_ranks("rl", recipe, folder=tmp_path)
    assert ended.code == 0, ended.err
    trained = load_file(run / "model" / "model.safetensors")
    ended = by_ranks("rl", "--resume", run, "--from-step", "0", folder=tmp_path)
    assert ended.code == 0, ended.err
    for name, each in load_file(run / "model" / "model.safetensors").items():
        assert each.equal(trained[name])
