"""`posttrain check-task`: what a reward pays for correct answers and for cheap tricks, before a policy finds out."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import starmap
from typing import TYPE_CHECKING

from posttrain.commands.arguments import split_arguments
from posttrain.commands.flags import CommandSpec
from posttrain.config.recipes import kind_of_reward
from posttrain.errors import RunError, UserError
from posttrain.options.bounds import Bounded, PositiveFloat, Unused, require_rules
from posttrain.options.dataset import DatasetOptions
from posttrain.options.environment import EnvironmentOptions, tool_name
from posttrain.options.reward import RewardOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.options.task import TASK_OPTIONS
from posttrain.records import Finish, Group, Prompt, Rollout, TokenSequence
from posttrain.rewards import cheap_attacks
from posttrain.rewards.cheap_attacks import JUDGE, SHAPING, Answer, AttackExample, generic, most_common
from posttrain.rewards.grading.answers import Score
from posttrain.rewards.grading.calls import CHAT_HINT, NEVER, RolloutRow, read_result
from posttrain.rewards.grading.dispatch import dispatch
from posttrain.rewards.grading.function import ENVIRONMENT_REWARD, RewardFunction, ScoringFailure
from posttrain.rewards.grading.grade import DEFAULTS, PendingScores, checked_verdicts, grade, marks_in
from posttrain.rewards.grading.resources import ChecksRows, Resources
from posttrain.rewards.grading.worker_process import NotWritableError, to_json
from posttrain.rewards.reward_registry import BUILT_IN, load_reward
from posttrain.tasks.dataset import content
from posttrain.tasks.programs_task import program_row
from posttrain.tasks.row_files.rows import DatasetRow, read_rows, require_column

if TYPE_CHECKING:
    from posttrain.environments.workers import ReplyWorkers

MOST_ROWS = 20
CHAT_FLAG = "(reads messages and gets text: --chat here, --task.prompt-format chat in training)"
EXAMPLES = {**cheap_attacks.EXAMPLES, **SHAPING}
"""By reward: examples that this package brings for it."""
TASK_REWARDS = {"countdown": "countdown", "programs": "code"}


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What replies to the answers, as in a recipe."""

    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    tools: tuple[str, ...] = ()
    tools_at: Mapping[str, str] = field(default_factory=dict)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)

    @property
    def replies(self) -> bool:
        return bool(self.tools) or self.environment.is_given

    def __post_init__(self) -> None:
        if not self.replies:
            names = ("options", "seconds", "workers", "max_failures")
            unread = " ".join([*(f"environment.{name}" for name in names), "tools_at"])
            require_rules(self, (Unused(unread, "an environment or tools"),))


@dataclass(frozen=True, kw_only=True)
class CheckSwitches(Bounded):
    """What a reward is tested with."""

    rows: str = ""
    """File of rows (.jsonl, .json, .csv, .parquet) for your own function or a reward model: the column `answer` is
    tried as a correct answer.  For code and programs, the tests in its rows are checked."""
    prompt_column: str = "prompt"
    """Column with the prompt."""
    chat: bool = False
    """Always pass messages to the function, as training with --task.prompt-format chat does."""
    seconds: PositiveFloat = 10.0
    """Time limit for scoring one answer; your function runs in its own process."""
    label: str = ""
    """Label of a reward model, by number or by name."""
    endpoint: str = ""
    """Address of a judge."""
    model: str = ""
    """Model of a judge."""
    key_env: str = ""
    """Environment variable with the key of a judge."""


PROGRAM = CommandSpec(
    name="posttrain check-task REWARD",
    description="Try correct answers and cheap tricks on a reward and show what it pays for each.  REWARD is a"
    " reward or task of this package, FILE.py:FUNCTION, package.module:FUNCTION, `judge`, or a reward model (FOLDER or"
    " org/name).  For a penalty, correct answers should cost nothing and tricks should be penalised.  A reward model"
    " does not have a fixed scale: it pays a trick that scores at least as much as the row's own answer.  With"
    " --environment.path an environment replies: each answer is repeated in every turn, up to four times, and REWARD"
    " may be `environment`, the replies' own rewards.  With --tools, answers may call tools in chat; with tools_at, in"
    " plain text."
    "  Exit code 0 if every correct answer is paid and no trick is, else 1.",
    switches=CheckSwitches(),
)
READ_BY = {
    "model": ("rows", "label", "prompt_column", "chat"),
    "function": ("rows", "prompt_column", "chat", "seconds"),
    "judge": ("endpoint", "model", "key_env"),
    "environment": ("rows", "prompt_column", "chat"),
}
"""Switches by kind of reward; a reward of this package reads `rows` if it can check them."""


