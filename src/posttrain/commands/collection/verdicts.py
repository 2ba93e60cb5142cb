"""Who is better, from what was said of a pair: rewards, a judge's answers, people's votes."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from statistics import fmean
from typing import Any

from posttrain.commands.collection.pair_choice import Pair
from posttrain.commands.collection.sampled_prompts import SampledCompletion, SampledPrompt

SHARES = {"first": 1.0, "second": 0.0, "tie": 0.5}
"""What the first of a pair gets of one point by a vote; `skip` says nothing of it."""
TIE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a pair."""

    pair: Pair
    share: float
    """What the first completion gets of one point: above a half it is the better one, at a half neither is."""
    judges: tuple[str, ...]
    margin: float | None = None
    """By how much the better one is better, in units of the reward; None where the judge gives no such number."""
    principles: tuple[str, ...] = ()
    """By which it was judged."""
    reasons: tuple[str, ...] = ()
    """What the judge said, one for each time that it was asked."""
    votes: Mapping[str, int] = field(default_factory=dict)
    """Of people: how many said `first`, `second` and `tie`."""

    @property
    def is_tie(self) -> bool:
        """Whether neither is better."""
        return self.share == TIE


def verdict_by_reward(pair: Pair, margin: float, name: str) -> Verdict | None:
    """What the rewards say of a pair; None where one of the two has none.

    The first is better where r_first - r_second > margin, the second where r_second - r_first > margin.
    """
    first, second = pair.first.reward, pair.second.reward
    if first is None or second is None:
        return None
    difference = abs(first - second)
    share = TIE if difference <= margin else float(first > second)
    return Verdict(pair=pair, share=share, judges=(name,), margin=difference)


def verdict_by_answers(pair: Pair, answers: Sequence[Mapping[str, Any]]) -> Verdict:
    """What a judge's answers add up to: by one principle, what both orders agree on; over several, what most say."""
    by_principle: dict[str, list[float]] = {}
    for each in answers:
        by_principle.setdefault(each["principle"], []).append(each["share"])
    points = [agreed_share(shares) - TIE for shares in by_principle.values()]
    total = sum(points)
    return Verdict(
        pair=pair,
        share=TIE if total == 0 else float(total > 0),
        judges=(answers[0]["judge"],),
        principles=tuple(principle for principle in by_principle if principle),
        reasons=tuple(each["says"] for each in answers),
    )


def agreed_share(shares: Sequence[float]) -> float:
    """The share on which all orders agree; a half where they do not."""
    return shares[0] if len(set(shares)) == 1 else TIE


def verdict_by_votes(pair: Pair, votes: Mapping[str, str]) -> Verdict | None:
    """What people's votes add up to; None where all have skipped the pair."""
    given = {rater: vote for rater, vote in votes.items() if vote in SHARES}
    if not given:
        return None
    total = sum(SHARES[vote] - TIE for vote in given.values())
    counts = Counter(given.values())
    return Verdict(
        pair=pair,
        share=TIE if total == 0 else float(total > 0),
        judges=tuple(given),
        votes={vote: counts[vote] for vote in SHARES},
    )


