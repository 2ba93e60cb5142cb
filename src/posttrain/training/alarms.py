"""Signs that a policy learns something else than its task: what to look at while a run goes on.

Pure functions of a run's metrics lines, so that a resumed run raises the alarms that it would have raised.  An alarm
says what was seen and shows a completion; it changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from posttrain.records import Grades, Group

WINDOW = 10
"""Steps that the present one is compared with."""
AGAIN_AFTER = 20
"""Steps before the same alarm is raised again."""
OUTCOME_JUMP = 0.3
LENGTH_FACTOR = 2.5
CLIPPED_JUMP = 0.3
REPETITION = 0.5
REPETITION_JUMP = 0.25
LEAST_RISE = 0.05
EXCERPT = 600

Line = Mapping[str, int | float | None]
"""One line of metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that should not happen."""

    name: str
    says: str
    outcome: tuple[str, str] | None = None
    """Reward function and verdict that it is about."""


def alarms(history: Sequence[Line], raised: Mapping[str, int]) -> list[Alarm]:
    """The alarms of the last line, given all before it and the steps at which each was raised last."""
    step = int(history[-1]["step"] or 0)
    found = [*outcome_jumps(history), length(history), repetition(history), no_signal(history), reward_alone(history)]
    return [
        alarm for alarm in found if alarm is not None and step - raised.get(alarm.name, -AGAIN_AFTER) >= AGAIN_AFTER
    ]


def values(history: Sequence[Line], name: str) -> list[float]:
    """A metric over the window before the last line, where it is known."""
    return [value for line in history[-1 - WINDOW : -1] if (value := line.get(name)) is not None]


def outcome_jumps(history: Sequence[Line]) -> list[Alarm]:
    """One verdict's share is suddenly larger than it was."""
    found = []
    for name, share in history[-1].items():
        if not name.startswith("outcomes/") or share is None or len(history) <= WINDOW // 2:
            continue
        before = [line.get(name) or 0.0 for line in history[-1 - WINDOW : -1]]
        if share - fmean(before) >= OUTCOME_JUMP:
            _, function, outcome = name.split("/", 2)
            says = f"{share:.0%} of completions are {outcome} by {function}, after {fmean(before):.0%} before"
            found.append(Alarm(f"outcome {function} {outcome}", says, (function, outcome)))
    return found


def length(history: Sequence[Line]) -> Alarm | None:
    """Completions grow suddenly, or suddenly run into the limit."""
    before, clipped = values(history, "completions/mean_length"), values(history, "completions/clipped_ratio")
    now, now_clipped = history[-1].get("completions/mean_length"), history[-1].get("completions/clipped_ratio")
    if len(before) < WINDOW // 2 or now is None or now_clipped is None:
        return None
    if now >= LENGTH_FACTOR * fmean(before) or now_clipped - fmean(clipped) >= CLIPPED_JUMP:
        says = f"completions have {now:.0f} tokens after {fmean(before):.0f}, and {now_clipped:.0%} run into the limit"
        return Alarm("length", says)
    return None


def repetition(history: Sequence[Line]) -> Alarm | None:
    """Completions repeat themselves."""
    before, now = values(history, "completions/repetition"), history[-1].get("completions/repetition")
    if now is None or not before or now < REPETITION or now - fmean(before) < REPETITION_JUMP:
        return None
    says = f"{now:.0%} of all 4-grams occurred before in their completion, after {fmean(before):.0%}"
    return Alarm("repetition", says)


def no_signal(history: Sequence[Line]) -> Alarm | None:
    """For many steps no group had a signal."""
    last = history[-WINDOW:]
    if len(last) < WINDOW or any(line.get("frac_reward_zero_std") != 1 for line in last):
        return None
    reward = history[-1].get("reward")
    return Alarm("no signal", f"in {WINDOW} steps no group had rewards that differ; the reward is {reward}")


def reward_alone(history: Sequence[Line]) -> Alarm | None:
    """The reward rose since the first evaluation along the way, and held-out accuracy did not."""
    evaluated = [i for i, line in enumerate(history) if i > 0 and line.get("eval/accuracy_sampled") is not None]
    if len(evaluated) < 2 or evaluated[-1] != len(history) - 1:
        return None
    first, last = evaluated[0], evaluated[-1]
    early = rewards(history[max(0, first - WINDOW // 2) : first + 1])
    late = rewards(history[max(0, last - WINDOW // 2) : last + 1])
    if len(early) < 2 or len(late) < 2:
        return None
    rise = fmean(late) - fmean(early)
    before, now = history[first]["eval/accuracy_sampled"], history[last]["eval/accuracy_sampled"]
    if before is None or now is None or now > before or rise < max(LEAST_RISE, pstdev(early) + pstdev(late)):
        return None
    rose = f"the reward rose from {fmean(early):.3f} to {fmean(late):.3f}"
    return Alarm("reward alone", f"{rose}, held-out accuracy went from {before:.3f} to {now:.3f}")


def rewards(history: Sequence[Line]) -> list[float]:
    """The rewards of some steps."""
    return [value for line in history if (value := line.get("reward")) is not None]


def transcript(alarm: Alarm, groups: Sequence[Group], grades: Grades) -> str:
    """A completion of the step that shows what the alarm is about, in brief."""
    rows = [(i, j) for i, group in enumerate(groups) for j in range(len(group.rollouts))]
    if alarm.outcome is not None and alarm.outcome[0] in grades.outcomes:
        shares = grades.outcomes[alarm.outcome[0]]
        rows = [row for row in rows if shares[row[0]][row[1]] == alarm.outcome[1]] or rows
    if alarm.name == "reward alone":
        rows.sort(key=lambda row: -grades.rewards[row].nan_to_num(nan=-1e9).item())
    elif alarm.name in ("length", "repetition"):
        rows.sort(key=lambda row: -len(groups[row[0]].rollouts[row[1]].tokens))
    i, j = rows[0]
    text = groups[i].graded_text(groups[i].rollouts[j])
    shown = text if len(text) <= EXCERPT else f"{text[: EXCERPT // 2]} … {text[-EXCERPT // 2 :]}"
    return f"{groups[i].prompt.text.strip()[-200:]}\n{shown}"


def repeated_share(ids: Sequence[int], ngram: int = 4) -> float:
    """Share of a completion's n-grams of tokens that occurred in it before; 0 for short ones."""
    count = len(ids) - ngram + 1
    if count <= 0:
        return 0.0
    return 1 - len(set(zip(*(ids[start:] for start in range(ngram)), strict=False))) / count
