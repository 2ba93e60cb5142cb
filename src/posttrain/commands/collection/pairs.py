"""Pairs of sampled completions as the journal stores them, and judged pairs as rows to train on."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean
from typing import Any

from posttrain.options.collect import CollectOptions
from posttrain.records import Finish, Grades, Group

SHARES = {"first": 1.0, "second": 0.0, "tie": 0.5}
"""Points of the first of a pair, out of one, by a vote; `skip` gives none to either."""
TIE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledCompletion:
    """One completion, as text."""

    sample: int
    text: str
    """The text that rewards read: the prefill and the sampled text, without its stop token."""
    finish: Finish
    num_tokens: int
    reward: float | None = None
    """The weighted sum of the scores; None if there is none."""
    scores: Mapping[str, float | None] | None = None
    """By reward function."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """In a conversation with replies: the policy's turns and the replies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPrompt:
    """A prompt with its completions: a line of the journal."""

    draw: int
    """Number of the prompt within its round."""
    prompt_id: str
    prompt: str | tuple[Mapping[str, str], ...]
    """As in rows of data: text, or the messages of a conversation, without the prefill."""
    completions: tuple[SampledCompletion, ...]

    @property
    def question(self) -> str:
        """The prompt as a judge or a person reads it."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1:
            return self.prompt[0]["content"]
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "SampledPrompt":
        made = [SampledCompletion(**{**each, "finish": Finish(each["finish"])}) for each in record["completions"]]
        prompt = record["prompt"] if isinstance(record["prompt"], str) else tuple(record["prompt"])
        return cls(**{**record, "prompt": prompt, "completions": tuple(made)})


def sampled_prompts(groups: Sequence[Group], grades: Grades | None) -> list[SampledPrompt]:
    """Groups as lines of the journal, with their scores if there are any."""

    def rewarded(row: int, column: int) -> dict[str, Any]:
        if grades is None:
            return {}
        scores = dict(zip(grades.names, grades.scores[:, row, column].tolist(), strict=True))
        scores[""] = grades.rewards[row, column].item()
        known = {name: None if math.isnan(score) else score for name, score in scores.items()}
        return {"reward": known.pop(""), "scores": known}

    def sampled(row: int, group: Group) -> SampledPrompt:
        completions = [
            SampledCompletion(
                sample=rollout.sample,
                text=group.graded_text(rollout),
                finish=rollout.finish,
                num_tokens=rollout.num_sampled,
                messages=tuple(group.graded_messages(rollout)) if rollout.turns else None,
                **rewarded(row, column),
            )
            for column, rollout in enumerate(group.rollouts)
            if not rollout.finish.failed
        ]
        prompt = group.prompt
        content = prompt.text.removesuffix(prompt.prefill) if prompt.messages is None else prompt.messages
        return SampledPrompt(draw=group.draw, prompt_id=prompt.id, prompt=content, completions=tuple(completions))

    return [sampled(row, group) for row, group in enumerate(groups)]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two different completions of a prompt; the first has the lower sample number."""

    prompt: SampledPrompt = field(repr=False)
    first: SampledCompletion = field(repr=False)
    second: SampledCompletion = field(repr=False)

    @property
    def id(self) -> str:
        """Name from the draw and sample numbers; the same pair always has the same name."""
        return f"{self.prompt.draw}:{self.first.sample}-{self.second.sample}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPairs:
    """The pairs of all prompts, and how many completions are not in a pair."""

    pairs: tuple[Pair, ...]
    num_cut_off: int = 0
    """Completions cut off by the token limit, if these are dropped."""
    num_empty: int = 0
    num_identical: int = 0
    """Completions with the same text as another one of their prompt."""
    num_unscored: int = 0
    """Completions without a reward, if rewards choose the pairs."""
    num_lone_prompts: int = 0
    """Prompts with fewer than two completions to compare."""


def choose_pairs(prompts: Sequence[SampledPrompt], options: CollectOptions, *, seed: int) -> ChosenPairs:
    """The pairs of these prompts: a function of them, of the options and of the seed."""
    pairs: list[Pair] = []
    counts: Counter[str] = Counter()
    for prompt in prompts:
        whole = [each for each in prompt.completions if options.cut_off == "keep" or not each.finish.cut_off]
        telling = [each for each in whole if each.text.strip()]
        different = list({each.text: each for each in reversed(telling)}.values())
        ranked = [each for each in different if options.pairs != "best_worst" or each.reward is not None]
        counts["num_cut_off"] += len(prompt.completions) - len(whole)
        counts["num_empty"] += len(whole) - len(telling)
        counts["num_identical"] += len(telling) - len(different)
        counts["num_unscored"] += len(different) - len(ranked)
        counts["num_lone_prompts"] += len(ranked) < 2
        pairs += chosen_pairs(prompt, sorted(ranked, key=lambda each: each.sample), options, seed=seed)
    return ChosenPairs(pairs=tuple(pairs), **counts)


