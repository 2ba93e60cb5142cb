"""`posttrain check-task`: what a reward would pay for right answers and for cheap tricks, before a policy finds out."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from posttrain.commands.arguments import split_arguments
from posttrain.config.recipes import kind_of_reward
from posttrain.errors import RunError, UserError
from posttrain.options.dataset import DatasetOptions
from posttrain.options.reward import RewardOptions
from posttrain.options.task import TASK_OPTIONS
from posttrain.records import Finish, Group, Prompt, Rollout, TokenSequence
from posttrain.rewards import cheap_attacks
from posttrain.rewards.cheap_attacks import Answer, AttackExample, generic, most_common
from posttrain.rewards.grading.answers import Score
from posttrain.rewards.grading.calls import CHAT_HINT, NEVER, RolloutRow, read_result
from posttrain.rewards.grading.dispatch import dispatch
from posttrain.rewards.grading.function import BUILT_IN, RewardFunction, ScoringFailure, load_reward
from posttrain.rewards.grading.grade import DEFAULTS, PendingScores, checked_verdicts, grade, marks_in
from posttrain.rewards.grading.resources import Resources, row_check
from posttrain.rewards.grading.worker_process import NotWritableError, to_json
from posttrain.rewards.shaping_attacks import JUDGE, SHAPING
from posttrain.tasks.dataset import content
from posttrain.tasks.programs_task import program_row
from posttrain.tasks.row_files.rows import DatasetRow, read_rows, require_column

HELP = """usage: posttrain check-task REWARD|TASK|FILE.py:FUNCTION|package.module:FUNCTION [--rows FILE]
                             [--prompt-column NAME] [--chat] [--seconds N]
       posttrain check-task FOLDER|org/name --rows FILE [--label LABEL] [--prompt-column NAME] [--chat]
       posttrain check-task judge --endpoint URL --model NAME [--key-env VARIABLE]

Replay right answers and cheap tricks against a reward and show what it pays for each.  A reward of this package has its
own right answers; for a function of yours --rows names rows (.jsonl, .json, .csv, .parquet), whose column `answer` is
tried as a right answer; for code and programs it names rows whose tests are looked at.  Your function is given text or
messages as each row's prompt is, with --chat messages always, as training with --task.prompt-format chat does.  It runs
in a process of its own, and has --seconds (10) for an answer; what it logs is looked at and not kept.  For a penalty a
right answer is one that goes free and a trick is one that is fined.  A reward model has no bound to pay above: of it a
trick is paid that has at least the score of the row's own answer.  Exit code 0 where every right answer is paid and no
trick is, else 1.
"""
FLAGS = ("rows", "prompt-column", "seconds", "endpoint", "model", "key-env", "label")
SWITCHES = ("chat",)
"""Flags without a value."""
MOST_ROWS = 20
CHAT_FLAG = "(reads messages and gets text: --chat here, --task.prompt-format chat in training)"
EXAMPLES = {**cheap_attacks.EXAMPLES, **SHAPING}
"""By the names of rewards: all that can be tried with nothing but this package."""
TASK_REWARDS = {"countdown": "countdown", "programs": "code"}


@dataclass(frozen=True, slots=True)
class Payment:
    """What an answer earned."""

    answer: Answer
    example: AttackExample
    score: float | None
    seconds: float
    error: str = ""
    lost: bool = False
    """Whether the function never came back."""

    @property
    def fine(self) -> bool:
        """Whether it is as it should be."""
        if self.error or self.seconds > self.example.slow_seconds * (10 if self.answer.right else 3):
            return False
        return self.earned if self.answer.right else self.answer.known or not self.earned

    @property
    def earned(self) -> bool:
        """Whether it is paid; of a penalty, whether it goes free."""
        return self.score is not None and self.score > self.example.above

    def line(self) -> str:
        """One line of the table."""
        if self.error:
            paid = "error"
        else:
            paid = "not scored" if self.score is None else f"{self.score + 0.0:.3g}"  # without the sign of -0
        kind = "right" if self.answer.right else "trick"
        verdict = "" if self.fine else "  <-- " + (self.error or ("too slow" if self.slow else "should not be"))
        known = "a penalty alone sees no task" if self.example.above < 0 else "a known hack: see the reward's page"
        note = f"  ({known})" if self.answer.known and self.earned else ""
        return f"  {kind}  {paid:>10}  {1000 * self.seconds:8.1f} ms  {self.answer.label}{note}{verdict}"

    @property
    def slow(self) -> bool:
        return self.seconds > self.example.slow_seconds


def main(arguments: Sequence[str]) -> int:
    """Print the table as it comes; the exit code says whether all is well."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(HELP)
        return 0
    given = split_arguments(arguments)
    if len(given.positional) != 1:
        raise UserError(f"check-task takes one reward, task or FILE.py:FUNCTION\n{HELP}")
    flags = read_switches(given.flags)
    function, examples = found(given.positional[0], flags)
    refuse_unread_flags(given.positional[0], function, flags)
    print(f"{function.name}: {sum(len(example.answers) for example in examples)} answers", flush=True)
    with Resources() as resources:
        check_users_rows(given.positional[0], function, flags, resources)
        paid = replayed(function, examples, resources)
    lost = {each.answer.label for each in paid if each.lost}
    if lost:
        print(f"not answered, and left out for the rows that follow: {', '.join(sorted(lost))}")
    wrong = [each for each in paid if not each.fine]
    print(f"{len(wrong)} of {len(paid)} are not as they should be" if wrong else "every answer got what it deserves")
    if function.name == "judge" and "endpoint" not in flags:
        raise UserError(
            "check-task: these tricks a judge's reward refuses without a call; what it pays for all others is up to the"
            " judge.  Name yours: posttrain check-task judge --endpoint URL --model NAME [--key-env VARIABLE]"
        )
    return 1 if wrong else 0


