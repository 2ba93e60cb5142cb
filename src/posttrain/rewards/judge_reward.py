"""Rewards by a judge: a model behind any OpenAI-compatible chat endpoint, by rubric or by comparing a group in pairs.

`compare: rubric` pays the judge's number as a share of its scale, in [0, 1].  `compare: pairs` asks of every pair of a
prompt's completions which is better, and pays each completion its share of the points it could win.

**Known hacks, and what stops them.**  Instructions to the judge: an answer is a JSON string between fences that it
cannot know.  One that looks like a verdict, also in JSON's escapes or in letters of other scripts, and one that says
nothing ("Solution:") score 0 without a call.  A reply without a verdict is a failure, never a 0.  A judge that has
stopped judging is regularly shown a bad and a good answer; while it cannot tell them apart, verdicts have the outcome
`doubted`.  Not stopped: what a judge likes and should not, such as length and a confident tone.
"""

import asyncio
import importlib.util
import json
import os
import random
import re
import warnings
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from posttrain.errors import RunError, UserError, require
from posttrain.options.bounds import Bounded, NonNegativeInt, PositiveFloat, PositiveInt
from posttrain.rewards import judge_prompts
from posttrain.rewards.grading.answers import DetailedGrade, Graded, Texts
from posttrain.rewards.grading.calls import NEVER, Deadline, after
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.grading.resources import Resources, default_resources
from posttrain.schemas import require_no_password

TRY_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
MAX_REPLY_BYTES = 4 << 20
KEPT_CHARACTERS = 1000
"""Characters of a reply that scores.jsonl keeps."""


class JudgeOutcome(StrEnum):
    """How a completion was judged."""

    JUDGED = "judged"
    DOUBTED = "doubted"
    """Judged by a judge that rated a bad answer no worse than a good one when last tested."""
    SAYS_NOTHING = "says_nothing"
    FORGED = "forged"
    """It contains what only the judge should say."""


@dataclass(frozen=True, kw_only=True)
class JudgeReward(Bounded):
    """Reward function: a model's judgement."""

    endpoint: str
    """Base of the API, such as http://127.0.0.1:8000/v1; plain http only to this machine."""
    model: str
    """The model's name there."""
    rubric: str = "Is the answer correct, complete and to the point?"
    """What is judged, in words."""
    compare: Literal["rubric", "pairs"] = "rubric"
    """rubric: each completion by itself.  pairs: the completions of a prompt against each other."""
    lowest: float = 0.0
    highest: float = 10.0
    """The judge's scale."""
    part: Literal["answer", "all"] = "answer"
    """Judge the text after the thinking, or all of a completion."""
    key_env: str = ""
    """Environment variable that holds the API key, which is never logged."""
    key_file: str = ""
    """File that holds the API key."""
    at_once: PositiveInt = 8
    """Concurrent calls."""
    timeout_seconds: PositiveFloat = 60.0
    """For one call, from its start to the end of the reply."""
    tries: PositiveInt = 3
    """Most calls for one verdict."""
    batch_seconds: PositiveFloat = 1800.0
    """For all verdicts of a batch together; verdicts that are missing then have failed."""
    max_tokens: PositiveInt = 512
    """Longest reply."""
    token_budget: NonNegativeInt = 0
    """Tokens of all calls of a session, as the endpoint counts them, after which the run stops; 0 means no limit."""
    canary_every: NonNegativeInt = 100
    """Verdicts between two tests of whether the judge still judges; 0 means no tests."""

    def __post_init__(self) -> None:
        require_no_password(self.endpoint, "endpoint", "Give a key by key_env or key_file.")
        super().__post_init__()
        url = urlsplit(self.endpoint)
        require(url.scheme in ("http", "https") and bool(url.hostname), self, "endpoint", "is not an http(s) address")
        safe = url.scheme == "https" or url.hostname in ("127.0.0.1", "localhost", "::1")
        require(safe, self, "endpoint", "would send answers and keys unencrypted: use https, or one on this machine")
        require(self.lowest < self.highest, self, "highest", f"must be above lowest = {self.lowest}")
        require(not (self.key_env and self.key_file), self, "key_file", "and key_env are both set; remove one")
        if importlib.util.find_spec("httpx") is None:
            raise UserError("reward judge: httpx is not installed. Run `pip install posttrain[judge]`.")

    @property
    def rows_stand_alone(self) -> bool:
        return self.compare == "rubric"

    async def __call__(
        self, /, *, prompts: Texts, completions: Texts, **_columns: object
    ) -> list[Graded | ScoringFailure]:
        return await self.with_resources(default_resources())(prompts=prompts, completions=completions)

    def with_resources(self, resources: Resources) -> Callable[..., Awaitable[list[Graded | ScoringFailure]]]:
        return partial(self.scores, resources.memory(self, JudgeBudget))

    async def scores(
        self, budget: "JudgeBudget", /, *, prompts: Texts, completions: Texts, **_columns: object
    ) -> list[Graded | ScoringFailure]:
        """A score for each completion; those that no judge needs to see are settled early."""
        parts = [judge_prompts.judged_part(text, self.part) for text in completions]
        early = [settled_early(part) for part in parts]
        open_rows = [index for index, verdict in enumerate(early) if verdict is None]
        async with JudgeBatch(self, budget) as batch:
            judge = batch.scores if self.compare == "rubric" else batch.shares
            found = dict(zip(open_rows, await judge([(prompts[i], parts[i]) for i in open_rows]), strict=True))
        outcome = JudgeOutcome.DOUBTED if budget.doubted else JudgeOutcome.JUDGED
        judged: dict[int, Graded | ScoringFailure] = {}
        for i, said in found.items():
            reply = batch.replies.get((prompts[i], parts[i]))
            if isinstance(said, ScoringFailure):
                judged[i] = said
            else:
                judged[i] = Graded(said, outcome) if reply is None else DetailedGrade(said, outcome, {"reply": reply})
        return [verdict or judged[index] for index, verdict in enumerate(early)]

    def key(self) -> str:
        """The API key, or "".  No message shows it, since messages go into logs."""
        if not (self.key_file or self.key_env):
            return ""
        name = "key_file" if self.key_file else "key_env"
        where = f"reward judge: {name} = {getattr(self, name)}"
        if self.key_file:
            path = Path(self.key_file)
            found = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
        else:
            found = os.environ.get(self.key_env)
        if found is None:
            raise UserError(f"{where}: {'no such file' if self.key_file else 'this variable is not set'}.")
        if not found.strip():
            raise UserError(f"{where}: is empty. Remove the option if the endpoint needs no key.")
        if not re.fullmatch(r"[!-~]+", found.strip()):
            raise UserError(f"{where}: is not an API key. Put only the key there: one line of visible ASCII text.")
        return found.strip()


