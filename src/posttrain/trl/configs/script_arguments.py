"""What TRL's scripts use besides the trainers' configs: ModelConfig, ScriptArguments and TrlParser."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import yaml
from transformers import HfArgumentParser

from posttrain.errors import UserError
from posttrain.schemas import did_you_mean
from posttrain.trl.configs.field_rules import (
    CheckedFields,
    Numbers,
    lines_about,
    old_name,
    refused,
    require_values,
    sets,
)

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

TargetModules = list[str] | None | str  # in the order that HfArgumentParser can read


@dataclass
class ModelConfig(CheckedFields):
    """Which model a script loads and how; the script decides what each field does."""

    model_name_or_path: Annotated[str | None, sets("model.path", "given to a trainer")] = None
    model_revision: Annotated[str, sets("model.revision", "in model_init_kwargs")] = "main"
    dtype: Annotated[str | None, sets("model.weights, model.dtype", "in model_init_kwargs")] = "float32"
    attn_implementation: Annotated[
        str | None, sets("model.attn_implementation", "in model_init_kwargs; of the plain forward pass")
    ] = None
    use_peft: Annotated[bool, sets("model.adapter", "by get_peft_config")] = False
    lora_r: Annotated[int, Numbers(1, integer=True), sets("model.adapter.rank")] = 16
    lora_alpha: Annotated[int, Numbers(0, above=True), sets("model.adapter.alpha")] = 32
    lora_dropout: Annotated[float, Numbers(0, 1, below=True), sets("model.adapter.dropout")] = 0.05
    lora_target_modules: Annotated[
        TargetModules, sets("model.adapter.targets", "those of peft for the model's family by default")
    ] = None
    lora_target_parameters: Annotated[
        list[str] | None, refused("adapters are over linear layers; name those in lora_target_modules.")
    ] = None
    lora_modules_to_save: Annotated[list[str] | None, sets("", "by peft's own layers")] = None
    lora_task_type: Annotated[str, sets("", "CAUSAL_LM")] = "CAUSAL_LM"
    use_rslora: Annotated[bool, sets("model.adapter.rslora")] = False
    use_dora: Annotated[bool, sets("", "by peft's own layers")] = False
    load_in_8bit: Annotated[bool, refused("weights are held in 4 bits or whole; use load_in_4bit=True.")] = False
    load_in_4bit: Annotated[bool, sets("model.quantization", "by get_quantization_config")] = False
    bnb_4bit_quant_type: Annotated[str, refused("4 bits are NF4 here; leave it out.")] = "nf4"
    use_bnb_nested_quant: Annotated[bool, sets("model.quantization", "scales are always quantised too")] = False
    bnb_4bit_quant_storage: Annotated[str | None, refused("4-bit weights are stored as bytes; leave it out.")] = None
    # A name that this class had once, and scripts still use.
    torch_dtype: Annotated[str | None, old_name("model.dtype", "is read as dtype.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.torch_dtype is not None:
            self.dtype = str(self.torch_dtype).removeprefix("torch.")
        if self.load_in_8bit and self.load_in_4bit:
            raise UserError("ModelConfig: load_in_8bit and load_in_4bit exclude each other; use 4 bits.")
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # "all-linear" on a command line
        require_values(self)
        for line in lines_about(self):
            print(f"posttrain.trl: {line}", flush=True)


def get_peft_config(model_args: ModelConfig) -> "LoraConfig | None":
    """PEFT's LoraConfig; None without use_peft."""
    if not model_args.use_peft:
        return None
    if model_args.load_in_4bit:
        print("posttrain.trl: load_in_4bit = True: give get_quantization_config as quantization_config.", flush=True)
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as error:
        raise UserError("ModelConfig: use_peft = True needs peft.  Install it: `pip install peft`.") from error
    config: Any = LoraConfig
    made: LoraConfig = config(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        target_modules=model_args.lora_target_modules,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        bias="none",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
    )
    return made


def get_quantization_config(model_args: ModelConfig) -> "BitsAndBytesConfig | None":
    """transformers' BitsAndBytesConfig; None if nothing is quantised."""
    if not model_args.load_in_4bit:
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    import torch

    return {"": 0} if torch.cuda.is_available() else None


@dataclass
class ScriptArguments:
    """Which data a script loads with `datasets.load_dataset`; the script decides what each field does."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


class TrlParser(HfArgumentParser):
    """Reads dataclasses such as GRPOConfig from flags, which override the YAML file of `--config FILE`.

        script_args, args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()

    The file is a mapping of fields; its `env` becomes the environment.
    """

    def __init__(self, dataclass_types: type | Iterable[type] = (), **given: Any) -> None:
        kinds = [dataclass_types] if isinstance(dataclass_types, type) else [*dataclass_types]
        for kind in kinds:
            if any(each.name == "config" for each in fields(kind)):
                raise UserError(f"TrlParser: {kind.__name__} has a field `config`, which is the flag for a file.")
        super().__init__(dataclass_types=cast(Any, kinds), **given)

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """An object of each dataclass; with `return_remaining_strings`, also the unused arguments."""
        line = list(sys.argv[1:] if args is None else args)
        unknown: dict[str, object] = {}
        if "--config" in line:
            index = line.index("--config")
            if index + 1 == len(line):
                raise UserError("TrlParser: the flag `config` is last; name a YAML file after it.")
            file = Path(line[index + 1])
            del line[index : index + 2]
            config, actions = config_of_file(file), {action.dest: action for action in self._actions}
            for name in config.keys() & actions.keys():
                actions[name].default, actions[name].required = config[name], False
            unknown = {name: value for name, value in config.items() if name not in actions}
            if unknown and fail_with_unknown_args and not return_remaining_strings:
                name = next(iter(unknown))
                raise UserError(f"{file}: there is no field {name!r}.  {did_you_mean(name, actions)}")
        made: tuple[Any, ...] = self.parse_args_into_dataclasses(
            args=line, return_remaining_strings=return_remaining_strings
        )
        if not return_remaining_strings:
            return made
        return (*made[:-1], [part for name, value in unknown.items() for part in (f"--{name}", str(value))] + made[-1])


def config_of_file(file: Path) -> Mapping[str, object]:
    """The fields that a YAML file names; its `env` goes into the environment."""
    if not file.is_file():
        raise UserError(f"TrlParser, config = {file}: there is no such file.")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"TrlParser, config = {file}: not YAML ({' '.join(str(error).split())[:200]}).") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise UserError(f"TrlParser, config = {file}: a {kind}; write a mapping, such as `max_steps: 100`.")
    variables = content.pop("env", {})
    if not isinstance(variables, dict):
        raise UserError(f"TrlParser, config = {file}: env = {variables!r:.60}; write a mapping of names to values.")
    os.environ.update({str(name): str(value) for name, value in variables.items()})
    return content
