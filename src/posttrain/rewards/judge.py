"""Rewards by a judge: a model behind any OpenAI-compatible chat endpoint, by rubric or by comparing a group in pairs.

**What earns what.**  `compare: rubric` asks for a number on a scale and pays its share of the scale, in [0, 1].
`compare: pairs` asks, for every pair of a prompt's completions, which is better, in an order drawn by lot, and pays
each completion its share of the points it could win.

**Known hacks, and what stops them.**  Instructions to the judge and verdicts in the answer: an answer is a JSON string
between fences that it cannot know, and one that looks like a verdict scores 0 unasked.  Empty answers and phrases that
judges are known to pay for ("Solution:"): 0 unasked.  A reply without a verdict is a failure, never a 0.  A judge
that has stopped judging: every so often it is shown an answer that is known to be bad and one that is known to be
good, and a warning is given where it does not tell them apart.  Not stopped: what a judge likes and should not, such as
length and confident tone.
"""

import asyncio
import os
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from posttrain.errors import RunError, UserError, require
from posttrain.rewards.function import ScoringFailure
from posttrain.rewards.graded import Graded
from posttrain.rewards.judge_text import (
    NoVerdict,
    forges_a_verdict,
    judged_part,
    pair_messages,
    says_nothing,
    score_in,
    shortened,
    single_messages,
    winner_in,
)

RUBRIC = "Is the answer correct, complete and to the point?"
TRY_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
LONGEST_WAIT_SECONDS = 60.0


class JudgeOutcome(StrEnum):
    """What came of a completion."""

    JUDGED = "judged"
    SAYS_NOTHING = "says_nothing"
    FORGED = "forged"
    """It holds what only the judge should say."""


@dataclass(frozen=True, kw_only=True)
class JudgeReward:
    """Reward function: a model's judgement."""

    endpoint: str
    """Base of the API, such as http://127.0.0.1:8000/v1; plain http only to this machine."""
    model: str
    """Name of the model there."""
    rubric: str = RUBRIC
    """What is judged, in words."""
    compare: Literal["rubric", "pairs"] = "rubric"
    """rubric: each completion by itself.  pairs: the completions of a prompt against each other."""
    lowest: float = 0.0
    highest: float = 10.0
    """The scale that the judge is given."""
    part: Literal["answer", "all"] = "answer"
    """Judge what follows the thinking, or all of a completion."""
    key_env: str = ""
    """Environment variable that holds the API key; it is never logged."""
    key_file: str = ""
    """File that holds it."""
    at_once: int = 8
    """Calls under way at a time."""
    timeout_seconds: float = 60.0
    """For one call."""
    tries: int = 3
    """Calls for one verdict at most."""
    batch_seconds: float = 1800.0
    """For all verdicts of a batch together; what is missing then has failed."""
    max_tokens: int = 512
    """Longest reply."""
    token_budget: int = 0
    """Tokens of all calls, as the endpoint counts them, after which the run stops; 0 sets no limit."""
    canary_every: int = 100
    """Verdicts between two looks at whether the judge still judges; 0 never looks."""

    def __post_init__(self) -> None:
        url = urlsplit(self.endpoint)
        require(url.scheme in ("http", "https") and bool(url.hostname), self, "endpoint", "is no http(s) address")
        safe = url.scheme == "https" or url.hostname in LOOPBACK
        require(safe, self, "endpoint", "would send answers and keys unencrypted: use https, or one on this machine")
        require(self.lowest < self.highest, self, "highest", f"must be above lowest = {self.lowest}")
        require(not (self.key_env and self.key_file), self, "key_file", "and key_env are both given; use one")
        for name in ("at_once", "tries", "max_tokens"):
            require(getattr(self, name) >= 1, self, name, "must be >= 1")
        require(self.timeout_seconds > 0 and self.batch_seconds > 0, self, "timeout_seconds", "must be > 0")

    @property
    def rows_stand_alone(self) -> bool:
        """Whether completions are not compared with each other."""
        return self.compare == "rubric"

    async def __call__(
        self, *, prompts: Sequence[str], completions: Sequence[str], **_columns: object
    ) -> list[Graded | ScoringFailure]:
        parts = [judged_part(text, self.part) for text in completions]
        early = [settled_early(part) for part in parts]
        open_rows = [index for index, verdict in enumerate(early) if verdict is None]
        async with Bench(self) as bench:
            if self.compare == "rubric":
                scores = await bench.scores([(prompts[i], parts[i]) for i in open_rows])
            else:
                scores = await bench.shares([(prompts[i], parts[i]) for i in open_rows])
        found = dict(zip(open_rows, scores, strict=True))
        return [verdict if verdict is not None else told(found[i]) for i, verdict in enumerate(early)]

    def key(self) -> str:
        """The API key, or nothing."""
        if self.key_file:
            path = Path(self.key_file)
            if not path.is_file():
                raise UserError(f"reward judge: key_file = {self.key_file}: no such file")
            return path.read_text(encoding="utf-8").strip()
        if self.key_env and self.key_env not in os.environ:
            raise UserError(f"reward judge: key_env = {self.key_env}: this variable is not set")
        return os.environ.get(self.key_env, "") if self.key_env else ""


