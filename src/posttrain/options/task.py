"""The `task` section of a recipe: one class of options per task, chosen by `name`."""

from posttrain.options.arithmetic import ArithmeticOptions
from posttrain.options.countdown import CountdownOptions
from posttrain.options.dataset import DatasetOptions, GeneratedOptions, ProgramsOptions
from posttrain.options.sentences import SentencesOptions

TaskOptions = (
    CountdownOptions | ArithmeticOptions | SentencesOptions | DatasetOptions | ProgramsOptions | GeneratedOptions
)

TASK_OPTIONS: dict[str, type[TaskOptions]] = {
    "countdown": CountdownOptions,
    "arithmetic": ArithmeticOptions,
    "sentences": SentencesOptions,
    "dataset": DatasetOptions,
    "programs": ProgramsOptions,
    "generated": GeneratedOptions,
}
"""The option class of each task, by the name it has in recipes."""
