"""Which reward functions score a completion: an item of a recipe's `rewards` section."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.errors import UserError, require
from posttrain.rewards.terms_options import Terms


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """One reward function and its weight in the sum."""

    name: str = ""
    """A reward function of this package, by name."""
    path: str = ""
    """A function of your own, as FILE.py:FUNCTION; give either this or `name`."""
    weight: float = 1.0
    """What its scores are multiplied by in the sum; 0 reports them and trains on none of them."""

    options: Mapping[str, object] = field(default_factory=dict)
    """Options of a reward of this package that has some, such as `{max_tokens: 400, cache_tokens: 100}`."""

    where: Mapping[str, object] = field(default_factory=dict)
    """Columns and the values that a row must have there, such as `{kind: code}`; the reward applies to no other row."""
    gate: str = ""
    """Another reward of the recipe whose score must be above 0; else this one is 0 and is not asked."""
    of: str = ""
    """Another reward of the recipe whose scores this one looks at, such as `cosine_length` at whether it was solved."""
    clip: tuple[float, float] | None = None
    """Bounds, [low, high], of what goes into the sum."""
    weight_to: float | None = None
    """The weight at step `over_steps`, reached in a line from `weight`."""
    over_steps: int = 0
    """Steps from the first weight to `weight_to`."""

    def __post_init__(self) -> None:
        self.terms()  # which refuses what makes no sense
        if self.path and self.options:
            raise UserError(f"options = {dict(self.options)} are for rewards of this package; {self.path} takes none")
        if (self.name == "") == (self.path == ""):
            raise UserError(
                "a reward has either a name (`name: graded_format`) or a path (`path: my_rewards.py:solved`)"
            )
        named = self.name == "" or self.name.isidentifier()
        require(named, self, "name", "is no name of a reward; a function of your own is path: FILE.py:FUNCTION")
        file, colon, function = self.path.rpartition(":")
        holds = self.path == "" or (colon == ":" and file.endswith(".py") and function.isidentifier())
        require(holds, self, "path", "is not FILE.py:FUNCTION, such as my_rewards.py:solved")
        require(abs(self.weight) < float("inf"), self, "weight", "is no finite number")

    def terms(self) -> Terms:
        """When the reward counts, and how much."""
        return Terms(
            where=self.where,
            gate=self.gate,
            of=self.of,
            clip=self.clip,
            weight_to=self.weight_to,
            over_steps=self.over_steps,
        )

    @property
    def short(self) -> str:
        """The short form that recipes and `--rewards` take: `graded_format`, `my_rewards.py:solved=0.5`."""
        source = self.name or self.path
        return source if self.weight == 1 else f"{source}={self.weight}"
