"""What the functions of an algorithm return, refused where it is not what they are to return: they may be a user's own.

Each check looks at a shape, or once at a column; what went wrong is only looked for after it did.
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
    """The needs as a set.  Raises UserError where one of them is unknown or cannot be had here."""
    if not isinstance(needs, frozenset | set | tuple | list) or not all(need in list(available) for need in needs):
        raise UserError(f"{where} = {needs!r}: give a set of {', '.join(sorted(available))}.")
    return frozenset(map(Need, needs))


def credit_of_rule(rule: CreditRule, evidence: Evidence, *, owner: str) -> object:
    """What a credit rule returns.  Raises RunError, which names the rule, where it raises."""
    try:
        return rule(evidence)
    except MissingColumn as missing:
        remedy = missing.remedy("`credit_needs` of the algorithm")
        raise RunError(
            f"{owner}: its credit rule {rule_name(rule)} cannot read `{missing.name}`.  {remedy}"
        ) from missing
    except (RunError, UserError):
        raise
    except Exception as error:
        frame = extract_tb(error.__traceback__)[-1]
        raise RunError(
            f"{owner}: its credit rule {rule_name(rule)} raised {type(error).__name__}: {str(error)[:300]}"
            f" ({Path(frame.filename).name}, line {frame.lineno})."
        ) from error


def rule_name(rule: object) -> str:
    """What a function is called in a message."""
    return str(getattr(rule, "__qualname__", type(rule).__name__))


def require_credit(credit: object, evidence: Evidence, groups: Sequence[Group], *, owner: str) -> Credit:
    """The credit, with a finite advantage for every completion token, and returns of that shape if there are any."""
    if not isinstance(credit, Credit):
        raise RunError(
            f"{owner}: its credit rule returned {value_text(credit)}; return a"
            " posttrain.algorithms.credit.Credit, such as Credit(advantages)."
        )
    num_tokens = int(evidence.lengths.sum())
    for name, column in credit.columns.items():
        if column is None and name != "advantages":
            continue
        if not is_column(column, num_tokens):
            raise RunError(
                f"{owner}: its credit rule returned {value_text(column)} as {name}; return a floating-point tensor of"
                f" one number for each of the {num_tokens} completion tokens, all completions one after the other."
                "  posttrain.algorithms.credit.per_rollout makes that of one number for each completion."
            )
        bad = (~torch.isfinite(column)).nonzero()
        if len(bad):
            raise RunError(f"{owner}: {not_finite(name, column, int(bad[0, 0]), evidence, groups)}")
    return credit


def not_finite(name: str, column: Tensor, token: int, evidence: Evidence, groups: Sequence[Group]) -> str:
    """Which completion has an advantage or a return that is no number, and what that usually comes of."""
    group, sample = divmod(int(evidence.rollout[token]), evidence.rewards.shape[1])
    unscored = evidence.rewards[group].isnan()
    told = f"its credit rule gave prompt {groups[group].prompt.id}, sample {sample}, {column[token].item()} as {name}"
    if bool(unscored.any()):
        return (
            f"{told}.  {int(unscored.sum())} of the {len(unscored)} rollouts of that prompt are unscored, and a reward"
            " that nothing scored is NaN: leave it out of every statistic (rewards.nanmean) and give its tokens 0"
            " (torch.where(rewards.isnan(), 0.0, ...)), as posttrain.algorithms.advantages does."
        )
    if bool(evidence.rewards.isnan().any()):
        return (
            f"{told}.  Rewards of other prompts are NaN, for nothing scored those rollouts: leave them out of every"
            " statistic, as posttrain.algorithms.advantages does."
        )
    return (
        f"{told}, although every rollout of the step is scored, the largest by {evidence.rewards.abs().max().item():g}."
        "  Look for a division by 0, such as by the deviation of rewards that are all equal, or a number too large to"
        " be squared."
    )


def checked_weights(weights: object, lengths: Tensor, rule: object, *, owner: str) -> Tensor:
    """The weights, one for each rollout, none of them negative or without a value."""
    where = f"{owner}: its rule of token weights, {getattr(rule, '__name__', rule)},"
    if not is_column(weights, len(lengths)):
        raise RunError(
            f"{where} returned {value_text(weights)}; return a floating-point tensor of one number for each of the"
            f" {len(lengths)} rollouts, which all of its tokens then have."
        )
    sound = torch.isfinite(weights) & (weights >= 0)
    if not bool(sound.all()):
        bad = int((~sound).nonzero()[0, 0])
        raise RunError(
            f"{where} gave rollout {bad} of {len(lengths)} the weight {weights[bad].item()}; a weight is a finite"
            " number, 0 or more, and 0 where a rollout is not scored."
        )
    return weights


def require_losses(losses: object, logprobs: Tensor, term: str, *, owner: str) -> Tensor:
    """A loss term's values, one for each token of the micro-batch."""
    if not is_column(losses, len(logprobs)):
        raise RunError(
            f"{owner}: its loss term {term} returned {value_text(losses)}; return a floating-point tensor of one number"
            f" for each token, [{len(logprobs)}] here.  Token weights add them up."
        )
    return losses


def is_column(value: object, length: int) -> TypeGuard[Tensor]:
    """Whether it is a tensor of so many floating-point numbers in a row."""
    return isinstance(value, Tensor) and value.shape == (length,) and value.is_floating_point()


def value_text(value: object) -> str:
    """What was returned, in a message: of a tensor its shape and type."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return f"{value!r:.60} ({type(value).__name__})"
