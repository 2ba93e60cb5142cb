"""Credit per token: from evidence about a step's rollouts to advantages, and to returns where there are values.

Sampled tokens of all completions are concatenated, group after group, as in a batch.  A given token, such as one
of a tool's reply, is not among them: no rule can credit it, and no length counts it.  `per_rollout` lifts a rule that
gives one advantage to a whole completion; other rules read the token columns of the evidence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from posttrain.algorithms.advantages import Deviation, leave_one_out, leave_one_out_zscore, standardised
from posttrain.errors import RunError, UserError
from posttrain.needs import StepColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(StepColumns):
    """The rollouts of a step; `known` has the columns that the algorithm declares as `credit_needs`, and log μ."""

    rewards: Float64[Tensor, "prompt group"]
    """Weighted sums of the scores; NaN where nothing scored a rollout."""
    scores: Float64[Tensor, "function prompt group"]
    """Score of each reward function, clipped where the recipe says so; NaN where it does not apply."""
    weights: Float64[Tensor, " function"]
    """The weight of each function's scores in `rewards`; 0 for one that is only reported."""
    lengths: Int64[Tensor, "prompt group"]
    """Tokens that the policy sampled in each completion, the stop token included; at least 1."""
    max_completion_tokens: int
    """The limit that completions were sampled under."""
    token_rewards: Float64[Tensor, " token"] | None = None
    """Rewards of single tokens, added to the reward of their completion: process rewards, and a KL penalty."""
    step_rewards: Float64[Tensor, " token"] | None = None
    """The process rewards among them, by the weights of their functions; NaN on tokens that end no step."""
    truncated: Bool[Tensor, "prompt group"] | None = None
    """Completions that a limit cut off; None if that is unknown."""

    @property
    def behaviour_logprobs(self) -> Float64[Tensor, " token"]:
        """log μ of each token, in nats; always there in a run."""
        return self.column("behaviour_logprobs")

    @property
    def final_values(self) -> Float64[Tensor, "prompt group"]:
        """The value after the last token of each completion that was cut off; 0 for the others."""
        return self.column("final_values")

    @property
    def rollout(self) -> Int64[Tensor, " token"]:
        """Which completion, counted through all groups, each token belongs to."""
        lengths = self.lengths.flatten()
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    @property
    def token_reward_totals(self) -> Float64[Tensor, "prompt group"]:
        """The sum of each completion's token rewards; 0 where there are none."""
        totals = torch.zeros(self.lengths.numel(), dtype=torch.float64)
        if self.token_rewards is not None:
            totals = totals.index_add(0, self.rollout, self.token_rewards)
        return totals.view(self.lengths.shape)


class Whitening(NamedTuple):
    """What advantages were whitened by, in units of reward: (A - shift) / scale."""

    shift: float = 0.0
    scale: float = 1.0


UNWHITENED = Whitening()


class Credit(NamedTuple):
    """The result of a credit rule, token by token."""

    advantages: Float64[Tensor, " token"]
    """0 on every token of a completion that nothing scored."""
    returns: Float64[Tensor, " token"] | None = None
    """The target of the value before each token; None for algorithms without values."""
    value_range: Float64[Tensor, " token"] | None = None
    """How far a value may move in this step before a clipped value loss stops it; None means no limit."""
    whitening: Whitening | None = None
    """How the advantages were whitened, over the whole step; None for algorithms that do not whiten."""

    @property
    def columns(self) -> dict[str, Any]:
        return {"advantages": self.advantages, "returns": self.returns, "value_range": self.value_range}


CreditRule = Callable[[Evidence], Credit]
Shaping = Callable[..., Tensor]
"""(rewards, lengths, *, max_completion_tokens) -> rewards, all "prompt group", before the advantage."""


def per_rollout(advantage: Callable[[Tensor], Tensor], *, shaping: Shaping | None = None) -> CreditRule:
    """Lift a rule for whole completions, rewards to advantages, both "prompt group", to every one of their tokens.

        A_t = A(r + Σ_t r_t)        r: rewards, shaped first; r_t: token rewards

    Every token of a completion gets the same advantage.
    """

    def credit(evidence: Evidence) -> Credit:
        rewards = evidence.rewards
        if shaping is not None:
            rewards = shaping(rewards, evidence.lengths, max_completion_tokens=evidence.max_completion_tokens)
        if evidence.token_rewards is not None:
            rewards = rewards + evidence.token_reward_totals
        found = advantage(rewards)
        if not isinstance(found, Tensor) or found.shape != rewards.shape:
            name = getattr(advantage, "__name__", advantage)
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise RunError(
                f"advantage rule {name}: returned {shape}; return one advantage for each reward, {list(rewards.shape)}."
            )
        return Credit(found.flatten().repeat_interleave(evidence.lengths.flatten()))

    return credit


