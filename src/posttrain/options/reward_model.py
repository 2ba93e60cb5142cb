"""A reward model as a reward: which sequence classifier it is, which of its numbers is the score, and how it runs."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from posttrain.errors import require
from posttrain.options.bounds import Bounded, NonNegativeFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class RewardModelOptions(Bounded):
    """The reward model of an item of a recipe's `rewards`; a function has none of these."""

    model: str = ""
    """A reward model in place of a function: the folder of a sequence classifier that transformers reads, or one of the
    hub as `org/name` or `org/name@revision`."""
    label: int | str | None = None
    """Which of its numbers is the score, by place or by its name in the model's `id2label`; null is the only one that
    there is, and an error where there are several."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the reward model's weights and products, whatever the policy's is; auto is bfloat16 on CUDA and float32
    on a CPU.  The head is float32 in any case."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the reward model lives, whatever the policy does; auto is cuda where there is one, else cpu."""
    quantization: Literal["nf4"] | None = None
    """Keep the reward model's linear layers in 4 bits (extra `qlora`), but for its head."""
    chat_template: str = ""
    """File of a chat template, in Jinja, in place of the reward model's own; for one without that is to read
    conversations."""
    max_tokens: PositiveInt | None = None
    """Most tokens of a prompt and its completion that the reward model reads; null is as many as it was made for."""
    over_long: Literal["error", "cut_left"] = "error"
    """What to do with a text of more: stop and name the completion, or cut it from its beginning, so that the reward
    model reads its end; what was cut has the outcome `cut`."""
    tokens_per_batch: PositiveInt = 16384
    """Tokens, padding included, that go through the reward model at a time: bounds memory, changes no score."""
    untrained_head: bool = False
    """Let a model whose head is not in its folder score with random numbers, the same in each run; without it such a
    folder is refused."""
    trust_remote_code: bool = False
    """Run the Python code that the reward model's folder brings, where transformers has none for it: anything that
    code can do on this machine, it may then do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        negative = isinstance(self.label, int) and self.label < 0
        require(not negative, self, "label", "is no place; labels count from 0")

    @property
    def model_options(self) -> dict[str, Any]:
        """What is said of a reward model beside which it is, where that is not the default."""
        named = [each.name for each in fields(RewardModelOptions) if each.name != "model"]
        plain = RewardModelOptions()
        return {name: getattr(self, name) for name in named if getattr(self, name) != getattr(plain, name)}


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions(Bounded):
    """Several reward models as one: what a single one takes for good by mistake, others may not.

    Coste et al. 2023, arXiv:2310.02743, and Eisenstein et al. 2023, arXiv:2312.09244.
    """

    ensemble: tuple[str, ...] = ()
    """More reward models, named as `model` is, which score together with it under the options that it has; trained on
    the same pairs from other seeds, such as `[runs/rm-1/model, runs/rm-2/model]`."""
    combine: Literal["mean", "least", "mean_minus_deviation"] = "mean"
    """What an ensemble's score is: the mean of its models' scores, the least of them, or the mean less
    `deviation_weight` of their deviation."""
    deviation_weight: NonNegativeFloat = 1.0
    """k of mean - k·deviation: what it costs that the models disagree (population deviation of their scores)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        usual = {"combine": EnsembleOptions.combine, "deviation_weight": EnsembleOptions.deviation_weight}
        given = [name for name, value in usual.items() if getattr(self, name) != value]
        for name in given if not self.ensemble else []:
            require(False, self, name, "puts several reward models together; name more than one: ensemble: [FOLDER]")
        weighs = self.combine == "mean_minus_deviation" or "deviation_weight" not in given
        require(weighs, self, "deviation_weight", "is of combine: mean_minus_deviation")


def folder_name(model: str) -> str:
    """What a reward model is called: the last part of its path, or of its name on the hub."""
    return Path(model).name.partition("@")[0] or Path(model).resolve().name
