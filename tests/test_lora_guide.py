"""The page on adapters: its recipe is one, its program runs, and the recipe that it types is bundled."""

from pathlib import Path

import pytest
import yaml

from posttrain.config import load_recipe
from posttrain.config.reading import resolved_config
from tests.support.pages import blocks, commands, programs, python

PAGE = (Path(__file__).parents[1] / "docs" / "guides" / "lora.md").read_text(encoding="utf-8")


def test_its_section_is_one_of_a_recipe() -> None:
    pytest.importorskip("bitsandbytes")
    (text,) = (text for language, _, text in blocks(PAGE) if language == "yaml")
    config = load_recipe(**yaml.safe_load(text))
    assert (config.model.adapter.rank, config.model.adapter.targets) == (16, ("all-linear",))
    assert resolved_config(config).update.learning_rate == 1e-5


def test_its_program_runs(tmp_path: Path) -> None:
    (program,) = programs(blocks(PAGE))
    done = python(program, tmp_path)
    assert done.code == 0, done.err
    assert done.out.strip() == "8960 parameters are trained"  # 4 layers × 4 × ((160 + 160) + (160 + 80))


def test_the_recipes_that_it_types_are_bundled_and_make_a_run_with_an_adapter() -> None:
    (typed,) = (line for line in commands(PAGE) if " rl " in line)
    names = [word for word in typed.split() if word.startswith("countdown-")]
    config = load_recipe(*names)
    assert config.model.adapter is not None
    assert config.algorithm["kl"]["coefficient"] == 0.03
    assert config.update.learning_rate == 1e-3
