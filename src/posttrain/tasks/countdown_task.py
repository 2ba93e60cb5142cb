"""Countdown: make a target from given numbers with + - * / and parentheses.

**What the prompt looks like.**  `compact` is one line, `Use all of 11, 25, 11 to make 25.` or `Use some of …`; it is
what the bundled model was trained on.  `r1` is a system and a user message that ask for `<think>…</think>
<answer>…</answer>` and state the rule in words.  Either may begin the answer with `<think>`.

**What earns what.**  1 for a right expression in the right structure, else 0: posttrain.rewards.countdown says
it in full, hacks and all.  The rule that the prompt states (`numbers`) is the rule that is graded.

**What is measured.**  A transcript as a search: its tries (lines between the think tags that begin with a step, as
posttrain.rewards.countdown reads them), and which of them reach the target.

**Where problems come from.**  posttrain.tasks.countdown_problems makes them; nothing is downloaded and no licence
applies.

**Demonstrations**, for supervised warm-up, are the smallest transcripts: tries, one per line, each step an exact
equation, each try judged (`!` for a hit, `.` for a miss), then an answer in tags.

    <think>17+5=22,22-3=19.
    5*3=15,15+17=32.
    17-5=12,12*3=36!
    </think>
    <answer>(17-5)*3</answer>

The search is imperfect on purpose.  The demonstrator combines numbers and operators at random, makes no try twice, and
writes no number too large for mental arithmetic.  After each failed try it stops with a constant probability and
answers with its last try, which is wrong.  Reinforcement learning can improve a policy cloned from it in two ways: by
searching for longer and by trying better.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from posttrain.errors import UserError
from posttrain.options.task import CountdownOptions, Demonstrator
from posttrain.records import Group, Prompt
from posttrain.rewards.countdown import HIT, MISS, STEP, Countdown, countdown, countdown_last, read_try
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.parsing.arithmetic import apply
from posttrain.rewards.parsing.tags import THINK, answer_text
from posttrain.tasks.base import DRAWS_PER_STEP, Messages, Probe, PromptRenderer, Reading, Task
from posttrain.tasks.countdown_problems import COURSE, Difficulty, held_out_problems, training_problem

SYSTEM = (
    "You are a careful problem solver. You first think about the problem, trying and checking ideas, and then give your"
    " answer. Your whole reply has this form: <think> your reasoning </think> <answer> your answer </answer>"
)

RULES = {
    "all": "Use every one of the numbers exactly once.",
    "subset": "Use each of the numbers at most once; you need not use all of them.",
}


CLOSING_TAGS = ("</think>", "<answer>", "</answer>")
"""Tokens with which a completion ends its search; without them it cannot give up."""

SEARCH_READINGS = {
    "tries_per_completion": Reading("tries per completion", digits=1),
    "success_per_try": Reading("success per try"),
    "success_of_first_try": Reading("success of first tries"),
}


class CountdownTask(Task):
    """Countdown as the options say; training problems also depend on the run's seed, held-out ones do not."""

    name = "countdown"

    def __init__(self, options: CountdownOptions, renderer: PromptRenderer, *, seed: int) -> None:
        self.options = options
        self.renderer = renderer
        self.seed = seed
        self.difficulty = difficulty(options)
        grader = countdown if options.format_mode == "strict" else countdown_last
        own = RewardFunction(name=grader.__name__, call=grader, text_only=True, bounded=True)
        self.reward_functions: tuple[RewardFunction, ...] = (own,)

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        assert draws.stop <= DRAWS_PER_STEP, draws
        indices = [step * DRAWS_PER_STEP + draw for draw in draws]
        return [self.prompt(self.training_problem(index), f"train/{index}") for index in indices]

    def training_problem(self, index: int) -> Countdown:
        return training_problem(self.difficulty, self.options.numbers, seed=self.seed, index=index)

    def held_out(self) -> list[Prompt]:
        problems = held_out_problems(self.difficulty, self.options.numbers, self.options.held_out_size)
        return [self.prompt(problem, f"held-out/{index}") for index, problem in enumerate(problems)]

    def longest_prompts(self) -> list[Prompt]:
        return self.prompts(0, range(64))

    def prompt(self, problem: Countdown, id: str) -> Prompt:
        content = compact(problem) if self.options.prompt_style == "compact" else chat_prompt(problem)
        columns = {"numbers": problem.numbers, "target": problem.target, "rule": problem.rule}
        return self.renderer.render(
            content, id=id, prefill=THINK if self.options.prefill_think else "", columns=columns
        )

    def probes(self) -> Mapping[str, Probe]:
        """Format and search of the sampled completions, and accuracy where the policy may not stop searching."""
        shape = Probe(readings={"format_rate": Reading("format rate"), **SEARCH_READINGS}, measure=self._statistics)
        never_giving_up = Probe(
            readings={"accuracy_never_giving_up": Reading("accuracy if never allowed to give up")},
            measure=found_share,
            suppressed=CLOSING_TAGS,
            endless=True,
        )
        return {"search": shape, "never_giving_up": never_giving_up}

    def _statistics(self, groups: Sequence[Group]) -> dict[str, float]:
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        mode = self.options.format_mode
        formatted = [answer_text(group.graded_text(rollout), mode) is not None for group, rollout in rollouts]
        searches = [search(puzzle_of(group.prompt), group.graded_text(rollout)) for group, rollout in rollouts]
        return {"format_rate": sum(formatted) / len(formatted), **search_statistics(searches)}


