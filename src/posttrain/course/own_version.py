"""A reader's own version of a course's function, tried on the cases of our tests."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain import course
from posttrain.binding import object_in_file
from posttrain.course.cases import FORMULA_CASES, IRL_CASES, TEXT_CASES, Case
from posttrain.course.model_laws import LAWS, Law
from posttrain.errors import RunError, UserError
from posttrain.schemas import did_you_mean

CHECKS: Mapping[str, Sequence[Case | Law]] = {**FORMULA_CASES, **TEXT_CASES, **IRL_CASES, **LAWS}
RELATIVE, ABSOLUTE = 1e-3, 1e-5


def check_own_version(name: str, file: str) -> Iterator[str]:
    """A line for each case that the function passes; a RunError with the first number that differs."""
    if name not in CHECKS:
        raise UserError(f"{name}: not a function of the course.  {did_you_mean(name, [*CHECKS])}")
    own = object_in_file(f"{file}:{name}", where="course check")
    if not callable(own):
        raise UserError(f"{file}: {name} is a {type(own).__name__}, not a function.")
    for check in CHECKS[name]:
        fault = fault_of(own, check, name)
        if fault:
            raise RunError(f"{file}: {name}: {check.says}: {fault}")
        yield f"  passes  {check.says}"


def fault_of(own: Callable[..., Any], check: Case | Law, name: str) -> str:
    """What is wrong; an empty string if nothing is."""
    try:
        return check.fault(own) if isinstance(check, Law) else fault_of_case(own, check, name)
    except UserError:
        raise
    except NotImplementedError:
        return "raises NotImplementedError.  Write it first."
    except Exception as error:
        described = f"raises {type(error).__name__}: {str(error).strip() or 'no message'}"
        hint = f"  It is called as {name}{signature(getattr(course, name))}." if isinstance(error, TypeError) else ""
        raise RunError(f"{name}: {check.says}: {described}.{hint}") from error


def fault_of_case(own: Callable[..., Any], case: Case, name: str) -> str:
    """The first number of the result, or of its gradient, that differs."""
    arguments = [deepcopy(each) for each in case.arguments]  # a version that writes into them must not change others
    of = None if case.slope_of is None else arguments[case.slope_of]
    if isinstance(of, Tensor):
        of.requires_grad_()
    found = own(*arguments, **case.options)
    fault = first_difference(found, case.expected, "result")
    if fault or not isinstance(of, Tensor):
        return fault
    loss = found[0] if isinstance(found, tuple) else found
    if not (isinstance(loss, Tensor) and loss.requires_grad):
        return "the result has no gradient, so it teaches nothing.  Is something under no_grad, or a float?"
    loss.backward()
    named = [*signature(getattr(course, name)).parameters][case.slope_of or 0]
    return first_difference(torch.zeros_like(of) if of.grad is None else of.grad, case.slope, f"gradient of {named}")


def first_difference(found: object, expected: object, where: str) -> str:
    """The first place where two results differ, with both numbers; an empty string if there is none."""
    if isinstance(expected, Tensor | np.ndarray):
        return array_difference(found, np.asarray(expected), where)
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping):
            return f"{where} is a {type(found).__name__}, expected a dictionary of {', '.join(expected)}"
        pairs = [(found.get(key), value, f"{where}[{key!r}]") for key, value in expected.items()]
    elif isinstance(expected, tuple | list):
        if not isinstance(found, Sequence) or len(found) != len(expected):
            size = f" of {len(found)}" if isinstance(found, Sequence) else ""
            return f"{where} is a {type(found).__name__}{size}, expected {len(expected)} values"
        pairs = [(*both, f"{where}[{i}]") for i, both in enumerate(zip(found, expected, strict=True))]
    else:
        return array_difference(found, np.asarray(expected), where)
    return next(filter(None, (first_difference(*each) for each in pairs)), "")


def array_difference(found: object, expected: np.ndarray, where: str) -> str:
    """`difference` of a tensor, an array or a number: kind, shape, then the first number that is not close."""
    if isinstance(found, Tensor):
        found = found.detach().cpu().numpy()
    if not isinstance(found, np.ndarray | np.generic | float | int | list):
        return f"{where} is a {type(found).__name__}, expected numbers of the shape {[*expected.shape]}"
    given = np.asarray(found)
    if given.shape != expected.shape:
        return f"{where} has the shape {[*given.shape]}, expected {[*expected.shape]}"
    for place in np.ndindex(expected.shape):
        one, other = float(given[place]), float(expected[place])
        if not math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            return f"{where}{[*place] if place else ''} = {one:.6g}, expected {other:.6g}"
    return ""
