"""What a run remembers: saved with a checkpoint and read back whole, and how long ago its best evaluation was."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.options.training import CheckpointOptions, ReferenceOptions
from posttrain.runs.checkpoint import load_latest, saved_steps
from posttrain.runs.clock import Clock
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.tensor_state import like
from posttrain.training.rl import learn
from posttrain.training.session import Session, frozen_copy
from posttrain.training.state import RunState, restore, save_checkpoint
from tests.engine.test_passes import collected_by, session_with
from tests.support.tiny import tiny_policy, weights

WITH_KL = {"name": "grpo", "kl": {"coefficient": 0.1}}


def session_of(refresh_every: int) -> Session:
    """Policy, optimiser and reference are all of a seed that training has not touched."""
    session = session_with(WITH_KL)
    session.config = replace(
        session.config,
        reference=ReferenceOptions(refresh_every=refresh_every),
        checkpoint=CheckpointOptions(keep_last=2, keep_best=False),
    )
    return session


def test_nothing_has_happened_at_first() -> None:
    state = RunState()
    assert (state.step, state.num_updates, state.evaluations_since_best) == (0, 0, 0)
    assert (state.num_tokens, state.completion_tokens, state.trained_tokens) == (0, 0, 0)
    assert state.best_accuracy is None


@pytest.mark.parametrize("refresh_every", [0, 2])
def test_a_saved_run_goes_on_from_its_weights_momentum_counts_and_reference(tmp_path: Path, refresh_every: int) -> None:
    session, state = session_of(refresh_every), RunState()
    with RunFolder.create(tmp_path / "run", "") as folder:
        for step in (1, 2, 3):
            learn(session, step, collected_by(session, step), state, Clock())
            state.step = step
            if step == 2:
                session.reference = frozen_copy(session.policy)
            save_checkpoint(folder, session, state, score=0.5)
        assert sorted(saved_steps(folder.checkpoints)) == [2, 3]  # as many as are to be kept
        saved = load_latest(folder.checkpoints)
    assert saved is not None
    # A reference that never changes is the model that training started from: no need to save it.
    assert ("reference" in saved.tensors) == bool(refresh_every)
    resumed = session_of(refresh_every)
    assert restore(resumed, saved) == state
    assert torch.equal(weights(resumed.policy), weights(session.policy))
    assert resumed.reference is not None
    expected = session.reference if refresh_every else tiny_policy()
    assert expected is not None
    assert torch.equal(weights(resumed.reference), weights(expected))
    # What comes next is the same to the bit, momentum and all.
    for one in (session, resumed):
        one.reference = frozen_copy(tiny_policy())
        learn(one, 4, collected_by(one, 4), RunState(), Clock())
    assert torch.equal(weights(resumed.policy), weights(session.policy))


def test_without_a_reference_none_is_saved(tmp_path: Path) -> None:
    session = session_of(2)
    session.reference = None
    with RunFolder.create(tmp_path / "run", "") as folder:
        save_checkpoint(folder, session, RunState())
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
