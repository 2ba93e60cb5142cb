"""Signs that a policy learns something other than its task.

Pure functions of a run's metrics lines, so that a resumed run raises the same alarms.  An alarm says what happened and
shows a completion; it does not change the run.  An alarm about an outcome that the reward pays is a notice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch

from posttrain.records import Grades, Group, Rollout

WINDOW = 10
"""Number of earlier steps that recent steps are compared with."""
RECENT = 3
"""Steps for the share of an outcome: in a single step, it depends on which problems were drawn."""
HALF = WINDOW // 2
"""Steps averaged for a mean reward, or for the first steps of a run."""
AGAIN_AFTER = 20
"""Steps before the same alarm is raised again."""
OUTCOME_JUMP = 0.3
LENGTH_FACTOR = 2.5
DRIFT_FACTOR = 8.0
"""Growth against the first steps: in an honest run of the demo, completions grow by a factor of four."""
CLIPPED_JUMP = 0.3
REPETITION = 0.5
REPETITION_JUMP = 0.25
SILENT_GROUPS = 0.8
LEAST_RISE = 0.25
"""In standard deviations of the reward within a group, so independent of the reward's scale."""
EXCERPT = 600
SHOWN = 8
"""Number of completions that an alarm names."""
EXPLAINED = "value/explained_variance"
TEACHER = "kl_teacher"
"""A metric of runs that learn from a teacher, with or without rewards."""
GAP, GAP_LIMIT, MOST_GAPS = (f"sampling/sampling_logp_difference/{name}" for name in ("max", "limit", "most"))
"""Difference of sampler and trainer: the largest of a step, its limit, and for mixtures in bfloat16 what most tokens do
not exceed, which is then compared with the limit."""
EFFECTIVE, LEAST_EFFECTIVE = "sampling/effective_sample_size", 0.5
LITTLE_EXPLAINED = 0.01
"""Explained share of the variance of returns below which a critic is useless."""

Line = Mapping[str, int | float | None]
"""One line of metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A sign of trouble."""

    name: str
    says: str
    outcome: tuple[str, str] | None = None
    """The reward function and verdict that the alarm is about."""
    held_out: bool = False
    """Whether it is about held-out completions."""


@dataclass(frozen=True, slots=True)
class Illustration:
    """Completions that show what an alarm is about."""

    transcript: str
    rollouts: Sequence[tuple[Group, Rollout]] = ()
    evaluation: str = ""
    """The evaluation that they are from; empty for completions of the step."""


def alarms(history: Sequence[Line], raised: Mapping[str, int]) -> list[Alarm]:
    """The alarms of the last line, given all earlier lines and the step at which each alarm was last raised."""
    step = int(history[-1]["step"] or 0)
    found = [
        *outcome_jumps(history),
        *held_out_jumps(history),
        length(history),
        repetition(history),
        no_signal(history),
        critic(history),
        sampler_gap(history),
        few_effective_samples(history),
        unscored(history),
        same_reward(history),
        reward_alone(history),
    ]
    return [each for each in found if each is not None and step - raised.get(each.name, -AGAIN_AFTER) >= AGAIN_AFTER]


def known(lines: Sequence[Line], name: str) -> list[float]:
    return [value for line in lines if (value := line.get(name)) is not None]


def shares(lines: Sequence[Line], name: str) -> list[float]:
    """An outcome's share in each line with outcomes of its function; a missing one is 0."""
    function = name.rpartition("/")[0] + "/"
    return [line.get(name) or 0.0 for line in lines if any(key.startswith(function) for key in line)]


