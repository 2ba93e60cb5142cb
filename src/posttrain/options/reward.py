"""Which reward functions score a completion: an item of a recipe's `rewards` section."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal

from posttrain.options.bounds import (
    GIVEN,
    Bounded,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Rule,
    Rules,
    Share,
    Unused,
)


@dataclass(frozen=True, kw_only=True)
class RewardModelOptions(Bounded):
    """Options of a reward model in a recipe's `rewards`; reward functions do not have them."""

    model: str = ""
    """A reward model: a folder with a sequence classifier that transformers reads, or a hub model as `org/name` or
    `org/name@revision`."""
    label: int | str | None = None
    """Which output is the score, by index or by name in the model's `id2label`.  Null: the only one; an error if there
    are several."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of its weights and matrix products, independent of the policy's; auto: bfloat16 on CUDA and float32 on
    a CPU.  The head is always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the reward model, independent of the policy's; auto: cuda if available, else cpu."""
    quantization: Literal["nf4"] | None = None
    """Keep its linear layers, except the head, in 4 bits (extra `qlora`)."""
    chat_template: str = ""
    """File of a Jinja chat template that replaces the reward model's; required for conversations if it does not have
    one."""
    max_tokens: PositiveInt | None = None
    """Maximum tokens of a prompt and its completion; null: the model's limit."""
    over_long: Literal["error", "cut_left"] = "error"
    """What to do with a longer text: stop and name the completion, or cut its beginning; the outcome is then `cut`."""
    tokens_per_batch: PositiveInt = 16384
    """Tokens, padding included, in the reward model at a time: limits memory, does not change scores."""
    untrained_head: bool = False
    """Accept a folder without a head.  Its scores are then random, but the same in each run."""
    trust_remote_code: bool = False
    """Run the Python code in the reward model's folder if transformers does not support the model.  That code can do
    anything on this machine."""

    rules: ClassVar[Rules] = (
        Rule("label", lambda o: not isinstance(o.label, int) or o.label >= 0, "is negative.  Labels count from 0."),
    )

    @property
    def model_options(self) -> dict[str, Any]:
        """The options except `model` that are not the default."""
        named = [each.name for each in fields(RewardModelOptions) if each.name != "model"]
        plain = RewardModelOptions()
        return {name: getattr(self, name) for name in named if getattr(self, name) != getattr(plain, name)}


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions(Bounded):
    """Several reward models as one: the others often do not share a single model's error.

    Coste et al. 2023, arXiv:2310.02743, and Eisenstein et al. 2023, arXiv:2312.09244.
    """

    ensemble: tuple[str, ...] = ()
    """More reward models, named like `model` and with the same options; for example, trained on the same pairs with
    other seeds: `[runs/rm-1/model, runs/rm-2/model]`."""
    combine: Literal["mean", "least", "mean_minus_deviation"] = "mean"
    """The ensemble's score: the mean of the models' scores, the smallest, or the mean minus `deviation_weight` times
    their standard deviation."""
    deviation_weight: NonNegativeFloat = 1.0
    """k of mean - k·deviation, the penalty for disagreement (population standard deviation of the models' scores)."""

    rules: ClassVar[Rules] = (
        Unused("combine deviation_weight", {"ensemble": GIVEN}, "Add reward models: ensemble: [FOLDER]."),
        Unused("deviation_weight", {"combine": "mean_minus_deviation"}),
    )


OF_MODELS = " ".join(each.name for each in fields(RewardModelOptions) if each.name != "model")
"""The options of a reward model except which one it is."""
OF_ENSEMBLES = " ".join(each.name for each in fields(EnsembleOptions))


def folder_name(model: str) -> str:
    return Path(model).name.partition("@")[0] or Path(model).resolve().name