@dataclass(frozen=True, slots=True)
class Payment:
    """The score of an answer."""

    answer: Answer
    example: AttackExample
    score: float | None
    seconds: float
    error: str = ""
    lost: bool = False
    """Whether the function did not return in time."""

    @property
    def slow(self) -> bool:
        return self.seconds > self.example.slow_seconds

    @property
    def fine(self) -> bool:
        if self.error or self.seconds > self.example.slow_seconds * (10 if self.answer.right else 3):
            return False
        return self.earned if self.answer.right else self.answer.known or not self.earned

    @property
    def earned(self) -> bool:
        """Whether it is paid, or, for a penalty, not penalised."""
        return self.score is not None and self.score > self.example.above

    @property
    def paid(self) -> str:
        """The score as it is printed."""
        scored = "not scored" if self.score is None else f"{self.score + 0.0:.3g}"  # without the sign of -0
        return "error" if self.error else scored

    def line(self) -> str:
        kind = "right" if self.answer.right else "trick"
        verdict = "" if self.fine else "  <-- " + (self.error or ("too slow" if self.slow else "should not be"))
        known = "penalties do not see the task" if self.example.above < 0 else "a known hack: see the reward's page"
        note = f"  ({known})" if self.answer.known and self.earned else ""
        return f"  {kind}  {self.paid:>10}  {1000 * self.seconds:8.1f} ms  {self.answer.label}{note}{verdict}"


def main(arguments: Sequence[str]) -> int:
    """Print the table as it comes; the exit code says whether all is well."""
    name, given = split_arguments(arguments, PROGRAM).only("REWARD")
    config, switches = given.configured(CheckConfig, [])
    function, examples = found(name, switches, config)
    if config.tools:
        examples = [each.with_tools([tool_name(tool) for tool in config.tools], config.tools_at) for each in examples]
    kind = "model" if kind_of_reward(name) == "model" else "function" if ":" in name else name
    read = READ_BY.get(kind, ("rows",) if isinstance(function.call, ChecksRows) else ())
    for each in fields(CheckSwitches):
        if each.name not in read and getattr(switches, each.name) != each.default:
            flag = each.name.replace("_", "-")
            raise UserError(f"check-task {name}: --{flag} is not used for this reward.  Leave it out.")
    print(f"{function.name}: {sum(len(example.answers) for example in examples)} answers", flush=True)
    checked: object = function.call
    with Resources(config.sandbox) as resources:
        if switches.rows and isinstance(checked, ChecksRows):
            rows = [program_row(row) if name == "programs" else row for row in read_rows(switches.rows)]
            checked.check_rows([(row.where, row.columns) for row in rows], resources)
            print(f"{switches.rows}: no problems in the tests of its {len(rows)} rows", flush=True)
        with listeners(config) as workers:
            paid = replayed(function, examples, resources, workers)
    lost = {each.answer.label for each in paid if each.lost}
    if lost:
        print(f"timed out, so skipped for later rows: {', '.join(sorted(lost))}")
    wrong = [each for each in paid if not each.fine]
    print(f"{len(wrong)} of {len(paid)} are not as they should be" if wrong else "every answer got what it deserves")
    if function.name == "judge" and not switches.endpoint:
        rule = "check-task: these tricks are rejected without a call; only a judge can say what it pays for others"
        raise UserError(f"{rule}.  Add --endpoint URL --model NAME [--key-env VARIABLE].")
    return 1 if wrong else 0


@contextmanager
def listeners(config: CheckConfig) -> "Iterator[ReplyWorkers | None]":
    """What replies to answers; None if nothing does."""
    if not config.replies:
        yield None
        return
    from posttrain.environments.tools import toolbox_of
    from posttrain.environments.workers import ReplyWorkers
    from posttrain.generation.spoken_text import environments_for_text

    with ExitStack() as opened:
        toolbox = opened.enter_context(closing(toolbox_of(config.tools, config.sandbox)))
        replying = environments_for_text(config.environment, toolbox, config.tools_at)
        yield opened.enter_context(ReplyWorkers(replying))


