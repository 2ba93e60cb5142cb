"""Countdown: make a target from given numbers with + - * / and parentheses.

**What the prompt looks like.**  `compact` is one line, `Use all of 11, 25, 11 to make 25.` or `Use some of …`; it is
what the bundled model was trained on.  `r1` is a system and a user message that ask for `<think>…</think>
<answer>…</answer>` and state the rule in words.  Either may begin the answer with `<think>`.

**What earns what.**  1 for a right expression in the right structure, else 0: posttrain.rewards.countdown.grader says
it in full, hacks and all.  The rule that the prompt states (`numbers`) is the rule that is graded.

**Where problems come from.**  posttrain.tasks.countdown.problems makes them; nothing is downloaded and no licence
applies.
"""

from collections.abc import Mapping, Sequence

from posttrain.options.countdown import CountdownOptions
from posttrain.records import Finish, Group, Prompt
from posttrain.rewards.countdown.grader import Countdown, countdown, countdown_last
from posttrain.rewards.format import FormatOutcome, format_outcome
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.parsing.tags import THINK
from posttrain.tasks.base import DRAWS_PER_STEP, Messages, Probe, PromptRenderer, Reading, Task
from posttrain.tasks.countdown.problems import COURSE, Difficulty, held_out_problems, training_problem
from posttrain.tasks.countdown.search import search, search_statistics

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
        """A problem of its own for every (step, draw)."""
        assert draws.stop <= DRAWS_PER_STEP, draws
        indices = [step * DRAWS_PER_STEP + draw for draw in draws]
        return [self.prompt(self.training_problem(index), f"train/{index}") for index in indices]

    def training_problem(self, index: int) -> Countdown:
        """The training problem with this index."""
        return training_problem(self.difficulty, self.options.numbers, seed=self.seed, index=index)

    def held_out(self) -> list[Prompt]:
        """`held_out_size` different problems whose numbers are never trained on."""
        problems = held_out_problems(self.difficulty, self.options.numbers, self.options.held_out_size)
        return [self.prompt(problem, f"held-out/{index}") for index, problem in enumerate(problems)]

    def longest_prompts(self) -> list[Prompt]:
        """Some problems: their prompts differ by a few digits."""
        return self.prompts(0, range(64))

    def prompt(self, problem: Countdown, id: str) -> Prompt:
        """A problem as the policy sees it, with the columns that its grader reads."""
        content = compact(problem) if self.options.prompt_style == "compact" else conversation(problem)
        columns = {"numbers": problem.numbers, "target": problem.target, "rule": problem.rule}
        return self.renderer.render(
            content, id=id, prefill=THINK if self.options.prefill_think else "", columns=columns
        )

    def probes(self) -> Mapping[str, Probe]:
        """Format and search, read from the sampled completions; and what is found by who may not stop searching."""
        shape = Probe(readings={"format_rate": Reading("format rate"), **SEARCH_READINGS}, measure=self._statistics)
        never_giving_up = Probe(
            readings={"accuracy_never_giving_up": Reading("accuracy if never allowed to give up")},
            measure=found_share,
            suppressed=CLOSING_TAGS,
            endless=True,
        )
        return {"search": shape, "never_giving_up": never_giving_up}

    def _statistics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Format rate, and tries per completion and successes per try: searching longer told from searching better."""
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        mode = self.options.format_mode
        formatted = [
            format_outcome(group.graded_text(rollout), mode, cut_off=rollout.finish == Finish.LENGTH)
            == FormatOutcome.FORMATTED
            for group, rollout in rollouts
        ]
        searches = [search(puzzle_behind(group.prompt), group.graded_text(rollout)) for group, rollout in rollouts]
        return {"format_rate": sum(formatted) / len(formatted), **search_statistics(searches)}


def found_share(groups: Sequence[Group]) -> dict[str, float]:
    """How often some try of a completion solves the problem: what is left when nobody gives up.

    Tells learning to search better from learning not to give up.
    """
    solved = [search(puzzle_behind(group.prompt), group.rollouts[0].text).successes > 0 for group in groups]
    return {"accuracy_never_giving_up": sum(solved) / len(solved)}


def puzzle_behind(prompt: Prompt) -> Countdown:
    """The problem behind a prompt that this task made."""
    columns = prompt.columns
    return Countdown(columns["numbers"], columns["target"], columns["rule"])  # type: ignore[arg-type]


def difficulty(options: CountdownOptions) -> Difficulty:
    """The difficulty that the options describe."""
    if options.variant == "course":
        return COURSE
    return Difficulty(
        num_numbers=options.num_numbers,
        pool=tuple(range(options.min_number, options.max_number + 1)),
        operators=options.operators,
        targets=(options.min_target, options.max_target),
    )


def compact(problem: Countdown) -> str:
    """The problem on one line, for tiny models."""
    how = "all" if problem.rule == "all" else "some"
    return f"Use {how} of {', '.join(map(str, problem.numbers))} to make {problem.target}.\n"


def conversation(problem: Countdown) -> Messages:
    """The problem as chat messages, for models that were trained to follow instructions."""
    request = (
        f"Using the numbers {', '.join(map(str, problem.numbers))}, write an expression that equals {problem.target}."
        f" {RULES[problem.rule]} You may use + - * / and parentheses, and no other numbers."
        " Show your reasoning in <think> </think> tags, then give nothing but the expression in <answer> </answer>"
        " tags, for example <answer>(1 + 2) / 3</answer>."
    )
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": request}]
