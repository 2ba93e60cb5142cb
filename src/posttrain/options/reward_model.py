"""A reward model as a reward: which sequence classifier, which of its numbers is the score, and how it runs."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from posttrain.options.bounds import Bounded, NonNegativeFloat, PositiveInt
from posttrain.options.rules import GIVEN, Rule, Rules, Unused


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
