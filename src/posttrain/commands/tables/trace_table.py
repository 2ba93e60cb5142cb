"""One rollout as a path through a Markov decision process.

The state is the text so far, the action is the next token, the transition appends it, and the reward comes with the
last action: all of it is what the graders give the whole completion, beside what they and a KL give single tokens.
The advantage is how much better that was than what the completion's siblings got; most algorithms give every token of
a completion the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posttrain.commands.typed_prompt import asked
from posttrain.errors import UserError
from posttrain.models.rendering import TokenizerRenderer
from posttrain.records import Grades, Group, Prompt
from posttrain.runs.clock import Clock
from posttrain.runs.progress import visible
from posttrain.runs.prompt_preview import logged_lines
from posttrain.training.collector import CollectedStep
from posttrain.training.session import Session


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One step of the decision process."""

    state: str
    action: str
    logprob: float
    reward: float


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
        return asked(text, TokenizerRenderer(session.policy.tokenizer, template_options=options))
    problems = session.questions().prompts
    if int(text) >= len(problems):
        raise UserError(f"command line: PROMPT {text}: there are {len(problems)} held-out problems, numbered from 0")
    return problems[int(text)]


def table(session: Session, prompt: Prompt, sample: int, window: TableWindow) -> list[str]:
    """The rollout as lines of text."""
    [group] = session.engine.rollout([prompt], session.collector.request(0, purpose="trace"))
    grades, notes = judged(session, group, sample)
    credited = session.learner.credit(CollectedStep(step=0, groups=[group], grades=grades), Clock())
    first = sum(len(rollout.tokens) for rollout in group.rollouts[:sample])
    own = slice(first, first + len(group.rollouts[sample].tokens))
    token_rewards = [] if credited.token_rewards is None else credited.token_rewards[own].tolist()
    rows = action_table(session, group, sample, rewards_of(grades.rewards[0, sample].item(), token_rewards, own))
    advantages = credited.groups.columns.advantages[own].tolist()
    actions, width = min(16, max(len("action"), *(len(row.action) for row in rows))), window.width
    lines = [
        f"prompt: {prompt.text!r}",
        f"{'t':>4}  {'state (its end)':{width}}  {'action':{actions}}  {'log-prob':>8}  {'reward':>6}  advantage",
    ]
    shown = [(t, row) for t, row in enumerate(rows) if row.logprob <= window.below]
    for t, row in shown:
        lines.append(
            f"{t:>4}  {row.state[-width:]:{width}}  {row.action:{actions}}  {row.logprob:8.3f}  {row.reward:6.2f}"
            f"  {advantages[t]:+9.3f}"
        )
    if len(shown) < len(rows):
        rule = f"those with a log-prob of at most {window.below:g}"
        notes.insert(0, f"shown are {len(shown)} of {len(rows)} tokens: {rule}")
    return [*lines, "", *notes]


def rewards_of(reward: float, token_rewards: Sequence[float], own: slice) -> list[float]:
    """What each action earns: what it is given by itself, and the last one the completion's reward too."""
    earned = list(token_rewards) or [0.0] * (own.stop - own.start)
    return [*earned[:-1], earned[-1] + reward]


def action_table(session: Session, group: Group, sample: int, rewards: Sequence[float]) -> list[TraceRow]:
    """Every action of one completion, and what it earns."""
    rollout, tokenizer = group.rollouts[sample], session.policy.tokenizer
    return [
        TraceRow(
            state=on_one_line(group.prompt.text + str(tokenizer.decode(list(rollout.tokens[:t])))),
            action=on_one_line(str(tokenizer.decode([token]))),
            logprob=logprob,
            reward=rewards[t],
        )
        for t, (token, logprob) in enumerate(zip(rollout.tokens, rollout.logprobs, strict=True))
    ]


def on_one_line(text: str) -> str:
    """Text with its line ends and control characters made visible."""
    return visible(text).replace("\n", "⏎").replace("\t", "⇥")


def judged(session: Session, group: Group, sample: int) -> tuple[Grades, list[str]]:
    """The grades of the group, and in words what became of one completion."""
    rollout = group.rollouts[sample]
    length, total = len(rollout.tokens), sum(rollout.logprobs)
    notes = [f"log-prob of the completion: {total:.3f} nats over {length} tokens; it ended by {rollout.finish}"]
    if not group.prompt.columns and not session.config.rewards:
        notes.append("No reward: the text is no problem of the task.  Name a reward that any text has: --rewards ...")
        unscored = torch.full((1, len(group.rollouts)), torch.nan, dtype=torch.float64)
        none = Grades(names=("none",), scores=unscored[None], weights=torch.ones(1).double(), rewards=unscored)
        return none, notes
    grades = session.collector.grade([group])
    got = " ".join(f"{value:.2f}" for value in grades.rewards[0].tolist())
    notes.append(f"rewards of the group: {got}; advantage by {session.algorithm.name}")
    notes += [f"{name}: {outcomes[0][sample]}" for name, outcomes in grades.outcomes.items()]
    notes += [visible(f"logged by {line}") for line in logged_lines(grades, 0, sample)]
    return grades, notes
