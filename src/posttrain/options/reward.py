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
    """Options of a reward model in a recipe's `rewards`; functions have none of these."""

    model: str = ""
    """A reward model: the folder of a sequence classifier that transformers reads, or one of the hub as `org/name` or
    `org/name@revision`."""
    label: int | str | None = None
    """Which of its numbers is the score, by index or by name in the model's `id2label`; null is the only one, and an
    error if there are several."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of its weights and products, whatever the policy's; auto is bfloat16 on CUDA and float32 on a CPU.  The head
    is always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the reward model is, wherever the policy is; auto is cuda if available, else cpu."""
    quantization: Literal["nf4"] | None = None
    """Keep its linear layers, except the head, in 4 bits (extra `qlora`)."""
    chat_template: str = ""
    """File of a Jinja chat template that replaces the reward model's; needed to read conversations if it has none."""
    max_tokens: PositiveInt | None = None
    """Most tokens of a prompt and its completion that it reads; null is the model's limit."""
    over_long: Literal["error", "cut_left"] = "error"
    """What to do with a longer text: stop and name the completion, or cut its beginning; the outcome is then `cut`."""
    tokens_per_batch: PositiveInt = 16384
    """Tokens, padding included, in the reward model at a time: bounds memory, changes no score."""
    untrained_head: bool = False
    """Accept a folder without a head, whose scores are then random, the same in each run."""
    trust_remote_code: bool = False
    """Run the Python code in the reward model's folder if transformers has none for it.  That code can do anything on
    this machine."""

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
    """Several reward models as one: an error of a single one is often not shared by the others.

    Coste et al. 2023, arXiv:2310.02743, and Eisenstein et al. 2023, arXiv:2312.09244.
    """

    ensemble: tuple[str, ...] = ()
    """More reward models, named as `model` is and with its options, for example trained on the same pairs with other
    seeds: `[runs/rm-1/model, runs/rm-2/model]`."""
    combine: Literal["mean", "least", "mean_minus_deviation"] = "mean"
    """The ensemble's score: the mean of its models' scores, the least, or the mean minus `deviation_weight` times their
    deviation."""
    deviation_weight: NonNegativeFloat = 1.0
    """k of mean - k·deviation, the cost of disagreement (population deviation of the models' scores)."""

    rules: ClassVar[Rules] = (
        Unused("combine deviation_weight", {"ensemble": GIVEN}, "Name more reward models: ensemble: [FOLDER]."),
        Unused("deviation_weight", {"combine": "mean_minus_deviation"}),
    )


OF_MODELS = " ".join(each.name for each in fields(RewardModelOptions) if each.name != "model")
"""The options of a reward model except which one it is."""
OF_ENSEMBLES = " ".join(each.name for each in fields(EnsembleOptions))


def folder_name(model: str) -> str:
    return Path(model).name.partition("@")[0] or Path(model).resolve().name


