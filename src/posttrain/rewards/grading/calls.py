"""One call of a reward function: its rows, and the arguments that its signature asks for."""

import difflib
import itertools
import math
import time
from collections.abc import MutableMapping, MutableSequence, MutableSet, Sequence, Set
from copy import Error as CopyError, deepcopy
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from posttrain.errors import RunError, UserError
from posttrain.records import Group, Rollout
from posttrain.rewards.grading import answers
from posttrain.rewards.grading.call_log import LOGS, CallLog
from posttrain.rewards.grading.function import TEXTS, Keywords, RewardFunction, ScoringFailure, TrainerState


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """A moment, and the limit that set it."""

    at: float
    """By `time.monotonic()`."""
    says: str
    """The message of a failure when it has passed."""

    def left(self) -> float:
        """Seconds until then: infinite without a limit, negative afterwards."""
        return self.at - time.monotonic()

    @property
    def passed(self) -> bool:
        return self.left() <= 0

    @property
    def timeout(self) -> float | None:
        """Seconds until then, at least 0; None without a limit."""
        return None if self.at == math.inf else max(0.0, self.left())


NEVER = Deadline(math.inf, "")


def after(seconds: float, says: str) -> Deadline:
    """The deadline in `seconds` from now; 0 sets none."""
    return Deadline(time.monotonic() + seconds, says) if seconds else NEVER


ENVIRONMENT = "environment"
"""The argument with the environments' objects, which no worker sees."""
NOT_CACHED = {"trainer_state", "log_metric", ENVIRONMENT, "environment_rewards"}
"""Arguments that a cached function may not have: they belong to a step, to one call, or to one conversation."""
STANDS_FOR = {"ground_truth": "answer", "nums": "numbers"}
"""Parameters of functions of one response, and the columns used if none has the parameter's name."""
WITHHELD = ("prompt", "completion")
"""Columns that functions of lists do not see: they get the rendered prompt and what was sampled instead."""
GIVEN = ("prompts", "completions", "completion_ids", "finish_reasons", "trainer_state", *LOGS)
"""Arguments that win over columns of these names, which no function of lists ever sees."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One completion to be scored."""

    group: Group
    rollout: Rollout
    base: float | None = None

    @property
    def text(self) -> str:
        return self.group.graded_text(self.rollout)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the calls of a function."""

    until: Deadline = NEVER
    may_lose: float = 0.0
    """Completions that may be lost to deadlines and crashes; with one more, the rest are not scored."""

    def refusal(self, rows_lost: int = 0) -> answers.OutOfTime | None:
        """Why no further call may be made, if so."""
        if self.until.passed:
            return answers.OutOfTime(self.until.says)
        lost = f"{rows_lost} completions before were lost to deadlines or crashes"
        return answers.OutOfTime(f"not asked, since {lost}") if rows_lost > self.may_lose else None


NO_RUN = TrainerState()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a reward function, for some rows."""

    function: RewardFunction
    rows: tuple[RolloutRow, ...]
    wanted: Keywords
    bounds: Bounds = field(default_factory=Bounds)
    trainer_state: object = NO_RUN
    """The run's progress: a TrainerState, or a similar object."""
    log: CallLog = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "log", CallLog(self.function.name, len(self.rows)))

    def deadline(self) -> Deadline:
        each, rows = self.function.settings.item_seconds, len(self.rows)
        of = "" if rows == 1 else f" for each of {rows} completions"
        return min(after(each * rows, f"it took longer than item_seconds = {each:g}{of}"), self.bounds.until)


Result = object | answers.FunctionError | ScoringFailure | answers.WorkerAnswer
"""What a call returned, or what became of it."""


def calls_for(call: Call) -> list[Call]:
    """One call split up: for each row, in workers for each prompt's rows, else one for all rows."""
    if call.wanted.one_by_one:
        return [replace(call, rows=(row,)) for row in call.rows]
    if call.function.settings.workers:
        prompts = itertools.groupby(call.rows, key=lambda row: id(row.group))
        return [replace(call, rows=tuple(of_prompt)) for _, of_prompt in prompts]
    return [call] if call.rows else []