def chosen_pairs(
    prompt: SampledPrompt, completions: Sequence[SampledCompletion], options: CollectOptions, *, seed: int
) -> Iterable[Pair]:
    """The pairs of one prompt's different completions, in the order of their samples."""
    every = [Pair(prompt, first, second) for first, second in combinations(completions, 2)]
    if options.pairs == "all" or not every:
        return every
    if options.pairs == "best_worst":
        # Python keeps the order of equals, so that of equal rewards the first is best and the last is worst.
        ranked = sorted(completions, key=lambda each: each.reward or 0.0, reverse=True)
        first, second = sorted((ranked[0], ranked[-1]), key=lambda each: each.sample)
        return [Pair(prompt, first, second)]
    drawn = sorted(every, key=lambda pair: lot(seed, f"pair of round {options.round}", pair.id))
    chosen = {pair.id for pair in drawn[: options.pairs_per_prompt]}
    return [pair for pair in every if pair.id in chosen]


def lot(seed: int, purpose: str, name: str) -> int:
    """A random number of 64 bits: a function of the seed, the purpose and the name of what it is drawn for."""
    digest = hashlib.blake2b(repr(("collect", seed, purpose, name)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judged pair."""

    pair: Pair
    share: float
    """Points of the first completion, from 0 to 1: above 1/2 it is the better one, at 1/2 the pair is a tie."""
    judges: tuple[str, ...]
    margin: float | None = None
    """By how much the better one is better, in units of the reward; None if the judge does not give a number."""
    principles: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    """The judge's replies."""
    votes: Mapping[str, int] = field(default_factory=dict)
    """For people: how many voted `first`, `second` and `tie`."""

    @property
    def is_tie(self) -> bool:
        return self.share == TIE

    def as_row(self) -> dict[str, object]:
        """`prompt`, `chosen` and `rejected`, then how they were judged.

        In a tie, the first completion is called chosen; this has no meaning.  If the prompt is a conversation, an
        answer is a list of messages: the assistant's, and the replies between them.
        """
        pair, prompt = self.pair, self.pair.prompt
        names, sides = ("first", "second"), (pair.first, pair.second)
        if self.share < TIE:
            names, sides = names[::-1], sides[::-1]
        chosen, rejected = sides
        texts: list[Any] = [side.text for side in sides]
        if not isinstance(prompt.prompt, str):
            texts = [[*(side.messages or [{"role": "assistant", "content": side.text}])] for side in sides]
        votes = dict(zip(("chosen", "rejected", "tie"), (*names, "tie"), strict=True))
        return {
            "prompt": prompt.prompt,
            "chosen": texts[0],
            "rejected": texts[1],
            "tie": self.is_tie,
            "judge": ", ".join(self.judges),
            "margin": self.margin,
            "principle": "\n".join(self.principles) or None,
            "reasons": list(self.reasons),
            "votes": {name: self.votes[side] for name, side in votes.items()} if self.votes else None,
            "pair": pair.id,
            "prompt_id": prompt.prompt_id,
            "chosen_sample": chosen.sample,
            "rejected_sample": rejected.sample,
            "chosen_reward": chosen.reward,
            "rejected_reward": rejected.reward,
        }


def verdict_by_reward(pair: Pair, margin: float, name: str) -> Verdict | None:
    """The verdict of the rewards; None if one of the two does not have a reward.

    The first is better where r_first - r_second > margin, the second where r_second - r_first > margin.
    """
    first, second = pair.first.reward, pair.second.reward
    if first is None or second is None:
        return None
    difference = abs(first - second)
    share = TIE if difference <= margin else float(first > second)
    return Verdict(pair=pair, share=share, judges=(name,), margin=difference)


def verdict_by_answers(pair: Pair, answers: Sequence[Mapping[str, Any]]) -> Verdict:
    """The verdict of a judge: for one principle, what both orders agree on; for several, the majority."""
    by_principle = defaultdict[str, list[float]](list)
    for each in answers:
        by_principle[each["principle"]].append(each["share"])
    return Verdict(
        pair=pair,
        share=majority(shares[0] for shares in by_principle.values() if len(set(shares)) == 1),
        judges=(answers[0]["judge"],),
        principles=tuple(filter(None, by_principle)),
        reasons=tuple(each["says"] for each in answers),
    )


def verdict_by_votes(pair: Pair, votes: Mapping[str, str]) -> Verdict | None:
    """The verdict of people; None if all of them skipped the pair."""
    given = {rater: vote for rater, vote in votes.items() if vote in SHARES}
    if not given:
        return None
    counts, share = Counter(given.values()), majority(SHARES[vote] for vote in given.values())
    return Verdict(pair=pair, share=share, judges=tuple(given), votes={vote: counts[vote] for vote in SHARES})


def majority(shares: Iterable[float]) -> float:
    total = sum(share - TIE for share in shares)
    return TIE if total == 0 else float(total > 0)


def judged_by_rewards(pairs: Sequence[Pair], margin: float, name: str) -> "Judged":
    verdicts = (verdict_by_reward(pair, margin, name) for pair in pairs)
    return [each for each in verdicts if each is not None], {"num_unasked": 0}


def judged_by_model(pairs: Sequence[Pair], records: "Records", still_open: Collection[str]) -> "Judged":
    """The verdicts on pairs with all questions answered."""
    answers = defaultdict[str, list[Mapping[str, Any]]](list)
    for each in records:
        answers[each["pair"]].append(each)
    whole = [pair for pair in pairs if pair.id in answers and pair.id not in still_open]
    orders = order_summary({pair.id: answers[pair.id] for pair in whole})
    verdicts = [verdict_by_answers(pair, answers[pair.id]) for pair in whole]
    return verdicts, {"num_unasked": len(pairs) - len(whole), **orders}


def judged_by_people(pairs: Sequence[Pair], records: "Records") -> "Judged":
    """The verdicts on pairs with at least one vote that is not a skip."""
    votes = standing_votes(records)
    of_pairs = [{rater: given[pair.id] for rater, given in votes.items() if pair.id in given} for pair in pairs]
    verdicts = [verdict_by_votes(pair, given) for pair, given in zip(pairs, of_pairs, strict=True)]
    unasked = sum(not given for given in of_pairs)
    summary = {"num_unasked": unasked, "num_skipped": verdicts.count(None) - unasked, **rater_summary(votes)}
    return [each for each in verdicts if each is not None], summary


Records = Sequence[Mapping[str, Any]]
Judged = tuple[list[Verdict], dict[str, object]]
"""Verdicts, and the summary's numbers on their judges."""


def standing_votes(records: "Records") -> dict[str, dict[str, str]]:
    """Each rater's votes by pair, in the order in which they were given, without those that were undone."""
    votes: dict[str, dict[str, str]] = {}
    for record in records:
        of_rater = votes.setdefault(record["rater"], {})
        if "undone" in record:
            of_rater.pop(record["undone"], None)
        else:
            of_rater[record["pair"]] = record["vote"]
    return votes


def agreement(first: Sequence[Hashable], second: Sequence[Hashable]) -> dict[str, float | None]:
    """Raw agreement and Cohen's kappa of two raters' verdicts, item by item.

        κ = (p_o - p_e) / (1 - p_e),   p_o = share of equal verdicts,   p_e = Σ_k p_1(k) p_2(k)

    Cohen 1960, "A coefficient of agreement for nominal scales".  1 is full agreement; 0 is what chance gives if raters
    use each verdict as often as these do; below 0 is less than chance.  κ is None if p_e = 1; both are None without
    items.
    """
    count = len(first)
    if not count:
        return {"num_common": 0, "raw": None, "kappa": None}
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / count
    of_first, of_second = Counter(first), Counter(second)
    expected = sum(of_first[verdict] * of_second[verdict] for verdict in of_first) / count**2
    kappa = None if expected == 1 else (observed - expected) / (1 - expected)
    return {"num_common": count, "raw": observed, "kappa": kappa}


def rater_summary(votes: Mapping[str, Mapping[str, str]]) -> dict[str, object]:
    """How many votes each rater gave, and how much each two of them agree on pairs that both judged."""
    between = {}
    for one, other in combinations(sorted(votes), 2):
        both = [(vote, votes[other].get(pair, "skip")) for pair, vote in votes[one].items()]
        common = [each for each in both if SHARES.keys() >= {*each}]
        between[f"{one} and {other}"] = agreement(*([vote[i] for vote in common] for i in range(2)))
    counts = {rater: dict(Counter(of_rater.values())) for rater, of_rater in sorted(votes.items())}
    return {"raters": counts, "agreement": between}


def order_summary(answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, object]:
    """For a judge that is asked in both orders: how often both agree, and how often it prefers the first answer.

    Without position bias, `first_shown_share` is 1/2.
    """
    asked = defaultdict[tuple[str, str], list[Mapping[str, Any]]](list)
    for pair, of_pair in answers.items():
        for each in of_pair:
            if each["order"]:
                asked[pair, each["principle"]].append(each)
    both = [of_question for of_question in asked.values() if len(of_question) == 2]
    shown_first = [each["share"] if each["order"] == "first" else 1 - each["share"] for pair in both for each in pair]
    kept = sum(one["share"] == other["share"] for one, other in both)
    return {
        "num_asked_in_both_orders": len(both),
        "same_in_both_orders": kept / len(both) if both else None,
        "first_shown_share": fmean(shown_first) if both else None,
    }


def length_summary(verdicts: Sequence[Verdict]) -> dict[str, float | None]:
    """Mean tokens of chosen and of rejected completions, and how often the longer one was chosen, without ties.

    This reveals a judge that mistakes length for quality.
    """
    lengths = [
        (each.pair.first.num_tokens, each.pair.second.num_tokens)[:: 1 if each.share > TIE else -1]
        for each in verdicts
        if not each.is_tie
    ]
    unequal = [chosen > rejected for chosen, rejected in lengths if chosen != rejected]
    return {
        "mean_chosen_tokens": fmean(chosen for chosen, _ in lengths) if lengths else None,
        "mean_rejected_tokens": fmean(rejected for _, rejected in lengths) if lengths else None,
        "longer_chosen_share": fmean(unequal) if unequal else None,
    }
