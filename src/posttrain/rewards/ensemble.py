"""Several reward models as one reward: what one of them takes for good by mistake, the others may not.

A policy that is trained against a reward model finds what that model overrates.  Models trained on the same pairs from
other seeds overrate other things, and disagree there.  Of the scores r_1 … r_n of one text:

    mean                   r̄ = Σ r_i / n
    least                  min r_i                                  the "worst case" of Coste et al. 2023
    mean_minus_deviation   r̄ - k·√(Σ (r_i - r̄)² / n)               their uncertainty weighting, with the deviation in
                                                                    place of the variance: it has the scores' unit

Coste et al. 2023, arXiv:2310.02743.  Scores have no unit that is common to models of different kinds: an ensemble is of
models that learned the same pairs, centred (`reward_model.center_coefficient` above 0), else one may always be least.

**Known hacks.**  What all of them overrate, which is more the more alike they are (Eisenstein et al. 2023,
arXiv:2312.09244): models that share their base share its mistakes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.errors import UserError
from posttrain.options.reward import RewardOptions
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.model import ReadText, RewardModel

Combine = Literal["mean", "least", "mean_minus_deviation"]


def combined_scores(
    scores: Float64[Tensor, "model text"], combine: Combine, deviation_weight: float = 1.0
) -> Float64[Tensor, " text"]:
    """One score for each text; of equal scores it is that score, whatever the rule."""
    if combine == "least":
        return scores.amin(dim=0)
    mean = scores.mean(dim=0)
    if combine == "mean":
        return mean
    return mean - deviation_weight * deviations(scores)


def deviations(scores: Float64[Tensor, "model text"]) -> Float64[Tensor, " text"]:
    """How far models disagree about each text: the population deviation of their scores."""
    return scores.std(dim=0, correction=0)


@dataclass(eq=False)
class RewardModelEnsemble:
    """Reward function: what several reward models say of prompt and completion, put together.

        RewardModelEnsemble([RewardModel("rm-0"), RewardModel("rm-1")], combine="least")

    It logs `deviation`, by which the models disagree: the mean as a metric, and each completion's beside its score.
    """

    models: Sequence[RewardModel]
    combine: Combine = "mean"
    deviation_weight: float = 1.0

    def __post_init__(self) -> None:
        if len(self.models) < 2:
            raise UserError(f"reward models: an ensemble of {len(self.models)}; give two or more, or a RewardModel.")
        self.__name__ = "ensemble"

    def __call__(
        self,
        /,
        *,
        prompts: Sequence[object],
        completions: Sequence[object],
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[float]], None] | None = None,
        **_columns: object,
    ) -> list[float] | list[Graded]:
        """A score for each completion, and the outcome `cut` where a model has read only the end of one."""
        said = [model(prompts=prompts, completions=completions) for model in self.models]
        scores = torch.tensor([[score_of(each) for each in of_model] for of_model in said], dtype=torch.float64)
        spread = deviations(scores)
        if log_metric is not None and len(completions):
            log_metric("deviation", spread.mean().item())
        if log_extra is not None:
            log_extra("deviation", spread.tolist())
        combined = combined_scores(scores, self.combine, self.deviation_weight).tolist()
        if not any(isinstance(each, Graded) for of_model in said for each in of_model):
            return combined
        cut = [any(is_cut(of_model[place]) for of_model in said) for place in range(len(combined))]
        outcomes = [ReadText.CUT if each else ReadText.WHOLE for each in cut]
        return [Graded(score, outcome) for score, outcome in zip(combined, outcomes, strict=True)]


def score_of(said: float | Graded) -> float:
    """The number in what a reward model says of a completion; each has one."""
    score = said.score if isinstance(said, Graded) else said
    assert score is not None
    return score


def is_cut(said: float | Graded) -> bool:
    """Whether a reward model has read only the end of a text."""
    return isinstance(said, Graded) and said.outcome is ReadText.CUT


def reward_model_of(options: RewardOptions) -> RewardModel | RewardModelEnsemble:
    """The reward model of an item of a recipe's `rewards`, or several as one."""
    models = [RewardModel(model, **options.model_options) for model in (options.model, *options.ensemble)]
    if len(models) == 1:
        return models[0]
    return RewardModelEnsemble(models, combine=options.combine, deviation_weight=options.deviation_weight)


def reward_models_in(call: object) -> tuple[RewardModel, ...]:
    """The reward models that a reward function asks; none of any other function."""
    if isinstance(call, RewardModelEnsemble):
        return tuple(call.models)
    return (call,) if isinstance(call, RewardModel) else ()
