"""Ranks other than 0 in a run of DPO in rounds: they sample their share, and learn the pairs that rank 0 gives them."""

from collections.abc import Sequence

from posttrain.config import DpoConfig
from posttrain.ranks.group import RankGroup
from posttrain.records import Preference
from posttrain.training.dpo.learned_rounds import LearnedRounds
from posttrain.training.fit_session import FitSession
from posttrain.training.following import FitFollower, RlFollower
from posttrain.training.reference import Reference
from posttrain.training.session import CallerObjects


class RoundFollower(RlFollower, FitFollower):
    """Samples as in training by reward, and learns as from rows."""

    def __init__(self, config: DpoConfig, caller: CallerObjects, reference: Reference | None, ranks: RankGroup) -> None:
        RlFollower.__init__(self, config.sampling_half(), caller, ranks)
        self.of_rounds, self.reference = config, reference

    def open(self, longest: int) -> None:
        super().open(longest)
        self.rounds = LearnedRounds(self.of_rounds, self.learner.policy, reference=self.reference)
        self.session = FitSession(self.of_rounds, "", self.rounds, self.rounds, own_optimizer=self.caller.optimizer)
        self.trained = self.session.trained

    def learn(self, step: int) -> None:
        FitFollower.learn(self, step)

    def begin_round(self, number: int, pairs: Sequence[Preference]) -> None:
        self.rounds.begin_round(number, pairs)
