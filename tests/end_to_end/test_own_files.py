"""An algorithm and a task from a file of the user's own: chosen, checked, printed and run as the package's own are."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import build_algorithm
from posttrain.cli import main
from posttrain.config import Config, as_recipe, build, load_recipe
from posttrain.config.reading import resolved_config as in_full
from posttrain.config.recipes import RecipeLayer, parse_yaml
from posttrain.tasks.task_registry import load_task
from tests.support import dice
from tests.support.commands import printed, refusal
from tests.support.refusals import refused
from tests.support.runs import metrics_of, save_tiny_model
from tests.support.tiny import token_loss

MINE = '''
from dataclasses import replace
from typing import Annotated, Literal
import torch
from typing_extensions import Doc
from posttrain.algorithms.credit import per_rollout
from posttrain.algorithms.table import grpo
from posttrain.algorithms.terms import KlTerm
from posttrain.errors import UserError
from posttrain.rewards.grading.function import reward_function
from posttrain.tasks.base import Probe, Reading, Task

made = []

def narrow(*, width: float = 0.1, side: Literal["low", "high"] = "low",
           kl: Annotated[KlTerm | None, Doc("A pull.")] = None,
           free=3, base=grpo, times: Annotated[int, Doc("How often.")] = 1):
    """A clip of one width."""
    if width > 1:
        raise UserError(f"width = {width}: use at most 1")
    made.append(free)
    return base(clip_low=width, clip_high=width, kl=kl)

def pulled(*, kl: KlTerm | None = KlTerm(coefficient=0.5, estimator="k1")):
    return grpo(kl=kl)

def signs(*, size: float = 1.0):
    """Only on which side of its group's mean a reward is."""
    rule = per_rollout(lambda rewards: size * (rewards - rewards.mean(dim=1, keepdim=True)).sign())
    return replace(grpo(), name="signs", credit=rule)

def no_algorithm():
    return 5

def by_position(width, /):
    return grpo()

def of_a_tensor(*, weights: torch.Tensor):
    return grpo()

def of_no_known_type(*, width: "Width" = 1):
    return grpo()

def called_by_name(*, name: str = "x"):
    return grpo()

def says(completions, want, **columns):
    return [float(letter in text) for text, letter in zip(completions, want)]

class Letters(Task):
    """Say a letter."""

    name = "letters"

    def __init__(self, renderer, *, seed, letters: str = "abc", size: int = 4, level=None):
        if size < 1:
            raise UserError(f"size = {size}: use >= 1")
        self.renderer, self.seed, self.letters, self.size, self.level = renderer, seed, letters, size, level
        self.reward_functions = (reward_function(says),)

    def one(self, number):
        letter = self.letters[number % len(self.letters)]
        return self.renderer.render(f"Say {letter}.", id=f"letter/{number}", prefill="", columns={"want": letter})

    def prompts(self, step, draws):
        return [self.one(10 * step + draw + self.seed) for draw in draws]

    def held_out(self):
        return [self.one(number) for number in range(self.size)]

    def probes(self):
        return {"vowels": Probe(readings={"vowel_share": Reading("share of vowels")}, measure=vowels)}

def vowels(groups):
    text = "".join(rollout.text for group in groups for rollout in group.rollouts)
    return {"vowel_share": sum(letter in "aeiou" for letter in text) / max(len(text), 1)}

class Bare:
    name = "bare"

    def __init__(self, renderer, *, seed):
        pass

class WithoutInit(Task):
    name = "without"

    def prompts(self, step, draws):
        return []

    def held_out(self):
        return []

class WithoutSeed:
    def __init__(self, renderer, size=1):
        pass