@dataclass(frozen=True, kw_only=True)
class CallOptions(Bounded):
    """In which process a reward function runs, its deadlines, and whether its scores are cached.

    Workers call a function that receives lists once per prompt, with that prompt's completions.  A function that
    compares completions of different prompts must stay in the trainer's process."""

    workers: NonNegativeInt = 0
    """Number of separate processes that call it, so that a hang or a crash does no harm; 0: the trainer's process."""
    item_seconds: NonNegativeFloat = 0.0
    """Time limit per completion; a call with n completions gets n times that.  Needs workers or an async function."""
    seconds: NonNegativeFloat = 0.0
    """Time limit for all completions of a step, retries included.  Needs workers or an async function."""
    cache: bool = False
    """Reuse scores of the same completion and columns.  Only set it if each score depends on nothing else.  A change of
    the function's file is noticed; a change of the file's imports is not."""

    rules: ClassVar[Rules] = (
        Rule(
            "item_seconds",
            lambda o: not o.seconds or o.item_seconds <= o.seconds,
            "must be at most seconds = {o.seconds}, the time limit for all completions together.",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class RewardTerms(Bounded):
    """When a reward counts, and how much."""

    weight: FiniteFloat = 1.0
    """Weight of its scores in the sum; with 0 they are only reported."""
    where: Mapping[str, object] = field(default_factory=dict)
    """Columns and the values that a row must have, such as `{kind: code}`.  The reward skips all other rows."""
    gate: str = ""
    """Another reward whose score must be above 0, as in "the format comes first".  Otherwise this reward is 0 and is
    not called."""
    of: str = ""
    """Another reward, whose scores are passed to this one as its argument `base`, as for `cosine_length`."""
    clip: tuple[float, float] | None = None
    """Limits, [low, high], on its score in the sum; the logged score is not limited."""
    weight_to: FiniteFloat | None = None
    """The weight at step `over_steps`, reached linearly from `weight`."""
    over_steps: NonNegativeInt = 0
    """Steps from the first weight to `weight_to`."""

    rules: ClassVar[Rules] = (
        Rule(
            "clip",
            lambda o: o.clip is None or (o.clip[0] < o.clip[1] and all(map(isfinite, o.clip))),
            "must be two finite bounds, the lower one first.  For example, use [-1, 1].",
        ),
        Rule("over_steps", lambda o: (o.weight_to is None) == (o.over_steps == 0), "needs weight_to.  Set both."),
    )

    def weight_at(self, step: int) -> float:
        if self.weight_to is None:
            return self.weight
        share = min(1.0, max(0, step - 1) / self.over_steps)
        return self.weight + share * (self.weight_to - self.weight)

    def applies(self, columns: Mapping[str, object]) -> bool:
        return all(columns.get(name) == value for name, value in self.where.items())


@dataclass(frozen=True, kw_only=True)
class RewardSettings(CallOptions, RewardTerms):
    """When a reward function counts, and how it is called."""


@dataclass(frozen=True, kw_only=True)
class RewardOptions(RewardModelOptions, EnsembleOptions, RewardSettings):
    """One reward function, by name or by path, or one reward model, with its settings."""

    name: str = ""
    """A reward function of this package; or a name for a reward model (default: its folder)."""
    path: str = ""
    """Your function, as FILE.py:FUNCTION or package.module:FUNCTION.  Give `path`, `name` or `model`."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of a reward of this package, such as `{max_tokens: 400, cache_tokens: 100}`."""

    rules: ClassVar[Rules] = (
        Rule(
            "path",
            lambda o: bool(o.name or o.model) != bool(o.path),
            "with name = {o.name!r} and model = {o.model!r} is not one reward.  Give `name: graded_format`,"
            " `path: my_rewards.py:solved` or `model: my-reward-model`.",
        ),
        Unused("options", {"path": "", "model": ""}, "Only rewards of this package have options."),
        Unused("ensemble", {"model": GIVEN}, "Set model to its first reward model."),
        Unused(OF_MODELS, {"model": GIVEN}),
        Rule(
            "name",
            lambda o: not o.name or o.model or o.name.isidentifier(),
            "is not the name of a reward.  For your own function, use path: FILE.py:FUNCTION.",
        ),
        Rule(
            "path",
            lambda o: not o.path or is_path(o.path),
            "must be FILE.py:FUNCTION or package.module:FUNCTION.  For example, use my_rewards.py:solved.",
        ),
        Unused(
            "workers cache",
            {"path": GIVEN},
            "Rewards of this package and reward models do not need workers or a cache.",
        ),
    )

    @property
    def called(self) -> str:
        return self.name or self.path.rpartition(":")[2] or folder_name(self.model)


def is_path(path: str) -> bool:
    """Whether a text is FILE.py:FUNCTION or package.module:FUNCTION."""
    place, _, function = path.rpartition(":")
    module = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    return module and function.isidentifier()


OnUnscoredRow = Literal["warn", "stop"]


@dataclass(frozen=True, kw_only=True)
class GradingOptions(Bounded):
    """How long scoring may take, how much of it may fail, and which scores are cached."""

    max_failure_share: Share = 0.05
    """Share of a function's scores in a step that may be missing because scoring failed.  If more are missing, the run
    stops."""
    max_unscored_steps: NonNegativeInt = 10
    """Stop the run after this many steps in a row without a single reward; 0: never."""
    on_unscored_row: OnUnscoredRow = "warn"
    """What to do if all functions return None for all completions of a prompt: warn names the prompt, stop ends the
    run.  Rows that every reward's `where` excludes are always rejected before training."""
    max_same_reward_steps: NonNegativeInt = 50
    """Stop the run if all completions of its first n steps have the same reward; 0: never."""
    seconds: NonNegativeFloat = 0.0
    """Time limit for all reward functions on one batch of completions, in a step or in an evaluation; 0: no limit."""
    cache_entries: NonNegativeInt = 100_000
    """Number of scores to cache for rewards with `cache`; the oldest are dropped first.  0: none."""
    cache_file: str = ""
    """File of cached scores; several runs can share it.  Empty: keep them in memory."""

    rules = (Unused("cache_file", {"cache_entries": GIVEN}),)
