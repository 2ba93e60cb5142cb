"""What TRL's scripts read beside the configs: the data set's name, and a command line over a YAML file."""

import os
import sys
from argparse import Action
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import yaml
from transformers import HfArgumentParser

from posttrain.errors import UserError
from posttrain.schemas import did_you_mean


@dataclass
class ScriptArguments:
    """Which data a script loads, by `datasets.load_dataset`; what becomes of each is up to the script."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


class TrlParser(HfArgumentParser):
    """Reads dataclasses such as GRPOConfig from flags, over what the YAML file of `--config FILE` says.

        script_args, args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()

    The file is a mapping of fields; what stands under `env` becomes the environment.
    """

    def __init__(self, dataclass_types: type | Iterable[type] = (), **given: Any) -> None:
        kinds = [dataclass_types] if isinstance(dataclass_types, type) else [*dataclass_types]
        for kind in kinds:
            if any(each.name == "config" for each in fields(kind)):
                raise UserError(
                    f"TrlParser: {kind.__name__} has a field `config`, the flag of which names a file of fields."
                )
        super().__init__(dataclass_types=cast(Any, kinds), **given)

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """An object of each dataclass; with `return_remaining_strings` also what no field is named by."""
        line = list(sys.argv[1:] if args is None else args)
        unknown: dict[str, object] = {}
        if "--config" in line:
            place = line.index("--config")
            if place + 1 == len(line):
                raise UserError("TrlParser: the flag `config` is last; name a YAML file after it.")
            file = Path(line[place + 1])
            del line[place : place + 2]
            unknown = self._take_defaults(config_of_file(file))
            if unknown and fail_with_unknown_args and not return_remaining_strings:
                name = next(iter(unknown))
                known = [action.dest for action in self._actions]
                raise UserError(f"{file}: there is no field {name!r}.  {did_you_mean(name, known)}")
        made: tuple[Any, ...] = self.parse_args_into_dataclasses(
            args=line, return_remaining_strings=return_remaining_strings
        )
        if not return_remaining_strings:
            return made
        return (*made[:-1], [part for name, value in unknown.items() for part in (f"--{name}", str(value))] + made[-1])

    def _take_defaults(self, config: Mapping[str, object]) -> dict[str, object]:
        """Have fields be what the file says unless a flag says otherwise; returns what is no field's."""
        actions: dict[str, Action] = {action.dest: action for action in self._actions}
        for name in config.keys() & actions.keys():
            actions[name].default, actions[name].required = config[name], False
        return {name: value for name, value in config.items() if name not in actions}


def config_of_file(file: Path) -> Mapping[str, object]:
    """The fields that a YAML file names; its `env` is in the environment then.  Raises UserError for another file."""
    if not file.is_file():
        raise UserError(f"TrlParser, config = {file}: there is no such file.")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"TrlParser, config = {file}: not YAML ({' '.join(str(error).split())[:200]}).") from error
    if not isinstance(content, dict):
        raise UserError(
            f"TrlParser, config = {file}: a {type(content).__name__}; write a mapping, such as `max_steps: 100`."
        )
    variables = content.pop("env", {})
    if not isinstance(variables, dict):
        raise UserError(f"TrlParser, config = {file}: env = {variables!r:.60}; write a mapping of names to values.")
    os.environ.update({str(name): str(value) for name, value in variables.items()})
    return content
