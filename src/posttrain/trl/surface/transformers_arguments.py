"""TrainingArguments of transformers, or TRL's own config, read as one of ours."""

from dataclasses import fields
from typing import Any, TypeVar

from posttrain.errors import UserError
from posttrain.trl.fields.field_rules import default_values, same
from posttrain.trl.fields.training_fields import TrainingFields

Args = TypeVar("Args", bound=TrainingFields)


def as_config(given: object, kind: type[Args]) -> tuple[Args, list[str]]:
    """The config that arguments of transformers' or TRL's class are, with a line about it; one of ours as it is.

    As in TRL, a field that a script leaves out has the default of the class that it gives: a rate of 5e-5.
    """
    if isinstance(given, kind):
        return given, []
    from transformers import TrainingArguments

    if not isinstance(given, TrainingArguments):
        raise UserError(f"args: {type(given).__name__} is given.  Give {kind.__name__}.")
    ours, untouched = default_values(kind), TrainingArguments(output_dir=given.output_dir, use_cpu=given.use_cpu)
    values: dict[str, Any] = {}
    for each in fields(given):
        value = getattr(given, each.name)
        basis = each.default if each.name == "use_cpu" else getattr(untouched, each.name, each.default)
        left_out = same(value, basis)
        if left_out and (each.name not in ours or same(ours[each.name], each.default)):
            continue
        if each.name in ours or not same(value, each.default):
            values[each.name] = value
    values["output_dir"] = given.output_dir
    return kind(**values), [f"args: {type(given).__name__} is read as {kind.__name__}."]
