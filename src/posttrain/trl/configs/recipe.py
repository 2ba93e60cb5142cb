"""TRL's configs as our recipes: the sections that all trainers share, and all of GRPOConfig and RLOOConfig.

Its batches become prompts, groups, epochs and mini-batches.  In TRL a generation batch is per_device_train_batch_size ·
steps_per_generation completions, used num_iterations times.  An optimiser update takes per_device_train_batch_size ·
gradient_accumulation_steps of them, in an order that splits groups.  Here an update takes complete groups.
docs/guides/trl.md has worked cases.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.options import training
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import ModelOptions
from posttrain.options.reward import GradingOptions
from posttrain.options.rollout import RolloutOptions
from posttrain.trl.configs.field_rules import require_values
from posttrain.trl.configs.trainer_configs import GRPOConfig, RLOOConfig, SampledFields
from posttrain.trl.configs.training_fields import TrainingFields


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """The length of a run."""

    updates: int
    """Number of optimiser updates, as TRL counts them."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One of our steps, and how many updates TRL would count."""

    prompts_per_step: int
    group_size: int
    epochs_per_step: int = 1
    minibatches_per_epoch: int = 1
    prompts_per_chunk: int
    """Prompts that TRL takes from the dataset at a time; it drops the remaining ones at the end of an epoch."""
    updates_per_chunk: float
    """Updates on these prompts: as many as TRL counts, or fewer, to keep groups together."""
    notes: tuple[str, ...] = ()
    """Notes on differences to TRL."""

    @property
    def updates_per_step(self) -> int:
        """How much `global_step` grows per step."""
        return self.epochs_per_step * self.minibatches_per_epoch

    def length(self, args: SampledFields, num_rows: int) -> RunLength:
        """The run in TRL's updates: max_steps, or num_train_epochs passes over the dataset."""
        chunks = max(1, num_rows // self.prompts_per_chunk)
        of_epoch = max(1, math.ceil(chunks * self.updates_per_chunk - 1e-9))
        updates = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * of_epoch)
        return RunLength(updates=updates, updates_per_step=self.updates_per_step, updates_per_epoch=of_epoch)


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
    step = {"prompts_per_step": prompts, "group_size": group}
    if spans:
        if passes > 1:
            notes.append(f"num_iterations = {passes}: all passes are in one update, where they are the same.")
        chunk, updates = of_generation // group, per_generation * passes / accumulation
        if of_generation % group:  # TRL refuses these; an update is what is taken at a time here
            chunk, updates = prompts, 1
        return BatchPlan(**step, notes=tuple(notes), prompts_per_chunk=chunk, updates_per_chunk=updates)
    updates, torn = divmod(per_generation, accumulation)
    if torn:
        raise UserError(
            f"{type(args).__name__}: steps_per_generation = {per_generation}, num_iterations = {passes} and"
            f" gradient_accumulation_steps = {accumulation} make an update of two generation batches.  Let"
            " steps_per_generation be a multiple of gradient_accumulation_steps, or the latter a multiple of"
            " steps_per_generation · num_iterations."
        )
    if prompts < updates:
        groups, are = ("group", "is") if prompts == 1 else ("groups", "are")
        notes.append(
            f"TRL would take {updates} updates on parts of {prompts} {groups} of {group}; a group stays whole here, so"
            f" there {are} {prompts}."
        )
    elif updates > 1:
        notes.append(f"each of the {updates} updates on a generation batch uses whole groups, which TRL would split.")
    minibatches = min(updates, prompts)
    return BatchPlan(
        **step,
        epochs_per_step=passes,
        minibatches_per_epoch=minibatches,
        notes=tuple(notes),
        prompts_per_chunk=prompts,
        updates_per_chunk=passes * minibatches,
    )


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


def run_length(args: TrainingFields, num_rows: int) -> RunLength:
    """The length of a run over rows, in updates as TRL counts them."""
    batches = math.ceil(num_rows / args.per_device_train_batch_size)
    of_epoch = math.ceil(batches / args.gradient_accumulation_steps)
    updates = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * of_epoch)
    return RunLength(updates=updates, updates_per_step=1, updates_per_epoch=of_epoch)


DEVIATION_EPSILON = 1e-4
"""What TRL adds to a standard deviation before it divides by it, in units of reward."""
TOKEN_WEIGHTS = {
    "grpo": "mean_over_sequences",
    "bnpo": "mean_over_tokens",
    "dapo": "mean_over_tokens",
    "dr_grpo": "constant_length",
    "luspo": "sum_over_sequence",
}
"""The divisor of each loss_type with a clipped ratio."""
NO_LIMIT = 1_000_000_000
"""Tokens of a micro-batch until the longest prompt is known."""