READ_BY = {
    "model": ("rows", "label", "prompt-column", "chat"),
    "function": ("rows", "prompt-column", "chat", "seconds"),
    "judge": ("endpoint", "model", "key-env"),
}
"""Flags by what is tried; a reward of this package reads `rows` where it can look at them, and nothing else."""


def refuse_unread_flags(name: str, function: RewardFunction, flags: Iterable[str]) -> None:
    """Refuse flags that nothing reads.  Raises UserError."""
    kind = "model" if kind_of_reward(name) == "model" else "function" if ":" in name else name
    read = READ_BY.get(kind, ("rows",) if row_check(function.call) is not None else ())
    for flag in flags:
        if flag not in read:
            raise UserError(f"check-task {name}: --{flag} is not read for this reward; leave it out")


def check_users_rows(name: str, function: RewardFunction, flags: Mapping[str, str], resources: Resources) -> None:
    """Have a reward of this package look at rows of the user's, where it can.  Raises UserError for those that fail."""
    checked = row_check(function.call)
    if "rows" not in flags or checked is None:
        return
    rows = [program_row(row) if name == "programs" else row for row in read_rows(flags["rows"])]
    checked.check_rows([(row.where, row.columns) for row in rows], resources)
    print(f"{flags['rows']}: nothing is wrong with the tests of its {len(rows)} rows", flush=True)


def replayed(function: RewardFunction, examples: Sequence[AttackExample], resources: Resources) -> list[Payment]:
    """What every answer is paid, told as it comes; an answer that ends in no time is not tried on the other rows."""
    paid: list[Payment] = []
    lost: set[str] = set()
    for example in examples:
        for answer in example.answers:
            if answer.label in lost:
                continue
            paid.append(twice_if_slow(function, example, answer, resources))
            print(paid[-1].line(), flush=True)
            lost |= {answer.label} if paid[-1].lost else set()
    return paid


def read_switches(flags: Sequence[str]) -> dict[str, str]:
    """The values of `--rows FILE` and the like."""
    values: dict[str, str] = {}
    left = list(flags)
    while left:
        name, _, value = left.pop(0).partition("=")
        if name.removeprefix("--") in SWITCHES and name.startswith("--") and not value:
            values[name.removeprefix("--")] = "yes"
            continue
        if name.removeprefix("--") not in FLAGS or not name.startswith("--"):
            raise UserError(f"{name}: no such flag\n{HELP}")
        if not value and not left:
            raise UserError(f"{name} needs a value\n{HELP}")
        values[name.removeprefix("--")] = value or left.pop(0)
    return values


