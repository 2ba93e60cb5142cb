"""The mistakes of course notebooks that `posttrain course mistake` trains with and without.

Numbers are those of docs/learn/mistakes/.  The trainer has the mistakes as switches; a reward with a mistake is a
grader that replaces the exercise's own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from rich.console import Console

from posttrain.course import exercises
from posttrain.course.exercises import Exercise, Grader
from posttrain.course.trainer import MeasuredStep, train
from posttrain.errors import UserError
from posttrain.generation.parity import EXACT_NATS
from posttrain.runs.alarms import GAP, GAP_LIMIT, Line, alarms
from posttrain.runs.curves import BLUE, ORANGE
from posttrain.runs.files import save_figure
from posttrain.runs.progress import Progress


@dataclass(frozen=True, kw_only=True)
class CourseMistake:
    """One mistake, its exercise, and what reveals it."""

    title: str
    exercise: Exercise
    pays: Grader | None = None
    """The reward with the mistake, where the mistake is in the reward."""
    told_by: str
    """The metric or message of this library that reveals it; `raised_alarms` computes its alarms."""


MISTAKES = {
    1: CourseMistake(
        title="log-probs are computed under no_grad",
        exercise=exercises.FORM,
        told_by="`grad_norm` is exactly 0 from the first step",
    ),
    2: CourseMistake(
        title="the loss has no policy term, and its KL is computed under no_grad",
        exercise=exercises.PROSE,
        told_by="`grad_norm` of the policy is 0, and `reward` stays flat while `loss` falls",
    ),
    3: CourseMistake(
        title="the prompt's length is used as an index into a left-padded row",
        exercise=exercises.PROSE,
        told_by="`sampling/sampling_logp_difference/mean`, at the first step",
    ),
    4: CourseMistake(
        title="the reference is the policy: disable_adapter() is called and not entered",
        exercise=exercises.FORM,
        told_by="`kl` is exactly 0 after the first update",
    ),
    6: CourseMistake(
        title="the KL is computed one position too late",
        exercise=exercises.EARLY_LETTER,
        told_by="no metric: `kl` looks plausible.  A test with known probabilities reveals it",
    ),
    7: CourseMistake(
        title="the completion is decoded, stripped and tokenised again, with the prompt",
        exercise=exercises.PROSE,
        told_by="`sampling/sampling_logp_difference/mean`, at the first step",
    ),
    8: CourseMistake(
        title="the mask `ids != pad` hides the stop token, which is the padding too",
        exercise=exercises.ONE_SENTENCE,
        told_by="`completions/clipped_ratio` stays near 1: the policy never learns to stop",
    ),
    9: CourseMistake(
        title="sampled with top-p 0.9, scored under the full softmax",
        exercise=exercises.FORM,
        told_by="`sampling/sampling_logp_difference/mean`; posttrain rejects it before the run: set"
        " rollout.allow_cut_sampling to train like this",
    ),
    10: CourseMistake(
        title='the prompt says "some of the numbers", the grader wants all of them',
        exercise=exercises.COUNTDOWN_OF_SOME,
        pays=exercises.solved,
        told_by="`reward` is 0 at every step.  `posttrain check-task` tries right answers before the run",
    ),
    11: CourseMistake(
        title="numbers are checked by membership, so one number may be used many times",
        exercise=exercises.COUNTDOWN,
        pays=exercises.solved_by_membership,
        told_by="`reward` above the accuracy by a correct grader.  `posttrain check-task` tries such answers before"
        " the run",
    ),
    12: CourseMistake(
        title="the ratio is to the reference, and is clipped there",
        exercise=exercises.FORM,
        told_by="`loss` grows, and a gradient that is not finite stops the run",
    ),
    13: CourseMistake(
        title="the format's pattern ends in `$` under MULTILINE",
        exercise=exercises.FORM_AND_LENGTH,
        pays=exercises.long_in_form_or_beyond,
        told_by="`reward` above the score of a correct grader.  `posttrain check-task` tries such answers before"
        " the run",
    ),
}
IGNORED_LABELS = 5
"""The mistake that ends in an error before training."""
PANELS = (
    ("reward", "honest_reward", "reward"),
    ("kl", "true_kl", "KL, nats per token"),
    ("length", "", "length, tokens"),
    ("grad_norm", "", "gradient norm"),
)
"""What the trainer measured, what a correct one would have measured, and the title."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The same exercise without a mistake and with it."""

    right: Sequence[MeasuredStep]
    wrong: Sequence[MeasuredStep]


def try_mistake(number: int, *, num_steps: int = 20, progress: Progress | None = None) -> Trial:
    """Train twice from the same weights on the same questions.  Raises UserError for a number without a trainer."""
    if number not in MISTAKES:
        raise UserError(f"mistake {number}: no such mistake.  Choose a number from 1 to {max(MISTAKES)}.")
    mistake = MISTAKES[number]
    progress = progress or Progress(console=Console(quiet=True))
    with progress.stage("without the mistake", num_steps) as advance:
        right = train(mistake.exercise, num_steps=num_steps, advance=advance)
    with progress.stage("with the mistake", num_steps) as advance:
        wrong = train(mistake.exercise, number, mistake.pays, num_steps=num_steps, advance=advance)
    return Trial(right=right, wrong=wrong)


