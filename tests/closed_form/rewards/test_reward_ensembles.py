"""Several reward models as one reward: what their scores become, and how a recipe names them."""

from typing import Any

import pytest
import torch

from posttrain.config import as_recipe, load_recipe
from posttrain.options.reward import RewardOptions
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.model import RewardModel, RewardModelEnsemble, combined_scores, reward_models_in
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.named_inputs import named_files
from tests.support.refusals import refused
from tests.support.reward_models import reward_folder

SCORES = torch.tensor([[1.0, -2.0, 3.0], [3.0, -2.0, 0.0], [2.0, -2.0, 0.0]], dtype=torch.float64)
# Means 2, -2, 1; least 1, -2, 0; population deviations √(2/3), 0, √2.


@pytest.mark.parametrize(
    ("combine", "weight", "expected"),
    [
        ("mean", 1.0, [2, -2, 1]),
        ("least", 1.0, [1, -2, 0]),
        ("mean_minus_deviation", 1.0, [2 - (2 / 3) ** 0.5, -2, 1 - 2**0.5]),
        ("mean_minus_deviation", 0.5, [2 - 0.5 * (2 / 3) ** 0.5, -2, 1 - 0.5 * 2**0.5]),
        ("mean_minus_deviation", 0.0, [2, -2, 1]),
    ],
)
def test_scores_of_several_models_become_one(combine: Any, weight: float, expected: list[float]) -> None:
    assert combined_scores(SCORES, combine, weight).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("ensemble")
    return [str(reward_folder(place / f"rm-{seed}", seed=seed)) for seed in range(3)]


TEXTS: dict[str, list[Any]] = {"prompts": ["2+2=", "2+2=", "a"], "completions": ["4", "five", "b"]}


@pytest.mark.parametrize("combine", ["mean", "least", "mean_minus_deviation"])
def test_a_recipe_names_an_ensemble_and_gets_what_its_models_say_together(folders: list[str], combine: Any) -> None:
    weight = {"deviation_weight": 0.25} if combine == "mean_minus_deviation" else {}
    options = RewardOptions(model=folders[0], ensemble=tuple(folders[1:]), combine=combine, **weight)  # type: ignore[arg-type]
    function = load_reward(options)
    assert function.name == "rm-0"
    alone = torch.tensor([RewardModel(folder)(**TEXTS) for folder in folders], dtype=torch.float64)
    found = function.call(**TEXTS)
    assert found == pytest.approx(combined_scores(alone, combine, weight.get("deviation_weight", 1.0)).tolist())
    assert [model.options.model for model in reward_models_in(function.call)] == folders


def test_their_disagreement_is_logged(folders: list[str]) -> None:
    told: dict[str, Any] = {}
    ensemble = RewardModelEnsemble([RewardModel(folder) for folder in folders])
    ensemble(**TEXTS, log_metric=told.__setitem__, log_extra=lambda name, values: told.update({f"{name}s": values}))
    alone = torch.tensor([model(**TEXTS) for model in ensemble.models], dtype=torch.float64)
    spread = alone.std(dim=0, correction=0)
    assert told["deviations"] == pytest.approx(spread.tolist())
    assert told["deviation"] == pytest.approx(spread.mean().item())


def test_a_text_that_one_of_them_reads_cut_is_told_so(folders: list[str]) -> None:
    short = RewardModel(folders[0], max_tokens=3, over_long="cut_left")
    ensemble = RewardModelEnsemble([short, RewardModel(folders[1])])
    found = ensemble(prompts=["a", "2+2+2="], completions=["b", "6"])
    assert [each.outcome for each in found if isinstance(each, Graded)] == ["whole", "cut"]


def test_options_of_one_reward_model_hold_for_all_of_them(folders: list[str]) -> None:
    function = load_reward(RewardOptions(model=folders[0], ensemble=(folders[1],), tokens_per_batch=7, name="both"))
    assert function.name == "both"
    assert [model.options.tokens_per_batch for model in reward_models_in(function.call)] == [7, 7]


def test_one_model_is_no_ensemble(folders: list[str]) -> None:
    with refused("ensemble of 1"):
        RewardModelEnsemble([RewardModel(folders[0])])


def test_a_saved_recipe_says_an_ensemble_and_says_nothing_of_it_where_there_is_none(folders: list[str]) -> None:
    plain, several = (
        load_recipe(rewards=[{"model": folders[0]} | more])
        for more in ({}, {"ensemble": folders[1:], "combine": "least"})
    )
    assert "ensemble:" not in as_recipe(plain)
    assert "combine: least" in as_recipe(several)
    assert {name for name in named_files(several) if name.startswith("rewards")} == {
        "rewards[0].model",
        "rewards[0].ensemble[0]",
        "rewards[0].ensemble[1]",
    }
