"""Refuses what the functions of an algorithm return where it is malformed: they may be a user's.

Each check looks at a shape, or once at a column; the cause is only searched for after a failure.
"""

from collections.abc import Sequence
from pathlib import Path
from traceback import extract_tb
from typing import TypeGuard

import torch
from torch import Tensor

from posttrain.algorithms.credit import Credit, CreditRule, Evidence
from posttrain.errors import RunError, UserError
from posttrain.needs import MissingColumn, Need
from posttrain.records import Group


def require_needs(needs: object, available: frozenset[Need], where: str) -> frozenset[Need]:
    """The needs as a set.  Raises UserError where one of them is unknown or not available here."""
    if not isinstance(needs, frozenset | set | tuple | list) or not all(need in list(available) for need in needs):
        raise UserError(f"{where} = {needs!r}: give a set of {', '.join(sorted(available))}.")
    return frozenset(map(Need, needs))


def credit_of_rule(rule: CreditRule, evidence: Evidence, *, owner: str) -> object:
    """What a credit rule returns.  Raises RunError, which names the rule, where it raises."""
    where = f"{owner}: its credit rule {getattr(rule, '__qualname__', type(rule).__name__)}"
    try:
        return rule(evidence)
    except MissingColumn as missing:
        remedy = missing.remedy("`credit_needs` of the algorithm")
        raise RunError(f"{where} cannot read `{missing.name}`.  {remedy}") from missing
    except (RunError, UserError):
        raise
    except Exception as error:
        frame = extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise RunError(f"{where} raised {type(error).__name__}: {str(error)[:300]} ({place}).") from error


def require_credit(credit: object, evidence: Evidence, groups: Sequence[Group], *, owner: str) -> Credit:
    """The credit, with a finite advantage for every completion token, and returns of that shape if there are any."""
    where = f"{owner}: its credit rule"
    if not isinstance(credit, Credit):
        raise RunError(f"{where} returned {value_text(credit)}; return a posttrain.Credit, such as Credit(advantages).")
    num_tokens = int(evidence.lengths.sum())
    for name, column in credit.columns.items():
        if column is None and name != "advantages":
            continue
        if not is_column(column, num_tokens):
            raise RunError(
                f"{where} returned {value_text(column)} as {name}; return a floating-point tensor of one number for"
                f" each of the {num_tokens} completion tokens.  `per_rollout` makes it from one for each completion."
            )
        bad = (~torch.isfinite(column)).nonzero()
        if len(bad):
            raise RunError(f"{where} {not_finite(name, column, int(bad[0, 0]), evidence, groups)}")
    return credit


def not_finite(name: str, column: Tensor, token: int, evidence: Evidence, groups: Sequence[Group]) -> str:
    """Which completion has an advantage or a return that is not finite, and the usual cause."""
    group, sample = divmod(int(evidence.rollout[token]), evidence.rewards.shape[1])
    num_unscored = int(evidence.rewards[group].isnan().sum())
    found = f"gave prompt {groups[group].prompt.id}, sample {sample}, {column[token].item()} as {name}"
    remedy = (
        "leave it out of statistics (rewards.nanmean) and give its tokens 0, as the rules in algorithms.advantages do"
    )
    if num_unscored:
        return f"{found}.  {num_unscored} rollouts of that prompt have no score, so a reward of NaN: {remedy}."
    if bool(evidence.rewards.isnan().any()):
        return f"{found}.  A rollout of another prompt has no score, so a reward of NaN: {remedy}."
    largest = evidence.rewards.abs().max().item()
    return f"{found}, although all are scored, |reward| ≤ {largest:g}.  Look for a division by 0 or an overflow."


def checked_weights(weights: object, lengths: Tensor, rule: object, *, owner: str) -> Tensor:
    """The weights, one for each rollout, each finite and at least 0."""
    where = f"{owner}: its rule of token weights, {getattr(rule, '__name__', rule)},"
    if not is_column(weights, len(lengths)):
        needed = f"return a floating-point tensor of one number for each of the {len(lengths)} rollouts"
        raise RunError(f"{where} returned {value_text(weights)}; {needed}.")
    sound = torch.isfinite(weights) & (weights >= 0)
    if not bool(sound.all()):
        bad = int((~sound).nonzero()[0, 0])
        found = f"gave rollout {bad} of {len(lengths)} the weight {weights[bad].item()}"
        raise RunError(f"{where} {found}; give a finite number of at least 0, and 0 to a rollout without a score.")
    return weights


def require_losses(losses: object, logprobs: Tensor, term: str, *, owner: str) -> Tensor:
    """A loss term's values, one for each token of the micro-batch."""
    if not is_column(losses, len(logprobs)):
        needed = f"return a floating-point tensor of one number for each token, [{len(logprobs)}] here"
        raise RunError(f"{owner}: its loss term {term} returned {value_text(losses)}; {needed}.")
    return losses


def is_column(value: object, length: int) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.shape == (length,) and value.is_floating_point()


def value_text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"{value!r:.60} ({type(value).__name__})"