def require_each(args: TrainingFields, mistakes: Mapping[str, bool]) -> None:
    """Reject fields that contradict each other: what is wrong, and whether it applies."""
    for says, is_so in mistakes.items():
        if is_so:
            raise UserError(f"{type(args).__name__}: {says}")


def rl_config(args: SampledFields, model: ModelOptions, plan: BatchPlan, length: RunLength) -> Config:
    """The run that the arguments describe, except the number of tokens of a micro-batch."""
    assert args.max_completion_length is not None, "checked by require_values"
    cuts: dict[str, Any] = {"top_p": args.top_p or 1.0, "top_k": max(0, args.top_k or 0), "min_p": args.min_p or 0.0}
    return Config(
        **shared_sections(args, model, length),
        task=DatasetOptions(
            held_out_share=0.0,
            last_assistant_message="prefill",
            over_long="error" if args.max_prompt_length is None else "cut_left",
            max_prompt_tokens=args.max_prompt_length,
            shuffle=args.shuffle_dataset is not False,
        ),
        algorithm=grpo_section(args) if isinstance(args, GRPOConfig) else rloo_section(args),
        grading=GradingOptions(max_same_reward_steps=0, max_unscored_steps=0),
        rollout=RolloutOptions(
            prompts_per_step=plan.prompts_per_step,
            group_size=plan.group_size,
            max_completion_tokens=args.max_completion_length,
            temperature=args.temperature,
            **cuts,
            allow_cut_sampling=cuts != {"top_p": 1.0, "top_k": 0, "min_p": 0.0},
        ),
        update=training.UpdateOptions(
            **adamw_options(args, model, length.updates),
            tokens_per_microbatch=NO_LIMIT,
            epochs_per_step=plan.epochs_per_step,
            minibatches_per_epoch=plan.minibatches_per_epoch,
            measure_entropy=True,
        ),
        reference=reference_options(args, length),
        evaluation=training.EvaluationOptions(every_steps=0),
    )


def adamw_options(args: TrainingFields, model: ModelOptions, updates: int) -> dict[str, Any]:
    return {
        "learning_rate": args.learning_rate,
        "warmup_steps": args.get_warmup_steps(updates),
        "schedule": args.lr_scheduler_type.removesuffix("_with_warmup"),
        "weight_decay": args.weight_decay,
        "decay_adapter": args.weight_decay > 0 and model.adapter is not None,
        "beta1": args.adam_beta1,
        "beta2": args.adam_beta2,
        "max_grad_norm": args.max_grad_norm or math.inf,
    }


def grpo_section(args: GRPOConfig) -> dict[str, object]:
    """TRL's loss as one of our algorithms, with its options."""
    scale, together, cispo = scale_of(args), args.multi_objective_aggregation, args.loss_type == "cispo"
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    level = "token" if args.importance_sampling_level == "token" else "sequence_mean"
    section: dict[str, object] = {"ratio_level": level}
    if together == "normalize_then_sum":  # which standardises whatever scale_rewards says
        section |= {"reward_aggregation": together, "deviation": "sample", "deviation_epsilon": DEVIATION_EPSILON}
    elif scale == "none":
        section["deviation"] = "none"
    else:
        section |= {"deviation": "sample", "deviation_over": scale, "deviation_epsilon": DEVIATION_EPSILON}
    section |= {"mask_truncated": args.mask_truncated_completions, "count_unscored": True}
    if args.beta:
        importance = level if args.use_bias_correction_kl else None
        section["kl"] = {"coefficient": args.beta, "estimator": "k3", "importance": importance}
    delta, bound = args.delta, 1 + high
    mistakes = {
        f"delta = {delta} with loss_type = cispo has no effect.  Leave it out.": cispo and delta is not None,
        f"epsilon_high = {high} is the largest ratio with loss_type = cispo.  Use 5.0, the paper's.": cispo
        and high < 1,
        f"delta = {delta} is below 1 + epsilon_high = {bound:g}.  Use at least that, or None for no bound.": not cispo
        and delta is not None
        and delta < bound,
    }
    require_each(args, mistakes)
    if cispo:
        return {"name": "cispo", "clip_high": high - 1, **section}
    section |= {"clip_low": args.epsilon, "clip_high": high, "token_weights": TOKEN_WEIGHTS[args.loss_type]}
    return {"name": "grpo", **section} | ({} if delta is None else {"dual_clip": delta})


def rloo_section(args: SampledFields) -> dict[str, object]:
    """TRL's RLOO: the ratio of a completion is clipped, and a KL is subtracted from its reward."""
    assert isinstance(args, RLOOConfig)
    bounds = args.reward_clip_range
    wrong = bounds is not None and (len(bounds) != 2 or bounds[0] > bounds[1])
    require_each(
        args, {f"reward_clip_range = {bounds}: give the smallest and the largest reward, such as (-1, 1).": wrong}
    )
    section: dict[str, object] = {
        "name": "rloo",
        "clip_low": args.epsilon,
        "clip_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "token_weights": "mean_over_sequences",
        "reward_range": None if bounds is None else [float(each) for each in bounds],
        "normalize_advantages": args.normalize_advantages,
        "mask_truncated": args.mask_truncated_completions,
        "count_unscored": True,
    }
    if args.beta:
        section["kl"] = {"coefficient": args.beta, "estimator": "k1", "place": "reward"}
    return section


