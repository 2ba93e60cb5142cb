"""Which files `mutants.py` changes, and which tests must notice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Files of the maths, and the tests about them: those of the suites that import any of the modules."""

    files: list[str]
    suites: list[str]
    modules: list[str]


GROUPS = [
    Group(
        files=["algorithms/*.py"],
        suites=["closed_form", "laws", "reference"],
        modules=["posttrain.algorithms"],
    ),
    Group(
        files=[
            "batch.py",
            *(f"training/{name}.py" for name in ("update", "metrics", "optimizer", "learner")),
        ],
        suites=["closed_form", "laws", "engine"],
        modules=[
            "posttrain.batch",
            *(f"posttrain.training.{name}" for name in ("update", "metrics", "optimizer", "learner")),
        ],
    ),
    Group(
        files=[
            "models/classifiers/heads.py",
            "training/critic.py",
            "training/credited_step.py",
            "training/reference.py",
        ],
        suites=["closed_form", "laws", "engine", "learning"],
        modules=[
            "posttrain.models.classifiers.heads",
            *(f"posttrain.training.{name}" for name in ("critic", "credited_step", "warm_start", "teacher")),
            "tests.support.stages",
        ],
    ),
    Group(
        files=[
            "models/classifiers/*.py",
            "training/pair_updates.py",
            "training/reward_model/calibration.py",
            "training/dpo/dpo_run.py",
        ],
        suites=["closed_form", "laws", "engine", "reference", "attacks"],
        modules=[
            "posttrain.models.classifiers",
            "posttrain.rewards.model",
            *(f"posttrain.training.{name}" for name in ("fit", "reward_model", "dpo")),
        ],
    ),
    Group(
        files=[
            "variance.py",
            *(f"behaviours/{name}.py" for name in ("behaviour_reader", "behaviour_table")),
            *(f"commands/{name}.py" for name in ("cells", "comparison_report", "phase_list", "phases")),
            "commands/collection/pairs.py",
        ],
        suites=["closed_form", "laws"],
        modules=[
            "posttrain.behaviours",
            "posttrain.variance",
            *(
                f"posttrain.commands.{name}"
                for name in ("collection", "cells", "comparison_report", "phase_list", "phases")
            ),
        ],
    ),
    Group(
        files=["training/collector.py", "training/rl.py"],
        suites=["closed_form", "laws", "engine", "end_to_end"],
        modules=["posttrain.training.collector", "posttrain.training.rl", "posttrain.train", "tests.support.stages"],
    ),
    Group(
        files=["generation/sampling.py", "generation/request.py"],
        suites=["laws"],
        modules=["posttrain.generation.sampling", "posttrain.generation.request"],
    ),
    Group(
        files=["generation/decoding_rows.py", "generation/in_process.py"],
        suites=["engine"],
        modules=["posttrain.generation.in_process"],
    ),
    Group(files=["runs/alarms.py"], suites=["closed_form"], modules=["posttrain.runs.alarms"]),
    Group(
        files=["training/evaluation.py", "runs/intervals.py"],
        suites=["closed_form"],
        modules=["posttrain.training.evaluation", "posttrain.runs.intervals"],
    ),
    Group(
        files=["rewards/grading/grade.py", "options/reward.py"],
        suites=["closed_form", "laws"],
        modules=["posttrain.rewards.grading.grade", "posttrain.options.reward"],
    ),
    Group(
        files=[
            "models/logprobs.py",
            *(f"models/{name}.py" for name in ("forward", "model_outputs")),
            *(
                f"models/shared_prompt/{name}.py"
                for name in (
                    "attention",
                    "decoder",
                    "families",
                    "fused",
                    "linear",
                )
            ),
        ],
        suites=["laws", "engine"],
        modules=[
            *(f"posttrain.models.{name}" for name in ("logprobs", "forward", "shared_prompt", "policy")),
            "posttrain.training.update",
            "tests.support.adapted",
        ],
    ),
    Group(
        files=[
            *(f"runs/{name}.py" for name in ("checkpoint", "tensor_state", "files")),
            "training/trained.py",
        ],
        suites=["closed_form", "engine"],
        modules=[
            *(f"posttrain.runs.{name}" for name in ("checkpoint", "tensor_state", "files")),
            "posttrain.training.trained",
        ],
    ),
    Group(
        files=["models/adapters/*.py"],
        suites=["closed_form", "laws", "engine"],
        modules=["posttrain.models.adapters", "tests.support.adapted"],
    ),
    Group(files=["models/memory/*.py"], suites=["closed_form"], modules=["posttrain.models.memory"]),
    Group(
        files=["tasks/draw_order.py", "tasks/row_files/row_formats.py"],
        suites=["closed_form", "laws"],
        modules=["posttrain.tasks.draw_order", "posttrain.tasks.row_files.row_formats"],
    ),
    Group(
        files=["irl/*.py", "neural_irl.py", "irl_runs/environment.py", "irl_runs/methods.py"],
        suites=["closed_form", "laws", "learning", "end_to_end"],
        modules=["posttrain.irl", "posttrain.neural_irl", "posttrain.irl_runs"],
    ),
]
