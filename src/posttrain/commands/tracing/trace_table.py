"""One rollout as a path through a Markov decision process.

The state is the text so far, the action is the next token, the transition appends it, and the reward comes with the
last action: all of it is what the graders give the whole completion, beside what they and a KL give single tokens.
The advantage is how much better that was than what the completion's siblings got; most algorithms give every token of
a completion the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Whitening
from posttrain.algorithms.table import build_algorithm
from posttrain.commands.tracing.advantage_picture import TokenCredit, draw_token_advantages
from posttrain.commands.tracing.traced_run import StepWhitening
from posttrain.commands.tracing.typed_prompt import ASKED, typed_prompt
from posttrain.config.recipe_yaml import parse_yaml
from posttrain.errors import UserError
from posttrain.generation.groups import sample_groups
from posttrain.models.rendering import renderer_of
from posttrain.records import Grades, Group, Prompt
from posttrain.runs.progress import Clock, visible
from posttrain.runs.prompt_preview import logged_lines
from posttrain.training.actor_critic_state import SCALE, SHIFT
from posttrain.training.collector import CollectedStep
from posttrain.training.credited_step import CreditedStep
from posttrain.training.learner import Learner
from posttrain.training.session import Session


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One step of the decision process."""

    state: str
    action: str
    logprob: float
    """NaN where the token was given and not sampled, as are the other numbers."""
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One completion, action by action, with what algorithms make of it."""

    prompt: Prompt
    tokens: Sequence[str]
    """The text of each token as it is, line ends too."""
    rows: Sequence[TraceRow]
    credits: Mapping[str, TokenCredit]
    """What each algorithm makes of it, the recipe's first."""
    notes: Sequence[str]
    """What else there is to say, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crediting:
    """By what else than the session's algorithm a completion is credited."""

    beside: Mapping[str, Algorithm] = field(default_factory=dict)
    """Algorithms beside it, by what they are called in the table."""
    reference: str = ""
    """The model that a KL of theirs compares with; empty is the policy itself."""
    whitening: StepWhitening | None = None
    """What a step of the run whitened by, for the session's algorithm."""


NO_RUN = Crediting()
"""A model from outside a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWindow:
    """How much of the table is shown."""

    width: int
    """Characters of each state: its end."""
    below: float = 0.0
    """Log-prob in nats above which a token is left out."""


def prompt_to_trace(session: Session, text: str) -> Prompt:
    """A held-out problem by number, or the text itself."""
    if not text.isascii() or not text.isdigit():
        options = session.config.model.template_options
        return typed_prompt(text, renderer_of(session.policy, options))
    problems = session.questions().prompts
    if int(text) >= len(problems):
        raise UserError(f"command line: PROMPT {text}: there are {len(problems)} held-out problems, numbered from 0")
    return problems[int(text)]


def sampled(session: Session, prompt: Prompt) -> Group:
    """A group of completions of the prompt."""
    [group] = sample_groups(session.engine, [prompt], session.collector.request(0, purpose="trace"))
    return group


def traced(session: Session, group: Group, sample: int, crediting: Crediting = NO_RUN) -> Trace:
    """One completion of a group, with what the session's algorithm and others make of the group."""
    grades, notes = graded_completion(session, group, sample)
    collected = CollectedStep(step=0, groups=[group], grades=grades)
    credited = session.learner.credit(collected, Clock())
    first = sum(rollout.num_sampled for rollout in group.rollouts[:sample])
    own = slice(first, first + group.rollouts[sample].num_sampled)
    token_rewards = [] if credited.token_rewards is None else credited.token_rewards[own].tolist()
    marks = group.rollouts[sample].sequence.sampled
    recipes = credit_of(credited, sample, own, crediting.whitening)
    credits = {f"{session.algorithm.name}, the recipe's": on_all_tokens(recipes, marks)}
    said = [*credit_notes("", session.learner, credited, crediting.whitening)]
    settings = session.learner.settings
    settings = replace(settings, reference_path=settings.reference_path or crediting.reference)
    for name, algorithm in crediting.beside.items():
        learner = Learner(session.policy, algorithm, settings)
        other = learner.credit(collected, Clock())
        credits[name] = on_all_tokens(credit_of(other, sample, own), marks)
        said += credit_notes(f"{name}: ", learner, other)
    return Trace(
        prompt=group.prompt,
        tokens=[str(session.policy.tokenizer.decode([token])) for token in group.rollouts[sample].tokens],
        rows=action_table(session, group, sample, action_rewards(grades.rewards[0, sample].item(), token_rewards, own)),
        credits=credits,
        notes=[*said, *notes],
    )


