"""Who is better, from what was said of a pair: rewards, a judge's answers, people's votes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from posttrain.training.collection.agreement import agreement
from posttrain.training.collection.pair_choice import Pair

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