def replayed(
    function: RewardFunction,
    examples: Sequence[AttackExample],
    resources: Resources,
    workers: "ReplyWorkers | None" = None,
) -> list[Payment]:
    """The score of each answer, printed as it comes; an answer that hangs is not tried on other rows.

    A fine answer is listed once, and only counted where another row gives the same score.
    """
    paid: list[Payment] = []
    lost: set[str] = set()
    listed: set[tuple[str, str]] = set()
    num_repeated = 0
    for example in examples:
        for answer in example.answers:
            if answer.label in lost:
                continue
            payment = tried(function, example, answer, resources, workers)
            if payment.slow and not payment.lost:  # the first call may have started a sandbox or a worker
                payment = tried(function, example, answer, resources, workers)
            paid.append(payment)
            lost |= {answer.label} if payment.lost else set()
            if payment.fine and (answer.label, payment.paid) in listed:
                num_repeated += 1
                continue
            listed.add((answer.label, payment.paid))
            print(payment.line(), flush=True)
    if num_repeated:
        print(f"  {num_repeated} more got the same score on other rows")
    return paid


def found(name: str, switches: CheckSwitches, config: CheckConfig) -> tuple[RewardFunction, list[AttackExample]]:
    """The reward, and the rows and answers to test it with."""
    if name == ENVIRONMENT_REWARD.name and config.environment.is_given:
        return ENVIRONMENT_REWARD, from_rows(switches)
    if kind_of_reward(name) == "model":
        return reward_model(name, switches)
    if ":" in name:
        examples = from_rows(switches)
        if config.replies:  # by objects that no other process sees
            return load_reward(RewardOptions(path=name)), examples
        return users_function(name, examples, switches.seconds), examples
    reward = TASK_REWARDS.get(name, name)
    if reward == "judge":
        return judge(switches)
    if reward not in EXAMPLES:
        known = ", ".join(sorted({*EXAMPLES, *TASK_REWARDS, "judge"}))
        reason = "does not have a reward" if name in BUILT_IN or name in TASK_OPTIONS else "is not a reward or task"
        raise UserError(f"check-task: {name} {reason}.  There are {known}, and FILE.py:FUNCTION.")
    example = EXAMPLES[reward]
    options = RewardOptions(name=reward, options=dict(example.options), of=example.of)
    return load_reward(options), [example.with_generic()]


def reward_model(name: str, switches: CheckSwitches) -> tuple[RewardFunction, list[AttackExample]]:
    """A reward model and rows to test it with: a trick's score is compared with that of the row's own answer."""
    examples = from_rows(switches)
    if not any(answer.right for example in examples for answer in example.answers):
        rule = "a reward model needs rows with an answer, to compare tricks with"
        raise UserError(f"check-task {name}: {rule}.  Give --rows FILE with the columns prompt and answer.")
    label = int(switches.label) if switches.label.isdecimal() else switches.label or None
    function = load_reward(RewardOptions(model=name, label=label, over_long="cut_left"))
    compared = []
    with Resources() as resources:
        for example in examples:  # the score of the row's own answer is the least that is paid; without one nothing is
            scores = [tried(function, example, answer, resources).score for answer in example.answers if answer.right]
            least = next((math.nextafter(score, -math.inf) for score in scores if score is not None), math.inf)
            compared.append(replace(example, above=least))
    return function, compared


def users_function(path: str, examples: Sequence[AttackExample], seconds: float) -> RewardFunction:
    """The user's function in a worker with a time limit, or in this process if a column cannot be sent to a worker."""
    try:
        for example in examples:
            to_json(dict(example.columns))
    except NotWritableError as error:
        print(f"without a time limit, since a column cannot be sent to another process: {error}")
        return load_reward(RewardOptions(path=path))
    return load_reward(RewardOptions(path=path, workers=1, item_seconds=seconds))


def judge(switches: CheckSwitches) -> tuple[RewardFunction, list[AttackExample]]:
    """A judge at an endpoint; without one, the tricks that are rejected before a judge is asked."""
    if bool(switches.endpoint) != bool(switches.model):
        raise UserError("check-task judge needs --endpoint and --model together.")
    options = {
        "endpoint": switches.endpoint or "http://127.0.0.1/v1",
        "model": switches.model,
        "key_env": switches.key_env,
    }
    function = load_reward(RewardOptions(name="judge", options=options))
    if switches.endpoint:
        return function, [JUDGE.with_generic()]
    return function, [replace(JUDGE, answers=tuple(answer for answer in JUDGE.answers if answer.unasked))]


