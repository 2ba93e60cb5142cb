"""What a run remembers of its evaluations: how long ago the best one was."""

from posttrain.training.state import RunState


def test_patience_is_counted_from_the_last_evaluation_that_beat_all_before() -> None:
    state, seen = RunState(), []
    for accuracy in (0.0, 0.3, 0.3, 0.2, 0.3, 0.4, 0.4):
        state.saw_evaluation(accuracy)
        seen.append((state.best_accuracy, state.evaluations_since_best))
    # As good as the best is not better than it.
    assert seen == [(0.0, 0), (0.3, 0), (0.3, 1), (0.3, 2), (0.3, 3), (0.4, 0), (0.4, 1)]
