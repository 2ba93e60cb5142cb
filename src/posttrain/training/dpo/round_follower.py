"""Ranks other than 0 in a run of DPO in rounds: they sample their share, and learn the pairs that rank 0 gives them."""

from posttrain.config import DpoConfig
from posttrain.ranks.group import RankGroup
from posttrain.training.dpo.learned_rounds import LearnedRounds
from posttrain.training.fit_session import FitSession
from posttrain.training.following import RlFollower
from posttrain.training.reference import Reference
from posttrain.training.session import CallerObjects


class RoundFollower(RlFollower):
    """Samples as in training by reward, and learns as with rows."""

    def __init__(self, config: DpoConfig, caller: CallerObjects, reference: Reference | None, ranks: RankGroup) -> None:
        super().__init__(config.sampling_half(), caller, ranks)
        self.of_rounds, self.reference = config, reference

    def open(self, longest: int) -> None:
        super().open(longest)
        self.rounds = LearnedRounds(self.of_rounds, self.learner.policy, reference=self.reference)
        self.session = FitSession(self.of_rounds, "", self.rounds, self.rounds, own_optimizer=self.caller.optimizer)
        self.trained = self.session.trained
        self.parts += [self.session, self.rounds]

    def learn(self, step: int) -> None:
        self.session.learn(step)