def from_rows(switches: CheckSwitches) -> list[AttackExample]:
    """The user's rows, or one default prompt, each with its own answer and the tricks."""
    column = switches.prompt_column
    read = [DatasetRow("row", {column: "What is 3 + 4?"})]
    if switches.rows:
        read = read_rows(switches.rows)
        require_column(read, column)
    common = most_common([row.columns for row in read[:MOST_ROWS]])
    options = DatasetOptions(prompt_column=column, prompt_format="chat" if switches.chat else "auto")
    examples = []
    for row in read[:MOST_ROWS]:  # the prompt as in training
        given = content(row, options)
        messages = None if isinstance(given, str) else tuple(dict(message) for message in given)
        prompt = given if isinstance(given, str) else given[-1]["content"]
        columns = {name: value for name, value in row.columns.items() if name != column}
        answer = columns.get("answer", columns.get("ground_truth"))
        right = (Answer("the row's own answer", str(answer), right=True),) if answer is not None else ()
        tricks = [trick for trick in generic(prompt, common) if trick.text.strip() != str(answer)]
        examples.append(AttackExample(prompt, columns, messages=messages, answers=(*right, *tricks)))
    return examples


def tried(
    function: RewardFunction,
    example: AttackExample,
    answer: Answer,
    resources: Resources,
    workers: "ReplyWorkers | None" = None,
) -> Payment:
    """The score of one answer, or the error of a function that raises or does not return."""
    columns, messages = dict(example.columns), example.messages
    prompt = Prompt(id="check", text=example.prompt, tokens=(0,), columns=columns, messages=messages)
    rollouts = tuple(starmap(rollout_of, enumerate((answer, *example.beside))))
    group = Group(prompt=prompt, draw=0, rollouts=rollouts)
    began = time.perf_counter()
    try:
        if workers is not None:
            group = with_replies(group, answer, workers)
            began = time.perf_counter() - sum(turn.seconds for turn in group.rollouts[0].turns)
        if function.settings.workers:  # without retries: one missed deadline is enough
            pending = PendingScores(function, [RolloutRow(group, group.rollouts[0])], DEFAULTS, NEVER)
            (call,) = pending.calls()
            (said,) = checked_verdicts(call, read_result(call, dispatch([call], resources)[0]), "stop", resources)
            if isinstance(said, ScoringFailure):
                raise said
            assert isinstance(said, Score), said  # "stop" raises what else there is
            marks = marks_in(said)
            score = said.value + (0.0 if marks is None else marks.total)
        else:
            watched = [load_reward(RewardOptions(name=example.of))] if example.of else []
            grades = grade([group], [*watched, function], resources=resources)
            score = (grades.scores + grades.marked)[-1, 0, 0].item()
    except ScoringFailure as failure:
        return Payment(answer, example, None, time.perf_counter() - began, str(failure), lost=True)
    except RunError as error:  # any other mistake concerns every answer
        first, *more = str(error).splitlines()
        hint = f"  {CHAT_FLAG}" if any(CHAT_HINT in line for line in more) else ""
        return Payment(answer, example, None, time.perf_counter() - began, first[:200] + hint)
    finally:
        if workers is not None:
            workers.end_of([group])
    return Payment(answer, example, None if math.isnan(score) else score, time.perf_counter() - began)


def with_replies(group: Group, answer: Answer, workers: "ReplyWorkers") -> Group:
    """The group after its first answer was sent to the environment.  Raises RunError if that fails."""
    from posttrain.generation.spoken_text import spoken

    try:
        said = spoken(group.prompt, answer.text, workers)
    except RunError as error:
        raise RunError(f"the environment failed: {str(error).splitlines()[-1]}") from error
    return replace(said, rollouts=(*said.rollouts, *group.rollouts[1:]))


def rollout_of(sample: int, answer: Answer) -> Rollout:
    text = answer.text.encode("utf-8", "surrogatepass")[:4096]
    tokens = tuple(range(answer.num_tokens)) if answer.num_tokens else tuple(text)
    finish = Finish.LENGTH if answer.cut_off else Finish.STOP
    sequence = TokenSequence.one_turn(tokens, logprobs=(0.0,) * len(tokens), finish=finish)
    return Rollout(sample=sample, sequence=sequence, text=answer.text)
