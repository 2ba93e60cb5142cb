"""What tells files, rows and functions of a run from others, as inputs.json keeps it; a resume compares them all."""

import copy
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import posttrain
import posttrain.config
import posttrain.options
from posttrain.config import load_recipe
from posttrain.config.reading import AnyConfig
from posttrain.config.sections import CollectConfig, Config
from posttrain.runs.named_inputs import named_files, named_options
from posttrain.runs.run_inputs import code_input
from posttrain.schemas import field_docs
from posttrain.training.session import CallerObjects, inputs_of
from tests.support.own_objects import ROWS, inputs


def test_rows_of_a_generator_are_taken_once_and_are_those_of_a_list() -> None:
    own = CallerObjects(rows=(row for row in ROWS))
    assert inputs_of(posttrain.Config(), own) == inputs_of(posttrain.Config(), own) == inputs(rows=ROWS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([1]), np.array([2])),
        (np.array([1]), np.array([1.0])),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
        (np.int64(3), np.int64(4)),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)),
        (torch.tensor(True), torch.tensor(False)),
        (torch.tensor([1.0], requires_grad=True), torch.tensor([1.5], requires_grad=True)),
        (b"ab", b"ac"),
    ],
    ids=str,
)
def test_arrays_and_tensors_in_rows_are_known_by_their_content(one: Any, other: Any) -> None:
    known = [inputs(rows=[{"prompt": "a", "x": each}]) for each in (one, copy.deepcopy(one), other)]
    assert known[0] == known[1]
    assert known[2].objects["rows"].differs(known[0].objects["rows"])


CODE = """import functools
import re
import digested_helper as hh
from digested_helper import inner

FOUND = re.compile("a+")
FACTOR, NUM_CALLS = 1.0, 0


def helper(text):
    return float(len(text))


def repeated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return [1 * each for each in function(*args, **kwargs)]

    return wrapper


class Base:
    def scored(self, text):
        return 1.0 + len(text)


class Scorer(Base):
    def __call__(self, completions, **columns):
        return [self.scored(each) + helper(each) for each in completions]

    def method(self, completions, **columns):
        return [0 * helper(each) for each in completions] and self(completions)


def plain(completions, **columns):
    return [helper(each) for each in completions]


def through(completions, **columns):
    return [outer(each) + len(FOUND.findall(each)) for each in completions]


def counted(completions, **columns):
    global NUM_CALLS
    NUM_CALLS += 1
    return [(lambda: FACTOR)() for each in completions]


def outer(text):
    return [helper(each) for each in text] and through and 0.0


def imported(completions, **columns):
    return [hh.inner(each) for each in completions]


def by_name(completions, **columns):
    return [inner(each) for each in completions]


@repeated
def wrapped(completions, **columns):
    return [0.0 for each in completions]


@functools.cache
def cached(completions, **columns):
    return [helper(each) for each in completions]


instance, method = Scorer(), Scorer().method
"""
CHANGES = {
    "instance": [("float(len", "2 * (len"), ("1.0 + len", "2.0 + len")],
    "method": [("float(len", "2 * (len"), ("1.0 + len", "2.0 + len")],
    "plain": [("float(len", "2 * (len")],
    "through": [("float(len", "2 * (len"), ('"a+"', '"b+"'), ("and 0.0", "and 1.0")],
    "counted": [("FACTOR, NUM_CALLS = 1.0", "FACTOR, NUM_CALLS = 2.0")],
    "wrapped": [("1 * each", "2 * each")],
    "cached": [("float(len", "2 * (len")],
    "imported": [("LIMIT = 1", "LIMIT = 2"), ("text) + ", "text) - ")],
    "by_name": [("LIMIT = 1", "LIMIT = 2"), ("text) + ", "text) - ")],
}
HELPER = "LIMIT = 1\n\n\ndef inner(text):\n    return len(text) + LIMIT\n"


@pytest.mark.parametrize("main", [False, True], ids=["imported", "__main__"])
@pytest.mark.parametrize("name", CHANGES)
def test_code_that_a_reward_reads_by_name_belongs_to_it(name: str, main: bool, tmp_path: Path, monkeypatch) -> None:
    def digest_with(was: str, now: str, number: int) -> str:
        """Of the reward in a module of its own, after a change to it or to its helper."""
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "digested_helper.py").write_text(HELPER.replace(was, now))
        (folder / "digested.py").write_text(CODE.replace(was, now))
        monkeypatch.syspath_prepend(str(folder))
        for each in ("digested", "digested_helper"):
            monkeypatch.delitem(sys.modules, each, raising=False)
        spec = spec_from_file_location("__main__" if main else "digested", folder / "digested.py")
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        found = code_input(name, getattr(module, name)).digest
        assert code_input(name, getattr(module, name)).digest == found  # which a call leaves as it is
        getattr(module, name)(("a",))
        assert code_input(name, getattr(module, name)).digest == found
        return found

    same = digest_with("", "", 0)
    assert same == digest_with("", "", 1) != ""
    unread = digest_with("instance, method", "other = 1\ninstance, method", 2)
    assert (unread == same) == main  # the file of `__main__` may change where the reward does not read it
    assert all(digest_with(*change, 3 + n) not in (same, "") for n, change in enumerate(CHANGES[name]))


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
            "environment": {"path": "mine.py:Replies"},
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
    "EnvironmentOptions.path": "environment.path",
    "LlmJudgeOptions.principles": "judge.principles",
}
WRITTEN = "the run writes it"
STEP_0 = "is read before the first step, and the checkpoint of step 0 holds what came of it"
NO_RESUME = "`posttrain irl` is not resumed"
ELSEWHERE = {
    "CollectRunOptions.folder": WRITTEN,
    "RunOptions.folder": WRITTEN,
    "GradingOptions.cache_file": WRITTEN,
    "HttpOptions.transfer_folder": WRITTEN,
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
            named = vars(import_module(module.name)).values()
            found |= {each for each in named if isinstance(each, type) and is_dataclass(each)}
    for options in (each for each in found if each.__name__.endswith(("Options", "Features"))):
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