def credit_of(credited: CreditedStep, sample: int, own: slice, whitening: StepWhitening | None = None) -> TokenCredit:
    """What a completion's tokens are credited with; NaN where no reward applies to it.

    Whitened by what a step of a run was whitened by, and else not: one group says nothing of a step's deviation.
    """
    columns, scored = credited.groups.columns, bool(credited.groups.scored[0, sample])
    values = columns.values[own].tolist() if "values" in columns.known else None
    advantages = columns.advantages[own]
    if (here := whitened_by(credited)) is not None:
        advantages = advantages * here.scale + here.shift
        if whitening is not None:
            advantages = (advantages - whitening.by.shift) / whitening.by.scale
    return TokenCredit(advantages=(advantages if scored else advantages * math.nan).tolist(), values=values)


def on_all_tokens(credit: TokenCredit, sampled: Sequence[bool]) -> TokenCredit:
    """The same with NaN at given tokens, which no algorithm credits."""
    values = None if credit.values is None else with_gaps(credit.values, sampled)
    return TokenCredit(advantages=with_gaps(credit.advantages, sampled), values=values)


def with_gaps(numbers: Sequence[float], sampled: Sequence[bool]) -> list[float]:
    """Numbers of sampled tokens at their places among all tokens, NaN elsewhere."""
    left = iter(numbers)
    return [next(left) if each else math.nan for each in sampled]


def whitened_by(credited: CreditedStep) -> Whitening | None:
    """What the group's own advantages were whitened by; None where the algorithm does not whiten."""
    if SHIFT not in credited.metrics:
        return None
    return Whitening(credited.metrics[SHIFT], credited.metrics[SCALE])


def credit_notes(
    where: str, learner: Learner, credited: CreditedStep, whitening: StepWhitening | None = None
) -> list[str]:
    """Which critic V is of, and what advantages are in units of."""
    notes: list[str] = []
    if learner.critic is not None:
        path = learner.critic.options.path
        new = "a new critic, which knows nothing: before every token it expects the mean reward of this group"
        notes.append(f"{where}V is {f'the critic {path}' if learner.critic.begun else new}")
    if whitened_by(credited) is None:
        return notes
    if whitening is None:
        raw = "not whitened, in units of reward; training whitens them over all completions of a step"
        return [*notes, f"{where}advantages are {raw}"]
    shift, scale = whitening.by
    rule = f"mean {shift:z.3f}, deviation {scale:.3f}"
    return [*notes, f"{where}advantages are whitened as in step {whitening.step} of the run: {rule}"]


def algorithms_beside(text: str) -> dict[str, Algorithm]:
    """The algorithms that `--beside` names, by what they are called in a table.

    Raises UserError where one is no algorithm, or is named twice.
    """
    if not text:
        return {}
    given = parse_yaml(text)
    made: dict[str, Algorithm] = {}
    for each in given if isinstance(given, list) else [given]:
        section = {"name": each} if isinstance(each, str) else each
        if not isinstance(section, Mapping):
            raise UserError(
                f"command line: --beside {text}: give the name of an algorithm, an algorithm in braces as a recipe"
                " writes it, or several in brackets: '[grpo, {name: rloo, credit: reward_to_go}]'"
            )
        label = section_label(section)
        if label in made:
            raise UserError(f"command line: --beside {text}: {label} is named twice; leave one out")
        made[label] = build_algorithm(section)
    return made


def section_label(section: Mapping[str, object]) -> str:
    """Its name, and the options that were given, in words: `grpo, token weights: mean over tokens`."""
    name = [str(section["name"])] if "name" in section else []
    options = [f"{spaced_name(option)}: {spaced_name(value)}" for option, value in section.items() if option != "name"]
    return ", ".join([*name, *options])


def spaced_name(value: object) -> str:
    """A name of an option or a choice without underscores; all else as it is."""
    text = str(value)
    return text.replace("_", " ") if text.isidentifier() else text


