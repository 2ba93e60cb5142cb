"""Recipes of a few lines that would never end, or fill all memory: each is one error, by file and line."""

from pathlib import Path

import pytest
import yaml

from posttrain.config.recipe_yaml import DEEPEST, MOST_VALUES, parse_yaml
from posttrain.config.recipes import RecipeLayer, merge
from tests.support.commands import refusal
from tests.support.refusals import refused

LISTS = "\n".join(f"  l{n}: &l{n} [{', '.join([f'*l{n - 1}' if n else 'x'] * 10)}]" for n in range(11))
MAPPINGS = "\n".join(f"  l{n}: &l{n} {{{', '.join(f'k{k}: *l{n - 1}' for k in range(10))}}}" for n in range(1, 11))
RECIPES = {
    "lists of lists": (f"algorithm:\n{LISTS}\n", f"more than {MOST_VALUES} values"),
    "mappings of mappings": (f"algorithm:\n  l0: &l0 x\n{MAPPINGS}\n", f"more than {MOST_VALUES} values"),
    "a list within itself": ("rewards: &r [*r]\n", "*r contains itself"),
    "a mapping within itself": ("model: &m {template_options: *m}\n", "*m contains itself"),
    "brackets": (f"rewards: {'[' * 5000}{']' * 5000}\n", f"more than {DEEPEST} deep"),
    "braces": (f"rewards: {'{a: ' * 5000}{'}' * 5000}\n", f"more than {DEEPEST} deep"),
    "a long integer": (f"run:\n  seed: {'9' * 10_000}\n", "an integer of 10000 digits"),
    "many keys": ("run:\n" + "".join(f"  k{n}: 1\n" for n in range(30_000)), f"more than {MOST_VALUES} values"),
    "much text": (f"model: {'x' * 2_000_000}\n", "a recipe has at most 1000000"),
}


@pytest.mark.parametrize("named", RECIPES)
def test_a_recipe_that_would_never_end_is_one_error(named: str, tmp_path: Path) -> None:
    text, says = RECIPES[named]
    (tmp_path / "recipe.yaml").write_text(text)
    said = refusal("config", tmp_path / "recipe.yaml")
    assert said.startswith(f"posttrain: {tmp_path}/recipe.yaml:")
    assert len(said.splitlines()) == 1
    with refused(says, error=yaml.YAMLError):
        parse_yaml(text)


def test_of_many_mistakes_the_first_are_told(tmp_path: Path) -> None:
    keys = "".join(f"k{n}: 1\n" for n in range(1_500))
    (tmp_path / "recipe.yaml").write_text(f"{keys}run: {{{keys.strip().replace(chr(10), ', ')}}}\n")
    assert len(refusal("config", tmp_path / "recipe.yaml").splitlines()) <= 40


def test_an_honest_recipe_may_repeat_itself_by_aliases() -> None:
    assert parse_yaml("a: &a {b: [1, 2]}\nc: *a\nd: {<<: *a, e: 3}\n") == {
        "a": {"b": [1, 2]},
        "c": {"b": [1, 2]},
        "d": {"b": [1, 2], "e": 3},
    }


def test_what_a_section_said_before_it_was_renamed_is_forgotten() -> None:
    layers = [
        RecipeLayer(where="one", sections={"algorithm": {"name": "dapo", "clip_high": 0.3}}),
        RecipeLayer(where="two", sections={"algorithm": {"name": "grpo"}}),
    ]
    merged = merge(layers)
    assert merged.sections == {"algorithm": {"name": "grpo"}}
    assert merged.origins == {"algorithm": "two", "algorithm.name": "two"}