def outcome_jumps(history: Sequence[Line]) -> list[Alarm]:
    """The share of an outcome jumps."""
    found = []
    for name in (name for name in history[-1] if name.startswith("outcomes/")):
        now, before = shares(history[-RECENT:], name), shares(history[-RECENT - WINDOW : -RECENT], name)
        if len(now) == RECENT and len(before) >= HALF and fmean(now) - fmean(before) >= OUTCOME_JUMP:
            _, function, outcome = name.split("/", 2)
            says = f"{fmean(now):.0%} of completions are {outcome} by {function}, after {fmean(before):.0%} before"
            found.append(Alarm(f"outcome {function} {outcome}", says, (function, outcome)))
    return found


def held_out_jumps(history: Sequence[Line]) -> list[Alarm]:
    """The share of an outcome jumps between evaluations; if the accuracy rises with it, this is learning."""
    found = []
    *earlier, last = history
    evaluations = [line for line in earlier if "eval/accuracy_sampled" in line][-HALF:]
    accuracies = known(evaluations, "eval/accuracy_sampled")
    for name in (name for name in last if name.startswith("eval/outcomes/") and accuracies):
        before, now = shares(evaluations, name), last[name] or 0.0
        learned = max(0.0, (last.get("eval/accuracy_sampled") or 0.0) - fmean(accuracies))
        if before and now - fmean(before) - learned >= OUTCOME_JUMP:
            _, _, function, outcome = name.split("/", 3)
            says = f"{now:.0%} of held-out completions are {outcome} by {function}, after {fmean(before):.0%} before"
            found.append(Alarm(f"held-out {function} {outcome}", says, (function, outcome), held_out=True))
    return found


def length(history: Sequence[Line]) -> Alarm | None:
    """Completions suddenly change in length, have grown many times over, or reach the limit more often."""
    lengths = known(history, "completions/mean_length")
    first, recent = fmean(lengths[:HALF] or [0.0]), fmean(lengths[-RECENT:] or [0.0])
    before = known(history[-1 - WINDOW : -1], "completions/mean_length")
    clipped = known(history[:-1], "completions/clipped_ratio")[:HALF]
    now, now_clipped = history[-1].get("completions/mean_length"), history[-1].get("completions/clipped_ratio")
    if len(before) < HALF or now is None or now_clipped is None:
        return None
    drifted = recent >= DRIFT_FACTOR * first > 0
    if now >= LENGTH_FACTOR * fmean(before) or drifted or now_clipped - fmean(clipped) >= CLIPPED_JUMP:
        tokens = f"completions have {now:.0f} tokens, up from {fmean(before):.0f} before and {first:.0f} at the start"
        limit = f"{now_clipped:.0%} reach the limit, compared with {fmean(clipped):.0%} at the start"
        return Alarm("length", f"{tokens}, and {limit}")
    return None


def repetition(history: Sequence[Line]) -> Alarm | None:
    """Completions repeat themselves more than at the start of the run."""
    before, now = known(history[:-1], "completions/repetition")[:HALF], history[-1].get("completions/repetition")
    if now is None or not before or now < REPETITION or now - fmean(before) < REPETITION_JUMP:
        return None
    says = f"{now:.0%} of all 4-grams repeat earlier ones of a completion, up from {fmean(before):.0%} at the start"
    return Alarm("repetition", says)


def no_signal(history: Sequence[Line]) -> Alarm | None:
    """For many steps almost no group had a signal."""
    silent = known(history[-WINDOW:], "frac_uninformative_groups")
    # Where advantages compare with a value, completions have one in any case.
    idle = known(history[-WINDOW:], "frac_zero_advantage")
    if len(silent) < WINDOW or fmean(silent) < SILENT_GROUPS or (idle and fmean(idle) < SILENT_GROUPS):
        return None
    if TEACHER in history[-1]:
        return None
    reward = history[-1].get("reward")
    told = "not scored" if reward is None else f"{reward:.3f} on average"
    says = f"over {WINDOW} steps, all rewards were equal in {fmean(silent):.0%} of the groups; they are {told}"
    return Alarm("no signal", says)


