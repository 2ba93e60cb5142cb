"""A model measured by itself, apart from any run."""

from dataclasses import replace
from pathlib import Path

from posttrain.config import Config
from posttrain.runs.progress import Progress
from posttrain.tasks.base import Task
from posttrain.training.evaluation import full_evaluation, num_completions
from posttrain.training.session import CallerObjects, Rewards, Rows, open_session


def evaluate(
    model: str | Path,
    config: Config | None = None,
    *,
    task: Task | None = None,
    rewards: Rewards = (),
    rows: Rows | None = None,
    progress: Progress | None = None,
) -> dict[str, object]:
    """What a model can do on held-out problems, with 95% intervals; what `posttrain eval` does.

    The config says which task and how many samples; the model in it is left out of account.  `task` is an object of
    your own in place of what the config describes, `rewards` are functions of your own and `rows` your own prompts.
    `progress` shows how far it is.
    """
    config = config or Config()
    config = replace(config, model=replace(config.model, path=str(model)))
    with open_session(config, CallerObjects(task=task, rewards=rewards, rows=rows)) as session:
        session.load_weights()
        questions, samples = session.questions(), config.evaluation.samples
        if progress is None:
            return full_evaluation(session.engine, questions, samples=samples)[0]
        total = num_completions(questions, samples=samples)
        with progress.stage("completions of held-out problems", total) as advance:
            return full_evaluation(session.engine, questions, samples=samples, advance=advance)[0]
