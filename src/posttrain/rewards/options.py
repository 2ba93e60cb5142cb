"""Which reward functions score a completion: an item of a recipe's `rewards` section."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.errors import UserError, require
from posttrain.rewards.asking_options import Asking
from posttrain.rewards.terms_options import Terms


@dataclass(frozen=True, kw_only=True)
class RewardOptions(Asking, Terms):
    """One reward function, its weight in the sum, its terms, and how it is asked."""

    name: str = ""
    """A reward function of this package, by name."""
    path: str = ""
    """A function of your own, as FILE.py:FUNCTION; give either this or `name`."""
    weight: float = 1.0
    """What its scores are multiplied by in the sum; 0 reports them and trains on none of them."""

    options: Mapping[str, object] = field(default_factory=dict)
    """Options of a reward of this package that has some, such as `{max_tokens: 400, cache_tokens: 100}`."""

    def __post_init__(self) -> None:
        Terms.__post_init__(self)
        Asking.__post_init__(self)
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
        for option in ("workers", "cache"):
            own = self.path != "" or not getattr(self, option)
            require(own, self, option, f"is for functions of your own; {self.name} sees to it by itself")

    @property
    def short(self) -> str:
        """The short form that recipes and `--rewards` take: `graded_format`, `my_rewards.py:solved=0.5`."""
        source = self.name or self.path
        return source if self.weight == 1 else f"{source}={self.weight}"
