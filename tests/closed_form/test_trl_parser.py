"""TrlParser: fields from a YAML file, over their defaults and below the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

from posttrain import trl
from posttrain.trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser

STORED = json.loads((Path(__file__).parents[1] / "data" / "trl_fields.json").read_text(encoding="utf-8"))
PARTS = (ScriptArguments, GRPOConfig, ModelConfig)


def config(folder: Path, text: str) -> str:
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_the_command_line_goes_over_the_file_and_the_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_TRIED", "before")
    file = config(
        tmp_path,
        "dataset_name: rows\nlearning_rate: 5e-6\nmax_steps: 7\nlora_r: 4\nmodel_init_kwargs: {revision: main}\n"
        "env: {POSTTRAIN_TRIED: 1}\n",
    )
    line = ["--max_steps", "9", "--config", file, "--use_peft"]
    script, args, of_model = TrlParser(PARTS).parse_args_and_config(line)
    assert (script.dataset_name, script.dataset_train_split) == ("rows", "train")
    assert (args.learning_rate, args.max_steps, args.num_generations) == (5e-6, 9, 8)  # YAML reads 5e-6 as text
    assert args.model_init_kwargs == {"revision": "main"}
    assert (of_model.lora_r, of_model.use_peft) == (4, True)
    import os

    assert os.environ["POSTTRAIN_TRIED"] == "1"
    assert TrlParser(GRPOConfig).parse_args_and_config([])[0].max_steps == -1


def test_what_is_no_field_comes_back_where_that_is_asked_for(tmp_path: Path) -> None:
    line = ["--config", config(tmp_path, "max_step: 3"), "--more", "x"]
    *_, rest = TrlParser(PARTS).parse_args_and_config(line, return_remaining_strings=True)
    assert rest == ["--max_step", "3", "--more", "x"]
    made = TrlParser(PARTS).parse_args_and_config(line[:2], fail_with_unknown_args=False)
    assert made[1].max_steps == -1


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
@pytest.mark.parametrize("config", [name for name in STORED if name.endswith("Config")])
def test_every_switch_of_trl_is_a_flag_with_and_without_a_value(config: str, parser: Any) -> None:
    made = parser(getattr(trl, config))
    for name, default in STORED[config].items():
        if isinstance(default, bool):
            said = {(f"--{name}",): True, (f"--{name}", "true"): True, (f"--{name}", "false"): False}
            for line, value in said.items():
                assert getattr(made.parse_args(line), name) is value
            if default:
                (args,) = made.parse_args_into_dataclasses([f"--no_{name}"])
                assert getattr(args, name) is False