def per_function(
    advantage: Callable[[Float64[Tensor, "function prompt group"], Float64[Tensor, " function"]], Tensor],
) -> CreditRule:
    """Lift a rule of scores and weights, to one advantage for each completion, to every one of its tokens."""

    def credit(evidence: Evidence) -> Credit:
        if evidence.token_rewards is not None:
            raise RunError(
                "reward_aggregation = normalize_then_sum normalises scores, and a reward also gave token rewards or"
                " spans. Use sum_then_normalize."
            )
        advantages = advantage(evidence.scores, evidence.weights)
        return Credit(advantages.flatten().repeat_interleave(evidence.lengths.flatten()))

    return credit


CreditLevel = Literal["completion", "reward_to_go", "steps"]
"""What a token is credited with: everything its completion earned, what is earned from it on, or the steps from it
on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The divisor of centred rewards."""

    deviation: Deviation | Literal["none"] = "none"
    epsilon: float = 0.0
    """Added to the deviation, in units of reward."""


UNSCALED = Scale()
ADVANTAGE_EPSILON = 1e-4
"""Added to a deviation of advantages over a step, in units of reward; TRL's."""


def credit_at(
    level: CreditLevel,
    completion: Callable[[Tensor], Tensor],
    *,
    centre: Callable[[Tensor], Tensor],
    scale: Scale = UNSCALED,
    step_weight: float = 1.0,
    whole_step: bool = False,
) -> CreditRule:
    """The rule for this level of credit; without token rewards every level is `completion`."""
    match level:
        case "completion":
            return per_rollout(completion)
        case "reward_to_go":
            return reward_to_go(completion, centre=centre, scale=scale, whole_step=whole_step)
        case "steps":
            return step_advantages(completion, scale=scale, step_weight=step_weight)


def leave_one_out_credit(
    level: Literal["completion", "reward_to_go"],
    *,
    reward_range: tuple[float, float] | None,
    normalize_advantages: bool,
    mask_truncated: bool,
) -> CreditRule:
    """RLOO's rule: the sum of rewards, bounded, above the mean of the siblings', optionally normalised.

    The bounds act before a KL is subtracted.  Unscored (NaN) stays unscored.  With `mask_truncated`, completions that
    ran into the length limit earn no token rewards, such as a KL penalty.
    """
    if level != "completion" and (reward_range is not None or normalize_advantages):
        raise UserError(f"credit = {level}: reward_range and normalize_advantages need credit: completion.")
    advantage = partial(leave_one_out_zscore, epsilon=ADVANTAGE_EPSILON) if normalize_advantages else leave_one_out
    rule = credit_at(level, advantage, centre=leave_one_out)
    if reward_range is not None:
        rule = per_rollout(advantage, shaping=lambda rewards, lengths, **_: rewards.clamp(*reward_range))

    def without_truncated(evidence: Evidence) -> Credit:
        if evidence.token_rewards is None or evidence.truncated is None:
            return rule(evidence)
        cut = evidence.truncated.flatten()[evidence.rollout]
        return rule(replace(evidence, token_rewards=torch.where(cut, 0.0, evidence.token_rewards)))

    return without_truncated if mask_truncated else rule


def reward_to_go(
    completion: Callable[[Tensor], Tensor],
    *,
    centre: Callable[[Tensor], Tensor],
    scale: Scale = UNSCALED,
    whole_step: bool = False,
) -> CreditRule:
    """Each token gets what was earned from it on, above what its siblings earned from the same place on.

        G_it = r_i + Σ_{s≥t} r_is        A_it = (G_it - b_it) / (σ + ε)        b_it from G_k,min(t, |y_k|)

    r_i: the reward of completion i, earned with its last token; r_is: token rewards.  `centre` subtracts a baseline
    from the group's G at each place t, as from rewards; a sibling that has ended counts with its last G.  For b the
    mean of the others, `leave_one_out`, the expected gradient is the true one: a token causes nothing that came before
    it (Williams 1992; Sutton et al. 2000, NeurIPS 12), and nothing that siblings earn.  σ² is the mean over the group's
    completions of the mean over their tokens of (G_it - b_it)², times n/(n - 1) for `sample`; `none` does not divide.
    Without token rewards, `completion` gives the advantages; it must equal what `centre` and σ give for completions
    that earn only with their last token.  With `whole_step` all completions of the step are one group.
    """
    plain = per_rollout(completion)

    def credit(evidence: Evidence) -> Credit:
        if evidence.token_rewards is None:
            return plain(evidence)
        advantages: list[Tensor] = []
        earned = evidence.token_rewards.split(evidence.lengths.flatten().tolist())
        groups = evidence.rewards.reshape(1, -1) if whole_step else evidence.rewards
        size = groups.shape[1]
        for row, rewards in enumerate(groups):
            parts = earned[row * size : (row + 1) * size]
            above = centre(returns_to_go(rewards, parts)).T
            centred = [line[: len(part)] for line, part in zip(above, parts, strict=True)]
            advantages += scaled(centred, ~rewards.isnan(), scale)
        return Credit(torch.cat(advantages))

    return credit


