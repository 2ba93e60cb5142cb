"""Evaluation of a model outside of a run."""

from dataclasses import replace
from pathlib import Path

from posttrain.algorithms.algorithm import Algorithm
from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.generation.engine import Engine
from posttrain.models.policy import Policy
from posttrain.runs.progress import Progress
from posttrain.tasks.base import Task
from posttrain.training.caller_objects import CallerObjects, Rewards, Rows
from posttrain.training.evaluation import full_evaluation, num_completions
from posttrain.training.session import open_session


def evaluate(
    model: str | Path | None = None,
    config: Config | None = None,
    *,
    policy: Policy | None = None,
    task: Task | None = None,
    engine: Engine | None = None,
    algorithm: Algorithm | None = None,
    rewards: Rewards = (),
    rows: Rows | None = None,
    held_out_rows: Rows | None = None,
    progress: Progress | None = None,
) -> dict[str, object]:
    """Evaluate a model on held-out problems, with 95% intervals, as `posttrain eval` does.

    The model is a folder, or an object given as `policy`; the one in the config is ignored.  The config gives the task
    and the number of samples.  The objects are those of `posttrain.train`; the algorithm changes no result.
    """
    if (model is None) == (policy is None):
        given = "neither is given" if model is None else f"model = {model} is given and a policy object as well"
        raise UserError(f"evaluate: {given}.  Name the folder of a model, or give policy=, one of them.")
    config = config or Config()
    if model is not None:
        config = replace(config, model=replace(config.model, path=str(model)))
    caller = CallerObjects(
        policy=policy,
        task=task,
        engine=engine,
        algorithm=algorithm,
        rewards=rewards,
        rows=rows,
        held_out_rows=held_out_rows,
    )
    with open_session(config, caller, inference=True) as session:
        session.load_weights()
        questions, samples = session.questions(), config.evaluation.samples
        if not questions.prompts:
            raise UserError(
                f"evaluate: {session.task.name} has no held-out problems.  For a dataset set task.held_out_share, such"
                " as 0.1, or task.held_out_path."
            )
        if config.rewards:  # computed also if the task has its caller measure, which judges
            questions = replace(questions, rewards=session.rewards)
        if progress is None:
            return full_evaluation(session.engine, questions, samples=samples)[0]
        total = num_completions(questions, samples=samples)
        with progress.stage("completions of held-out problems", total) as advance:
            return full_evaluation(session.engine, questions, samples=samples, advance=advance)[0]