def table(trace: Trace, window: TableWindow) -> list[str]:
    """The rollout as lines of text."""
    rows, notes, width = trace.rows, list(trace.notes), window.width
    actions = min(16, max(len("action"), *(len(row.action) for row in rows)))
    columns = number_columns(trace.credits)
    lines = [
        f"prompt: {trace.prompt.text!r}",
        f"{'t':>4}  {'state (its end)':{width}}  {'action':{actions}}  {'log-prob':>8}  {'reward':>6}"
        + "".join(f"  {head:>9}" for head, _, _ in columns),
    ]
    shown = [(t, row) for t, row in enumerate(rows) if window.below == 0 or row.logprob <= window.below]
    for t, row in shown:
        logprob, reward = aligned_number(row.logprob, "z", 8, 3), aligned_number(row.reward, "z", 6, 2)
        lines.append(
            f"{t:>4}  {row.state[-width:]:{width}}  {row.action:{actions}}  {logprob}  {reward}"
            + "".join(
                f"  {aligned_number(numbers[t], f'{sign}z', max(9, len(head)), 3)}" for head, sign, numbers in columns
            )
        )
    if len(shown) < len(rows):
        rule = f"those with a log-prob of at most {window.below:g}"
        notes.insert(0, f"shown are {len(shown)} of {len(rows)} tokens: {rule}")
    return [*lines, "", *notes]


def aligned_number(value: float, sign: str, width: int, digits: int) -> str:
    """A number in so many characters, nothing but space where there is none."""
    return " " * width if math.isnan(value) else f"{value:>{sign}{width}.{digits}f}"


def number_columns(credits: Mapping[str, TokenCredit]) -> list[tuple[str, str, Sequence[float]]]:
    """Columns of the table: its head, how its numbers are signed, and them; values that two share are there once."""
    columns: list[tuple[str, str, Sequence[float]]] = []
    shown: list[Sequence[float]] = []
    for number, (name, credit) in enumerate(credits.items()):
        columns.append((name if number else "advantage", "+", credit.advantages))
        if credit.values is not None and credit.values not in shown:
            shown.append(credit.values)
            columns.append((f"V of {name}" if number else "V", "", credit.values))
    return columns


def draw(trace: Trace, picture: Path) -> None:
    """Draw the completion as each algorithm credits it."""
    title = f"{trace.prompt.text.strip().splitlines()[-1][-90:]}\n{trace.notes[-1][:110]}"
    draw_token_advantages(trace.tokens, trace.credits, picture, title)


def action_rewards(reward: float, token_rewards: Sequence[float], own: slice) -> list[float]:
    """What each sampled token earns: what it is given by itself, and the last one the completion's reward too."""
    earned = list(token_rewards) or [math.nan if math.isnan(reward) else 0.0] * (own.stop - own.start)
    return [*earned[:-1], earned[-1] + reward]


def action_table(session: Session, group: Group, sample: int, rewards: Sequence[float]) -> list[TraceRow]:
    """Every token of one completion, and what it earns."""
    rollout, tokenizer = group.rollouts[sample], session.policy.tokenizer
    logprobs, earned = (with_gaps(each, rollout.sequence.sampled) for each in (rollout.logprobs, rewards))
    return [
        TraceRow(
            state=on_one_line(group.prompt.text + str(tokenizer.decode(list(rollout.tokens[:t])))),
            action=on_one_line(str(tokenizer.decode([token]))),
            logprob=logprobs[t],
            reward=earned[t],
        )
        for t, token in enumerate(rollout.tokens)
    ]


def on_one_line(text: str) -> str:
    """Text with its line ends and control characters made visible."""
    return visible(text).replace("\n", "⏎").replace("\t", "⇥")


def graded_completion(session: Session, group: Group, sample: int) -> tuple[Grades, list[str]]:
    """The grades of the group, and in words what became of one completion."""
    rollout = group.rollouts[sample]
    length, total = rollout.num_sampled, sum(rollout.logprobs)
    notes = [f"log-prob of the completion: {total:.3f} nats over {length} tokens; it ended by {rollout.finish}"]
    if group.prompt.id == ASKED and not group.prompt.columns and not session.config.rewards:
        notes.append(
            "No reward: the text is not a problem of the task.  Name a reward that any text has: --rewards ..."
        )
        unscored = torch.full((1, len(group.rollouts)), torch.nan, dtype=torch.float64)
        none = Grades(names=("none",), scores=unscored[None], weights=torch.ones(1).double(), rewards=unscored)
        return none, notes
    grades = session.collector.grade([group])
    got = " ".join(f"{value:.2f}" for value in grades.rewards[0].tolist())
    notes.append(f"rewards of the group: {got}; advantage by {session.algorithm.name}")
    notes += [f"{name}: {outcomes[0][sample]}" for name, outcomes in grades.outcomes.items()]
    notes += [visible(f"logged by {line}") for line in logged_lines(grades, 0, sample)]
    return grades, notes
