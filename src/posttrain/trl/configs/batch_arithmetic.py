"""TRL's batch vocabulary in ours: completions per device and micro-steps become prompts, groups, epochs, mini-batches.

In TRL a generation batch is per_device_train_batch_size · steps_per_generation completions, used num_iterations times.
An optimiser update takes per_device_train_batch_size · gradient_accumulation_steps of them, in an order that tears
groups apart.  Here an update takes complete groups.  docs/guides/trl.md has worked cases.
"""

import math
from dataclasses import dataclass

from posttrain.errors import UserError
from posttrain.trl.configs.field_rules import require_values
from posttrain.trl.configs.trainer_configs import SampledFields
from posttrain.trl.configs.training_fields import TrainingFields


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What one step of ours is, and how many updates TRL would count."""

    prompts_per_step: int
    group_size: int
    epochs_per_step: int = 1
    minibatches_per_epoch: int = 1
    prompts_per_chunk: int
    """Prompts that TRL takes from the dataset at a time; it drops those left over at the end of an epoch."""
    updates_per_chunk: float
    """Updates on them: those that TRL counts, or fewer if groups stay together."""
    notes: tuple[str, ...] = ()
    """Lines about what TRL would do differently."""

    @property
    def updates_per_step(self) -> int:
        """How much `global_step` grows in a step."""
        return self.epochs_per_step * self.minibatches_per_epoch

    def updates_per_epoch(self, num_rows: int) -> int:
        """Optimiser updates that TRL counts for one pass over the dataset."""
        chunks = max(1, num_rows // self.prompts_per_chunk)
        return max(1, math.ceil(chunks * self.updates_per_chunk - 1e-9))

    def num_updates(self, args: SampledFields, num_rows: int) -> int:
        """Optimiser updates of the run: max_steps, or num_train_epochs passes over the dataset."""
        if args.max_steps > 0:
            return args.max_steps
        return math.ceil(args.num_train_epochs * self.updates_per_epoch(num_rows))

    def num_steps(self, num_updates: int) -> int:
        return math.ceil(num_updates / self.updates_per_step)


def batch_plan(args: SampledFields) -> BatchPlan:
    """The step that these arguments describe.  Raises UserError if no step of complete groups fits."""
    require_values(args)
    group, accumulation, passes = args.num_generations, args.gradient_accumulation_steps, args.num_iterations
    assert group is not None, "checked by require_values"
    per_generation, notes = micro_steps_of_generation(args), list[str]()
    chunks_per_update, rest = divmod(accumulation, per_generation * passes)
    spans = rest == 0  # an update spans one or more whole generation batches
    of_generation = args.per_device_train_batch_size * per_generation
    completions = of_generation * (chunks_per_update if spans else 1)
    prompts = math.ceil(completions / group)
    if prompts * group != completions:
        notes.append(
            f"{completions} completions are not a whole number of groups of {group}: a step has {prompts * group},"
            f" those of {prompts} {'prompt' if prompts == 1 else 'prompts'}."
        )
    if spans:
        per_chunk, updates_per_chunk = of_generation // group, per_generation * passes / accumulation
        if of_generation % group:  # TRL refuses these; an update is what is taken at a time here
            per_chunk, updates_per_chunk = prompts, 1
        if passes > 1:
            notes.append(f"num_iterations = {passes}: all passes are in one update, where they are the same.")
        return BatchPlan(
            prompts_per_step=prompts,
            group_size=group,
            notes=tuple(notes),
            prompts_per_chunk=per_chunk,
            updates_per_chunk=updates_per_chunk,
        )
    updates, torn = divmod(per_generation, accumulation)
    if torn:
        raise UserError(
            f"{type(args).__name__}: steps_per_generation = {per_generation}, num_iterations = {passes} and"
            f" gradient_accumulation_steps = {accumulation} make an update of two generation batches.  Let"
            " steps_per_generation be a multiple of gradient_accumulation_steps, or the latter a multiple of"
            " steps_per_generation · num_iterations."
        )
    if updates > 1:
        notes.append(note_of_updates(updates, prompts, group))
    return BatchPlan(
        prompts_per_step=prompts,
        group_size=group,
        epochs_per_step=passes,
        minibatches_per_epoch=min(updates, prompts),
        notes=tuple(notes),
        prompts_per_chunk=prompts,
        updates_per_chunk=passes * min(updates, prompts),
    )


def note_of_updates(updates: int, prompts: int, group: int) -> str:
    if prompts < updates:
        return (
            f"TRL would take {updates} updates on parts of {prompts} {'group' if prompts == 1 else 'groups'} of"
            f" {group}; a group stays whole here, so there {'is' if prompts == 1 else 'are'} {prompts}."
        )
    return f"the {updates} updates on a generation batch are each on whole groups, which TRL would tear apart."


def micro_steps_of_generation(args: SampledFields) -> int:
    """steps_per_generation, given or derived."""
    rows, given, size = args.per_device_train_batch_size, args.steps_per_generation, args.generation_batch_size
    kind = type(args).__name__
    if given is not None and size is not None:
        both = f"steps_per_generation = {given} and generation_batch_size = {size}"
        raise UserError(f"{kind}: {both} say the same in two ways.  Leave one out.")
    if size is None:
        return args.gradient_accumulation_steps if given is None else given
    if size % rows:
        nearest = math.ceil(size / rows) * rows
        raise UserError(
            f"{kind}: generation_batch_size = {size} is not a multiple of per_device_train_batch_size = {rows}.  Use"
            f" {nearest}."
        )
    return size // rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """How long a run is."""

    updates: int
    """Of the optimiser, as TRL counts them."""
    updates_per_step: int
    updates_per_epoch: int

    @property
    def steps(self) -> int:
        return math.ceil(self.updates / self.updates_per_step)

    def steps_in(self, updates: float) -> int:
        """Steps between two events that are this many updates apart, below 1 a share of the run; 0 for 0."""
        if not updates:
            return 0
        count = math.ceil(self.updates * updates) if updates < 1 else updates
        return max(1, round(count / self.updates_per_step))


def run_length(args: TrainingFields, num_rows: int) -> RunLength:
    """How long a run over rows is, in updates as TRL counts them."""
    batches = math.ceil(num_rows / args.per_device_train_batch_size)
    of_epoch = math.ceil(batches / args.gradient_accumulation_steps)
    updates = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * of_epoch)
    return RunLength(updates=updates, updates_per_step=1, updates_per_epoch=of_epoch)
