"""What a run remembers: saved with a checkpoint and read back whole, and how long ago its best evaluation was."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.options.training import CheckpointOptions, RunOptions
from posttrain.runs.checkpoint import load_latest
from posttrain.runs.files import saved_steps
from posttrain.runs.harness import Harness, HarnessOptions
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.tensor_state import like
from posttrain.training.learner import Learner
from posttrain.training.reference import FrozenCopy
from posttrain.training.session import trained_by_reward
from posttrain.training.sft.sft_run import SftState
from posttrain.training.trained import RunState, Trained
from tests.support.stages import Stages, stages_with
from tests.support.tiny import tiny_policy, weights

WITH_KL = {"name": "grpo", "kl": {"coefficient": 0.1}}


def stages_of(refresh_every: int) -> Stages:
    """Policy, optimiser and reference are all of a seed that training has not touched."""
    made = stages_with(WITH_KL)
    settings = replace(made.learner.settings, refresh_reference_every=refresh_every)
    return replace(made, learner=Learner(made.policy, made.learner.algorithm, settings))


def saved_by(trained: Trained[RunState], folder: RunFolder) -> None:
    """As a run saves a step."""
    options = HarnessOptions(run=RunOptions(), checkpoint=CheckpointOptions(keep_last=2, keep_best=False))
    Harness(folder, trained, options).save(score=0.5)


def test_nothing_has_happened_at_first() -> None:
    state = RunState()
    assert (state.step, state.num_updates, state.evaluations_since_best) == (0, 0, 0)
    assert (state.num_tokens, state.completion_tokens, state.trained_tokens) == (0, 0, 0)
    assert state.best_accuracy is None


@pytest.mark.parametrize("refresh_every", [0, 2])
def test_a_saved_run_goes_on_from_its_weights_momentum_counts_and_reference(tmp_path: Path, refresh_every: int) -> None:
    stages = stages_of(refresh_every)
    trained = trained_by_reward(stages.learner)
    with RunFolder.create(tmp_path / "run", "") as folder:
        for step in (1, 2, 3):
            stages.learn(stages.credited(step))
            trained.run.step, trained.run.num_updates = step, stages.learner.num_updates
            saved_by(trained, folder)
        assert sorted(saved_steps(folder.checkpoints)) == [2, 3]  # as many as are to be kept
        saved = load_latest(folder.checkpoints)
    assert saved is not None
    # A reference that never changes is the model that training started from: no need to save it.
    assert ("reference" in saved.tensors) == bool(refresh_every)
    again = stages_of(refresh_every)
    resumed = trained_by_reward(again.learner)
    resumed.restore(saved)
    assert resumed.run == trained.run
    assert (resumed.step, again.learner.num_updates) == (3, 3)
    assert torch.equal(weights(again.policy), weights(stages.policy))
    assert again.learner.reference is not None
    assert stages.learner.reference is not None
    expected = stages.learner.reference.policy if refresh_every else tiny_policy()
    assert torch.equal(weights(again.learner.reference.policy), weights(expected))
    # What comes next is the same to the bit, momentum and all.
    for one in (stages, again):
        one.learner.reference = FrozenCopy(tiny_policy())
        one.learn(one.credited(4))
    assert torch.equal(weights(again.policy), weights(stages.policy))


def test_without_a_reference_none_is_saved(tmp_path: Path) -> None:
    stages = stages_of(2)
    stages.learner.reference = None
    with RunFolder.create(tmp_path / "run", "") as folder:
        saved_by(trained_by_reward(stages.learner), folder)
        saved = load_latest(folder.checkpoints)
    assert saved is not None
    assert set(saved.tensors) == {"policy", "optimizer"}


def test_what_was_a_tuple_is_one_again_and_a_list_stays_a_list() -> None:
    assert like([0.8, 0.95], (0.9, 0.999)) == (0.8, 0.95)
    assert like([1, 2], [3, 4]) == [1, 2]


def test_patience_is_counted_from_the_last_evaluation_that_beat_all_before() -> None:
    state, seen = RunState(), []
    for accuracy in (0.0, 0.3, 0.3, 0.2, 0.3, 0.4, 0.4):
        state.saw_evaluation(accuracy)
        seen.append((state.best_accuracy, state.evaluations_since_best))
    # As good as the best is not better than it.
    assert seen == [(0.0, 0), (0.3, 0), (0.3, 1), (0.3, 2), (0.3, 3), (0.4, 0), (0.4, 1)]


def test_the_seconds_of_stages_add_up_whichever_a_step_has() -> None:
    trained = trained_by_reward(stages_with(WITH_KL).learner)
    trained.add_seconds({"rollout": 2.0, "update": 0.5})
    trained.add_seconds({"rollout": 3.0, "grade": 0.25})
    assert trained.run.seconds == {"rollout": 5.0, "update": 0.5, "grade": 0.25}
    assert trained.seconds == 5.75


def test_the_seconds_of_an_earlier_version_s_supervised_run_are_those_of_its_updates() -> None:
    state = SftState()
    state.restore({"step": 3, "next_example": 12, "seconds": 1.5, "best_eval_loss": 2.0})
    state.add_seconds({"update": 0.5, "evaluate": 1.0})
    assert (state.step, state.first, state.best_eval_loss) == (3, 12, 2.0)
    assert state.seconds == {"update": 2.0, "evaluate": 1.0}
