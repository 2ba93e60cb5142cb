"""Bounds of options: each is held, and refused in one wording that names the option, the value and the rule."""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from math import inf, nan
from typing import Annotated, Any

import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen

import posttrain.options
from posttrain.errors import UserError
from posttrain.options.bounds import Bounded, NonEmptyStr, PositiveFloat, PositiveInt, Share, bounds_of
from posttrain.rewards.code.code_reward import CodeReward
from posttrain.rewards.judge_reward import JudgeReward


def bounded_classes() -> Iterator[Any]:
    for module in pkgutil.iter_modules(posttrain.options.__path__, "posttrain.options."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.name:
                yield value
    yield from (CodeReward, JudgeReward)


def beyond(bounds: tuple[object, ...]) -> list[object]:
    """Values just outside of each bound, and NaN where they are of numbers."""
    outside: list[object] = []
    for bound in bounds:
        match bound:
            case Ge(ge=least):
                outside += [least - 1, nan]
            case Gt(gt=above):
                outside += [above, nan]
            case Le(le=most):
                outside.append(most + 1)
            case Lt(lt=below):
                outside.append(below)
            case MinLen():
                outside.append("")
    return outside


CASES = [
    pytest.param(options, name, value, id=f"{options.__name__}.{name}={value}")
    for options in bounded_classes()
    for name, (bounds, _) in bounds_of(options).items()
    for value in beyond(bounds)
]


def test_there_are_bounds() -> None:
    assert len(CASES) > 200


@pytest.mark.parametrize(("options", "name", "value"), CASES)
def test_what_is_out_of_bounds_is_refused_by_name_and_value(options: Any, name: str, value: object) -> None:
    given = {each.name: "" for each in fields(options) if each.default is MISSING and each.default_factory is MISSING}
    given |= {each: "x" for each, (bounds, _) in bounds_of(options).items() if MinLen(1) in bounds}
    with pytest.raises(UserError) as refused:
        options(**{**given, name: value})
    assert str(refused.value).startswith(f"{name} = {value!r}: must be "), refused.value


@dataclass(frozen=True, kw_only=True)
class Example(Bounded):
    rank: PositiveInt = 1
    limit: PositiveInt | None = None
    rate: PositiveFloat = 1.0
    share: Share = 0.5
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    folder: NonEmptyStr = "runs/example"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rank": 0}, "rank = 0: must be at least 1"),
        ({"limit": 0}, "limit = 0: must be at least 1, or null"),
        ({"rate": inf}, "rate = inf: must be a finite number greater than 0"),
        ({"share": 1.5}, "share = 1.5: must be at least 0 and at most 1"),
        ({"dropout": 1.0}, "dropout = 1.0: must be at least 0 and less than 1"),
        ({"folder": ""}, "folder = '': must be non-empty"),
    ],
)
def test_the_rule_is_in_plain_words(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        Example(**given)
    assert str(refused.value) == says


def test_what_is_at_a_bound_is_taken() -> None:
    assert Example(rank=1, limit=None, share=1, dropout=0).share == 1


def test_every_class_with_bounds_checks_them() -> None:
    assert [options for options in bounded_classes() if bounds_of(options) and not issubclass(options, Bounded)] == []
