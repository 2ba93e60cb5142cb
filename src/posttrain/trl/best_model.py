"""The best evaluation of a run as transformers' Trainer knows it: which it is, its checkpoint, its weights at the end.

With `metric_for_best_model` each evaluation during training is compared with the best so far.  Beside transformers, the
step of the best is saved when it is found, wherever `load_best_model_at_end` or save_strategy = best wants it, so that
save_steps need not be a multiple of eval_steps.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from transformers import TrainerState

from posttrain.errors import UserError
from posttrain.models.policy import Policy
from posttrain.runs.checkpoint import discard, load_checkpoint
from posttrain.runs.files import write_atomically
from posttrain.runs.manifest import saved_steps
from posttrain.runs.tensor_state import restore_module
from posttrain.trl.fields.training_fields import TrainingFields

STATE_FILE = "trainer_state.json"
"""What callbacks know of a run, beside a checkpoint's own files and where transformers has it."""


def is_best(args: TrainingFields, state: TrainerState, measured: Mapping[str, object]) -> bool:
    """Whether an evaluation is better than all before it, which the state is then told.  Raises UserError without it.

    What was not measured, None or NaN, is better than nothing.
    """
    if args.metric_for_best_model is None:
        return False
    name = "eval_" + args.metric_for_best_model.removeprefix("eval_")
    if name not in measured:
        raise UserError(
            f"{type(args).__name__}: metric_for_best_model = {args.metric_for_best_model!r}: an evaluation has no"
            f" {name}; use one of {', '.join(sorted(measured))}."
        )
    value, best = measured[name], state.best_metric
    if not isinstance(value, int | float) or math.isnan(value):
        return False
    if best is not None and not (value > best if args.greater_is_better else value < best):
        return False
    state.best_metric, state.best_global_step = float(value), state.global_step
    return True


def wants_best(args: TrainingFields) -> bool:
    """Whether the best is to be on the disk as soon as it is found."""
    return args.load_best_model_at_end or args.save_strategy == "best"


def prune(folder: Path, args: TrainingFields, best: str | None) -> None:
    """Keep the newest `save_total_limit` checkpoints, and the best and the last whatever the limit."""
    limit = args.save_total_limit or 0
    if limit <= 0 or args.metric_for_best_model is None:
        return
    steps = saved_steps(folder)
    kept = {max(steps), *(step for step, path in steps.items() if best is not None and path.samefile(best))}
    others = [step for step in steps if step not in kept]
    for step in others[: max(0, len(steps) - max(limit, len(kept)))]:
        discard(steps[step])


def load_best(policy: Policy, path: Path) -> None:
    """Have the policy's weights be those of a checkpoint."""
    restore_module(policy.model, load_checkpoint(path).tensors["policy"])


def write_state(state: TrainerState, folder: Path) -> None:
    """Write what callbacks know of a run, as transformers' `TrainerState.load_from_json` reads it."""
    content = json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"
    write_atomically(folder / STATE_FILE, content.encode())


def saved_state(checkpoints: Path, step: int | None) -> TrainerState:
    """What was known when a step was saved, None for the last; nothing where no file tells."""
    steps = saved_steps(checkpoints)
    file = steps.get(step if step is not None else max(steps, default=0), checkpoints) / STATE_FILE
    if not file.is_file():
        return TrainerState()
    state: TrainerState = TrainerState.load_from_json(str(file))
    if state.best_model_checkpoint is not None and not Path(state.best_model_checkpoint).is_dir():
        state.best_model_checkpoint = None
    return state