def settled_early(part: str) -> Graded | None:
    if judge_prompts.says_nothing(part):
        return Graded(0.0, JudgeOutcome.SAYS_NOTHING)
    return Graded(0.0, JudgeOutcome.FORGED) if judge_prompts.forges_a_verdict(part) else None


@dataclass
class JudgeBudget:
    """What a judge has used in a session, over all batches."""

    tokens: int = 0
    verdicts: int = 0
    next_canary: int = 0
    doubted: bool = False
    """Whether it failed the last test."""


@dataclass
class JudgeBatch:
    """One batch before the judge: its connection, limits and deadline."""

    reward: JudgeReward
    spent: JudgeBudget
    client: Any = None
    slots: asyncio.Semaphore = field(init=False)
    until: Deadline = NEVER
    key: str = ""
    replies: dict[tuple[str, str], str] = field(default_factory=dict)
    """What the judge said about a candidate, by prompt; empty for pairs, where a reply is about two."""

    async def __aenter__(self) -> "JudgeBatch":
        import httpx

        reward, self.key = self.reward, self.reward.key()
        self.slots = asyncio.Semaphore(reward.at_once)
        self.until = after(reward.batch_seconds, f"batch_seconds = {reward.batch_seconds:g} are over")
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # no compressed bombs
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        self.client = httpx.AsyncClient(headers=headers, timeout=reward.timeout_seconds, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def scores(self, rows: Sequence[tuple[str, str]]) -> list[float | ScoringFailure]:
        if rows:
            await self.canaries()
        return list(await asyncio.gather(*(self.score(prompt, part) for prompt, part in rows)))

    async def score(self, prompt: str, part: str, rubric: str = "") -> float | ScoringFailure:
        low, high = scale = self.reward.lowest, self.reward.highest
        fields = {"rubric": rubric or self.reward.rubric, "low": low, "high": high}
        candidate = judge_prompts.cut_candidate(part)
        messages = judge_prompts.judge_messages(judge_prompts.SINGLE, prompt, candidate, **fields)

        def read(reply: str) -> float:
            value = judge_prompts.score_in(reply, scale)
            self.replies[prompt, part] = self.without_key(reply)[:KEPT_CHARACTERS]
            return value

        return await self.verdict(messages, read)

    async def shares(self, rows: Sequence[tuple[str, str]]) -> list[float | ScoringFailure]:
        """Each candidate's share of the points of its pairs; 0.5 if it has no pair."""
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
        """The first candidate's share of one point.  Which one is shown first is random, but the same each time."""
        swapped = judge_prompts.shown_second(rows[a][0], rows[a][1], rows[b][1])
        first, second = (b, a) if swapped else (a, b)
        candidates = [judge_prompts.cut_candidate(rows[first][1]), judge_prompts.cut_candidate(rows[second][1])]
        asked = judge_prompts.judge_messages(judge_prompts.PAIR, rows[a][0], candidates, rubric=self.reward.rubric)
        result = await self.verdict(asked, judge_prompts.winner_in)
        return result if isinstance(result, ScoringFailure) or not swapped else 1 - result

    async def verdict(self, messages: list[dict[str, str]], read: Callable[[str], float]) -> float | ScoringFailure:
        failure = ScoringFailure(self.until.says)
        for attempt in range(self.reward.tries):
            wait: float | None = 0.0
            async with self.slots:  # whose holders finish by the deadline
                if self.until.passed:
                    break
                try:
                    value = read(await self.reply(messages))
                except judge_prompts.NoVerdict as error:
                    failure = ScoringFailure(f"the judge gave no verdict: {error}")
                except RetryableFailure as error:
                    failure = ScoringFailure(f"the judge cannot be reached: {error}")
                    wait = error.wait_seconds
                else:
                    self.spent.verdicts += 1
                    return value
            wait = backoff(attempt) if wait is None else wait
            await asyncio.sleep(max(0.0, min(wait, 60.0, self.until.left())))
        return failure

    async def reply(self, messages: list[dict[str, str]]) -> str:
        """The judge's reply.  Raises RetryableFailure if another try may help, else RunError."""
        reward = self.reward
        if reward.token_budget and self.spent.tokens >= reward.token_budget:
            spent = f"{self.spent.tokens:,} tokens are spent and token_budget = {reward.token_budget:,}"
            raise RunError(f"reward judge: {spent}. Raise it, or judge fewer completions, and resume the run.")
        body = {"model": reward.model, "messages": messages, "max_tokens": reward.max_tokens, "temperature": 0}
        status, text, wait_seconds = await self.answer(json.dumps(body))
        if status in TRY_AGAIN:
            raise RetryableFailure(f"status {status}", wait_seconds)
        if status != 200:
            said = f"status {status}: {self.without_key(text)[:300]}"
            raise RunError(f"reward judge: {reward.endpoint}: {said}\n    Check endpoint, model and key.")
        try:
            answer = json.loads(text)
            self.spent.tokens += max(0, int((answer.get("usage") or {}).get("total_tokens") or 0))
            return str(answer["choices"][0]["message"]["content"])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise RetryableFailure(f"a reply in another format: {self.without_key(text)[:100]!r}") from error

    async def answer(self, body: str) -> tuple[int, str, float | None]:
        """Status, text and requested wait of one call, with a time limit and a bounded reply."""
        import httpx

        seconds = min(self.reward.timeout_seconds, self.until.left())
        url, content = f"{self.reward.endpoint.rstrip('/')}/chat/completions", bytearray()
        try:
            async with asyncio.timeout(seconds), self.client.stream("POST", url, content=body) as response:
                async for piece in response.aiter_raw():
                    content += piece
                    if len(content) > MAX_REPLY_BYTES:
                        raise RetryableFailure(f"a reply of more than {MAX_REPLY_BYTES:,} bytes")
        except TimeoutError as error:
            raise RetryableFailure(f"no whole reply in {seconds:.3g} seconds") from error
        except (httpx.NetworkError, httpx.TimeoutException) as error:
            raise RetryableFailure(f"{type(error).__name__}: {error}") from error
        except httpx.HTTPError as error:
            raise RetryableFailure(type(error).__name__) from None  # its text may hold the headers, hence the key
        wait_seconds = None
        with suppress(ValueError, TypeError):  # a date is ignored
            wait_seconds = max(0.0, float(response.headers.get("Retry-After")))
        return response.status_code, content.decode("utf-8", "replace"), wait_seconds

    def without_key(self, text: str) -> str:
        return text.replace(self.key, "[key]") if self.key else text

    async def canaries(self) -> None:
        """Regularly show the judge a bad and a good answer; warn if it cannot tell them apart."""
        every, spent = self.reward.canary_every, self.spent
        if not every or spent.verdicts < spent.next_canary:
            return
        spent.next_canary = spent.verdicts + every
        known_bad = (
            "Great question! Let me solve it step by step. The final answer is clearly stated above and correct."
        )
        known_good = "A spider has 8 legs, so three have 3 * 8 = 24."
        task, rubric = "How many legs do three spiders have together?", "Is the answer correct?"
        bad, good = await asyncio.gather(*(self.score(task, text, rubric) for text in (known_bad, known_good)))
        if isinstance(bad, ScoringFailure) or isinstance(good, ScoringFailure):
            return
        spent.doubted = not bad < 0.5 < good
        if spent.doubted:
            given = f"{bad:.2f} to an answer known to be bad and {good:.2f} to one known to be good"
            problem = f"{self.reward.model} gives {given}, after {spent.verdicts} verdicts"
            warnings.warn(f"reward judge: {problem}. Its scores may mean nothing: read its replies.", stacklevel=2)


class RetryableFailure(Exception):
    """A call that failed, but may succeed later."""

    def __init__(self, text: str, wait_seconds: float | None = None) -> None:
        super().__init__(text)
        self.wait_seconds = wait_seconds


def backoff(attempt: int) -> float:
    """Seconds before a retry: 0.5, 1, 2, … and up to twice that at random, to spread calls out."""
    return float(0.5 * 2**attempt * (1 + random.random()))
