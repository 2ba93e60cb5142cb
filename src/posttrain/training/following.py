"""Ranks other than 0: they execute rank 0's calls, each with its share of the tokens.

rank 0                                          every other rank
learner.credit(collected)  ── "credit" ──→      the same on the same groups; passes over tokens are shared
learner.learn(batches, …)  ── "learn" ───→      its own batches, which must equal those of rank 0; gradients are summed
open, put, take             ── "sample" ──→      its share of the continuations
harness.save, resume       ── "save", "restore" →
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from posttrain.algorithms.table import build_algorithm
from posttrain.config import Config
from posttrain.config.reading import resolved_config
from posttrain.generation.rank_sampling import RankEngine, RankShare
from posttrain.models.adapters.in_force import trains_adapter
from posttrain.models.loading.new_model import policy_of_run
from posttrain.models.sharding import whole_copy
from posttrain.options.rollout import InProcessOptions
from posttrain.ranks.group import RankGroup
from posttrain.runs import checkpoint
from posttrain.runs.checkpoint import ThreadClaim, claim_threads
from posttrain.runs.files import writing
from posttrain.runs.harness import TrainedState
from posttrain.runs.interruption import interruptible
from posttrain.runs.progress import Clock
from posttrain.runs.reports import Run
from posttrain.runs.shards import write_shards
from posttrain.training.collector import CollectedStep
from posttrain.training.credited_step import CreditedStep
from posttrain.training.fit_session import FitSession
from posttrain.training.learner import Learner, fit_critic
from posttrain.training.metrics import UpdateReport
from posttrain.training.session import CallerObjects, engine_of, learner_of, trained_by_reward


class Follower:
    """What all kinds of runs do on the other ranks; rank 0 calls methods by name."""

    trained: TrainedState

    def __init__(self, threads: ThreadClaim) -> None:
        self.threads = threads
        self.parts: list[object] = [self]
        """Objects with the methods that rank 0 calls; the first object that has the method is used."""

    def write_shards(self, folder: Path) -> None:
        """This rank's parts of a checkpoint, in RUN/checkpoints/STEP."""
        with writing(folder, folder.parent.parent):
            write_shards(folder, self.trained.tensors())

    def restore(self, path: Path) -> None:
        """Restore a checkpoint, which every rank reads."""
        saved = checkpoint.load_checkpoint(path)
        checkpoint.restore_threads(saved, self.threads)
        self.trained.restore(saved)


def follow_rank_0(follower: Follower, ranks: RankGroup, folder: str) -> Run:
    """Execute rank 0's calls until it ends the run.  A signal is passed on to rank 0 at the next step."""
    with interruptible() as interruption, follower.threads:
        while True:
            call, given = ranks.next_call()
            if call == "end":
                return cast("Run | None", given[0]) or Run(folder=Path(folder), summary={}, interrupted=True)
            ranks.asked = interruption.reason if interruption else ""
            part = next((each for each in follower.parts if hasattr(each, call)), None)
            assert part is not None, f"no part of {type(follower).__name__} has {call}"
            getattr(part, call)(*given)


class RlFollower(Follower):
    """Training by reward: policy, engine and learner, without task, rewards and folder."""

    engine: RankShare | None = None
    learner: Learner
    credited: CreditedStep
    updates: Sequence[UpdateReport]

    def __init__(self, config: Config, caller: CallerObjects, ranks: RankGroup) -> None:
        own = caller.policy
        self.config = resolved_config(config, adapter=None if own is None else trains_adapter(own.model))
        Follower.__init__(self, claim_threads(self.config.run.threads))
        self.policy, _ = policy_of_run(self.config.model, own, seed=self.config.run.seed, ranks=ranks)
        self.caller = caller

    def open(self, longest: int) -> None:
        policy = self.policy
        if self.caller.engine is None and isinstance(self.config.engine, InProcessOptions):  # else rank 0 asks servers
            engine, policy = engine_of(self.config, self.caller, policy, longest)
            self.engine = engine.share if isinstance(engine, RankEngine) else None
        algorithm = self.caller.algorithm or build_algorithm(self.config.algorithm)
        self.learner = learner_of(self.config, self.caller, policy, algorithm)
        self.trained = trained_by_reward(self.learner)
        self.parts += [self.engine, self.learner]

    def load_version(self, version: int) -> None:
        assert self.engine is not None, "rank 0 has the same engine"
        self.engine.load_version(self.learner.weights(), version)

    def whole_copy(self) -> None:
        whole_copy(self.learner.policy)

    def whole_critic(self) -> None:
        assert self.learner.critic is not None, "rank 0 has one"
        self.learner.critic.whole()

    def credit(self, collected: CollectedStep) -> None:
        self.credited = self.learner.credit(collected, Clock())

    def undropped_gaps(self) -> None:
        self.learner.undropped_gaps(self.credited.groups)

    def learn(self, step: int) -> None:
        self.learner.remember(self.credited)
        self.updates = self.learner.learn(self.learner.batches(self.credited, Clock()), step, Clock())

    def updated(self) -> None:
        self.learner.updated(self.credited.groups, self.updates, Clock())

    def fit_critic(self, collected: CollectedStep) -> None:
        fit_critic(self.learner, collected, Clock())


class FitFollower(Follower):
    """Training on rows or pairs, which every rank reads."""

    session: FitSession[Any]

    def __init__(self, session: FitSession[Any], threads: ThreadClaim) -> None:
        super().__init__(threads)
        self.session, self.trained = session, session.trained
        self.parts += [session, session.objective]

    def whole_copy(self) -> None:
        whole_copy(self.session.objective.policy)
