"""What an algorithm is: the record that sampling, batching and the update read, and that they ask nothing else of."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from posttrain.algorithms.aggregation import sums_differ
from posttrain.algorithms.checks import checked_weights, credit_of_rule, require_credit, require_needs
from posttrain.algorithms.credit import Credit, CreditRule, Evidence
from posttrain.algorithms.kl import AdaptiveKl
from posttrain.algorithms.reward_shaping import RewardScaling
from posttrain.algorithms.terms import KlTerm, LossTerm, TokenView, needs_of, total_loss
from posttrain.errors import UserError
from posttrain.needs import CREDIT_NEEDS, KEPT_FOR_TERMS, Need
from posttrain.options.critic import CriticOptions
from posttrain.options.teacher import TeacherOptions
from posttrain.options.training import ONE_PASS, Passes
from posttrain.records import Grades, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Resample:
    """Dynamic sampling: groups whose rewards, before any shaping, are all equal make room for other prompts' groups."""

    max_rounds: int = 3
    """Extra sampling rounds per step at most; what is uninformative after the last stays."""

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise UserError(f"max_rounds = {self.max_rounds}: use 1 or more; for no resampling write `resample: null`.")


DYNAMIC_SAMPLING = Resample()
"""Dynamic sampling as it is where a method has it and no more is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """All that sampling, batching and the update need to know about a method."""

    name: str
    credit: CreditRule
    """Evidence about a step's rollouts to advantages, and returns where there are values, per token."""
    terms: tuple[LossTerm, ...]
    """What the loss of a token is the sum of."""
    token_weights: Callable[..., Tensor]
    """A rule of posttrain/algorithms/token_weights.py."""
    credit_needs: frozenset[Need] = frozenset()
    """Columns that the credit rule reads in its evidence; names of `Need` do too."""
    kl_penalty: KlTerm | None = None
    """A KL to the reference that is taken off the rewards of the sampled tokens."""
    resample: Resample | None = None
    informative: Callable[[Grades], Tensor] = sums_differ
    """Which groups teach something, as dynamic sampling asks: the others make room."""
    masks_truncated: bool = False
    """Whether completions that ran into the length limit carry no loss; their rewards count in their group."""
    counts_unscored: bool = False
    """Whether completions that no reward function scored count, with an advantage of 0: in divisors, and in a KL."""
    least_group_size: int = 2
    """Completions of a prompt that it takes to tell better from worse: 2 where they are compared with each other."""
    critic: CriticOptions | None = None
    """What expects the reward, token by token; None goes without."""
    adaptive_kl: AdaptiveKl | None = None
    """What moves the coefficient of `kl_penalty` from step to step."""
    reward_scaling: RewardScaling | None = None
    """What rewards go through before credit is made of them."""
    passes: Passes = ONE_PASS
    """Epochs and mini-batches of a step, where the recipe leaves them to the algorithm."""
    largest_epoch_kl: float | None = None
    """KL to the policy that sampled, in nats per token, beyond which no further update of a step is taken."""
    teacher: TeacherOptions | None = None
    """Whose log-probs are learned, by a term or a rule of credit that needs them."""

    def __post_init__(self) -> None:
        owner = f"algorithm {self.name}"
        for name, rule in (("credit", self.credit), ("token_weights", self.token_weights)):
            if not callable(rule):
                raise UserError(f"{owner}: {name} = {rule!r:.60} ({type(rule).__name__}): give a function.")
        if not isinstance(self.terms, tuple | list) or not all(isinstance(term, LossTerm) for term in self.terms):
            raise UserError(
                f"{owner}: terms = {self.terms!r:.60}: give a tuple of LossTerm, such as (policy_term(...),)."
            )
        if not self.terms:
            raise UserError(f"{owner}: terms = (): a loss is the sum of one term or more, such as policy_term(...).")
        for what, names in (
            ("terms have the name", [term.name for term in self.terms]),
            ("terms report the metric", [term.metric_name for term in self.terms if term.reported]),
        ):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise UserError(f"{owner}: {names.count(twice[0])} {what} {twice[0]!r}; give each a name of its own.")
        needs = require_needs(self.credit_needs, CREDIT_NEEDS, f"{owner}: credit_needs")
        object.__setattr__(self, "credit_needs", needs)
        if Need.VALUES in self.needs | needs and self.critic is None:
            raise UserError(f"{owner}: it needs values, and critic = None; give a CriticOptions.")
        if self.uses_teacher and self.teacher is None:
            raise UserError(f"{owner}: it needs a teacher, and none is named; give `teacher`, a TeacherOptions.")

    def credited(self, evidence: Evidence, groups: Sequence[Group]) -> Credit:
        """The credit for the tokens of these groups.

        Raises RunError where the rule raises, reads a column that it does not declare, or gives none to some token.
        """
        owner = f"algorithm {self.name}"
        credit = credit_of_rule(self.credit, evidence.limited_to(self.credit_needs), owner=owner)
        return require_credit(credit, evidence, groups, owner=owner)

    def weighted(
        self, lengths: Int64[Tensor, " rollout"], scored: Bool[Tensor, " rollout"], *, max_completion_tokens: int
    ) -> Tensor:
        """The token weight of each rollout.  Raises RunError where the rule gives none to some rollout."""
        weights = self.token_weights(lengths, scored, max_completion_tokens=max_completion_tokens)
        return checked_weights(weights, lengths, self.token_weights, owner=f"algorithm {self.name}")

    def loss(self, view: TokenView) -> Float[Tensor, " token"]:
        """Σ_k c_k L_k of every token.  Raises RunError where a term gives no loss to some token."""
        return total_loss(self.terms, view, owner=f"algorithm {self.name}")

    @property
    def needs(self) -> frozenset[Need]:
        """What the terms and the rewards need beside log π, log μ and advantages."""
        return needs_of(self.terms) | ({Need.REFERENCE_LOGPROBS} if self.kl_penalty is not None else set())

    @property
    def column_needs(self) -> frozenset[Need]:
        """What is computed of a step before its updates: for the credit rule, for terms and for a KL in the reward."""
        return self.credit_needs | (self.needs & KEPT_FOR_TERMS)

    @property
    def uses_teacher(self) -> bool:
        """Whether a teacher must be kept."""
        return bool((self.needs | self.credit_needs) & {Need.TEACHER_LOGPROBS, Need.TEACHER_KL})

    @property
    def uses_reference(self) -> bool:
        """Whether a reference policy must be kept."""
        return bool((self.needs | self.credit_needs) & {Need.REFERENCE_LOGPROBS, Need.FULL_KL})

    @property
    def keeps_zero_advantages(self) -> bool:
        """Whether a completion without advantage still has a gradient, from a term such as a KL in the loss."""
        return not all(term.vanishes_without_advantage for term in self.terms)
