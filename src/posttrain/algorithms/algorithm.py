"""What an algorithm is: the record that sampling, batching and the update read.

What its functions return is checked, since they may be a user's: a shape, or a column at once.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.algorithms.advantages import RewardScaling, sums_differ
from posttrain.algorithms.credit import Credit, CreditRule, Evidence
from posttrain.algorithms.kl import AdaptiveKl
from posttrain.algorithms.terms import KlTerm, LossTerm, TokenView, is_column, needs_of, require_needs, value_text
from posttrain.errors import RunError, UserError
from posttrain.needs import CREDIT_NEEDS, KEPT_FOR_TERMS, MissingColumn, Need
from posttrain.options.algorithm import CriticOptions, TeacherOptions
from posttrain.options.bounds import Bounded, PositiveInt
from posttrain.options.training import ONE_PASS, Passes
from posttrain.records import Grades, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Resample(Bounded):
    """Dynamic sampling: other prompts' groups replace those whose rewards, before any shaping, are all equal."""

    max_rounds: PositiveInt = 3
    """Extra sampling rounds per step at most; uninformative groups of the last round stay.  For none write
    `resample: null`."""


DYNAMIC_SAMPLING = Resample()


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """All that sampling, batching and the update need to know about a method."""

    name: str
    credit: CreditRule
    """From evidence about a step's rollouts to advantages per token, and returns where there are values."""
    terms: tuple[LossTerm, ...]
    """The loss of a token is their sum."""
    token_weights: Callable[..., Tensor]
    """A rule of posttrain/algorithms/losses.py."""
    credit_needs: frozenset[Need] = frozenset()
    """Columns that the credit rule reads in its evidence; names of `Need` do too."""
    kl_penalty: KlTerm | None = None
    """A KL to the reference that is subtracted from the rewards of the sampled tokens."""
    resample: Resample | None = None
    informative: Callable[[Grades], Tensor] = sums_differ
    """Which groups dynamic sampling keeps."""
    masks_truncated: bool = False
    """Whether completions that reached the length limit carry no loss; their rewards still count in their group."""
    counts_unscored: bool = False
    """Whether completions that no reward function scored count, with an advantage of 0: in divisors, and in a KL."""
    credits_turns: bool = False
    """Whether the credit rule credits a token with what is earned from it on.  If so, rewards of an environment's
    replies belong to the token that ends the turn, else to the whole completion."""
    least_group_size: int = 2
    """Smallest group: 2 where completions of a prompt are compared with each other."""
    critic: CriticOptions | None = None
    """A value for each token; None for methods without values."""
    adaptive_kl: AdaptiveKl | None = None
    """Moves the coefficient of `kl_penalty` from step to step."""
    reward_scaling: RewardScaling | None = None
    """Applied to rewards before the credit rule."""
    passes: Passes = ONE_PASS
    """Epochs and mini-batches of a step, if the recipe does not set them."""
    largest_epoch_kl: float | None = None
    """KL to the sampling policy, in nats per token; beyond it a step makes no further update."""
    teacher: TeacherOptions | None = None
    """The policy whose log-probs are learned, by a term or a credit rule that needs them."""

    def __post_init__(self) -> None:
        owner = f"algorithm {self.name}"
        for name, rule in (("credit", self.credit), ("token_weights", self.token_weights)):
            if not callable(rule):
                raise UserError(f"{owner}: {name} = {rule!r:.60} ({type(rule).__name__}): give a function.")
        terms = self.terms
        if not isinstance(terms, tuple | list) or not terms or not all(isinstance(term, LossTerm) for term in terms):
            raise UserError(f"{owner}: terms = {terms!r:.60}: give a tuple of LossTerm, such as (policy_term(...),).")
        for what, names in (
            ("terms have the name", [term.name for term in terms]),
            ("terms report the metric", [term.metric_name for term in terms if term.reported]),
        ):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise UserError(f"{owner}: {names.count(twice[0])} {what} {twice[0]!r}; give each a different name.")
        needs = require_needs(self.credit_needs, CREDIT_NEEDS, f"{owner}: credit_needs")
        object.__setattr__(self, "credit_needs", needs)
        if Need.VALUES in self.needs | needs and self.critic is None:
            raise UserError(f"{owner}: it needs values, and critic = None; give a CriticOptions.")
        if self.uses_teacher and self.teacher is None:
            raise UserError(f"{owner}: it needs a teacher, and teacher = None; give a TeacherOptions.")

    def credited(self, evidence: Evidence, groups: Sequence[Group]) -> Credit:
        """The credit for the tokens of these groups.  Raises RunError if the rule fails or its result is invalid."""
        where = f"algorithm {self.name}: its credit rule"
        rule = f"{where} {getattr(self.credit, '__qualname__', type(self.credit).__name__)}"
        try:
            credit: object = self.credit(evidence.limited_to(self.credit_needs))
        except MissingColumn as missing:
            remedy = missing.remedy("`credit_needs` of the algorithm")
            raise RunError(f"{rule} cannot read `{missing.name}`.  {remedy}") from missing
        except (RunError, UserError):
            raise
        except Exception as error:
            frame = extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}, line {frame.lineno}"
            raise RunError(f"{rule} raised {type(error).__name__}: {str(error)[:300]} ({place}).") from error
        if not isinstance(credit, Credit):
            found = value_text(credit)
            raise RunError(f"{where} returned {found}; return a posttrain.Credit, such as Credit(advantages).")
        num_tokens = int(evidence.lengths.sum())
        for name, column in credit.columns.items():
            if column is None and name != "advantages":
                continue
            if not is_column(column, num_tokens):
                needed = f"a floating-point tensor of one number for each of the {num_tokens} completion tokens"
                remedy = "`per_rollout` makes it from one for each completion."
                raise RunError(f"{where} returned {value_text(column)} as {name}; return {needed}.  {remedy}")
            bad = (~torch.isfinite(column)).nonzero()
            if len(bad):
                raise RunError(f"{where} {not_finite(name, column, int(bad[0, 0]), evidence, groups)}")
        return credit

    def weighted(
        self, lengths: Int64[Tensor, " rollout"], scored: Bool[Tensor, " rollout"], *, max_completion_tokens: int
    ) -> Tensor:
        """The token weight of each rollout.  Raises RunError unless each is finite and at least 0."""
        rule = self.token_weights
        weights: object = rule(lengths, scored, max_completion_tokens=max_completion_tokens)
        where = f"algorithm {self.name}: its rule of token weights, {getattr(rule, '__name__', rule)},"
        if not is_column(weights, len(lengths)):
            needed = f"return a floating-point tensor of one number for each of the {len(lengths)} rollouts"
            raise RunError(f"{where} returned {value_text(weights)}; {needed}.")
        sound = torch.isfinite(weights) & (weights >= 0)
        if not bool(sound.all()):
            bad = int((~sound).nonzero()[0, 0])
            found = f"gave rollout {bad} of {len(lengths)} the weight {weights[bad].item()}"
            raise RunError(f"{where} {found}; give a finite number of at least 0, and 0 to a rollout without a score.")
        return weights

    def loss(self, view: TokenView) -> Float[Tensor, " token"]:
        """Σ_k c_k L_k of every token."""
        owner = f"algorithm {self.name}"
        first, *others = (term.coefficient * term.losses(view, owner=owner) for term in self.terms)
        return sum(others, start=first)

    @property
    def needs(self) -> frozenset[Need]:
        """Columns that the terms and a KL in the reward need."""
        return needs_of(self.terms) | ({Need.REFERENCE_LOGPROBS} if self.kl_penalty is not None else set())

    @property
    def column_needs(self) -> frozenset[Need]:
        """Columns computed before the updates of a step: for the credit rule, for terms and for a KL in the reward."""
        return self.credit_needs | (self.needs & KEPT_FOR_TERMS)

    @property
    def uses_teacher(self) -> bool:
        return bool((self.needs | self.credit_needs) & {Need.TEACHER_LOGPROBS, Need.TEACHER_KL})

    @property
    def uses_reference(self) -> bool:
        return bool((self.needs | self.credit_needs) & {Need.REFERENCE_LOGPROBS, Need.FULL_KL})

    @property
    def keeps_zero_advantages(self) -> bool:
        """Whether a completion without advantage still has a gradient, from a term such as a KL in the loss."""
        return not all(term.vanishes_without_advantage for term in self.terms)


def not_finite(name: str, column: Tensor, token: int, evidence: Evidence, groups: Sequence[Group]) -> str:
    """Which completion has an advantage or a return that is not finite, and the usual cause."""
    group, sample = divmod(int(evidence.rollout[token]), evidence.rewards.shape[1])
    num_unscored = int(evidence.rewards[group].isnan().sum())
    found = f"gave prompt {groups[group].prompt.id}, sample {sample}, {column[token].item()} as {name}"
    remedy = "leave it out of statistics (rewards.nanmean) and give its tokens 0, as rules in algorithms.advantages do"
    if num_unscored:
        return f"{found}.  {num_unscored} rollouts of that prompt have no score, so a reward of NaN: {remedy}."
    if bool(evidence.rewards.isnan().any()):
        return f"{found}.  A rollout of another prompt has no score, so a reward of NaN: {remedy}."
    largest = evidence.rewards.abs().max().item()
    return f"{found}, although all are scored, |reward| ≤ {largest:g}.  Look for a division by 0 or an overflow."