'''


@pytest.fixture(autouse=True)
def in_a_folder_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)


def from_text(text: str) -> Config:
    sections = parse_yaml(text)
    assert isinstance(sections, dict)
    return build(Config, [RecipeLayer(where="test", sections=sections)])


def resolved(*argv: str) -> dict:
    sections = parse_yaml(printed("config", *argv))
    assert isinstance(sections, dict)
    return sections


def test_the_signature_of_the_function_is_the_schema_of_the_section() -> None:
    config = from_text("algorithm: {path: 'mine.py:narrow', width: 0.3, kl: {coefficient: 1}}")
    kl = {"coefficient": 1.0, "estimator": "k3", "place": "loss", "importance": None, "level": "token"}
    # `base` is none of the options: its default is a function, which no recipe can say.
    spelled = {"path": "mine.py:narrow", "width": 0.3, "side": "low", "kl": kl, "free": 3, "times": 1}
    assert config.algorithm == spelled
    built = build_algorithm(config.algorithm)
    assert [term.coefficient for term in built.terms] == [1.0, 1.0]
    assert largest_gain(built) == pytest.approx(1.3)
    pulled = from_text("algorithm: 'mine.py:pulled'").algorithm
    assert pulled["kl"] == {**kl, "coefficient": 0.5, "estimator": "k1"}
    assert [(term.name, term.coefficient) for term in build_algorithm(pulled).terms] == [("policy", 1.0), ("kl", 0.5)]
    assert len(build_algorithm({"path": "mine.py:pulled", "kl": None}).terms) == 1


def largest_gain(algorithm: Algorithm) -> float:
    """What a token of advantage 1 gains where its ratio, e, is beyond any bound: the upper end of the clip."""
    ones = torch.ones(1, dtype=torch.float64)
    first = torch.zeros(1, dtype=torch.int64)
    return -token_loss(algorithm, ones, 0 * ones, ones, first, reference=ones).item()


def test_recipe_flags_and_python_say_the_same_and_the_printed_recipe_says_it_again() -> None:
    recipe = "{algorithm: {path: 'mine.py:narrow', width: 0.3, free: [1, x]}, task: {path: 'mine.py:Letters', size: 2}}"
    config = from_text(recipe)
    Path("recipe.yaml").write_text(recipe)
    assert config.task == {"path": "mine.py:Letters", "letters": "abc", "size": 2, "level": None}
    flags = "--algorithm.path mine.py:narrow --algorithm.width 0.3 --algorithm.free [1,x]"
    by_flags = resolved(*flags.split(), "--task.path=mine.py:Letters", "--task.size", "2")
    assert by_flags == resolved("recipe.yaml") == parse_yaml(as_recipe(config))
    algorithm = {"path": "mine.py:narrow", "width": 0.3, "free": [1, "x"]}
    assert load_recipe(algorithm=algorithm, task={"path": "mine.py:Letters", "size": 2}) == config
    assert Config(algorithm=algorithm, task={"path": "mine.py:Letters", "size": 2}) == config
    assert load_recipe(algorithm="mine.py:narrow") == from_text("algorithm: {path: 'mine.py:narrow'}")
    assert from_text(as_recipe(config)) == in_full(config)


def test_choosing_another_one_starts_its_options_afresh() -> None:
    Path("own.yaml").write_text("{algorithm: {path: 'mine.py:narrow', width: 0.3}, task: 'mine.py:Letters'}")
    Path("named.yaml").write_text("{algorithm: {name: grpo, clip_low: 0.1}, task: {name: dataset, path: rows.jsonl}}")
    to_named = resolved("own.yaml", "--algorithm.name", "grpo", "--task.name", "countdown")
    assert to_named["algorithm"] == Config().algorithm
    assert to_named["task"]["name"] == "countdown"
    to_own = resolved("named.yaml", "--algorithm.path", "mine.py:narrow", "--task.path", "mine.py:Letters")
    assert to_own["algorithm"]["width"] == 0.1
    assert to_own["task"] == {"path": "mine.py:Letters", "letters": "abc", "size": 4, "level": None}
    # The rows of a dataset are a path too, and no other task.
    assert resolved("named.yaml", "--task.path", "other.jsonl")["task"]["name"] == "dataset"


MISTAKES = {
    "algorithm: {path: 'mine.py:narrow', widht: 1}": "algorithm.widht: no such field.  Did you",
    "algorithm: {path: 'mine.py:narrow', width: x}": "algorithm.width = 'x' should be a number",
    "algorithm: {path: 'mine.py:narrow', side: lo}": "should be 'low' or 'high'.  Did you mean `low`?",
    "algorithm: {path: 'mine.py:narrow', width: 2}": "algorithm: width = 2.0: use at most 1",
    "algorithm: {path: 'other.py:narrow'}": "algorithm: other.py: no such file.",
    "algorithm: {path: 'mine.py:narow'}": "mine.py has no function `narow`.  Did you mean `narrow`?",
    "algorithm: {path: mine.py}": "algorithm.path = mine.py is not FILE.py:FUNCTION, such as",
    "algorithm: {path: 'mine.py:Letters'}": "algorithm: mine.py:Letters is a class, not a function",
    "algorithm: 'mine.py:no_algorithm'": "mine.py:no_algorithm returned 5 (int); return a",
    "algorithm: 'mine.py:by_position'": "cannot be called as (**options): missing a required",
    "algorithm: 'mine.py:of_a_tensor'": "of_a_tensor has an option of a type that a recipe cannot",
    "algorithm: 'mine.py:of_no_known_type'": "name 'Width' is not defined",
    "algorithm: 'mine.py:called_by_name'": "`name` chooses it in a recipe",
    "algorithm: {name: grpo, path: 'mine.py:narrow'}": "name = grpo and path = mine.py:narrow are both given",
    "task: {path: 'mine.py:Letters', sise: 2}": "task.sise: no such field.  Did you mean `size`?",
    "task: {path: 'mine.py:Letters', size: x}": "task.size = 'x' should be a whole number",
    "task: {path: 'mine.py:Letters', seed: 2}": "task.seed: no such field",
    "task: {path: 'mine.py:Leters'}": "task: mine.py has no class `Leters`.  Did you mean `Letters`?",
    "task: {path: 'mine.py:narrow'}": "task: mine.py:narrow is a function, not a class",
    "task: {path: 'mine.py:WithoutSeed'}": "cannot be called as (renderer, *, seed, **options)",
    "task: {path: 'mine.py:WithoutInit'}": "it has no `__init__`, and that of Task takes nothing",
}


@pytest.mark.parametrize(("recipe", "says"), MISTAKES.items())
def test_a_mistake_is_told_as_for_what_comes_with_the_package(recipe: str, says: str) -> None:
    Path("recipe.yaml").write_text(recipe)
    told = refusal("config", "recipe.yaml")
    assert says in told
    assert told.startswith("posttrain: recipe.yaml: ")
    assert "Traceback" not in told


class Renderer:
    """What a task renders with, of no use here."""

    def render(self, *arguments: object, **named: object) -> None: ...


def test_a_class_that_is_no_task_is_told_what_it_lacks() -> None:
    with refused("mine.py:Bare", "held_out", "prompts"):
        load_task({"path": "mine.py:Bare"}, Renderer(), seed=0, prompts_per_step=1)
    with refused("size = 0", ">= 1"):
        load_task({"path": "mine.py:Letters", "size": 0}, Renderer(), seed=0, prompts_per_step=1)
    with refused("rows: ", "mine.py:Letters"):
        load_task({"path": "mine.py:Letters"}, Renderer(), seed=0, prompts_per_step=1, rows=[{"prompt": "x"}])
    made = load_task({"path": "mine.py:Letters", "size": 3}, Renderer(), seed=7, prompts_per_step=1)
    assert (made.seed, made.size, made.name) == (7, 3, "letters")


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """A step of a tiny model on the file's task."""
    save_tiny_model(tmp_path / "model")
    return {
        "model": {"path": "model"},
        "task": {"path": "mine.py:Letters", "letters": "xy"},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 6},
        "evaluation": {"samples": 1, "brief_problems": 2},
        "run": {"folder": "first", "num_steps": 1, "threads": 1},
    }


def test_a_run_with_both_can_be_planned_and_its_saved_recipe_runs_again(recipe: dict[str, Any], capsys) -> None:
    sections = {**recipe, "algorithm": {"path": "mine.py:narrow", "width": 0.5}}
    Path("recipe.yaml").write_text(json.dumps(sections))
    assert "letters, 4 held-out problems" in printed("rl", "recipe.yaml", "--dry-run")
    assert not Path("first").exists()
    assert main(["rl", "recipe.yaml"]) == 0
    assert "path: mine.py:Letters" in Path("first/config.yaml").read_text()
    label = re.search(r"^share of vowels +(\S+) +(\S+)$", capsys.readouterr().out, flags=re.MULTILINE)
    summary = json.loads(Path("first/summary.json").read_text())
    assert list(label.groups()) == [f"{summary[when]['vowel_share']:.3f}" for when in ("before", "after")]
    assert main(["rl", "first/config.yaml", "--run.folder", "again"]) == 0
    assert metrics_of(Path("first")) == metrics_of(Path("again"))


def test_credit_of_ones_own_is_what_a_run_trains_with(recipe: dict[str, Any]) -> None:
    Path("recipe.yaml").write_text(json.dumps(recipe))
    algorithm = ("--algorithm.path", "mine.py:signs", "--algorithm.size", "0.5", "--rollout.group-size", "4")
    Path("dice.py").write_text(Path(dice.__file__).read_text())
    assert "algorithm  signs, learning rate" in printed("rl", "recipe.yaml", *algorithm, "--rewards", "dice.py:dice")
    rows = parquet.read_table("first/rollouts/step-000001.parquet").to_pylist()
    rewards = torch.tensor([row["reward"] for row in rows]).view(2, 4)
    expected = 0.5 * (rewards - rewards.mean(dim=1, keepdim=True)).sign()
    assert {0.5, -0.5} <= set(expected.flatten().tolist()), "of no use: nothing to tell apart"
    assert [row["advantage"] for row in rows] == expected.flatten().tolist()


AT_THE_RUN = {
    "what is no task": ({"task": "mine.py:Bare"}, "task: mine.py:Bare lacks held_out, prompts; inherit from"),
    "a rule of the task": ({"task": {"path": "mine.py:Letters", "size": 0}}, "task: size = 0: use >= 1"),
}


@pytest.mark.parametrize("mistake", AT_THE_RUN)
@pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=["run", "plan"])
def test_a_mistake_ends_a_run_before_it_leaves_anything(
    mistake: str, flags: tuple[str, ...], recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    sections, says = AT_THE_RUN[mistake]
    Path("recipe.yaml").write_text(json.dumps({**recipe, **sections}))
    assert main(["rl", "recipe.yaml", *flags]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("posttrain: ")
    assert says in told.err
    assert "Traceback" not in told.err
    assert not Path("first").exists()