def critic(history: Sequence[Line]) -> Alarm | None:
    """For many steps the values explain almost nothing of the returns."""
    explained = known([line for line in history[-WINDOW:] if not line.get("value/critic_alone")], EXPLAINED)
    if len(explained) < WINDOW or max(explained) >= LITTLE_EXPLAINED:
        return None
    says = (
        f"for {WINDOW} steps values have explained less than {LITTLE_EXPLAINED:.0%} of the variance of returns,"
        f" now {explained[-1]:z.2f}: a constant would predict as well"
    )
    return Alarm("critic", says)


def sampler_gap(history: Sequence[Line]) -> Alarm | None:
    """Log-probs of sampler and trainer differ by more than rounding explains."""
    judged = judged_gap(history[-1])
    if judged is None or judged[1] <= judged[2]:
        return None
    name, gap, limit = judged
    tokens = "a token's log-prob is" if name == GAP else "the log-probs of more than 5% of tokens are"
    return Alarm("sampler gap", f"{tokens} {gap:.2g} nats apart in sampler and trainer; the limit is {limit:g}")


def few_effective_samples(history: Sequence[Line]) -> Alarm | None:
    """The weights that sampled are so old that importance weighting leaves few effective tokens."""
    share = history[-1].get(EFFECTIVE)
    if share is None or share >= LEAST_EFFECTIVE:
        return None
    return Alarm(
        "effective sample size",
        f"weighted by π/μ, the step's tokens are worth {share:.0%} of as many from the current policy.  Lower"
        " rollout.max_staleness or update.learning_rate",
    )


def judged_gap(line: Line) -> tuple[str, float, float] | None:
    """The metric of the difference of sampler and trainer, its value and its limit."""
    limit = line.get(GAP_LIMIT)
    for name in (MOST_GAPS, GAP):
        if limit is not None and (gap := line.get(name)) is not None:
            return name, gap, limit
    return None


def unscored(history: Sequence[Line]) -> Alarm | None:
    """No completion of the step was scored."""
    if history[-1].get("frac_unscored") != 1:
        return None
    failed = history[-1].get("num_score_failures")
    why = f"{failed:.0f} scores failed" if failed else "no reward function applies to them"
    return Alarm("unscored", f"no completion of the step has a reward: {why}")


def same_reward(history: Sequence[Line]) -> Alarm | None:
    """Since the start of the run, each reward function has given every completion the same score."""
    if history[-1].get("frac_uninformative_groups") != 1 or TEACHER in history[-1]:
        return None
    lines = [line for line in history if line.get("reward") is not None]
    names = {name for line in lines for name in line if name.startswith("rewards/")}
    spreads = known(lines, "frac_uninformative_groups")
    means = [{*known(lines, name)} for name in names if name.endswith("/mean")]
    deviations = [value for name in names if name.endswith("/std") for value in known(lines, name)]
    if not deviations or any(deviations) or any(len(each) > 1 for each in means) or min(spreads) < 1:
        return None
    steps = "the step" if len(lines) == 1 else f"{len(lines)} steps"
    return Alarm("same reward", f"all completions of {steps} have the same reward, {lines[-1]['reward']:.3f}")


@dataclass(frozen=True, slots=True)
class PastEvaluation:
    """An evaluation, with the rewards of the steps before it."""

    accuracy: float
    low: float
    high: float
    rewards: list[float]
    within: float
    """Mean standard deviation of the reward within a group."""


def evaluation_at(history: Sequence[Line], at: int) -> PastEvaluation | None:
    """The evaluation in a line, if any; the one before training has the rewards of the first steps."""
    accuracy, low, high = (history[at].get(f"eval/accuracy_sampled{end}") for end in ("", "_low", "_high"))
    lines = history[max(1, at - HALF + 1) : max(HALF, at) + 1]
    rewards = known(lines, "reward")
    if accuracy is None or low is None or high is None or len(rewards) < 2:
        return None
    return PastEvaluation(accuracy, low, high, rewards, fmean(known(lines, "reward_std_within_groups") or [0.0]))


