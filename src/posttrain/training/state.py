"""What a run remembers between steps, besides weights: saved with every checkpoint and read back on resume."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from posttrain.runs import checkpoint
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.folder import RunFolder
from posttrain.runs.tensor_state import module_tensors, optimizer_tensors, restore_module, restore_optimizer
from posttrain.training.session import Session, frozen_copy


@dataclass(slots=True, kw_only=True)
class RunState:
    """Counters and results of a run; plain data."""

    step: int = 0
    """Steps finished."""
    num_updates: int = 0
    """Optimiser updates taken."""
    num_tokens: int = 0
    """Prompt and completion tokens of all rollouts."""
    completion_tokens: int = 0
    trained_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by stage, resumed parts included."""
    best_accuracy: float | None = None
    evaluations_since_best: int = 0
    before: dict[str, object] = field(default_factory=dict)
    """Held-out results before training."""
    transcripts: list[list[str]] = field(default_factory=list)
    """[prompt, completion before training] of the problems that the end shows side by side."""

    def saw_evaluation(self, accuracy: float) -> None:
        """Count an evaluation along the way towards the best one."""
        if self.best_accuracy is None or accuracy > self.best_accuracy:
            self.best_accuracy, self.evaluations_since_best = accuracy, 0
        else:
            self.evaluations_since_best += 1


def save_checkpoint(folder: RunFolder, session: Session, state: RunState, *, score: float | None = None) -> None:
    """Save all that the next step reads; on the disk when this returns."""
    optimizer, options = optimizer_tensors(session.optimizer)
    tensors = {"policy": module_tensors(session.policy.model), "optimizer": optimizer}
    if session.reference is not None and session.config.reference.refresh_every:
        tensors["reference"] = module_tensors(session.reference.model)
    checkpoint.save(folder.checkpoints, state.step, tensors, {"run": asdict(state), "optimizer": options}, score=score)
    keep = session.config.checkpoint
    checkpoint.prune(folder.checkpoints, keep_last=keep.keep_last, keep_best=int(keep.keep_best))


def restore(session: Session, saved: Checkpoint) -> RunState:
    """Put a checkpoint's weights and optimiser state back; returns what the run remembered."""
    restore_module(session.policy.model, saved.tensors["policy"])
    optimizer, run = saved.state["optimizer"], saved.state["run"]
    assert isinstance(optimizer, Mapping)
    assert isinstance(run, Mapping)
    restore_optimizer(session.optimizer, saved.tensors["optimizer"], optimizer)
    if "reference" in saved.tensors:
        session.reference = frozen_copy(session.policy)
        restore_module(session.reference.model, saved.tensors["reference"])
    return RunState(**run)
