"""A resume compares every file and folder that an option names, or a list here says why not."""

import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path

import pytest

import posttrain.config
import posttrain.options
from posttrain.config import load_recipe
from posttrain.config.reading import AnyConfig
from posttrain.config.sections import CollectConfig, Config
from posttrain.runs.named_inputs import named_files, named_options
from posttrain.schemas import field_docs

RM = {"model": "rm", "ensemble": ["rm2"], "chat_template": "rm.jinja"}
CONFIGS: list[tuple[type[AnyConfig], Mapping[str, object]]] = [
    (
        Config,
        {
            "model": {"path": "model", "chat_template": "t.jinja"},
            "task": {"name": "dataset", "path": "rows.jsonl", "held_out_path": "apart.jsonl"},
            "rewards": [{"path": "mine.py:score"}, RM],
            "algorithm": {"name": "ppo", "kl": {"coefficient": 0.1}, "critic": {"path": "critic", "trunk": "own"}},
            "reference": {"path": "reference"},
            "behaviours": {"file": "more.yaml"},
        },
    ),
    (Config, {"algorithm": {"name": "distill", "teacher": {"model": "teacher"}}}),
    (CollectConfig, {"judge": {"name": "llm", "endpoint": "http://127.0.0.1:1", "model": "m", "principles": "p.yaml"}}),
]
"""Recipes that name something by each of these options."""
NAMED = {
    "ModelOptions.path": "model.path",
    "ModelOptions.chat_template": "model.chat_template",
    "RowSourceOptions.path": "task.path",
    "DatasetOptions.held_out_path": "task.held_out_path",
    "ProgramsOptions.path": "task.path",
    "RewardOptions.path": "rewards[0].path",
    "RewardModelOptions.model": "rewards[1].model",
    "EnsembleOptions.ensemble": "rewards[1].ensemble[0]",
    "RewardModelOptions.chat_template": "rewards[1].chat_template",
    "CriticOptions.path": "algorithm.critic.path",
    "TeacherOptions.model": "algorithm.teacher.model",
    "ReferenceOptions.path": "reference.path",
    "BehaviourOptions.file": "behaviours.file",
    "LlmJudgeOptions.principles": "judge.principles",
}
WRITTEN = "the run writes it"
STEP_0 = "is read before the first step, and the checkpoint of step 0 holds what came of it"
NO_RESUME = "`posttrain irl` is not resumed"
ELSEWHERE = {
    "CollectRunOptions.folder": WRITTEN,
    "RunOptions.folder": WRITTEN,
    "GradingOptions.cache_file": WRITTEN,
    "UpdateOptions.optimizer_from": STEP_0,
    "CriticOptions.warm_start": STEP_0,
    "FileFeatures.path": NO_RESUME,
    "RecoveryOptions.folder": NO_RESUME,
    "TableOptions.path": NO_RESUME,
    "RecordedOptions.path": NO_RESUME,
    "LlmJudgeOptions.model": "is the name of a model behind an endpoint",
    "RewardOptions.name": "is a name; it speaks of a folder",
    "BehaviourOptions.measure": "are names; it speaks of a file",
    "TrackerOptions.name": "is a name; it speaks of a folder",
    "MixtureSourceOptions.name": "is a name; it speaks of a file",
    "RowSourceOptions.split": "is a part of what `path` names",
    "RowSourceOptions.json_columns": "are parts of what `path` names",
    "TeacherOptions.template": "is the text itself",
    "RowSourceOptions.delimiter": "is a character of what `path` names",
}


def options_about_files() -> Iterator[str]:
    """Texts, or lists of them, among all options, whose name or meaning speaks of a file or a folder."""
    found = set()
    for package in (posttrain.options, posttrain.config):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            found |= {each for each in vars(import_module(module.name)).values() if is_dataclass(each)}
    for options in (
        each for each in found if isinstance(each, type) and each.__name__.endswith(("Options", "Features"))
    ):
        docs, own = field_docs(options), vars(options).get("__annotations__", {})
        for each in fields(options):
            says = re.search(r"\b(files?|folders?|FILE|RUN)\b|\bA run\b|named as `", docs.get(each.name, ""))
            called = re.search(r"path|file|folder|template$|^model$", each.name)
            if each.name in own and each.type in (str, tuple[str, ...]) and (says or called):
                yield f"{options.__name__}.{each.name}"


def test_every_option_that_names_a_file_is_compared_by_a_resume_or_has_a_reason() -> None:
    configs = [load_recipe(kind=kind, **recipe) for kind, recipe in CONFIGS]
    named = {each.option for config in configs for each in named_options(config)}
    assert set(options_about_files()) <= NAMED.keys() | ELSEWHERE.keys()
    assert set(NAMED.values()) <= named


@pytest.mark.parametrize("option", ["rewards[0].chat_template", "behaviours.file"])
def test_a_changed_file_that_an_option_names_is_noticed(option: str, tmp_path: Path) -> None:
    file = tmp_path / "named"
    file.write_text("one")
    (tmp_path / "config.json").write_text("{}")  # of the reward model
    rewards = [{"model": str(tmp_path), "chat_template": str(file)}] if "rewards" in option else []
    config = load_recipe(rewards=rewards, behaviours={} if rewards else {"file": str(file)})
    began = named_files(config)
    file.write_text("other")
    assert [name for name, now in named_files(config).items() if now.differs(began[name])] == [option]
