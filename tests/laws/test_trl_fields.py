"""Every field of TRL 1.16's configs is known with its default, and what becomes of it is said and done.

tests/data/trl_fields.json has the names and defaults as `dataclasses.fields` of TRL's classes gives them.
"""

import json
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import UserError
from posttrain.trl import GRPOConfig, ModelConfig, SFTConfig
from posttrain.trl.configs.field_rules import (
    CheckedFields,
    Treatment,
    default_values,
    lines_about,
    mappings,
    require_values,
)
from posttrain.trl.configs.training_fields import OTHER_ADAMW
from tests.support.refusals import refused

DOCS = Path(__file__).parents[2] / "docs"
STORED = json.loads((Path(__file__).parents[1] / "data" / "trl_fields.json").read_text(encoding="utf-8"))
PAGE = runpy.run_path(str(DOCS / "trl_fields.py"))
CONFIGS: tuple[type[CheckedFields], ...] = PAGE["CONFIGS"]
OTHER_DEFAULTS = {"gradient_checkpointing": False}
"""Where a script that leaves a field out gets something else, which changes memory and no number."""
BY_CLASS = [
    pytest.param(config, name, rule, id=f"{config.__name__}.{name}")
    for config in CONFIGS
    for name, rule in config.field_rules.items()
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_field_of_trl_is_in_the_table_with_its_default(config: type[CheckedFields]) -> None:
    stored, ours = STORED[config.__name__], default_values(config)
    assert stored.keys() - config.field_rules.keys() == set()
    assert config.field_rules.keys() == ours.keys()
    assert {name: ours[name] for name in stored} == stored | {n: d for n, d in OTHER_DEFAULTS.items() if n in stored}
    assert next(iter(ours)) == next(iter(stored)), "the one that scripts give by position"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_a_config_of_defaults_is_honoured_without_a_word(config: type[CheckedFields]) -> None:
    assert [*lines_about(config())] == []


@pytest.mark.parametrize(("config", "name", "rule"), BY_CLASS)
def test_another_value_is_taken_told_or_refused(config: type[CheckedFields], name: str, rule: Any) -> None:
    """And never ignored; a refusal names the field, the value and what to do."""
    assert rule.ours or rule.says, "the table says what becomes of it"
    other = config()
    object.__setattr__(other, name, "another value")
    if rule.treatment is Treatment.REFUSED:
        with pytest.raises(UserError, match=rf"{config.__name__}: {name} = 'another value': \w.* .*\w"):
            list(lines_about(other))
        for honoured in rule.honours:
            object.__setattr__(other, name, honoured)
            assert [*lines_about(other)] == []
    else:
        told = [*lines_about(other)]
        assert len(told) == (rule.treatment is not Treatment.SUPPORTED)
        assert all(name in line and rule.says in line for line in told)


PUBLIC: list[tuple[Any, str, Any, str]] = [
    *(
        (GRPOConfig, "optim", name, "is read as AdamW of torch, with moments in float32")
        for name in OTHER_ADAMW.split()
    ),
    *((SFTConfig, "optim", name, "is read as AdamW of torch, with moments in float32") for name in OTHER_ADAMW.split()),
    *((GRPOConfig, "optim", name, "!give another in `optimizers`") for name in ("lion_8bit", "adafactor", "sgd")),
    (SFTConfig, "optim", "paged_lion_8bit", "!give another in `optimizers`"),
    *((each, "optim", name, "") for each in (GRPOConfig, SFTConfig) for name in ("adamw_torch_fused", "adamw_hf")),
    *((each, "use_liger_kernel", True, "without that package") for each in (GRPOConfig, SFTConfig)),
    *((each, "tf32", True, "torch.set_float32_matmul_precision") for each in (GRPOConfig, SFTConfig)),
    *((each, "fp16", True, "") for each in (GRPOConfig, SFTConfig)),
    *((each, "debug", value, "") for each in (GRPOConfig, SFTConfig) for value in (None, [], [""])),
    (SFTConfig, "packing", True, "rows are not joined, and padding costs nothing here.  An update learns 8 rows"),
    (SFTConfig, "eval_packing", True, "rows are not joined"),
    (SFTConfig, "activation_offloading", True, "use gradient_checkpointing=True"),
    (SFTConfig, "dataset_kwargs", {"skip_prepare_dataset": True}, "rows with `input_ids` are learned as they are"),
    (SFTConfig, "dataset_kwargs", {"add_special_tokens": False}, "opening tokens once"),
    (SFTConfig, "dataset_kwargs", {"append_concat_token": False}, "rows are not joined"),
    (SFTConfig, "dataset_kwargs", {"add_special": False}, "!dataset_kwargs: add_special = False: rows are prepared"),
    (GRPOConfig, "top_k", -1, ""),
    (GRPOConfig, "vllm_sampling_params", object(), "!set temperature, top_p, top_k, min_p"),
    (GRPOConfig, "weight_decay", 0.1, ""),
]
"""Values that public scripts give, with what is said about each; an exclamation mark is a refusal."""


@pytest.mark.parametrize(("config", "name", "value", "says"), PUBLIC)
def test_what_public_scripts_set_is_accepted_with_its_line_or_refused_by_name(
    config: Any, name: str, value: Any, says: str
) -> None:
    args = config(**{name: value})
    require_values(args)
    if says.startswith("!"):
        with refused(f"{config.__name__}: {name}") as caught:
            list(lines_about(args))
        assert says[1:] in str(caught.value)
        return
    told = list(lines_about(args))
    assert len(told) == bool(says)
    assert all(line.startswith(name) and says in line for line in told)


def test_a_field_that_a_script_adds_in_a_subclass_is_its_own() -> None:
    @dataclass
    class Args(GRPOConfig):
        benchmarks: str = "none"

    args: Any = Args(benchmarks="all", max_steps=3)
    require_values(args)
    assert (list(lines_about(args)), args.benchmarks) == ([], "all")


def test_a_default_that_a_script_changes_in_a_subclass_is_a_value_that_it_gives() -> None:
    @dataclass
    class Args(GRPOConfig):
        beta: float = 0.1
        log_completions: bool = True
        optim: str = "lion_8bit"

    with refused("Args: optim = 'lion_8bit'"):
        list(lines_about(Args()))
    assert [line.split()[0] for line in lines_about(Args(optim="adamw_hf"))] == ["log_completions"]


def test_enums_and_mappings_in_json_are_read() -> None:
    from transformers.trainer_utils import SchedulerType

    args = GRPOConfig(lr_scheduler_type=SchedulerType.COSINE, model_init_kwargs='{"revision": "main"}', run_name="{a}")
    assert (args.lr_scheduler_type, args.model_init_kwargs) == ("cosine", {"revision": "main"})
    assert args.run_name == "{a}", "only what may be a mapping is read as one"


@pytest.mark.parametrize("config", [GRPOConfig, SFTConfig], ids=lambda config: config.__name__)
def test_every_mapping_may_be_json_on_a_command_line(config: Any) -> None:
    from transformers import HfArgumentParser

    names = sorted(mappings(config))
    line = [part for name in names for part in (f"--{name}", '{"a": {"b": 1}}')]
    made = HfArgumentParser(config).parse_args_into_dataclasses(line)[0]
    assert {name: vars(made)[name] for name in names} == {name: {"a": {"b": 1}} for name in names}
    assert {"model_init_kwargs", "gradient_checkpointing_kwargs"} <= {*names}


def test_transformers_parser_of_command_lines_reads_the_configs() -> None:
    from transformers import HfArgumentParser

    line = "--output_dir run --warmup_steps 0.1 --report_to wandb --max_steps 3 --lora_target_modules a b"
    args, of_model = HfArgumentParser((GRPOConfig, ModelConfig)).parse_args_into_dataclasses(line.split())
    assert (args.warmup_steps, args.report_to, args.max_steps) == (0.1, "wandb", 3)
    assert of_model.lora_target_modules == ["a", "b"]
    assert HfArgumentParser(SFTConfig).parse_args_into_dataclasses(["--max_length", "8"])[0].max_length == 8


def test_the_page_of_fields_is_made_of_the_tables() -> None:
    page = PAGE["page"]()
    for config, name, _ in (case.values for case in BY_CLASS):
        assert f"| `{name}` |" in page, config
    assert "| `use_vllm` | `False` | nothing to set |" in page
    assert "| `num_generations` | `8` | supported | `rollout.group_size`; a whole number >= 2 |" in page
    assert "trl_fields.write()" in (DOCS / "conf.py").read_text(encoding="utf-8")
