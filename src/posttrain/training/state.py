"""What a run by reward remembers between steps besides weights, saved with every checkpoint and read on resume."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from torch.optim import Optimizer

from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.tensor_state import Tensors
from posttrain.training.learner import Learner


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
    sampled_tokens: int = 0
    """Completion tokens sampled in training, those of groups that dynamic sampling set aside included."""
    trained_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by stage, resumed parts included."""
    best_accuracy: float | None = None
    evaluations_since_best: int = 0
    before: dict[str, object] = field(default_factory=dict)
    """Held-out results before training."""
    transcripts: list[list[str]] = field(default_factory=list)
    """[prompt, completion before training] of the problems that the end shows side by side."""
    recipe: str = ""
    """File or name of the recipe that the run was started with, where it is known."""

    def saw_evaluation(self, accuracy: float) -> None:
        """Count an evaluation along the way towards the best one."""
        if self.best_accuracy is None or accuracy > self.best_accuracy:
            self.best_accuracy, self.evaluations_since_best = accuracy, 0
        else:
            self.evaluations_since_best += 1

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Count the time of stages."""
        self.seconds = {
            stage: self.seconds.get(stage, 0.0) + seconds.get(stage, 0.0) for stage in {**self.seconds, **seconds}
        }


class TrainedByReward:
    """A learner and the counters of its run, as the harness saves and restores them."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.run = learner, RunState()

    @property
    def step(self) -> int:
        """Steps finished."""
        return self.run.step

    @property
    def optimizer(self) -> Optimizer:
        """What takes the updates."""
        return self.learner.optimizer

    def tensors(self) -> Mapping[str, Tensors]:
        """All tensors that the next step reads."""
        return self.learner.tensors()

    def state(self) -> Mapping[str, object]:
        """Whatever else it reads, as plain data."""
        learner = self.learner
        return {"run": asdict(self.run), "optimizer": learner.optimizer_state(), **learner.frozen, **learner.state()}

    @property
    def seconds(self) -> float:
        """What they and the evaluations have taken, in all lives of the run."""
        return sum(self.run.seconds.values())

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Count the time of a step, by stage."""
        self.run.add_seconds(seconds)

    def restore(self, saved: Checkpoint) -> None:
        """Be as the checkpoint was."""
        run = saved.state["run"]
        assert isinstance(run, Mapping)
        self.run = RunState(**run)
        self.learner.restore(saved, num_updates=self.run.num_updates)
