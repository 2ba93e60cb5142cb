"""One rollout as a path through a Markov decision process.

The state is the text so far, the action is the next token, and the transition appends it.  The completion's reward
comes with the last action; process rewards and KL penalties come with single tokens.  The advantage says how much
better that is than the completion's siblings; most algorithms give every token of a completion the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Whitening
from posttrain.algorithms.table import build_algorithm
from posttrain.commands.advantage_picture import TokenCredit
from posttrain.commands.chat import ASKED, typed_prompt
from posttrain.config import Config
from posttrain.config.reading import recipe_kind
from posttrain.config.recipes import given_yaml
from posttrain.errors import UserError
from posttrain.models.rendering import renderer_of
from posttrain.options.model import ModelOptions, is_run_folder
from posttrain.records import Grades, Group, Prompt, Rollout
from posttrain.runs.checkpoint import load_latest
from posttrain.runs.files import read_metrics
from posttrain.runs.named_inputs import run_recipe
from posttrain.runs.progress import Clock, visible
from posttrain.runs.prompt_preview import logged_lines
from posttrain.runs.run_folder import METRICS
from posttrain.runs.run_inputs import began_with
from posttrain.training.collector import CollectedStep
from posttrain.training.credited_step import SCALE, SHIFT, CreditedStep
from posttrain.training.critic import has_head, saved_options
from posttrain.training.learner import Learner
from posttrain.training.session import Session

StepWhitening = tuple[int, Whitening]
"""The number of a step, and how its advantages were whitened."""


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """A finished RL run, and its recipe."""

    folder: Path
    algorithm: Mapping[str, Any]
    first_model: str

    @property
    def critic(self) -> str:
        folder = str(self.folder / "critic")
        return folder if has_head(folder) else ""

    def with_critic(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm with the run's trained critic, unless the recipe names another critic."""
        given, began_with = algorithm.critic, (self.algorithm.get("critic") or {}).get("path", "")
        if given is None or not self.critic or given.path not in ("", began_with):
            return algorithm
        return replace(algorithm, critic=saved_options(self.critic))

    def with_reference(self, config: Config, algorithm: Algorithm) -> Config:
        """The config with the run's reference, for a KL in the reward; compared with the trained policy, it would be 0.

        Raises UserError if the run's first model is missing, or was never in a folder.
        """
        reference = config.reference
        if algorithm.kl_penalty is None or reference.path or reference.refresh_every:
            return config
        first, gone = ModelOptions(path=self.first_model), ""
        if "policy" in began_with(self.folder).objects:
            gone = "which was an object in Python"
        elif not first.is_bundled and first.hub_name is None and not first.folder.is_dir():
            gone = f"{first.path}, which is missing"
        if gone:
            rule = f"its rewards contain a KL to the run's first model, {gone}"
            raise UserError(f"{self.folder}: {rule}.  Set --reference.path, or trace without it: --algorithm.kl null.")
        return replace(config, reference=replace(reference, path=first.path))

    def restore(self, learner: Learner, config: Config) -> None:
        """Restore a KL coefficient, a reward scale or a reference that changed during the run."""
        algorithm = learner.algorithm
        if not (algorithm.adaptive_kl or algorithm.reward_scaling or config.reference.refresh_every):
            return
        saved = load_latest(self.folder / "checkpoints") if (self.folder / "checkpoints").is_dir() else None
        if saved is None or config.algorithm != self.algorithm:
            return
        learner.actor_critic_state = learner.actor_critic_state.restored(saved.state, algorithm)
        if learner.reference is not None and "reference" in saved.tensors:
            learner.reference.restore(saved.tensors["reference"])

    def whitening(self, config: Config) -> StepWhitening | None:
        """The whitening of the run's last step, if the algorithm is the same."""
        if config.algorithm != self.algorithm:
            return None
        whitened = [line for line in read_metrics(self.folder / METRICS) if SHIFT in line and SCALE in line]
        if not whitened:
            return None
        step, shift, scale = (whitened[-1][name] for name in ("step", SHIFT, SCALE))
        return int(str(step)), Whitening(float(str(shift)), float(str(scale)))


