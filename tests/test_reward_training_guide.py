"""The guide to training reward models says what is so: its rows, commands, program, recipe and metrics."""

import json
import runpy
import shlex
from pathlib import Path

import yaml
from matplotlib.figure import Figure

from posttrain.cli import main
from posttrain.config import load_recipe
from posttrain.rewards.model import reward_models_in
from posttrain.rewards.reward_registry import load_reward
from posttrain.training.reward_model.calibration import CALIBRATION, WITH_INTERVAL
from tests.support.conversations import save_chat_model
from tests.support.pages import blocks, commands, documented, programs, write_files
from tests.support.pictures import save_blank

PAGE = (Path(__file__).parents[1] / "docs" / "guides" / "reward_model_training.md").read_text(encoding="utf-8")
BLOCKS = blocks(PAGE)


def test_its_commands_its_program_and_its_recipe_do_what_it_says(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", save_blank)
    write_files(BLOCKS, tmp_path)
    save_chat_model(tmp_path / "MODEL")
    look, train = (
        shlex.split(line)[1:] for line in commands(PAGE) if line.startswith("posttrain reward-model --model")
    )
    assert main([*look, "--run.threads", "1"]) == 0
    assert "margins of 1 pairs times 1" in capsys.readouterr().out
    assert main([*train, "--run.threads", "1"]) == 0
    lines = [json.loads(line) for line in Path("runs/rm/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]  # four pairs, one epoch
    assert all(documented(name) for line in lines for name in line)
    (program,) = programs(BLOCKS)
    Path("program.py").write_text(program)
    runpy.run_path("program.py")
    assert capsys.readouterr().out.splitlines()[-1] == "2 4"
    recipe = yaml.safe_load(Path("several.yaml").read_text())
    (item,) = load_recipe(**recipe).rewards
    assert len(reward_models_in(load_reward(item).call)) == 2


def test_every_measure_of_held_out_pairs_is_on_the_page_of_metrics() -> None:
    names = [f"eval/{name}{end}" for name in WITH_INTERVAL for end in ("", "_low", "_high")] + [
        f"eval/{name}" for name in CALIBRATION
    ]
    assert all(documented(name) for name in [*names, "eval/mean_reward", "eval/reward_std", "accuracy", "margin"])
