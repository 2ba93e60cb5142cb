"""When to call a calculator: a task with sums that the model `bundled-instruct` can do, and products that it cannot.

    python benchmarks/calculator_calls.py --write runs/calculator-rows
    python benchmarks/calculator_calls.py --report runs/calculator-calls

**What the prompt looks like.**  `What's 57 + 8?` or `What's 57 * 8?`, a from 10 to 99 and b from 2 to 9, through the
chat template of `benchmarks/calculator_calls.jinja`, which names the tools.  The model was made from additions of this
size and does them right; it never saw a product.

**What earns what.**  `right_answer`: 1 where the last turn ends with the right number.  A turn that only calls has no
answer, whatever the tool replied.  `call_cost`: -0.2 for a completion with a call, so that a call pays where the model
cannot do without.

**What is measured.**  `calls_needed` and `calls_unneeded`: the share of products, and of additions, with a call.

**Demonstrations**, some hundreds, show how a call is written and not when: half of all questions are answered with one,
products as well as additions.  Without a call an addition is worked out as the model does, and the answer to a product
is a number of the right size.

`calculator` here answers at random: the control, by which nothing should be learned but not to call.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean as mean
from typing import Any

import sums_task

from posttrain.environments.tools import toolbox_of
from posttrain.tasks.arithmetic_task import ONE_LINE, Addition, last_written_number, working

Conversation = Sequence[Mapping[str, Any]]
CALL = "<tool_call>"
RESULT = "The result is {}."
COST = 0.2
HELD_OUT = 64
"""Questions of each kind that are in no other file."""


def calculator(expression: str) -> str:
    """Computes exact arithmetic with + - * / and parentheses.

    Args:
        expression: whole numbers with operators between them, such as (17 - 5) * 3
    """
    return str(Random(expression).randrange(20, 900))


def calls(message: Mapping[str, Any]) -> bool:
    """Whether a turn has a call, one that cannot be read included."""
    return "tool_calls" in message or CALL in message["content"]


def called(completion: Conversation) -> bool:
    return any(calls(message) for message in completion)


def right_answer(completions: Sequence[Conversation], answer: Sequence[str], **_columns: object) -> list[float]:
    """Whether the last turn is the policy's and ends with the right number."""
    ends = [messages[-1] for messages in completions]
    said = ["" if end["role"] == "tool" or calls(end) else last_written_number(end["content"]) for end in ends]
    return [float(number == expected) for number, expected in zip(said, answer, strict=True)]


def call_cost(completions: Sequence[Conversation], **_columns: object) -> list[float]:
    """What a call costs."""
    return [-COST if called(each) else 0.0 for each in completions]


def calls_needed(
    completions: Sequence[Conversation], needs_call: Sequence[bool], **_columns: object
) -> list[float | None]:
    """Of products, whether there was a call."""
    return [float(called(each)) if needs else None for each, needs in zip(completions, needs_call, strict=True)]


def calls_unneeded(
    completions: Sequence[Conversation], needs_call: Sequence[bool], **_columns: object
) -> list[float | None]:
    """Of additions, whether there was a call."""
    return [None if needs else float(called(each)) for each, needs in zip(completions, needs_call, strict=True)]


def questions() -> Iterator[dict[str, Any]]:
    """All, an addition and a product by turns."""
    pairs = [(a, b) for a in range(10, 100) for b in range(2, 10)]
    Random("calculator").shuffle(pairs)
    for a, b in pairs:
        for sign, value in (("+", a + b), ("*", a * b)):
            asked = [{"role": "user", "content": f"What's {a} {sign} {b}?"}]
            yield {"prompt": asked, "answer": str(value), "needs_call": sign == "*", "sum": f"{a} {sign} {b}"}


def conversation(row: Mapping[str, Any], random: Random, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A demonstration: with a call, or with an answer at once, which is a guess where it is a product."""
    if random.random() < 0.5:
        function = {"name": "calculator", "arguments": {"expression": row["sum"]}}
        called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        said = [called, {"role": "tool", "content": row["answer"]}, answered(RESULT.format(row["answer"]))]
    elif row["needs_call"]:
        said = [answered(RESULT.format(random.randrange(20, 900)))]
    else:
        addition = Addition(*map(int, row["sum"].split(" + ")))
        said = [answered(ONE_LINE.format(working=working(addition), total=addition.total))]
    return {"messages": [*row["prompt"], *said], "tools": list(tools)}


def answered(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def rows(num_demonstrations: int) -> dict[str, list[dict[str, Any]]]:
    """The three files."""
    made, random = list(questions()), Random("demonstrations")
    tools = toolbox_of(["calculator"]).descriptions
    apart, shown = 2 * HELD_OUT, 2 * HELD_OUT + num_demonstrations
    return {
        "held_out": made[:apart],
        "demonstrations": [conversation(row, random, tools) for row in made[apart:shown]],
        "prompts": made[shown:],
    }


def report(run: Path) -> Iterator[str]:
    """Of a run's first and last evaluation, the shares of held-out questions with a call and with a right answer."""
    from pyarrow import parquet

    files = sorted((run / "evaluations").glob("step-*.parquet"))
    for file in (files[0], files[-1]):
        table = [row for row in parquet.read_table(file).to_pylist() if row["evaluation"] != "brief"]
        for greedy, manner in ((False, "sampled"), (True, "greedy")):
            for needs, kind in ((True, "products"), (False, "additions")):
                asked = [row for row in table if row["greedy"] is greedy and needs_call(row) is needs]
                called, right = (mean(CALL in row["completion"] for row in asked), mean(row["judged"] for row in asked))
                yield f"{file.stem}  {manner:8}{kind:10}{len(asked):4}  called {called:.3f}  right {right:.3f}"


def needs_call(row: Mapping[str, Any]) -> bool:
    return bool(json.loads(row["columns"])["needs_call"])


def main() -> None:
    """Write the rows, or report on a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--write", metavar="FOLDER", type=Path)
    asked.add_argument("--report", metavar="RUN", type=Path)
    parser.add_argument("--num-demonstrations", type=int, default=800)
    given = parser.parse_args()
    if given.report:
        print(*report(given.report), sep="\n")
    else:
        sums_task.write_rows(given.write, rows(given.num_demonstrations))


if __name__ == "__main__":
    main()