def scale_of(args: GRPOConfig) -> str:
    """scale_rewards by its names; True and False are the names of older versions."""
    scale = args.scale_rewards
    return ("none", "group")[scale] if isinstance(scale, bool) else str(scale)


def ratio_level_notes(args: SampledFields) -> list[str]:
    """TRL's warnings: sequence ratios whose tokens are then added up, and the reverse."""
    if not isinstance(args, GRPOConfig):
        return []
    level, loss = args.importance_sampling_level, args.loss_type
    if level == "sequence" and loss in ("bnpo", "dr_grpo", "dapo", "cispo"):
        adds_up = f"importance_sampling_level = 'sequence' with loss_type = {loss!r} adds up tokens"
        return [f"{adds_up}: it weights completions by length.  For GSPO as published set loss_type = 'grpo'."]
    if level == "token" and loss == "luspo":
        return ["loss_type = 'luspo' is published with importance_sampling_level = 'sequence'."]
    return []


def require_strategies(args: TrainingFields, *, measures: bool) -> None:
    """Reject a strategy that needs evaluations if there are none."""
    never, metric = args.eval_strategy == "no", args.metric_for_best_model
    loads, saves_best = args.load_best_model_at_end, args.save_strategy == "best"
    best = "load_best_model_at_end = True" if loads else "save_strategy = best"
    mistakes = {
        f"eval_strategy = {args.eval_strategy!r}: give the trainer an eval_dataset, or leave it out.": not never
        and not measures,
        f"{best}, but nothing is measured.  Set eval_strategy as well.": never and (loads or saves_best),
        f"{best} with save_strategy = no saves nothing to load.  Use save_strategy = best.": loads
        and args.save_strategy == "no",
        "save_strategy = best needs metric_for_best_model, such as reward or loss.": saves_best and metric is None,
        f"metric_for_best_model = {metric!r} needs evaluations.  Give eval_strategy, or leave it out.": never
        and metric is not None
        and not args.eval_on_start,
    }
    require_each(args, mistakes)


def reference_options(args: SampledFields, length: RunLength) -> training.ReferenceOptions:
    """How often the reference becomes a copy of the policy."""
    if not args.sync_ref_model:
        return training.ReferenceOptions()
    mixup = args.ref_model_mixup_alpha
    mistakes = {
        f"ref_model_mixup_alpha = {mixup} with sync_ref_model: a reference is a copy here; use 1.0.": mixup != 1.0,
        "sync_ref_model = True with beta = 0: there is no reference.  Leave one out.": not args.beta,
    }
    require_each(args, mistakes)
    return training.ReferenceOptions(refresh_every=length.steps_in(args.ref_model_sync_steps))


def shared_sections(args: TrainingFields, model: ModelOptions, length: RunLength) -> dict[str, Any]:
    """The sections that all trainers set in the same way: the model, checkpoints, the run."""
    every = {
        "no": 0,
        "best": 0,  # an evaluation that finds it requests it
        "steps": length.steps_in(args.save_steps),
        "epoch": length.steps_in(length.updates_per_epoch),
    }[args.save_strategy]
    limit = args.save_total_limit or 0
    prunes_itself = limit <= 0 or args.metric_for_best_model is not None  # which never deletes the best
    kept = 1_000_000 if prunes_itself else limit
    known, given = get_args(training.TrackerName), args.report_to or []
    report_to = tuple(each for each in ([given] if isinstance(given, str) else given) if each != "none")
    for each in report_to:
        if each not in known:
            kind = type(args).__name__
            raise UserError(f"{kind}: report_to = {each!r}: use none, or name some of {', '.join(known)}.")
    tracker = training.TrackerOptions()
    if report_to:
        project = tracker.project if args.project == TrainingFields.project else args.project
        tracker = training.TrackerOptions(project=project, name=args.run_name or tracker.name)
    return {
        "model": model,
        "checkpoint": training.CheckpointOptions(every_steps=every, keep_last=kept, keep_best=False),
        "tracker": tracker,
        "run": training.RunOptions(
            folder=folder_of_run(args),
            overwrite=args.overwrite_output_dir,
            seed=args.seed,
            num_steps=length.steps,
            report_to=cast(tuple[training.TrackerName, ...], report_to),
            curves=False,
        ),
    }


def folder_of_run(args: TrainingFields) -> str:
    return args.output_dir or "trainer_output"
