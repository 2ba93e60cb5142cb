"""`posttrain check-task`: what a reward would pay for right answers and for cheap tricks, before a policy finds out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.commands.arguments import told_apart
from posttrain.errors import UserError
from posttrain.records import Finish, Group, Prompt, Rollout
from posttrain.rewards.cheap_attacks import EXAMPLES, Answer, Example, generic, most_common
from posttrain.rewards.function import RewardFunction
from posttrain.rewards.loading import BUILT_IN, load_reward
from posttrain.rewards.options import RewardOptions
from posttrain.rewards.protocol import grade
from posttrain.tasks.options import TASK_OPTIONS
from posttrain.tasks.rows import read_rows

HELP = """usage: posttrain check-task REWARD|TASK|FILE.py:FUNCTION [--rows FILE] [--prompt-column NAME]

Replay right answers and cheap tricks against a reward and show what it pays for each.  A reward of this package has its
own right answers; for a function of yours --rows names rows (.jsonl, .json, .csv, .parquet), whose column `answer` is
tried as a right answer.  Exit code 0 where every right answer is paid and no trick is, else 1.
"""
SLOW_SECONDS = 1.0
MOST_ROWS = 20
QUICK: dict[str, dict[str, object]] = {"code": {"cpu_seconds": 0.5}}
"""Options under which tricks that hang are over soon, also on a machine that is busy."""
TASK_REWARDS = {"countdown": "countdown", "programs": "code"}


@dataclass(frozen=True, slots=True)
class Paid:
    """What an answer earned."""

    answer: Answer
    score: float | None
    seconds: float
    error: str = ""

    @property
    def fine(self) -> bool:
        """Whether it is as it should be."""
        if self.error or self.seconds > SLOW_SECONDS * (10 if self.answer.right else 3):
            return False
        if self.answer.right:
            return self.score is not None and self.score > 0
        return self.answer.known or not self.score or self.score <= 0

    def line(self) -> str:
        """One line of the table."""
        if self.error:
            paid = "error"
        else:
            paid = "not scored" if self.score is None else f"{self.score:.3g}"
        kind = "right" if self.answer.right else "trick"
        verdict = "" if self.fine else "  <-- " + (self.error or ("too slow" if self.slow else "should not be"))
        note = "  (a known hack: see the reward's page)" if self.answer.known and self.score else ""
        return f"  {kind}  {paid:>10}  {1000 * self.seconds:8.1f} ms  {self.answer.label}{note}{verdict}"

    @property
    def slow(self) -> bool:
        return self.seconds > SLOW_SECONDS


def main(arguments: Sequence[str]) -> int:
    """Print the table; the exit code says whether all is well."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(HELP)
        return 0
    given = told_apart(arguments)
    if len(given.positional) != 1:
        raise UserError(f"check-task takes one reward, task or FILE.py:FUNCTION\n{HELP}")
    flags = read_flags(given.flags)
    function, examples = found(given.positional[0], flags)
    paid = [twice_if_slow(function, example, answer) for example in examples for answer in example.answers]
    print(f"{function.name}: {len(paid)} answers")
    for each in paid:
        print(each.line())
    wrong = [each for each in paid if not each.fine]
    print(f"{len(wrong)} of {len(paid)} are not as they should be" if wrong else "every answer got what it deserves")
    return 1 if wrong else 0


def read_flags(flags: Sequence[str]) -> dict[str, str]:
    """`--rows FILE` and `--prompt-column NAME`."""
    values: dict[str, str] = {}
    left = list(flags)
    while left:
        name, _, value = left.pop(0).partition("=")
        if name not in ("--rows", "--prompt-column"):
            raise UserError(f"{name}: no such flag\n{HELP}")
        if not value and not left:
            raise UserError(f"{name} needs a value\n{HELP}")
        values[name.removeprefix("--")] = value or left.pop(0)
    return values


def found(name: str, flags: dict[str, str]) -> tuple[RewardFunction, list[Example]]:
    """The reward, and the rows and answers to try it with."""
    if ":" in name:
        function = load_reward(RewardOptions(path=name))
        return function, from_rows(flags)
    reward = TASK_REWARDS.get(name, name)
    if reward not in EXAMPLES:
        known = ", ".join(sorted({*EXAMPLES, *TASK_REWARDS}))
        reason = "has no notion of right" if name in BUILT_IN or name in TASK_OPTIONS else "is no reward or task"
        raise UserError(f"check-task: {name} {reason}; there are {known}, and FILE.py:FUNCTION")
    example = EXAMPLES[reward]
    both = Example(example.prompt, example.columns, (*example.answers, *generic(example.prompt)))
    return load_reward(RewardOptions(name=reward, options=QUICK.get(reward, {}))), [both]


def from_rows(flags: dict[str, str]) -> list[Example]:
    """Rows of the user's, or one bare prompt."""
    if "rows" not in flags:
        return [Example("What is 3 + 4?", {}, generic("What is 3 + 4?"))]
    column = flags.get("prompt-column", "prompt")
    rows = [row.columns for row in read_rows(flags["rows"])][:MOST_ROWS]
    common = most_common(rows)
    examples = []
    for row in rows:
        prompt = str(row.get(column, ""))
        answer = row.get("answer", row.get("ground_truth"))
        right = (Answer("the row's own answer", str(answer), right=True),) if answer is not None else ()
        tricks = [trick for trick in generic(prompt, common) if trick.text.strip() != str(answer)]
        examples.append(Example(prompt, {k: v for k, v in row.items() if k != column}, (*right, *tricks)))
    return examples


def twice_if_slow(function: RewardFunction, example: Example, answer: Answer) -> Paid:
    """What an answer is paid; slow ones once more, as the first to need it may have started a sandbox."""
    paid = tried(function, example, answer)
    return tried(function, example, answer) if paid.slow else paid


def tried(function: RewardFunction, example: Example, answer: Answer) -> Paid:
    """What one answer is paid; a function that raises is told as such."""
    prompt = Prompt(id="check", text=example.prompt, tokens=(0,), columns=dict(example.columns))
    tokens = tuple(answer.text.encode("utf-8", "surrogatepass")[:4096])
    rollout = Rollout(sample=0, tokens=tokens, logprobs=(0.0,) * len(tokens), finish=Finish.STOP, text=answer.text)
    began = time.perf_counter()
    try:
        score = grade([Group(prompt=prompt, draw=0, rollouts=(rollout,))], [function]).scores[0, 0, 0].item()
    except UserError as error:
        return Paid(answer, None, time.perf_counter() - began, str(error).splitlines()[0][:200])
    return Paid(answer, None if score != score else score, time.perf_counter() - began)