def returns_to_go(rewards: Float64[Tensor, " group"], token_rewards: Sequence[Tensor]) -> Float64[Tensor, "time group"]:
    """G_it = r_i + Σ_{s≥t} r_is up to the end of the longest completion; after the end of one, its last."""
    longest = max(len(part) for part in token_rewards)
    columns: list[Tensor] = []
    for reward, part in zip(rewards, token_rewards, strict=True):
        to_go = reward + part.flip(0).cumsum(0).flip(0)
        last = to_go[-1:] if len(part) else reward  # an environment may fail before the first token
        columns.append(torch.cat([to_go, last.expand(longest - len(to_go))]))
    return torch.stack(columns, dim=1)


def scaled(centred: Sequence[Tensor], scored: Bool[Tensor, " group"], scale: Scale) -> list[Tensor]:
    """The centred returns of a group in units of σ, the root of their mean square; exactly 0 where all are."""
    largest = max((float(part.abs().amax()) for part in centred if len(part)), default=0.0)
    if scale.deviation == "none" or largest == 0:
        return list(centred)
    squares = torch.stack([(part / largest).square().mean() for part in centred if len(part)])  # 0: nothing scored
    degrees = int(scored.sum()) - (scale.deviation == "sample")
    spread = float((squares.sum() / degrees).sqrt())
    return [part / largest / (spread + scale.epsilon / largest) for part in centred]


def step_advantages(completion: Callable[[Tensor], Tensor], *, scale: Scale, step_weight: float = 1.0) -> CreditRule:
    """GRPO with process supervision: the normalised rewards of the steps that end with a token or later.

        A_it = A(r_i) + w Σ_{j: end(j) ≥ t} (s_ij - mean S) / (std S + ε)        S: all steps of the group's completions

    Shao et al. 2024, arXiv:2402.03300, §4.1.3, whose advantage is only the sum; A(r_i), the rule for whole
    completions, is added so that an outcome can count as well, and `step_weight` is w.  A step that earned 0 counts in
    S, a token that ends no step does not.  Steps that all earned the same, or a single one, are exactly 0.  The sum
    grows with the number of steps: it favours many steps above the group's mean, and few below it.  A KL penalty counts
    in r_i.
    """
    rule = per_rollout(completion)
    normalised = standardised(scale.deviation, over="group", epsilon=scale.epsilon)

    def credit(evidence: Evidence) -> Credit:
        steps = evidence.step_rewards
        if steps is None or evidence.token_rewards is None:
            return rule(evidence)
        rest = evidence.token_rewards - torch.where(steps.isnan(), 0.0, steps)
        outcome = rule(replace(evidence, token_rewards=rest if bool((rest != 0).any()) else None)).advantages
        lengths, size = evidence.lengths.flatten().tolist(), evidence.rewards.shape[1]
        counted = ~(evidence.rewards.isnan().flatten().repeat_interleave(evidence.lengths.flatten()) | steps.isnan())
        values = torch.where(counted, steps, torch.nan)
        parts = values.split(lengths)
        sums: list[Tensor] = []
        for row in range(len(evidence.rewards)):
            of_group = parts[row * size : (row + 1) * size]
            above = normalised(torch.cat(of_group)[None])[0]  # NaN marks no step, and becomes 0
            sums += [part.flip(0).cumsum(0).flip(0) for part in above.split([len(part) for part in of_group])]
        return Credit(outcome + step_weight * torch.cat(sums))

    return credit


def mean_of_rollouts(
    tokens: Float64[Tensor, " token"], lengths: Int64[Tensor, "prompt group"]
) -> Float64[Tensor, "prompt group"]:
    """The mean of each completion's tokens, and exactly x where all are x; 0 of one without a token."""
    parts = [part if len(part) else part.new_zeros(1) for part in tokens.split(lengths.flatten().tolist())]
    means = [part[0] if bool((part == part[0]).all()) else part.mean() for part in parts]
    return torch.stack(means).view(lengths.shape)