def standing_votes(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Each rater's votes by pair, in the order in which they were given; what was undone is gone."""
    votes: dict[str, dict[str, str]] = {}
    for record in records:
        of_rater = votes.setdefault(record["rater"], {})
        if "undone" in record:
            of_rater.pop(record["undone"], None)
        else:
            of_rater[record["pair"]] = record["vote"]
    return votes


def rater_summary(votes: Mapping[str, Mapping[str, str]]) -> dict[str, object]:
    """How many votes each rater gave, and how far every two of them agree on the pairs that both have judged."""
    between = {}
    for one, other in combinations(sorted(votes), 2):
        common = [
            pair for pair, vote in votes[one].items() if vote in SHARES and votes[other].get(pair, "skip") in SHARES
        ]
        found = agreement([votes[one][pair] for pair in common], [votes[other][pair] for pair in common])
        between[f"{one} and {other}"] = found.as_record()
    counts = {rater: dict(Counter(of_rater.values())) for rater, of_rater in sorted(votes.items())}
    return {"raters": counts, "agreement": between}


def order_summary(answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, object]:
    """Of a judge that is asked in both orders: how often it keeps to its word, and how often it likes what comes first.

    Without a bias for the place, `first_shown_share` is a half.
    """
    asked: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for pair, of_pair in answers.items():
        for each in of_pair:
            if each["order"]:
                asked.setdefault((pair, each["principle"]), []).append(each)
    both = [of_question for of_question in asked.values() if len(of_question) == 2]
    shown_first = [
        each["share"] if each["order"] == "first" else 1 - each["share"] for of_both in both for each in of_both
    ]
    kept = sum(of_both[0]["share"] == of_both[1]["share"] for of_both in both)
    return {
        "num_asked_in_both_orders": len(both),
        "same_in_both_orders": kept / len(both) if both else None,
        "first_shown_share": sum(shown_first) / len(shown_first) if both else None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of two raters, over what both have judged."""

    num_common: int
    raw: float | None
    """Share of equal verdicts; None where nothing is common."""
    kappa: float | None
    """Cohen's; None where nothing is common, or both always say one and the same."""

    def as_record(self) -> dict[str, object]:
        """Plain data for the summary."""
        return asdict(self)


def agreement(first: Sequence[Hashable], second: Sequence[Hashable]) -> Agreement:
    """Raw agreement and Cohen's kappa of two raters' verdicts, item by item.

        κ = (p_o - p_e) / (1 - p_e),   p_o = share of equal verdicts,   p_e = Σ_k p_1(k) p_2(k)

    Cohen 1960, "A coefficient of agreement for nominal scales".  1 is full agreement, 0 what chance gives to raters
    who say each thing as often as these do, below 0 less than that.  Undefined, here None, where p_e = 1.
    """
    assert len(first) == len(second)
    count = len(first)
    if not count:
        return Agreement(num_common=0, raw=None, kappa=None)
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / count
    of_first, of_second = Counter(first), Counter(second)
    expected = sum(of_first[verdict] * of_second[verdict] for verdict in of_first) / count**2
    kappa = None if expected == 1 else (observed - expected) / (1 - expected)
    return Agreement(num_common=count, raw=observed, kappa=kappa)


def row_of_verdict(verdict: Verdict) -> dict[str, object]:
    """One row: `prompt`, `chosen` and `rejected`, then how it came about.

    Of a tie the first completion stands as chosen, which means nothing.  Prompts that are conversations have answers
    that are lists of one message of the assistant's.
    """
    pair = verdict.pair
    chosen, rejected = (pair.second, pair.first) if verdict.share < 0.5 else (pair.first, pair.second)
    names = (
        {"chosen": "first", "rejected": "second"} if chosen is pair.first else {"chosen": "second", "rejected": "first"}
    )
    return {
        "prompt": pair.prompt.prompt,
        "chosen": answer_content(pair.prompt, chosen),
        "rejected": answer_content(pair.prompt, rejected),
        "tie": verdict.is_tie,
        "judge": ", ".join(verdict.judges),
        "margin": verdict.margin,
        "principle": "\n".join(verdict.principles) or None,
        "reasons": list(verdict.reasons),
        "votes": {name: verdict.votes[side] for name, side in {**names, "tie": "tie"}.items()}
        if verdict.votes
        else None,
        "pair": pair.id,
        "prompt_id": pair.prompt.prompt_id,
        "chosen_sample": chosen.sample,
        "rejected_sample": rejected.sample,
        "chosen_reward": chosen.reward,
        "rejected_reward": rejected.reward,
    }


def answer_content(prompt: SampledPrompt, completion: SampledCompletion) -> str | list[Mapping[str, str]]:
    """A completion in the shape of its prompt."""
    if isinstance(prompt.prompt, str):
        return completion.text
    return [{"role": "assistant", "content": completion.text}]


def length_summary(verdicts: Sequence[Verdict]) -> dict[str, float | None]:
    """Mean tokens of chosen and of rejected completions, and how often the longer one was chosen, ties left out.

    A judge that takes length for quality shows here.
    """
    lengths = [
        (pair.first.num_tokens, pair.second.num_tokens)[:: 1 if verdict.share > 0.5 else -1]
        for verdict in verdicts
        if not verdict.is_tie and (pair := verdict.pair)
    ]
    unequal = [chosen > rejected for chosen, rejected in lengths if chosen != rejected]
    return {
        "mean_chosen_tokens": fmean(chosen for chosen, _ in lengths) if lengths else None,
        "mean_rejected_tokens": fmean(rejected for _, rejected in lengths) if lengths else None,
        "longer_chosen_share": fmean(unequal) if unequal else None,
    }
