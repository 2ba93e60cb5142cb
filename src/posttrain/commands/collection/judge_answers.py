"""A language model as the judge of pairs: by a rubric or by principles, each pair in both orders.

**Asked:** which of two answers is better.  The prompt (posttrain.rewards.judge_prompts) treats candidates as data
between fences.  Each pair is asked in both orders, since a judge may prefer the first answer (Zheng et al. 2023,
arXiv:2306.05685).  If the two replies name different winners, the pair is a tie by that principle.

**Not asked:** an empty completion, or one that imitates the judge, loses without a call; if both do, neither is better.
A reply without a verdict is a failure, never a tie: the question is asked again, and once more when the collection is
resumed.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from posttrain.binding import bind
from posttrain.commands.collection.pairs import Pair, lot
from posttrain.config.recipes import given_yaml
from posttrain.errors import UserError
from posttrain.options.collect import LlmJudgeOptions
from posttrain.rewards.grading.function import ScoringFailure
from posttrain.rewards.judge_prompts import PAIR, cut_candidate, judge_messages, judged_part, winner_in
from posttrain.rewards.judge_reward import JudgeBatch, JudgeBudget, JudgeReward, settled_early

Keep = Callable[[Mapping[str, object]], None]
"""Function that saves an answer."""
REASONS = "First say in one or two sentences what decides it, then give the verdict."
PRINCIPLE = "Which answer is better by this principle, and by nothing else?\n{principle}"
MOST_SAID = 4000
"""Characters of a reply that are kept."""
ORDERS = ("first", "second")
"""Which completion of the pair is answer A."""
OWN_FIELDS = ("endpoint", "model", "rubric", "compare")
"""Options of the reward `judge` that are options of the section itself, or that pairs do not use."""


@dataclass(frozen=True, slots=True)
class JudgeQuestion:
    """One call: a pair, the principle that judges it, and which completion comes first."""

    pair: Pair
    principle: str
    """Empty for the rubric."""
    order: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.pair.id, self.principle, self.order


class LlmJudge:
    """Asks a model about pairs, and keeps each answer as it comes."""

    def __init__(self, options: LlmJudgeOptions, *, seed: int) -> None:
        if own := [name for name in OWN_FIELDS if name in options.options]:
            raise UserError(f"judge.options: {own[0]} is an option of `judge` itself, or is not used for pairs.")
        given = {**options.options, "endpoint": options.endpoint, "model": options.model}
        self.reward = bind(JudgeReward, given, where="judge")
        self.options, self.seed = options, seed
        self.principles = read_principles(options.principles) if options.principles else ()
        self.budget = JudgeBudget()

    def open_questions(self, pairs: Sequence[Pair], answers: Sequence[Mapping[str, Any]]) -> list[JudgeQuestion]:
        """The questions without an answer; a pair decided without a call has no open question."""
        answered = {(each["pair"], each["principle"], each["order"]) for each in answers}
        settled = {pair for pair, _, order in answered if not order}
        asked = (question for pair in pairs if pair.id not in settled for question in self.questions(pair))
        return [question for question in asked if question.key not in answered]

    def questions(self, pair: Pair) -> list[JudgeQuestion]:
        """Each principle that judges a pair, in both orders; the empty one is the rubric."""
        principles = self.principles or ("",)
        if self.options.principle == "draw":
            principles = (principles[lot(self.seed, "principle", pair.id) % len(principles)],)
        return [JudgeQuestion(pair, *each) for each in product(principles, ORDERS)]

    def ask(
        self, questions: Sequence[JudgeQuestion], keep: Keep, stopping: Callable[[], bool] = lambda: False
    ) -> list[ScoringFailure]:
        """Ask all of these concurrently; returns the failures.  No more are asked once `stopping` is true."""
        open_now: list[JudgeQuestion] = []
        for question in questions:
            if (settled := self.settled(question.pair)) is None:
                open_now.append(question)
            elif question.key == self.questions(question.pair)[0].key:  # once, however often it would be asked
                keep(settled)

        async def answered(batch: JudgeBatch, at_once: asyncio.Semaphore, each: JudgeQuestion) -> ScoringFailure | None:
            async with at_once:
                return None if stopping() else await self._answer(batch, each, keep)

        async def asked() -> list[ScoringFailure]:
            at_once = asyncio.Semaphore(self.reward.at_once)
            async with JudgeBatch(self.reward, self.budget) as batch:
                await batch.canaries()
                results = await asyncio.gather(*(answered(batch, at_once, each) for each in open_now))
            return [each for each in results if each is not None]

        return asyncio.run(asked()) if open_now else []

    def settled(self, pair: Pair) -> dict[str, object] | None:
        """The answer for a pair that is decided without a call."""
        first, second = (settled_early(judged_part(each.text, self.reward.part)) for each in (pair.first, pair.second))
        if first is None and second is None:
            return None
        share = 0.5 if first is not None and second is not None else float(first is None)
        why = [f"the {place} {each.outcome}" for place, each in (("first", first), ("second", second)) if each]
        return self.record(pair, "", "", share, f"unasked: {', '.join(why)}")

    def record(self, pair: Pair, principle: str, order: str, share: float, says: str) -> dict[str, object]:
        return {
            "pair": pair.id,
            "judge": self.options.model,
            "principle": principle,
            "order": order,
            "share": share,
            "says": says[-MOST_SAID:],
        }

    async def _answer(self, batch: JudgeBatch, question: JudgeQuestion, keep: Keep) -> ScoringFailure | None:
        said = ""

        def read(reply: str) -> float:
            nonlocal said
            said = reply
            return winner_in(reply)

        pair, principle = question.pair, question.principle
        texts = [cut_candidate(judged_part(each.text, self.reward.part)) for each in (pair.first, pair.second)]
        in_front = question.order == ORDERS[0]
        basis = PRINCIPLE.format(principle=principle) if principle else self.options.rubric
        shown = list(texts if in_front else texts[::-1])
        asked = judge_messages(PAIR, pair.prompt.question, shown, rubric=f"{basis}\n\n{REASONS}")
        share = await batch.verdict(asked, read)
        if isinstance(share, ScoringFailure):
            return share
        keep(self.record(pair, principle, question.order, share if in_front else 1 - share, said))
        return None


def read_principles(name: str) -> tuple[str, ...]:
    """The principles of a file, in order, without duplicates.  Raises UserError if there are none."""
    path = Path(name)
    where = f"judge.principles = {name}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise UserError(f"{where}: cannot be read: {reason}.  Paths are relative to the folder you run in.") from error
    listed: object = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    if path.suffix in (".yaml", ".yml"):
        content = given_yaml(text, f"{where}:")
        listed = content.get("principles") if isinstance(content, dict) else content
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise UserError(f"{where}: must be a list of texts, each on a line that begins with `- `.")
    principles = tuple(dict.fromkeys(each.strip() for each in listed if each.strip()))
    if not principles:
        raise UserError(f"{where}: is empty.  Write one principle on each line.")
    return principles