def found(name: str, flags: dict[str, str]) -> tuple[RewardFunction, list[AttackExample]]:
    """The reward, and the rows and answers to try it with."""
    if kind_of_reward(name) == "model":
        return reward_model(name, flags)
    if ":" in name:
        examples = from_rows(flags)
        return users_function(name, examples, seconds_of(flags)), examples
    reward = TASK_REWARDS.get(name, name)
    if reward == "judge":
        return judge(flags)
    if reward not in EXAMPLES:
        known = ", ".join(sorted({*EXAMPLES, *TASK_REWARDS, "judge"}))
        reason = "has no reward of its own" if name in BUILT_IN or name in TASK_OPTIONS else "is no reward or task"
        raise UserError(f"check-task: {name} {reason}; there are {known}, and FILE.py:FUNCTION")
    example = EXAMPLES[reward]
    options = RewardOptions(name=reward, options=dict(example.options), of=example.of)
    return load_reward(options), [example.with_generic()]


def reward_model(name: str, flags: dict[str, str]) -> tuple[RewardFunction, list[AttackExample]]:
    """A reward model and rows to try it with: what a trick earns is held against what the row's own answer does."""
    examples = from_rows(flags)
    if not any(answer.right for example in examples for answer in example.answers):
        raise UserError(
            f"check-task {name}: a reward model is tried with rows that have an answer, which tricks are held against:"
            " give --rows FILE with the columns prompt and answer"
        )
    function = load_reward(RewardOptions(model=name, label=label_flag(flags), over_long="cut_left"))
    with Resources() as resources:
        return function, [above_its_answer(function, example, resources) for example in examples]


def label_flag(flags: Mapping[str, str]) -> int | str | None:
    """The label of a reward model, by place or by name."""
    label = flags.get("label")
    return int(label) if label is not None and label.isdecimal() else label


def above_its_answer(function: RewardFunction, example: AttackExample, resources: Resources) -> AttackExample:
    """The example, in which paid is what has at least the score of the row's own answer; without one nothing is."""
    scores = [tried(function, example, answer, resources).score for answer in example.answers if answer.right]
    known = [score for score in scores if score is not None]
    return replace(example, above=math.nextafter(known[0], -math.inf) if known else math.inf)


def seconds_of(flags: Mapping[str, str]) -> float:
    """How long a function of the user's has for one answer."""
    try:
        seconds = float(flags.get("seconds", "10"))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds {flags['seconds']}: is no number of seconds; use > 0")
    return seconds


def users_function(path: str, examples: Sequence[AttackExample], seconds: float) -> RewardFunction:
    """A function of the user's, in a worker that a deadline ends; here where a column cannot be sent to one."""
    try:
        for example in examples:
            to_json(dict(example.columns))
    except NotWritableError as error:
        print(f"without a deadline, as a column cannot be sent to another process: {error}")
        return load_reward(RewardOptions(path=path))
    return load_reward(RewardOptions(path=path, workers=1, item_seconds=seconds))


def judge(flags: Mapping[str, str]) -> tuple[RewardFunction, list[AttackExample]]:
    """A judge at an endpoint; without one, what is refused before any judge is asked."""
    if ("endpoint" in flags) != ("model" in flags):
        raise UserError(f"check-task judge takes --endpoint and --model together\n{HELP}")
    options: dict[str, object] = {
        "endpoint": flags.get("endpoint", "http://127.0.0.1/v1"),
        "model": flags.get("model", ""),
    }
    function = load_reward(RewardOptions(name="judge", options=options | {"key_env": flags.get("key-env", "")}))
    if "endpoint" in flags:
        return function, [JUDGE.with_generic()]
    return function, [replace(JUDGE, answers=tuple(answer for answer in JUDGE.answers if answer.unasked))]