@dataclass(frozen=True, kw_only=True)
class CallOptions(Bounded):
    """In which process a reward function is called, for how long, and whether twice.

    Workers call a function of lists once for each prompt, with that prompt's completions.  A function that compares
    completions of different prompts must stay in the trainer's process.
    """

    workers: NonNegativeInt = 0
    """Separate processes that call it, so that a deadline or a crash does no harm; 0 is the trainer's process."""
    item_seconds: NonNegativeFloat = 0.0
    """Deadline for one completion; n times that for n in a call.  Needs workers or an async function."""
    seconds: NonNegativeFloat = 0.0
    """Deadline for all completions of a step, retries included; needs workers or an async function."""
    cache: bool = False
    """Call it once for the same completion and columns: you promise that each score depends on nothing else.  A change
    of its file is noticed, a change of what the file imports is not."""

    rules: ClassVar[Rules] = (
        Rule(
            "item_seconds",
            lambda o: not o.seconds or o.item_seconds <= o.seconds,
            "is more than seconds = {o.seconds}, the deadline for all completions together.  Use less.",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class RewardTerms(Bounded):
    """When a reward counts, and how much."""

    weight: FiniteFloat = 1.0
    """Factor of its scores in the sum; with 0 they are only reported."""
    where: Mapping[str, object] = field(default_factory=dict)
    """Columns and the values that a row must have, such as `{kind: code}`; the reward skips all other rows."""
    gate: str = ""
    """Another reward whose score must be above 0; else this one is 0 and is not called: "format must hold first"."""
    of: str = ""
    """Another reward whose scores this one gets as its argument `base`, as `cosine_length` does."""
    clip: tuple[float, float] | None = None
    """Bounds, [low, high], of its part of the sum; the score is logged without them."""
    weight_to: FiniteFloat | None = None
    """The weight at step `over_steps`, reached linearly from `weight`."""
    over_steps: NonNegativeInt = 0
    """Steps from the first weight to `weight_to`."""

    rules: ClassVar[Rules] = (
        Rule(
            "clip",
            lambda o: o.clip is None or (o.clip[0] < o.clip[1] and all(map(isfinite, o.clip))),
            "must be two finite bounds, the lower one first.  Use such as [-1, 1].",
        ),
        Rule("over_steps", lambda o: (o.weight_to is None) == (o.over_steps == 0), "goes with weight_to.  Give both."),
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
    """One reward function, by name or by path, or a reward model; and its settings."""

    name: str = ""
    """A reward function of this package; or a name for a reward model, whose default is its folder."""
    path: str = ""
    """Your function, as FILE.py:FUNCTION or package.module:FUNCTION; give this, `name` or `model`."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of a reward of this package, such as `{max_tokens: 400, cache_tokens: 100}`."""

    rules: ClassVar[Rules] = (
        Rule(
            "path",
            lambda o: bool(o.name or o.model) != bool(o.path),
            "with name = {o.name!r} and model = {o.model!r} is not one reward.  Give `name: graded_format`,"
            " `path: my_rewards.py:solved` or `model: my-reward-model`.",
        ),
        Unused("options", {"path": "", "model": ""}, "They are for rewards of this package."),
        Unused("ensemble", {"model": GIVEN}, "Name its first reward model as model."),
        Unused(OF_MODELS, {"model": GIVEN}),
        Rule(
            "name",
            lambda o: not o.name or o.model or o.name.isidentifier(),
            "is not a name of a reward.  For your function use path: FILE.py:FUNCTION.",
        ),
        Rule(
            "path",
            lambda o: not o.path or is_path(o.path),
            "is not FILE.py:FUNCTION or package.module:FUNCTION.  Use such as my_rewards.py:solved.",
        ),
        Unused("workers cache", {"path": GIVEN}, "Rewards of this package and reward models need no workers or cache."),
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
    """Share of a function's scores of a step that may be missing because scoring failed; more stop the run."""
    max_unscored_steps: NonNegativeInt = 10
    """Stop the run after this many steps in a row without a single reward; 0 never stops it."""
    on_unscored_row: OnUnscoredRow = "warn"
    """What happens if all functions return None for all completions of a prompt: warn names the prompt, stop ends the
    run.  Rows that every reward's `where` leaves out are always refused before training."""
    max_same_reward_steps: NonNegativeInt = 50
    """Stop the run if all completions of its first steps, this many, have the same reward; 0 never stops it."""
    seconds: NonNegativeFloat = 0.0
    """Deadline for all reward functions on one batch of completions, of a step or of an evaluation; 0 sets none."""
    cache_entries: NonNegativeInt = 100_000
    """Scores to cache, of rewards with `cache`; the oldest are dropped first.  0: none."""
    cache_file: str = ""
    """File of cached scores, which several runs may share; empty keeps them in memory."""

    rules = (Unused("cache_file", {"cache_entries": GIVEN}),)