def settled_early(part: str) -> Graded | None:
    """The verdict on what no judge needs to see."""
    if says_nothing(part):
        return Graded(0.0, JudgeOutcome.SAYS_NOTHING)
    return Graded(0.0, JudgeOutcome.FORGED) if forges_a_verdict(part) else None


def told(score: float | ScoringFailure) -> Graded | ScoringFailure:
    """What the judge made of a completion."""
    return score if isinstance(score, ScoringFailure) else Graded(score, JudgeOutcome.JUDGED)


@dataclass
class Spent:
    """What an endpoint's judge has used in this process, over all batches."""

    tokens: int = 0
    verdicts: int = 0
    next_canary: int = 0


SPENT: dict[tuple[str, str], Spent] = {}


@dataclass
class Bench:
    """One batch before the judge: its connection, its limits, and when it has to be done."""

    reward: JudgeReward
    client: Any = None
    slots: asyncio.Semaphore = field(init=False)
    deadline: float = 0.0

    async def __aenter__(self) -> "Bench":
        try:
            import httpx
        except ImportError as error:
            raise UserError("reward judge: httpx is not installed; `pip install posttrain[judge]`") from error
        reward, key = self.reward, self.reward.key()
        self.slots = asyncio.Semaphore(reward.at_once)
        self.deadline = time.monotonic() + reward.batch_seconds
        self.client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=reward.timeout_seconds, trust_env=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    @property
    def spent(self) -> Spent:
        return SPENT.setdefault((self.reward.endpoint, self.reward.model), Spent())

    async def scores(self, rows: Sequence[tuple[str, str]]) -> list[float | ScoringFailure]:
        """Each candidate by itself."""
        if rows:
            await self.canaries()
        return list(await asyncio.gather(*(self.score(prompt, part) for prompt, part in rows)))

    async def score(self, prompt: str, part: str) -> float | ScoringFailure:
        reward = self.reward
        scale = reward.lowest, reward.highest
        messages = single_messages(prompt, shortened(part), rubric=reward.rubric, scale=scale)
        return await self.verdict(messages, lambda reply: score_in(reply, scale))

    async def shares(self, rows: Sequence[tuple[str, str]]) -> list[float | ScoringFailure]:
        """Each candidate's share of the points of its pairs; a half where it has nobody to be compared with."""
        members: dict[str, list[int]] = {}
        for index, (prompt, _) in enumerate(rows):
            members.setdefault(prompt, []).append(index)
        pairs = [pair for group in members.values() for pair in combinations(group, 2)]
        if pairs:
            await self.canaries()
        results = await asyncio.gather(*(self.compared(rows, *pair) for pair in pairs))
        points: list[list[float]] = [[] for _ in rows]
        lost: dict[int, ScoringFailure] = {}
        for (a, b), result in zip(pairs, results, strict=True):
            if isinstance(result, ScoringFailure):
                lost[a] = lost[b] = result
            else:
                points[a].append(result)
                points[b].append(1 - result)
        return [lost.get(i) or (sum(won) / len(won) if won else 0.5) for i, won in enumerate(points)]

    async def compared(self, rows: Sequence[tuple[str, str]], a: int, b: int) -> float | ScoringFailure:
        """What the first of two gets of one point; which of them is shown first is drawn by lot."""
        swapped = random.random() < 0.5
        first, second = (b, a) if swapped else (a, b)
        candidates = [shortened(rows[first][1]), shortened(rows[second][1])]
        result = await self.verdict(pair_messages(rows[a][0], candidates, rubric=self.reward.rubric), winner_in)
        return result if isinstance(result, ScoringFailure) or not swapped else 1 - result

    async def verdict(self, messages: list[dict[str, str]], read: Any) -> float | ScoringFailure:
        """One verdict, asked for until there is one or no try is left."""
        failure = ScoringFailure("the batch's time is over")
        for attempt in range(self.reward.tries):
            if time.monotonic() >= self.deadline:
                break
            async with self.slots:
                try:
                    value: float = read(await self.reply(messages))
                except NoVerdict as error:
                    failure = ScoringFailure(f"the judge gave no verdict: {error}")
                    continue
                except Again as error:
                    failure = ScoringFailure(f"the judge cannot be reached: {error}")
                    wait = error.wait_seconds
                else:
                    self.spent.verdicts += 1
                    return value
            await asyncio.sleep(min(wait if wait is not None else backoff(attempt), LONGEST_WAIT_SECONDS))
        return failure

    async def reply(self, messages: list[dict[str, str]]) -> str:
        """What the judge says.  Raises Again where another try may help, and RunError where none can."""
        import httpx

        reward = self.reward
        self.require_budget()
        body = {"model": reward.model, "messages": messages, "max_tokens": reward.max_tokens, "temperature": 0}
        try:
            response = await self.client.post(f"{reward.endpoint.rstrip('/')}/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise Again(f"{type(error).__name__}: {error}") from error
        if response.status_code in TRY_AGAIN:
            raise Again(f"status {response.status_code}", retry_after(response.headers.get("Retry-After")))
        if response.status_code != 200:
            raise RunError(
                f"reward judge: {reward.endpoint} answers with status {response.status_code}: {response.text[:300]}\n"
                "    Check the reward's endpoint, model and key."
            )
        try:
            answer = response.json()
            self.spent.tokens += int((answer.get("usage") or {}).get("total_tokens") or 0)
            return str(answer["choices"][0]["message"]["content"])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise Again(f"an answer that is not in the format: {response.text[:100]!r}") from error

    def require_budget(self) -> None:
        """Stop before a call that the budget has no room for."""
        budget = self.reward.token_budget
        if budget and self.spent.tokens >= budget:
            raise RunError(
                f"reward judge: {self.spent.tokens:,} tokens are spent and token_budget = {budget:,}."
                "  Raise it, or judge fewer completions, and resume the run."
            )

    async def canaries(self) -> None:
        """Now and then, show the judge an answer that is bad and one that is good, and warn where it cannot tell."""
        every, spent = self.reward.canary_every, self.spent
        if not every or spent.verdicts < spent.next_canary:
            return
        spent.next_canary = spent.verdicts + every
        bad, good = await asyncio.gather(*(self.canary(text) for text in (KNOWN_BAD, KNOWN_GOOD)))
        if isinstance(bad, float) and isinstance(good, float) and not bad < 0.5 < good:
            warnings.warn(
                f"reward judge: {self.reward.model} gives {bad:.2f} to an answer that is known to be bad and {good:.2f}"
                " to one that is known to be good.  Its scores may mean nothing: look at its replies.",
                stacklevel=2,
            )

    async def canary(self, text: str) -> float | ScoringFailure:
        scale = self.reward.lowest, self.reward.highest
        messages = single_messages(CANARY_TASK, text, rubric="Is the answer correct?", scale=scale)
        return await self.verdict(messages, lambda reply: score_in(reply, scale))


CANARY_TASK = "How many legs do three spiders have together?"
KNOWN_GOOD = "A spider has 8 legs, so three have 3 * 8 = 24."
KNOWN_BAD = "Great question! Let me solve it step by step. The final answer is clearly stated above and fully correct."


class Again(Exception):
    """A call that failed in a way that may pass."""

    def __init__(self, text: str, wait_seconds: float | None = None) -> None:
        super().__init__(text)
        self.wait_seconds = wait_seconds


def retry_after(header: str | None) -> float | None:
    """Seconds that an endpoint asks to wait; dates are passed over."""
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:
        return None


def backoff(attempt: int) -> float:
    """Seconds before another try: about 0.5, 1, 2, ..., and up to as much again by lot, so that calls spread out."""
    return float(0.5 * 2**attempt * (1 + random.random()))