def reward_arguments(call: Call) -> dict[str, object]:
    """The arguments in the function's signature, all newly made for this call."""
    of_run = {"trainer_state": call.trainer_state, **call.log.arguments(), **environment_arguments(call)}
    wanted = call.wanted
    if call.function.settings.cache:
        of_run = {name: value for name, value in of_run.items() if name not in NOT_CACHED}
    if wanted.one_by_one:
        values = single_arguments(call.rows[0], call.function) | of_run
        require_arguments(call, values.keys())
    else:
        given = list_arguments(call.rows, call.function) | of_run
        columns = {name: None for row in call.rows for name in row.group.prompt.columns if name not in WITHHELD}
        texts: dict[str, object] = {name: [row.text for row in call.rows] for name in TEXTS & wanted.required}
        require_arguments(call, columns.keys() | given.keys() | texts.keys())
        for name in filter(wanted.wants, columns):
            texts[name] = [private_copy(row.group.prompt.columns.get(name)) for row in call.rows]
        values = texts | given
    return {name: value for name, value in values.items() if wanted.wants(name)}


def environment_arguments(call: Call) -> dict[str, object]:
    """Further arguments for completions with an environment: its objects, and what its replies earned."""
    if not any(row.rollout.has_environment for row in call.rows):
        return {}
    objects = [row.rollout.environment for row in call.rows]
    earned = [row.rollout.environment_reward for row in call.rows]
    if call.wanted.one_by_one:
        return {ENVIRONMENT: objects[0], "environment_reward": earned[0]}
    return {ENVIRONMENT: objects, "environment_rewards": earned}


def list_arguments(rows: Sequence[RolloutRow], function: RewardFunction) -> dict[str, object]:
    """The arguments of functions of lists; they win over columns of the same names."""
    return {
        "prompts": [reward_prompt(row, function) for row in rows],
        "completions": [reward_completion(row, function) for row in rows],
        "completion_ids": [list(row.rollout.tokens) for row in rows],
        "finish_reasons": [row.rollout.finish for row in rows],
        **({"base": [row.base for row in rows]} if function.settings.of else {}),
    }


def single_arguments(row: RolloutRow, function: RewardFunction) -> dict[str, object]:
    """The arguments of a function of one response; `STANDS_FOR` gives columns other names."""
    values = {name: private_copy(value) for name, value in row.group.prompt.columns.items()}
    for name, column_name in STANDS_FOR.items():
        if name not in values and column_name in values:
            values[name] = private_copy(values[column_name])
    return values | {
        "prompt": reward_prompt(row, function),
        "response": row.text,
        "completion": row.text,
        "finish_reason": row.rollout.finish,
        **({"base": row.base} if function.settings.of else {}),
    }


IMMUTABLE = frozenset((str, int, float, bool, complex, bytes, range, type(None)))


def private_copy(value: Any) -> object:
    """A copy of a mutable value: `numbers.remove(3)` in a reward must not alter the problem."""
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind in (list, tuple) and IMMUTABLE.issuperset(map(type, value)):
        return value.copy() if kind is list else value
    if kind is memoryview:  # which cannot be copied and stay one of the same memory
        return memoryview(bytearray(value)) if not value.readonly else value
    if isinstance(value, MutableSequence | MutableMapping | MutableSet | tuple):
        return deepcopy(value)
    if isinstance(value, answers.Array):
        return deepcopy(value.detach() if hasattr(value, "detach") else value)  # a gradient's history has no copy
    if kind is MappingProxyType:
        return MappingProxyType(deepcopy(dict(value)))
    try:
        return deepcopy(value)
    except (TypeError, AttributeError, ValueError, RuntimeError, CopyError):
        return value  # such as a lock, shared, as docs/rewards.md says


def reward_prompt(row: RolloutRow, function: RewardFunction) -> object:
    """The prompt without the start of the answer: messages if there are any, else text."""
    prompt = row.group.prompt
    if prompt.messages is not None and not function.text_only:
        return [dict(message) for message in prompt.messages]
    return prompt.text.removesuffix(prompt.prefill)


def reward_completion(row: RolloutRow, function: RewardFunction) -> object:
    if row.group.prompt.messages is None or function.text_only:
        return row.text
    return private_copy(row.group.graded_messages(row.rollout))


def require_arguments(call: Call, offered: Set[str]) -> None:
    for name in sorted(call.wanted.required - offered):
        there = ", ".join(sorted(offered))
        raise UserError(
            f"reward {call.function.name!r} needs an argument {name!r}, but there are only {there}."
            f" {argument_hint(call, name, offered)}"
        )