def traced_run(model: str) -> TracedRun | None:
    """The RL run in a folder; None for a model's folder and for runs of other kinds."""
    if not is_run_folder(Path(model)):
        return None
    recipe = run_recipe(Path(model))
    if recipe_kind([recipe]) is not Config:
        return None
    sections: Mapping[str, Any] = recipe.sections
    return TracedRun(
        folder=Path(model),
        algorithm=sections.get("algorithm") or {},
        first_model=str((sections.get("model") or {}).get("path", ModelOptions().path)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One completion, action by action, with the credit by each algorithm; the recipe's comes first."""

    prompt: Prompt
    tokens: Sequence[str]
    """The text of each token, line ends included."""
    rows: Sequence[tuple[str, str, float, float]]
    """State, action, log-prob and reward of each token; NaN for tokens that the policy did not sample."""
    credits: Mapping[str, TokenCredit]
    notes: Sequence[str]
    """Notes below the table."""


def prompt_to_trace(session: Session, text: str) -> Prompt:
    if not text.isascii() or not text.isdigit():
        return typed_prompt(text, renderer_of(session.policy, session.config.model.template_options))
    problems = session.questions().prompts
    if int(text) >= len(problems):
        raise UserError(f"command line: PROMPT {text}: there are {len(problems)} held-out problems, numbered from 0.")
    return problems[int(text)]


def traced(
    session: Session,
    group: Group,
    sample: int,
    *,
    beside: Mapping[str, Algorithm] = MappingProxyType({}),
    reference: str = "",
    whitening: StepWhitening | None = None,
) -> Trace:
    """One completion of a group, with its credit by the session's algorithm and by those in `beside`, by name.

    `reference` is the model that their KL compares with, if it is not the policy itself; `whitening` is that of a step
    of the run, for the session's algorithm.
    """
    grades, notes = graded_completion(session, group, sample)
    collected = CollectedStep(step=0, groups=[group], grades=grades)
    rollout, settings = group.rollouts[sample], session.learner.settings
    settings = replace(settings, reference_path=settings.reference_path or reference)
    credited = session.learner.credit(collected, Clock())
    credits: dict[str, TokenCredit] = {}
    recipe = f"{session.algorithm.name}, the recipe's"
    credits[recipe], said = credit_of(session.learner, credited, sample, whitening)
    for name, algorithm in beside.items():
        learner = Learner(session.policy, algorithm, settings)
        credits[name], its_notes = credit_of(learner, learner.credit(collected, Clock()), sample)
        said += [f"{name}: {note}" for note in its_notes]
    reward = grades.rewards[0, sample].item()
    earned = [math.nan if math.isnan(reward) else 0.0] * rollout.num_sampled
    if credited.token_rewards is not None and rollout.num_sampled:
        earned = credited.token_rewards[own_tokens(group, sample)].tolist()
    rewards = [*earned[:-1], earned[-1] + reward]  # the completion's reward comes with its last action
    return Trace(
        prompt=group.prompt,
        tokens=[str(session.policy.tokenizer.decode([token])) for token in rollout.tokens],
        rows=action_table(session, group.prompt, rollout, rewards),
        credits=credits,
        notes=[*said, *notes],
    )


def own_tokens(group: Group, sample: int) -> slice:
    """The slice of a completion's tokens among all sampled tokens."""
    first = sum(each.num_sampled for each in group.rollouts[:sample])
    return slice(first, first + group.rollouts[sample].num_sampled)


def credit_of(
    learner: Learner, credited: CreditedStep, sample: int, whitening: StepWhitening | None = None
) -> tuple[TokenCredit, list[str]]:
    """The credit of a completion's tokens, and notes on its critic and on the units of advantages.

    NaN for tokens that were not sampled, and if no reward applies.  Advantages are only whitened as in a step of a run:
    one group does not give a step's standard deviation.
    """
    (group,), columns = credited.groups.groups, credited.groups.columns
    own, sampled, notes = own_tokens(group, sample), group.rollouts[sample].sequence.sampled, list[str]()
    if learner.critic is not None:
        path = learner.critic.options.path
        new = "a new, untrained critic: before every token it expects the mean reward of this group"
        notes.append(f"V is from {f'the critic {path}' if learner.critic.begun else new}")
    advantages = columns.advantages[own]
    if SHIFT in credited.metrics:  # the algorithm whitens: that of the group is undone
        advantages = advantages * credited.metrics[SCALE] + credited.metrics[SHIFT]
        units = "not whitened, in units of reward; training whitens them over all completions of a step"
        if whitening is not None:
            step, (shift, scale) = whitening
            advantages = (advantages - shift) / scale
            units = f"whitened as in step {step} of the run: mean {shift:z.3f}, standard deviation {scale:.3f}"
        notes.append(f"advantages are {units}")
    values = with_gaps(columns.values[own].tolist(), sampled) if "values" in columns.known else None
    known = advantages if credited.groups.scored[0, sample] else advantages * math.nan
    return TokenCredit(advantages=with_gaps(known.tolist(), sampled), values=values), notes


def with_gaps(numbers: Sequence[float], sampled: Sequence[bool]) -> list[float]:
    """The numbers of sampled tokens at their positions among all tokens, NaN elsewhere."""
    left = iter(numbers)
    return [next(left) if each else math.nan for each in sampled]


def algorithms_beside(text: str) -> dict[str, Algorithm]:
    """The algorithms that `--beside` names, by their names in the table.

    Raises UserError if one is not an algorithm, or is named twice.
    """
    given = given_yaml(text, f"command line: --beside {text}") if text else []
    made: dict[str, Algorithm] = {}
    for each in given if isinstance(given, list) else [given]:
        section = {"name": each} if isinstance(each, str) else each
        if not isinstance(section, Mapping):
            form = "'[grpo, {name: rloo, credit: reward_to_go}]'"
            raise UserError(f"command line: --beside {text}: must name algorithms, as in a recipe: {form}")
        options = (f"{spaced_name(name)}: {spaced_name(value)}" for name, value in section.items() if name != "name")
        label = ", ".join([*([str(section["name"])] if "name" in section else []), *options])
        if label in made:
            raise UserError(f"command line: --beside {text}: {label} is named twice.  Leave one out.")
        made[label] = build_algorithm(section)
    return made


def spaced_name(value: object) -> str:
    text = str(value)
    return text.replace("_", " ") if text.isidentifier() else text


def table(trace: Trace, *, width: int, below: float) -> list[str]:
    """The rollout as lines of text, with the last `width` characters of each state.

    With `below` 0 all tokens are shown, else those with at most that log-prob, in nats.
    """
    notes = list(trace.notes)
    actions = min(16, max(len("action"), *(len(action) for _, action, _, _ in trace.rows)))
    columns: list[tuple[str, str, Sequence[float]]] = []
    shown_values: list[Sequence[float]] = []
    for number, (name, credit) in enumerate(trace.credits.items()):
        columns.append((name if number else "advantage", "+", credit.advantages))
        if credit.values is not None and credit.values not in shown_values:  # two algorithms may share them
            shown_values.append(credit.values)
            columns.append((f"V of {name}" if number else "V", "", credit.values))
    heads = "".join(f"  {head:>9}" for head, _, _ in columns)
    lines = [
        f"prompt: {trace.prompt.text!r}",
        f"{'t':>4}  {'state (its end)':{width}}  {'action':{actions}}  {'log-prob':>8}  {'reward':>6}{heads}",
    ]
    shown = [(t, *row) for t, row in enumerate(trace.rows) if below == 0 or row[2] <= below]
    for t, state, action, logprob, reward in shown:
        cells = [
            f"{t:>4}",
            f"{state[-width:]:{width}}",
            f"{action:{actions}}",
            aligned_number(logprob, "z", 8, 3),
            aligned_number(reward, "z", 6, 2),
            *(aligned_number(numbers[t], f"{sign}z", max(9, len(head)), 3) for head, sign, numbers in columns),
        ]
        lines.append("  ".join(cells))
    if len(shown) < len(trace.rows):
        rule = f"those with a log-prob of at most {below:g}"
        notes.insert(0, f"shown are {len(shown)} of {len(trace.rows)} tokens: {rule}")
    return [*lines, "", *notes]


def aligned_number(value: float, sign: str, width: int, digits: int) -> str:
    """A number in `width` characters; spaces for NaN."""
    return " " * width if math.isnan(value) else f"{value:>{sign}{width}.{digits}f}"


def action_table(
    session: Session, prompt: Prompt, rollout: Rollout, rewards: Sequence[float]
) -> list[tuple[str, str, float, float]]:
    """State, action, log-prob and reward of every token of a completion."""

    def on_one_line(tokens: Sequence[int], before: str = "") -> str:
        text = before + str(session.policy.tokenizer.decode(list(tokens)))
        return visible(text).replace("\n", "⏎").replace("\t", "⇥")

    logprobs, earned = (with_gaps(each, rollout.sequence.sampled) for each in (rollout.logprobs, rewards))
    return [
        (on_one_line(rollout.tokens[:t], prompt.text), on_one_line([token]), logprobs[t], earned[t])
        for t, token in enumerate(rollout.tokens)
    ]


def turn_lines(rollout: Rollout) -> list[str]:
    """A line for each turn with a reply, and one for a failure."""
    lines = []
    for number, turn in enumerate(rollout.turns, start=1):
        reward = "" if turn.reward is None else f", reward {turn.reward:g}"
        calls = ", ".join(f"{call.name} failed" if call.failed else call.name for call in turn.calls)
        called = f", calls {calls}" if calls else ""
        replied = f"its reply has {turn.num_given} tokens{reward}{called}"
        lines.append(f"turn {number} ends with token {turn.end - 1}; {replied}")
    return [*lines, *(f"environment: {line}" for line in rollout.failure.strip().splitlines()[-1:])]


def graded_completion(session: Session, group: Group, sample: int) -> tuple[Grades, list[str]]:
    """The grades of the group, and notes on one completion."""
    rollout = group.rollouts[sample]
    length, total = rollout.num_sampled, sum(rollout.logprobs)
    notes = [f"log-prob of the completion: {total:.3f} nats over {length} tokens; finish reason: {rollout.finish}"]
    if group.prompt.id == ASKED and not group.prompt.columns and not session.config.rewards:
        notes.append("No reward: the text is not a problem of the task.  To score any text, add --rewards ...")
        unscored = torch.full((1, len(group.rollouts)), torch.nan, dtype=torch.float64)
        none = Grades(names=("none",), scores=unscored[None], weights=torch.ones(1).double(), rewards=unscored)
        return none, notes
    grades = session.collector.grade([group])
    notes += [visible(line) for line in turn_lines(rollout)]
    got = " ".join(f"{value:.2f}" for value in grades.rewards[0].tolist())
    notes.append(f"rewards of the group: {got}; advantage by {session.algorithm.name}")
    notes += [f"{name}: {outcomes[0][sample]}" for name, outcomes in grades.outcomes.items()]
    notes += [visible(f"logged by {line}") for line in logged_lines(grades, 0, sample)]
    return grades, notes