def from_rows(flags: dict[str, str]) -> list[AttackExample]:
    """Rows of the user's, or one bare prompt."""
    column = flags.get("prompt-column", "prompt")
    read = [DatasetRow("row", {column: "What is 3 + 4?"})]
    if "rows" in flags:
        read = read_rows(flags["rows"])
        require_column(read, column)
    common = most_common([row.columns for row in read[:MOST_ROWS]])
    options = DatasetOptions(prompt_column=column, prompt_format="chat" if "chat" in flags else "auto")
    return [from_row(row, options, common) for row in read[:MOST_ROWS]]


def from_row(row: DatasetRow, options: DatasetOptions, common: str) -> AttackExample:
    """One row, its prompt of the shape that training would give it, with its own answer and the tricks."""
    given = content(row, options)
    messages = None if isinstance(given, str) else tuple(dict(message) for message in given)
    prompt = given if isinstance(given, str) else given[-1]["content"]
    columns = {name: value for name, value in row.columns.items() if name != options.prompt_column}
    answer = columns.get("answer", columns.get("ground_truth"))
    right = (Answer("the row's own answer", str(answer), right=True),) if answer is not None else ()
    tricks = [trick for trick in generic(prompt, common) if trick.text.strip() != str(answer)]
    return AttackExample(prompt, columns, messages=messages, answers=(*right, *tricks))


def twice_if_slow(function: RewardFunction, example: AttackExample, answer: Answer, resources: Resources) -> Payment:
    """What an answer is paid; slow ones once more, as the first may have started a sandbox or a worker."""
    paid = tried(function, example, answer, resources)
    return tried(function, example, answer, resources) if paid.slow and not paid.lost else paid


def tried(function: RewardFunction, example: AttackExample, answer: Answer, resources: Resources) -> Payment:
    """What one answer is paid; a function that raises, or does not come back, is told as such."""
    columns, messages = dict(example.columns), example.messages
    prompt = Prompt(id="check", text=example.prompt, tokens=(0,), columns=columns, messages=messages)
    rollouts = tuple(rollout_of(each, sample) for sample, each in enumerate((answer, *example.beside)))
    group = Group(prompt=prompt, draw=0, rollouts=rollouts)
    began = time.perf_counter()
    try:
        once = function.settings.workers
        score = asked_once(function, group, resources) if once else graded(function, example, group, resources)
    except ScoringFailure as failure:
        return Payment(answer, example, None, time.perf_counter() - began, str(failure), lost=True)
    except RunError as error:  # any other mistake is no answer's, and is told once for all
        first, *more = str(error).splitlines()
        hint = f"  {CHAT_FLAG}" if any(CHAT_HINT in line for line in more) else ""
        return Payment(answer, example, None, time.perf_counter() - began, first[:200] + hint)
    return Payment(answer, example, None if math.isnan(score) else score, time.perf_counter() - began)


def graded(function: RewardFunction, example: AttackExample, group: Group, resources: Resources) -> float:
    """What the first of a group earns, score and marks, as a step of training would have it."""
    watched = [load_reward(RewardOptions(name=example.of))] if example.of else []
    grades = grade([group], [*watched, function], resources=resources)
    return (grades.scores + grades.marked)[-1, 0, 0].item()


def asked_once(function: RewardFunction, group: Group, resources: Resources) -> float:
    """The same from a function in a worker, without other tries: a deadline that has passed once is enough."""
    pending = PendingScores(function, [RolloutRow(group, group.rollouts[0])], DEFAULTS, NEVER)
    (call,) = pending.calls()
    (said,) = checked_verdicts(call, read_result(call, dispatch([call], resources)[0]), "stop", resources)
    if isinstance(said, Score):
        marks = marks_in(said)
        return said.value + (0.0 if marks is None else marks.total)
    assert isinstance(said, ScoringFailure), said  # "stop" raises what else there is
    raise said


def rollout_of(answer: Answer, sample: int) -> Rollout:
    """An answer as if it had been sampled."""
    text = answer.text.encode("utf-8", "surrogatepass")[:4096]
    tokens = tuple(range(answer.num_tokens)) if answer.num_tokens else tuple(text)
    finish = Finish.LENGTH if answer.cut_off else Finish.STOP
    sequence = TokenSequence.one_turn(tokens, logprobs=(0.0,) * len(tokens), finish=finish)
    return Rollout(sample=sample, sequence=sequence, text=answer.text)