def found_share(groups: Sequence[Group]) -> dict[str, float]:
    """How often a completion has a try that solves the problem, where the policy may not give up."""
    solved = [search(puzzle_of(group.prompt), group.rollouts[0].text).successes > 0 for group in groups]
    return {"accuracy_never_giving_up": sum(solved) / len(solved)}


def puzzle_of(prompt: Prompt) -> Countdown:
    columns = prompt.columns
    return Countdown(columns["numbers"], columns["target"], columns["rule"])  # type: ignore[arg-type]


def difficulty(options: CountdownOptions) -> Difficulty:
    if options.variant == "course":
        return COURSE
    return Difficulty(
        num_numbers=options.num_numbers,
        pool=tuple(range(options.min_number, options.max_number + 1)),
        operators=options.operators,
        targets=(options.min_target, options.max_target),
    )


def compact(problem: Countdown) -> str:
    how = "all" if problem.rule == "all" else "some"
    return f"Use {how} of {', '.join(map(str, problem.numbers))} to make {problem.target}.\n"


def chat_prompt(problem: Countdown) -> Messages:
    request = (
        f"Using the numbers {', '.join(map(str, problem.numbers))}, write an expression that equals {problem.target}."
        f" {RULES[problem.rule]} You may use + - * / and parentheses, and no other numbers."
        " Show your reasoning in <think> </think> tags, then give nothing but the expression in <answer> </answer>"
        " tags, for example <answer>(1 + 2) / 3</answer>."
    )
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": request}]


@dataclass(frozen=True, slots=True)
class Search:
    """What one completion tried."""

    tries: int
    successes: int
    at_once: bool = False
    """Whether the first try succeeds."""


def search(puzzle: Countdown, text: str) -> Search:
    """Count the tries of a completion and those that solve the puzzle; text after `</think>` is not part of it."""
    lines = text.split("</think>")[0].replace("<think>", "").split("\n")
    tries = [line for line in lines if STEP.match(line.strip())]
    solved = [read_try(puzzle, line).hits for line in tries]
    return Search(tries=len(tries), successes=sum(solved), at_once=solved[:1] == [True])


def search_statistics(searches: Sequence[Search]) -> dict[str, float]:
    """Mean tries per completion, successes per try over all tries, and over first tries; {} without tries.

    A search ends at its first hit, so problems that are hard for the policy fill most of the tries: a policy that
    searches longer may lower its successes per try without trying worse.  First tries are one for each completion.
    """
    tries = sum(search.tries for search in searches)
    if not tries:
        return {}
    successes = sum(search.successes for search in searches)
    return {
        "tries_per_completion": tries / len(searches),
        "success_per_try": successes / tries,
        "success_of_first_try": sum(search.at_once for search in searches) / len(searches),
    }


MAX_DRAWS = 10_000
"""Random tries, most of them abandoned half-way, after which a problem counts as having no allowed try."""
IDEAS = 20
"""Tries in a row without a new one after which a demonstrator stops."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt: its steps as text, a key that identifies it, its result and the expression that made that."""

    steps: str
    key: frozenset[str]
    """Its steps, up to the order of operands."""
    value: int
    expression: str


def demonstrate(problem: Countdown, rng: Random, who: Demonstrator) -> str:
    """One completion: tries until one hits the target or the demonstrator stops, then the last try as the answer."""
    tries: list[Attempt] = []
    while True:
        known = {tried.key for tried in tries}
        ideas = (one_try(problem, rng, who.largest_result) for _ in range(IDEAS))
        attempt = next((idea for idea in ideas if idea.key not in known), None)
        if attempt is not None:
            tries.append(attempt)
        out_of_ideas = attempt is None or len(tries) == who.max_tries
        if out_of_ideas or tries[-1].value == problem.target or rng.random() < who.give_up:
            break
    lines = "\n".join(tried.steps + (HIT if tried.value == problem.target else MISS) for tried in tries)
    answer = tries[-1].expression
    answer = answer[1:-1] if answer.startswith("(") else answer  # without its outer parentheses
    return f"<think>{lines}\n</think>\n<answer>{answer}</answer>"


def one_try(problem: Countdown, rng: Random, largest: int) -> Attempt:
    """Combine all the numbers, two at a time, by steps that stay in the non-negative integers up to `largest`."""
    for _ in range(MAX_DRAWS):
        table = [(number, str(number)) for number in problem.numbers]
        steps: list[tuple[str, str]] = []
        while len(table) > 1:
            a, left = table.pop(rng.randrange(len(table)))
            b, right = table.pop(rng.randrange(len(table)))
            operator = "+-*/"[rng.randrange(4)]
            value = apply(operator, a, b)
            if value is None or value > largest:
                break
            sides = sorted((a, b)) if operator in "+*" else (a, b)
            steps.append((f"{a}{operator}{b}={value}", f"{sides[0]}{operator}{sides[1]}"))
            table.append((value, f"({left}{operator}{right})"))
        else:
            return Attempt(",".join(text for text, _ in steps), frozenset(key for _, key in steps), *table[0])
    raise UserError(
        f"demonstrator.largest_result = {largest}: {MAX_DRAWS} tries at {problem.numbers} all went beyond it."
        "  Raise it, or demonstrate smaller numbers."
    )
