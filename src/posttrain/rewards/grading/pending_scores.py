"""What one reward function is asked in a round, and what it has said so far."""

from collections.abc import Sequence

from posttrain.errors import UserError
from posttrain.options.grading import GradingOptions
from posttrain.rewards.grading.answers import OutOfTime, Score, Verdict
from posttrain.rewards.grading.calls import NO_RUN, Bounds, Call, Deadline, RolloutRow, after, calls_for, sooner
from posttrain.rewards.grading.function import RewardFunction, ScoringFailure, keywords
from posttrain.rewards.grading.score_cache import Cache, keys_of


class PendingScores:
    """The rows that a function is asked about in a round, and its verdicts on them."""

    def __init__(
        self,
        function: RewardFunction,
        seen: Sequence[RolloutRow | Score],
        bounds: Bounds,
        cache: Cache | None = None,
        trainer_state: object = NO_RUN,
    ) -> None:
        """`seen` has what is settled without asking in place of a row; `bounds` are those of this function."""
        self.function, self.bounds, self.cache, self.trainer_state = function, bounds, cache, trainer_state
        self.rows = {index: row for index, row in enumerate(seen) if isinstance(row, RolloutRow)}
        unasked = OutOfTime(bounds.until.says)
        self.verdicts: list[Verdict] = [said if isinstance(said, Score) else unasked for said in seen]
        self.asked = list(self.rows)
        """Rows without a verdict, by place: at first all of them, and after each try those where scoring failed."""
        self.keys: dict[int, bytes] = {}
        """What the cache knows each row by that it can know."""
        self.same: dict[int, int] = {}
        """Rows that are like an earlier one in all that the function is told, and which one that is."""
        if cache is not None:
            self._look_up(cache)
        self.num_cached = len(self.rows) - len(self.asked)
        """Rows that the function is not asked about, as their score is known or another's will be theirs."""

    def _look_up(self, cache: Cache) -> None:
        """Take from the cache what is there, and leave one of several equal rows to be asked about."""
        keys = zip(self.rows, keys_of(self.function, list(self.rows.values()), cache.sandbox), strict=True)
        self.keys = {index: key for index, key in keys if key is not None}
        known = cache.known(self.keys.values())
        first: dict[bytes, int] = {}
        for index, key in self.keys.items():
            if key in known:
                self.verdicts[index] = known[key]
                self.asked.remove(index)
            elif first.setdefault(key, index) != index:
                self.same[index] = first[key]
                self.asked.remove(index)

    def calls(self) -> list[Call]:
        """The calls that ask about what is open."""
        rows = tuple(self.rows[index] for index in self.asked)
        return calls_for(Call(self.function, rows, keywords(self.function), self.bounds, self.trainer_state))

    def take(self, fresh: Sequence[Verdict]) -> None:
        """Write down what the calls came to; what failed is open again, what no call was made for first."""
        for index, said in zip(self.asked, fresh, strict=True):
            self.verdicts[index] = said
        failed = [index for index in self.asked if isinstance(self.verdicts[index], ScoringFailure)]
        self.asked = sorted(failed, key=lambda index: not isinstance(self.verdicts[index], OutOfTime))

    @property
    def open(self) -> bool:
        """Whether something is left to be asked, and time to do it."""
        return bool(self.asked) and not self.bounds.until.passed

    def conclude(self) -> list[Verdict]:
        """The verdicts on all rows, those that nobody was asked about included."""
        for index, first in self.same.items():
            self.verdicts[index] = self.verdicts[first]
        return self.verdicts

    def remember(self) -> None:
        """Put the scores into the cache."""
        if self.cache is not None:
            said = {key: self.verdicts[index] for index, key in self.keys.items()}
            self.cache.remember({key: one for key, one in said.items() if isinstance(one, Score)})


def bounds_of(function: RewardFunction, num_rows: int, grading: GradingOptions, until: Deadline) -> Bounds:
    """The bounds of a function whose round begins now; `until` is when all functions have to be done."""
    own = after(
        function.settings.seconds, f"the reward's seconds = {function.settings.seconds:g} for a batch were over"
    )
    return Bounds(until=sooner(own, until), may_lose=grading.max_failure_share * num_rows)


def require_enforceable(function: RewardFunction, grading: GradingOptions) -> None:
    """Refuse limits that nothing could hold a function to, and workers or a cache where it has no name to go by."""
    settings = function.settings
    if settings.workers or settings.cache:
        function.find_source()
    if settings.workers or function.is_async:
        return
    who = f"cannot end reward {function.name!r}, a plain function in the trainer's process"
    remedy = (
        "Give it `workers: 1` or more in the recipe, reward_function(call, workers=1) in Python, or make it an"
        " `async def`."
    )
    for name, value in (("item_seconds", settings.item_seconds), ("seconds", settings.seconds)):
        if value:
            raise UserError(f"{name} = {value:g} {who}.  {remedy}")
    if grading.seconds and not function.bounded:
        raise UserError(f"grading.seconds = {grading.seconds:g} {who}.  {remedy}")
