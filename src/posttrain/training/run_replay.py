"""Training again on recorded steps, from their rollout files: no sampling, no grading, the same weights bit for bit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from posttrain.config import Config
from posttrain.errors import RunError, UserError
from posttrain.records import Group
from posttrain.runs import checkpoint
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.files import DamageError, read_manifest, saved_steps
from posttrain.runs.progress import Clock
from posttrain.runs.recorded_step import RecordedGroups, read_step, recorded_files
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.tensor_state import Tensors
from posttrain.tasks.base import training_prompts
from posttrain.training.collector import CollectedStep
from posttrain.training.credited_step import CreditedStep
from posttrain.training.held_out import held_out_score
from posttrain.training.learner import warm_start
from posttrain.training.metrics import UpdateReport, step_tokens
from posttrain.training.session import NO_CALLER, CallerObjects, Session, open_session, require_training_by_reward
from posttrain.training.trained import RunState


def count_step(state: RunState, collected: CollectedStep, updates: Sequence[UpdateReport], num_updates: int) -> None:
    state.step, state.num_updates = collected.step, num_updates
    state.num_tokens += step_tokens(collected.groups)
    state.completion_tokens += collected.num_completion_tokens
    state.sampled_tokens += collected.num_sampled_tokens
    state.trained_tokens += sum(update.num_tokens for update in updates)


def train_again(session: Session, step: int, folder: RunFolder) -> None:
    """Repeat a finished step; its journals, with evaluations and seconds, are kept."""
    clock, file = Clock(), recorded_files(folder.path / "rollouts")[step]
    learn_from(session, session.learner.credit(recorded(session, step, file), clock), clock)
    line = next(each for each in folder.metrics() if each["step"] == step)
    numbers = {name: float(value) for name, value in line.items() if value is not None}
    if (score := held_out_score(numbers)) is not None:
        session.trained.run.saw_evaluation(score)
    stages = {name.removeprefix("seconds/"): value for name, value in numbers.items() if name.startswith("seconds/")}
    stages.pop("sampler_wait", None)  # beside the others, not in sum with them
    session.trained.add_seconds(stages)


def learn_from(session: Session, credited: CreditedStep, clock: Clock) -> None:
    """The second half of a step."""
    learner, collected = session.learner, credited.collected
    learner.remember(credited)
    updates = learner.learn(learner.batches(credited, clock), collected.step, clock)
    count_step(session.trained.run, collected, updates, learner.num_updates)


def recorded(session: Session, step: int, file: Path) -> CollectedStep:
    """The step of a file.  Raises RunError if it is another step, or if the task now has other prompts."""
    found = read_step(file)
    if found.step != step:
        raise RunError(f"{file}: holds step {found.step}, where step {step} is expected.  Restore the file.")
    draws = [group.draw for part in (found.trained, found.replaced) if part for group in part.groups]
    prompts = training_prompts(session.task, step, range(max(draws) + 1))
    may_add = session.environment.replies

    def prompted(group: Group) -> Group:
        """The group with the task's full prompt, which a teacher and spans of the prefill need."""
        prompt = prompts[group.draw]
        same = may_add or prompt.tokens == group.prompt.tokens  # `reset` may have added to the prompt
        if prompt.id != group.prompt.id or not same:
            here = f"draw {group.draw} is of prompt {group.prompt.id}, {group.prompt.text!r:.80}"
            raise RunError(f"{file}: {here}, but the task draws {prompt.text!r:.80}.  Restore the rows of the run.")
        return replace(group, prompt=replace(prompt, text=group.prompt.text, tokens=group.prompt.tokens))

    def groups_of(part: RecordedGroups) -> list[Group]:
        return [prompted(group) for group in part.groups]

    replaced = [] if found.replaced is None else [(groups_of(found.replaced), found.replaced.grades)]
    return CollectedStep(step=step, groups=groups_of(found.trained), grades=found.trained.grades, replaced=replaced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """How the weights of a replayed run compare with its checkpoints."""

    num_steps: int
    """Number of repeated steps."""
    differences: Mapping[int, Sequence[str]]
    """Differences by the step of each checkpoint; empty if all bits are equal."""

    @property
    def equal(self) -> bool:
        return not any(self.differences.values())


def replay(
    config: Config, caller: CallerObjects = NO_CALLER, *, show: Callable[[str], object] = lambda line: None
) -> Replayed:
    """Repeat a run's training from the rollouts in `config.run.folder`, and compare the weights with every checkpoint.

    The folder does not change, and servers and environments are not needed.  Pass the same objects as when the run was
    started in Python.  `show` receives a line for each checkpoint.  Raises UserError if there is nothing to replay.
    """
    require_training_by_reward(config)
    folder = Path(config.run.folder)
    files, saved = recorded_files(folder / "rollouts"), saved_steps(folder / "checkpoints")
    last = max((step for step in saved if step <= len(files)), default=0)
    if not last or list(files)[:last] != list(range(1, last + 1)):
        raise UserError(
            f"{folder}: steps before a checkpoint are missing in its folder `rollouts`.  Replay a complete run."
        )
    require_one_rank(folder, [path for step, path in saved.items() if step <= last])
    differences: dict[int, Sequence[str]] = {}
    with open_session(config, caller, samples=False) as session:
        learner, clock = session.learner, Clock()
        kept = {step: checkpoint.load_step(folder / "checkpoints", step) for step in saved if step <= last}
        for note in checkpoint.restore_threads(kept[last], session.threads):
            show(note)
        if config.update.optimizer_from:
            learner.load_optimizer_state(config.update.optimizer_from)
        warm_start(learner, clock)

        def compare(step: int) -> None:
            if step in kept:
                differences[step] = found = tensor_differences(session, kept[step])
                show(f"step {step}: " + ("; ".join(found) or "equal in every bit"))

        for step in range(1, last + 1):
            credited = learner.credit(recorded(session, step, files[step]), clock)
            if step == 1:  # step 0 is saved once a new critic has learned its scale from the first step's credit
                compare(0)
            learn_from(session, credited, clock)
            compare(step)
    return Replayed(num_steps=last, differences=differences)


def require_one_rank(folder: Path, checkpoints: Iterable[Path]) -> None:
    """Reject a run of several ranks: this process sums gradients in another order."""
    for path in checkpoints:
        ranks: object = 1
        with suppress(DamageError):  # which is an error when it is read
            ranks = read_manifest(path).made_with.get("ranks", 1)
        if ranks != 1:
            raise UserError(
                f"{folder}: {path.name} was made by {ranks} ranks.  A replay runs in one process, which sums gradients"
                " in another order, so bits would differ.  Replay runs of one process."
            )


def tensor_differences(session: Session, saved: Checkpoint) -> list[str]:
    """How the checkpoint's tensors differ from the session's, file by file."""
    lines = []
    for name, now in session.trained.tensors().items():
        wrong = differing(now, saved.tensors.get(name, {}))
        if wrong:
            others = "" if len(wrong) == 1 else f" and {len(wrong) - 1} more"
            lines.append(f"{name} differs in {wrong[0]}{others} of {len(now)} tensors")
    return lines


def differing(now: Tensors, saved: Tensors) -> list[str]:
    """Names of tensors that differ in any bit."""
    return [
        name
        for name in sorted(now.keys() | saved.keys())
        if name not in now or name not in saved or not torch.equal(bits(now[name]), bits(saved[name]))
    ]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes: NaN equals itself, and 0 is not -0."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