def trial_table(trial: Trial) -> str:
    """First and last step of both runs, one line per number."""
    runs, steps = (trial.right, trial.wrong), f"{'first':>10}{'last':>10}"
    lines = [f"{'':28}{'without':>20}{'with the mistake':>22}", f"{'step':28}{steps}  {steps}"]
    for each in fields(MeasuredStep):
        ends = [(shown_number(getattr(run[0], each.name)), shown_number(getattr(run[-1], each.name))) for run in runs]
        lines.append(f"{LABELS[each.name]:28}" + "  ".join(f"{first:>10}{last:>10}" for first, last in ends))
    if len(trial.wrong) < len(trial.right):
        lines.append(f"The mistaken run ends at step {len(trial.wrong)}: its gradient is not a finite number.")
    return "\n".join(lines)


def raised_alarms(steps: Sequence[MeasuredStep], *, honest: bool = False) -> dict[str, int]:
    """Alarms that a run of this library raises on these numbers, each with its first step.

    `honest`: the correct grader's mean serves as held-out accuracy.  The trainer measures only the mean gap of
    log-probs, so it serves as the largest one; rewards are not negative, so a mean of 0 says that they are equal.
    """
    history: list[Line] = []
    raised: dict[str, int] = {}
    for number, each in enumerate(steps, 1):
        equal = each.reward == 0
        line: dict[str, int | float | None] = {
            "step": number,
            "reward": each.reward,
            "rewards/paid/mean": each.reward,
            "rewards/paid/std": float(not equal),
            "frac_uninformative_groups": float(equal),
            "completions/mean_length": each.length,
            "completions/clipped_ratio": each.cut_off,
            GAP: each.logprob_gap,
            GAP_LIMIT: EXACT_NATS,
        }
        if honest:
            interval = {"eval/accuracy_sampled_low": -math.inf, "eval/accuracy_sampled_high": math.inf}
            line |= {"eval/accuracy_sampled": each.honest_reward, **interval}
        history.append(line)
        raised |= {alarm.name: number for alarm in alarms(history, {}) if alarm.name not in raised}
    return raised


def shown_alarms(raised: Mapping[str, int]) -> str:
    return ", ".join(f"`{name}` at step {step}" for name, step in raised.items()) or "none"


def shown_number(value: float) -> str:
    return f"{value:.1e}" if abs(value) >= 1e4 else f"{value:.3f}"


LABELS = {
    "reward": "reward, as paid",
    "honest_reward": "reward, by a correct grader",
    "kl": "KL, as computed",
    "true_kl": "KL, computed correctly",
    "length": "tokens of a completion",
    "cut_off": "share cut off by the limit",
    "grad_norm": "gradient norm of the policy",
    "logprob_gap": "|log π − log μ| of a token",
    "loss": "loss",
}


def draw_trial(trial: Trial, picture: Path, title: str = "") -> None:
    """Four panels: reward, KL, length and gradient norm; dashed lines are what a correct trainer measures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.7), layout="constrained")
    for axes, (name, truth, label) in zip(figure.subplots(1, 4), PANELS, strict=True):
        for run, colour, says in ((trial.right, BLUE, "without"), (trial.wrong, ORANGE, "with the mistake")):
            steps = range(1, len(run) + 1)
            values = [getattr(each, name) for each in run]
            true = [getattr(each, truth) for each in run] if truth else values
            axes.plot(
                steps, values, color=colour, linewidth=1.8, label=says, marker="." if run is trial.wrong else None
            )
            if true != values:
                axes.plot(steps, true, color=colour, linewidth=1.4, linestyle="--", label=f"{says}, measured right")
        axes.set_title(label, loc="left", fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=10)
    handles = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    names = [str(each) for each in handles]
    figure.legend([*handles.values()], names, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    save_figure(figure, picture, dpi=80)


def ignored_labels() -> str:
    """Mistake 5, which trains nothing: it looks up -100 before masking it."""
    torch.manual_seed(0)
    logprobs, labels = torch.randn(4, 10).log_softmax(-1), torch.tensor([3, 7, -100, -100])
    try:
        logprobs.gather(1, labels[:, None])
        error = "none"
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    kept = labels != -100
    right = logprobs[kept].gather(1, labels[kept][:, None]).sum().item()
    clamped = logprobs.gather(1, labels.clamp(min=0)[:, None]).sum().item()
    return (
        f"logprobs.gather(1, labels[:, None])  ->  RuntimeError: {error}\n"
        f"labels.clamp(min=0) hides the error and scores token 0 at every masked place: Σ log π = {clamped:.3f}\n"
        f"only the places with a label: Σ log π = {right:.3f}"
    )
