"""The verdicts in what a call came to, and the error that names the row where there is none."""

from posttrain.errors import RunError
from posttrain.rewards.answers import EXCERPT, Answered, Problem, Verdict, raised, verdicts_in
from posttrain.rewards.calls import Call, Result, Row
from posttrain.rewards.function import ScoringFailure
from posttrain.rewards.invoking import FunctionRaised


def read(call: Call, result: Result) -> list[Verdict] | Problem:
    """One verdict per row of the call, or what is wrong with all of them together."""
    if isinstance(result, Answered):
        return result.verdicts
    if isinstance(result, ScoringFailure):
        return [result] * len(call.rows)
    if isinstance(result, FunctionRaised):
        assert result.__cause__ is not None
        return raised(result.__cause__)
    return verdicts_in(result, one_by_one=call.wanted.one_by_one, count=len(call.rows))


def stop(call: Call, problem: Problem, row: Row | None) -> RunError:
    """The error that stops the run, with the row where it is known; to be raised from the problem's cause."""
    where = f"reward {call.function.name!r}"
    if row is None:
        return RunError(f"{where} {problem.text}")
    return RunError(
        f"{where}, prompt {row.group.prompt.id!r}, sample {row.rollout.sample}: {problem.text}"
        f"\n    The completion: {excerpt(row.text)}"
        '\n    To go on without such scores use on_error="none": they are then left out and counted.'
    )


def excerpt(text: str) -> str:
    """The beginning and the end of a text, on one line and safe to print."""
    if len(text) > EXCERPT:
        return f"{text[: EXCERPT // 2]!a} … {text[-EXCERPT // 2 :]!a} ({len(text)} characters)"
    return ascii(text)
