"""What a reward function gives or does that a run could not go on with: told, put back, or said at the start."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import posttrain
from posttrain.cli import main
from posttrain.errors import RunError
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.rewards.grading.calls import GIVEN, Call, list_arguments, run_arguments
from posttrain.rewards.grading.function import keywords, reward_function
from posttrain.rewards.shaping import Blocklist
from posttrain.trl.reward_texts import DecodedReward
from tests.end_to_end.test_own_objects import Sums, config, policy_of
from tests.support.refusals import refused
from tests.support.runs import metrics_of, save_tiny_model, tiny_recipe
from tests.support.tiny import weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("edges") / "model")


def trained(model: Path, folder: Path, reward: Callable[..., object]) -> torch.Tensor:
    policy = policy_of(model)
    posttrain.train(config(folder, 1), policy=policy, task=Sums(policy), rewards=[reward])
    return weights(policy)


def by_letters(completions: Sequence[str], **columns: object) -> list[float]:
    return [float(len(set(text))) for text in completions]


def changing_torch(completions: Sequence[str], **columns: object) -> list[float]:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    return by_letters(completions)


def test_what_a_reward_switches_off_in_torch_is_switched_on_again(model: Path, tmp_path: Path) -> None:
    plain = trained(model, tmp_path / "plain", by_letters)
    assert torch.equal(trained(model, tmp_path / "changing", changing_torch), plain)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def huge(completions: Sequence[str], **columns: object) -> list[float]:
    return [1e308 if len(text) % 2 else -1e308 for text in completions]


def huge_metric(completions: Sequence[str], log_metric: Callable[..., None], **columns: object) -> list[float]:
    log_metric("size", 1e308)
    return by_letters(completions)


@pytest.mark.parametrize("reward", [huge, huge_metric])
def test_numbers_that_cannot_be_averaged_are_refused_with_their_reward(
    reward: Callable[..., object], model: Path, tmp_path: Path
) -> None:
    with refused(f"reward '{reward.__name__}'", "1e+308, too large", error=RunError):
        trained(model, tmp_path / "run", reward)


def test_the_arguments_that_hide_columns_are_all_that_a_function_is_given_beside_them() -> None:
    function = reward_function(by_letters)
    call = Call(function=function, rows=(), wanted=keywords(function))
    assert set(GIVEN) == (list_arguments((), function) | run_arguments(call)).keys()


def test_a_column_called_self_reaches_objects_that_take_all_columns() -> None:
    """Ours, and what `posttrain.trl` puts around a function."""
    told: dict[str, object] = {}

    def noting(**columns: object) -> list[float]:
        told.update(columns)
        return [1.0]

    assert Blocklist(phrases=("b",))(completions=["a"], self=[1]) == [0.0]
    around = DecodedReward(noting, new_tokenizer(), lambda: None)
    assert around(completion_ids=[[5]], self=[1]) == [1.0]
    assert told["self"] == [1]


def test_columns_that_rewards_do_not_see_are_named_at_the_start(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"prompt": "a{n}", "completions": "x", "trainer_state": 1, "self": {n}}}\n' for n in range(20))
    )
    task = {"name": "dataset", "path": str(rows), "held_out_share": 0}
    recipe = tiny_recipe(tmp_path / "place", model={"path": str(model)}, run={"num_steps": 1})
    more = ["--task.name", "dataset", "--task.path", task["path"], "--task.held-out-share", "0"]
    assert main(["rl", str(recipe), *map(str, more)]) == 0
    said = capsys.readouterr().out
    assert "rewards do not see the columns completions, trainer_state of the rows" in said
    assert "{own_completions: completions}" in said
    assert metrics_of(tmp_path / "place" / "run")[1]["reward"] >= 0


@pytest.mark.parametrize("side", ["rows", "held_out_rows"])
def test_columns_whose_names_stand_for_what_is_sampled_are_named_in_the_note_and_in_the_error(
    side: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def asking(completions: Sequence[str], completion: Sequence[str]) -> list[float]:
        return [0.0 for _ in completion]

    rows = {"rows": [{"question": "a"}], "held_out_rows": [{"question": "b"}]}
    rows[side] = [{"question": "c", "prompt": "d", "completion": "e"}]
    config = posttrain.load_recipe(
        model={"path": str(model)},
        task={"name": "dataset", "prompt_column": "question"},
        rollout={"prompts_per_step": 1, "group_size": 2, "max_completion_tokens": 2},
        evaluation={"every_steps": 0, "samples": 1},
        run={"num_steps": 0, "folder": str(tmp_path / "run"), "curves": False},
    )
    posttrain.train(config, **rows, rewards=[length])
    assert "rewards do not see the columns prompt, completion of the rows, whose names" in capsys.readouterr().out
    if side == "rows":
        with refused("needs an argument 'completion'", "The column `completion`"):
            posttrain.train(replace(config, run=replace(config.run, overwrite=True)), **rows, rewards=[asking])


def length(completions: Sequence[str], **columns: object) -> list[float]:
    return [float(len(each)) for each in completions]
