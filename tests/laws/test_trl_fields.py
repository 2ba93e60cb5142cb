"""Every field of TRL 1.16's configs is known with its default, and what becomes of it is said and done.

tests/data/trl_fields.json has the names and defaults as `dataclasses.fields` of TRL's classes gives them.
"""

import json
import runpy
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer as TheirTrainer

from posttrain.errors import UserError
from posttrain.trl import DPOTrainer, GRPOConfig, GRPOTrainer, ModelConfig, SFTConfig, SFTTrainer
from posttrain.trl.configs import field_rules
from posttrain.trl.configs.training_fields import OTHER_ADAMW
from posttrain.trl.names_elsewhere import NAMES, TRAINER_NAMES, not_here
from tests.support.refusals import refused
from tests.support.runs import save_tiny_model
from tests.support.trl_trainers import PROMPTS, length

DOCS = Path(__file__).parents[2] / "docs"
STORED = json.loads((Path(__file__).parents[1] / "data" / "trl_fields.json").read_text(encoding="utf-8"))
PAGE = runpy.run_path(str(DOCS / "trl_fields.py"))
CONFIGS: tuple[type[field_rules.CheckedFields], ...] = PAGE["CONFIGS"]
OTHER_DEFAULTS = {"gradient_checkpointing": False}
"""Where a script that leaves a field out gets something else, which changes memory and no number."""
BY_CLASS = [
    pytest.param(config, name, rule, id=f"{config.__name__}.{name}")
    for config in CONFIGS
    for name, rule in config.field_rules.items()
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_field_of_trl_is_in_the_table_with_its_default(config: type[field_rules.CheckedFields]) -> None:
    stored, ours = STORED[config.__name__], field_rules.default_values(config)
    assert stored.keys() - config.field_rules.keys() == set()
    assert config.field_rules.keys() == ours.keys()
    assert {name: ours[name] for name in stored} == stored | {n: d for n, d in OTHER_DEFAULTS.items() if n in stored}
    assert next(iter(ours)) == next(iter(stored)), "the one that scripts give by position"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_a_config_of_defaults_is_honoured_without_a_word(config: type[field_rules.CheckedFields]) -> None:
    assert [*field_rules.lines_about(config())] == []


@pytest.mark.parametrize(("config", "name", "rule"), BY_CLASS)
def test_another_value_is_taken_told_or_refused(config: type[field_rules.CheckedFields], name: str, rule: Any) -> None:
    """And never ignored; a refusal names the field, the value and what to do."""
    assert rule.ours or rule.says, "the table says what becomes of it"
    other = config()
    object.__setattr__(other, name, "another value")
    if rule.treatment is field_rules.Treatment.REFUSED:
        with pytest.raises(UserError, match=rf"{config.__name__}: {name} = 'another value': \w.* .*\w"):
            list(field_rules.lines_about(other))
        for honoured in rule.honours:
            object.__setattr__(other, name, honoured)
            assert [*field_rules.lines_about(other)] == []
    else:
        told = [*field_rules.lines_about(other)]
        assert len(told) == (rule.treatment is not field_rules.Treatment.SUPPORTED)
        assert all(name in line and rule.says in line for line in told)


READ_AS = "is read as AdamW of torch, with moments in float32"
OF_BOTH: list[tuple[str, Any, str]] = [
    *(("optim", name, READ_AS) for name in OTHER_ADAMW.split()),
    *(("optim", name, "") for name in ("adamw_torch_fused", "adamw_hf")),
    ("use_liger_kernel", True, "without that package"),
    ("tf32", True, "torch.set_float32_matmul_precision"),
    ("fp16", True, ""),
    *(("debug", value, "") for value in (None, [], [""])),
]
PUBLIC: list[tuple[Any, str, Any, str]] = [
    *((config, *case) for config in (GRPOConfig, SFTConfig) for case in OF_BOTH),
    *((GRPOConfig, "optim", name, "!give another in `optimizers`") for name in ("lion_8bit", "adafactor", "sgd")),
    (SFTConfig, "optim", "paged_lion_8bit", "!give another in `optimizers`"),
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
def test_what_public_scripts_set_is_accepted_with_its_line_or_refused_by_name(config, name, value, says) -> None:
    args = config(**{name: value})
    field_rules.require_values(args)
    if says.startswith("!"):
        with refused(f"{config.__name__}: {name}") as caught:
            list(field_rules.lines_about(args))
        assert says[1:] in str(caught.value)
        return
    told = list(field_rules.lines_about(args))
    assert len(told) == bool(says)
    assert all(line.startswith(name) and says in line for line in told)


def test_a_field_that_a_script_adds_in_a_subclass_is_its_own() -> None:
    @dataclass
    class Args(GRPOConfig):
        benchmarks: str = "none"

    args: Any = Args(benchmarks="all", max_steps=3)
    field_rules.require_values(args)
    assert (list(field_rules.lines_about(args)), args.benchmarks) == ([], "all")


def test_a_default_that_a_script_changes_in_a_subclass_is_a_value_that_it_gives() -> None:
    @dataclass
    class Args(GRPOConfig):
        beta: float = 0.1
        log_completions: bool = True
        optim: str = "lion_8bit"

    with refused("Args: optim = 'lion_8bit'"):
        list(field_rules.lines_about(Args()))
    assert [line.split()[0] for line in field_rules.lines_about(Args(optim="adamw_hf"))] == ["log_completions"]


def test_enums_and_mappings_in_json_are_read() -> None:
    from transformers.trainer_utils import SchedulerType

    args = GRPOConfig(lr_scheduler_type=SchedulerType.COSINE, model_init_kwargs='{"revision": "main"}', run_name="{a}")
    assert (args.lr_scheduler_type, args.model_init_kwargs) == ("cosine", {"revision": "main"})
    assert args.run_name == "{a}", "only what may be a mapping is read as one"


@pytest.mark.parametrize("config", [GRPOConfig, SFTConfig], ids=lambda config: config.__name__)
def test_every_mapping_may_be_json_on_a_command_line(config: Any) -> None:
    from transformers import HfArgumentParser

    names = sorted(field_rules.mappings(config))
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


SMALL: dict[str, Any] = {"max_completion_length": 4, "num_generations": 2, "per_device_train_batch_size": 4}
SMALL |= {"max_steps": 2, "logging_steps": 1}
HONOURED = {"create_optimizer", "create_optimizer_and_scheduler", "create_scheduler", "evaluate", "log", "save_model"}
HONOURED |= {"add_callback", "is_world_process_zero", "log_metrics", "pop_callback", "push_to_hub", "remove_callback"}
HONOURED |= {"is_local_process_zero", "train", "get_num_trainable_parameters"}
"""Methods that training calls, or that a script alone calls, as in TRL."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("trl") / "model"))


def trainer(model: str, folder: Path, kind: Any = GRPOTrainer, **args: Any) -> Any:
    return kind(model, length, GRPOConfig(str(folder), **{**SMALL, **args}), PROMPTS)


@pytest.mark.parametrize("kind", [GRPOTrainer, SFTTrainer])
def test_every_method_of_theirs_is_honoured_or_refused_in_a_subclass(kind: Any) -> None:
    names = NAMES["Trainer"] | NAMES[kind.__name__]
    methods = {name for name in names if callable(getattr(kind, name, None))}
    honoured = methods - not_here(kind)
    assert honoured <= HONOURED
    for name in sorted(names - honoured - {"model", "state", "control", "model_wrapped", "hub_model_id", "_tag_names"}):
        if name in {"train_dataset", "eval_dataset", "optimizer", "lr_scheduler"} and name not in not_here(kind):
            continue
        with refused(f"Mine.{name}: training does not use it here", ".  "):
            type("Mine", (kind,), {name: lambda self: None})


def test_the_list_holds_the_names_of_the_transformers_that_is_here() -> None:
    if json.loads(TRAINER_NAMES.read_bytes())["made by"]["transformers"] != version("transformers"):
        pytest.skip("the list was written from another version of transformers")
    assert {name for name in vars(TheirTrainer) if not name.startswith("__")} <= NAMES["Trainer"]


def test_mixins_patches_and_attributes_of_a_trainer_are_refused_too(model, tmp_path, monkeypatch) -> None:
    class Mixin:
        def compute_loss(self, *given: Any) -> None: ...

    for kind, remedy in ((GRPOTrainer, "a LossTerm"), (DPOTrainer, "`loss_type`"), (SFTTrainer, "cannot be replaced")):
        with refused("Mixed.compute_loss:", remedy):
            type("Mixed", (Mixin, kind), {})
    made = trainer(model, tmp_path)
    for name in ("compute_loss", "_calculate_rewards", "beta", "processing_class", "args", "get_train_dataloader"):
        with refused(f"GRPOTrainer.{name}: training does not use it"):
            setattr(made, name, None)
    made.train_dataset, made.note, made.model = PROMPTS[:2], "a script's own", made.model.to("cpu")
    with refused("GRPOTrainer.model:", "Make a trainer with that model"):
        made.model = torch.nn.Linear(1, 1)
    with refused("GRPOTrainer.ref_model is not here.", error=AttributeError):
        print(made.ref_model)
    assert not hasattr(made, "_metrics")
    made.args.lr_scheduler_type = "polynomial"
    with refused("GRPOConfig: lr_scheduler_type = 'polynomial': use linear"):
        made.train()
    made.args.lr_scheduler_type, made.args.optim = "linear", "lion_8bit"
    with refused("GRPOConfig: optim = 'lion_8bit': AdamW of torch is the optimiser here"):
        made.train()
    monkeypatch.setattr(GRPOTrainer, "training_step", print, raising=False)
    with refused("GRPOTrainer.training_step: training does not use it"):
        trainer(model, tmp_path)


def test_what_is_honoured_is_called_and_has_its_effect(model: str, tmp_path: Path) -> None:
    saved: list[str] = []

    class Mine(GRPOTrainer):
        def log(self, logs: Any, start_time: float | None = None) -> None:
            super().log({**logs, "mine": 1.0}, start_time)

        def create_optimizer(self) -> Any:  # type: ignore[override]  # as scripts write it
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / num_training_steps)

        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            return {**super().evaluate(eval_dataset, ignore_keys, metric_key_prefix), "eval_mine": 2.0}

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            saved.append(f"{output_dir} {_internal_call}")
            super().save_model(output_dir, _internal_call)

    args = GRPOConfig(str(tmp_path / "run"), **SMALL, eval_strategy="steps", metric_for_best_model="mine")
    made = Mine(model, length, args, PROMPTS, PROMPTS[:2])
    made.train()
    assert [entry["mine"] for entry in made.state.log_history] == [1.0] * 5  # 2 steps, 2 evaluations, the end
    rates = [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]
    assert rates == [0.25, 0.125]
    assert made.state.best_metric == 2.0
    assert saved == [f"{tmp_path / 'run' / 'checkpoints' / 'step-000002'} True"]
    assert trainer(model, tmp_path).create_optimizer().param_groups[0]["lr"] == 1e-6


def test_a_function_put_in_place_of_log_is_called(model: str, tmp_path: Path) -> None:
    made, seen = trainer(model, tmp_path / "run"), []
    made.log = lambda logs, start_time=None: seen.append(logs)
    made.train()
    assert len(seen) == 3
    assert made.state.log_history == []
