"""A term of a loss that reads several completions at once is refused: the split into micro-batches would change it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import ALGORITHMS, build_algorithm
from posttrain.algorithms.terms import LossTerm, TokenView
from posttrain.algorithms.token_locality import LocalityCheck
from posttrain.cli import main
from posttrain.needs import Need
from posttrain.runs.progress import Clock
from tests.support.refusals import refused
from tests.support.runs import save_tiny_model, tiny_recipe
from tests.support.stages import stages_with
from tests.support.tiny import weights

MORE: dict[str, dict[str, Any]] = {
    "grpo with a KL of tokens": {"name": "grpo", "kl": {"coefficient": 0.1, "importance": "token"}},
    "grpo with a KL of completions": {"name": "grpo", "kl": {"coefficient": 0.1, "level": "completion"}},
    "grpo with a full KL": {"name": "grpo", "kl": {"coefficient": 0.1, "estimator": "full"}},
    "gspo by products": {"name": "gspo", "sequence_ratio": "product"},
    "corrected": {"name": "grpo", "correction": {}},
    "ppo with a trunk of its own": {"name": "ppo", "critic": {"trunk": "own", "fit_steps": 0}},
    "ppo": {"name": "ppo", "critic": {"fit_steps": 0}, "entropy_bonus": 0.1},
}


@pytest.mark.parametrize("case", [*(name for name in ALGORITHMS if name not in ("distill", *MORE)), *MORE])
def test_every_term_of_ours_reads_one_completion_at_a_time(case: str) -> None:
    """Each is tried in the first update, where ratios are 1, and again in the second, where they are not.

    `distill`, which needs a teacher, is tried by every Learner of test_distillation.
    """
    options = MORE.get(case, {"name": case})
    stages = stages_with(options, epochs_per_step=2, minibatches_per_epoch=1)
    batches = stages.learner.batches(credited := stages.credited(), Clock())
    stages.learner.remember(credited)
    for batch in batches:
        stages.learner.check_terms = LocalityCheck()
        stages.learner.learn([batch], 1, Clock())
        assert stages.learner.check_terms.tried == {term.name for term in stages.learner.algorithm.terms}


def forking(view: TokenView) -> Tensor:
    """The best-known rule of the kind: of all tokens the fifth with the highest entropies learns (arXiv:2506.01939)."""
    chosen = view.entropies >= view.entropies.quantile(0.8)
    return torch.where(chosen, -view.columns.advantages * view.logprobs, 0.0)


def pushed_by_the_sum(view: TokenView) -> Tensor:
    """Its value does not depend on the split, only its gradient does."""
    total = view.logprobs.sum()
    return -view.columns.advantages * view.logprobs.detach() + 0.1 * (total - total.detach())


def drawn(view: TokenView) -> Tensor:
    return torch.rand_like(view.logprobs) * view.logprobs


STATISTICS: dict[str, Callable[[TokenView], Tensor]] = {
    "quantile": forking,
    "mean": lambda view: -(view.columns.advantages - view.columns.advantages.mean()) * view.logprobs,
    "largest": lambda view: view.logprobs * (view.logprobs / view.logprobs.min()).detach(),
    "count": lambda view: view.logprobs / len(view.logprobs),
    "gradient": pushed_by_the_sum,
    "drawn": drawn,
    "of advantages": lambda view: -view.logprobs * view.columns.advantages.abs().sum(),
    "of ratios": lambda view: (
        -view.columns.advantages
        * view.logprobs
        * torch.exp(-10 * (view.logprobs - view.columns.behaviour_logprobs).detach().abs().mean())
    ),
}


def with_term(per_token: Callable[[TokenView], Tensor]) -> Algorithm:
    term = LossTerm(name="mine", per_token=per_token, needs=frozenset({Need.ENTROPY}))
    return replace(build_algorithm({"name": "grpo"}), terms=(term,))


@pytest.mark.parametrize("budget", [16384, 1])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_statistic_over_several_completions_is_refused_by_the_name_of_its_term(statistic: str, budget: int) -> None:
    """Also where every micro-batch holds one completion; before any step is taken."""
    stages = stages_with(with_term(STATISTICS[statistic]), tokens_per_microbatch=max(2, budget))
    before = weights(stages.policy)
    with refused("loss term mine", "tokens_per_microbatch"):
        stages.learn(stages.credited())
    assert torch.equal(weights(stages.policy), before)


@pytest.mark.parametrize("statistic", ["of advantages", "of ratios"])
def test_a_first_step_in_which_nobody_has_an_advantage_hides_no_statistic(statistic: str) -> None:
    """Nor one whose policy is that which sampled, so that all ratios are 1."""
    stages = stages_with(with_term(STATISTICS[statistic]))
    credited = stages.credited()
    columns = replace(credited.groups.columns, advantages=torch.zeros_like(credited.groups.columns.advantages))
    flat = replace(credited, groups=replace(credited.groups, columns=columns))
    with refused("loss term mine"):
        stages.learn(flat)


def of_own_completion(view: TokenView) -> Tensor:
    """A statistic of each completion by itself."""
    total = torch.zeros(int(view.rollout[-1]) + 1).to(view.logprobs).index_add(0, view.rollout, view.logprobs)
    return -view.columns.advantages * total[view.rollout] / view.rollout.bincount()[view.rollout]


def test_a_statistic_of_one_completion_is_taken_and_trying_it_changes_no_number() -> None:
    torch.manual_seed(3)
    checked, unchecked = (stages_with(with_term(of_own_completion)) for _ in range(2))
    unchecked.learner.check_terms.tried.add("mine")
    checked.learn(checked.credited())
    state = torch.random.get_rng_state()
    unchecked.learn(unchecked.credited())
    assert torch.equal(weights(checked.policy), weights(unchecked.policy))
    assert torch.equal(state, torch.random.get_rng_state())


MINE = """
from dataclasses import replace
import torch
from posttrain.algorithms.table import grpo
from posttrain.algorithms.terms import LossTerm, Need

def forking(view):
    chosen = view.entropies >= view.entropies.quantile(0.8)
    return torch.where(chosen, -view.columns.advantages * view.logprobs, 0.0)

def mine():
    return replace(grpo(), terms=(LossTerm(name="forking", per_token=forking, needs=frozenset({Need.ENTROPY})),))
"""


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_the_command_refuses_it_in_a_run_and_in_its_plan(dry, tmp_path, capsys) -> None:
    save_tiny_model(tmp_path / "model")
    recipe = tiny_recipe(tmp_path / "place")
    (tmp_path / "place" / "mine.py").write_text(MINE)
    content = yaml.safe_load(recipe.read_text()) | {"algorithm": {"path": f"{tmp_path}/place/mine.py:mine"}}
    recipe.write_text(yaml.safe_dump(content))
    assert main(["rl", str(recipe), *dry]) == 2
    assert "its loss term forking gives a token" in capsys.readouterr().err