def argument_hint(call: Call, name: str, offered: Set[str]) -> str:
    """How to give a function an argument that is missing."""
    if name in WITHHELD and any(name in row.group.prompt.columns for row in call.rows):
        return (
            f"The column `{name}` is withheld, since this run samples {name}s. Rename it by task.columns, such as"
            f" {{own_{name}: {name}}}, and call the parameter `own_{name}`."
        )
    if name in NOT_CACHED and call.function.settings.cache:
        return "Scores that are cached must not depend on the step or the call: remove `cache`."
    if name in (ENVIRONMENT, "environment_reward", "environment_rewards"):
        return "Only a run with an environment has it: set environment.path, environment.url or `tools`."
    if name == "ground_truth" and call.wanted.one_by_one:
        return "It is taken from a column `ground_truth` or `answer`; add one of these to the dataset."
    if name == "ground_truth":
        remedy = "call the parameter `answer`" if "answer" in offered else "add a column `ground_truth` to the dataset"
        return f"A function of lists gets columns under their own names: {remedy}."
    near = difflib.get_close_matches(name, offered, n=1)
    return f"Did you mean {near[0]!r}?" if near else "Rename the parameter, give it a default, or add the column."


def read_result(call: Call, result: Result) -> list[answers.Verdict] | answers.InvalidScore:
    """One verdict per row of the call, with what the call logged of it, or what is wrong with all of them."""
    verdicts: list[answers.Verdict] | answers.InvalidScore
    if isinstance(result, answers.WorkerAnswer):
        verdicts = result.verdicts
    elif isinstance(result, ScoringFailure):
        verdicts = [result] * len(call.rows)
    elif isinstance(result, answers.FunctionError):
        cause, said = result.__cause__, answers.safe_text(result.__cause__, str)[: answers.EXCERPT]
        verdicts = answers.InvalidScore(f"raised {type(cause).__name__}: {said}", cause)
    else:
        verdicts = answers.verdicts_in(result, one_by_one=call.wanted.one_by_one, count=len(call.rows))
    verdicts = call.log.kept_with(verdicts)
    if isinstance(verdicts, answers.InvalidScore):
        return verdicts
    return [misplaced_marks(row, said) or said for row, said in zip(call.rows, verdicts, strict=True)]


def misplaced_marks(row: RolloutRow, said: answers.Verdict) -> answers.InvalidScore | None:
    """What is wrong with marks outside of the completion, if anything."""
    if not isinstance(said, answers.Score) or said.marks is None:
        return None
    count, num_tokens, num_characters = len(said.marks["tokens"]), len(row.rollout.tokens), len(row.text)
    if count not in (0, num_tokens):
        rule = "give one for each of completion_ids, the stop token included (None where no step ends)"
        return answers.InvalidScore(f"returned {count} token_rewards for a completion of {num_tokens} tokens; {rule}")
    for place, (start, end, _) in enumerate(said.marks["spans"]):
        if not 0 <= start < end <= num_characters:
            given = f"spans[{place}] = characters {start} to {end} of a text of {num_characters}"
            rule = "a span is [start, end), with 0 <= start < end <= length of the text"
            return answers.InvalidScore(f"returned {given}; {rule}")
    return None


def run_error(call: Call, problem: answers.InvalidScore, row: RolloutRow | None) -> RunError:
    """The error that stops the run, with the row if it is known; raise it from the problem's cause."""
    where = f"reward {call.function.name!r}"
    if row is None:
        return RunError(f"{where} {problem.text}")
    reads_chats = type(problem.cause).__name__ == "TypeError" and "string indices must be integers" in problem.text
    hint = f"\n    {CHAT_HINT}" if reads_chats and row.group.prompt.messages is None else ""  # also from a worker
    text, half = ascii(row.text), answers.EXCERPT // 2
    if len(row.text) > answers.EXCERPT:
        text = f"{row.text[:half]!a} … {row.text[-half:]!a} ({len(row.text)} characters)"
    return RunError(
        f"{where}, prompt {row.group.prompt.id!r}, sample {row.rollout.sample}: {problem.text}"
        f"\n    The completion: {text}{hint}"
        '\n    To leave such scores out and count them, set rollout.on_reward_error = none, or grade(on_error="none").'
    )


CHAT_HINT = (
    "It reads messages, but the prompts are plain text: set task.prompt_format = chat"
    " (--task.prompt-format chat), or let it read text."
)