def reward_alone(history: Sequence[Line]) -> Alarm | None:
    """The reward rose but held-out accuracy did not, or accuracy fell below its best but the reward did not fall.

    A rise must exceed the spread over steps and a quarter of the spread within groups.  A fall of accuracy counts where
    the intervals do not overlap.
    """
    last = evaluation_at(history, len(history) - 1)
    far = range(len(history) - HALF if len(history) > WINDOW else 0)
    earlier = [found for at in far if (found := evaluation_at(history, at)) is not None]
    if last is None or not earlier:
        return None
    first, best = earlier[0], max(earlier, key=lambda found: found.low)
    if rise(first, last) > bar(first, last) and last.accuracy <= first.accuracy:
        since = first
    elif rise(best, last) >= -bar(best, last) and last.high < best.low:
        since = best
    else:
        return None
    rewards = f"the reward went from {fmean(since.rewards):.3f} to {fmean(last.rewards):.3f}"
    return Alarm("reward alone", f"{rewards}, held-out accuracy from {since.accuracy:.3f} to {last.accuracy:.3f}")


def rise(before: PastEvaluation, now: PastEvaluation) -> float:
    return fmean(now.rewards) - fmean(before.rewards)


def bar(before: PastEvaluation, now: PastEvaluation) -> float:
    """The smallest significant change of the reward."""
    return max(LEAST_RISE * before.within, pstdev(before.rewards) + pstdev(now.rewards))


def is_notice(alarm: Alarm, grades: Grades) -> bool:
    """Whether completions with the alarm's outcome score higher than the rest of the step.

    Such an outcome rises because it is rewarded, as when a policy learns a format.
    """
    if alarm.outcome is None or alarm.outcome[0] not in grades.outcomes:
        return False
    function, outcome = alarm.outcome
    scores = grades.scores[grades.names.index(function)]
    has_it = torch.tensor([[told == outcome for told in row] for row in grades.outcomes[function]])
    paid, others = (scores[rows & ~scores.isnan()] for rows in (has_it, ~has_it))
    if not len(paid):
        return False
    return bool(paid.mean() > others.mean()) if len(others) else bool((paid > 0).all())


def illustrations(alarm: Alarm, groups: Sequence[Group], grades: Grades) -> list[tuple[Group, Rollout]]:
    """Completions of the step that show what the alarm is about, clearest first; at most `SHOWN`."""
    rows = [(i, j) for i, group in enumerate(groups) for j in range(len(group.rollouts))]
    if alarm.outcome is not None and alarm.outcome[0] in grades.outcomes:
        told = grades.outcomes[alarm.outcome[0]]
        rows = [row for row in rows if told[row[0]][row[1]] == alarm.outcome[1]] or rows
    if alarm.name == "reward alone":
        rows.sort(key=lambda row: -grades.rewards[row].nan_to_num(nan=-1e9).item())
    elif alarm.name in ("length", "repetition"):
        rows.sort(key=lambda row: -groups[row[0]].rollouts[row[1]].num_sampled)
    return [(groups[i], groups[i].rollouts[j]) for i, j in rows[:SHOWN]]


def transcript(group: Group, rollout: Rollout) -> str:
    """The end of a prompt, and below it an excerpt of a completion."""
    text = group.graded_text(rollout)
    shown = text if len(text) <= EXCERPT else f"{text[: EXCERPT // 2]} … {text[-EXCERPT // 2 :]}"
    return f"{group.prompt.text.strip()[-200:]}\n{shown}"


def repeated_share(ids: Sequence[int], ngram: int = 4) -> float:
    """Share of a completion's n-grams of tokens that occurred in it before; 0 for short completions."""
    count = len(ids) - ngram + 1
    if count <= 0:
        return 0.0
    return 1 - len(set(zip(*(ids[start:] for start in range(ngram)), strict=False))) / count
