"""Prints every name that TRL's trainers have, methods and attributes, run by the interpreter of TRL's environment.

.venv-trl/bin/python benchmarks/trl/parity/trainer_names_worker.py
"""

import ast
import inspect
import json
import sys
from importlib.metadata import version

import trl
from transformers import Trainer

TRAINERS = ("GRPOTrainer", "SFTTrainer", "DPOTrainer", "RewardTrainer", "RLOOTrainer")
PACKAGES = ("trl", "transformers")


def names_of(kind: type) -> set[str]:
    """What a class and those it inherits from define, and what their methods set on `self`."""
    found: set[str] = set()
    for each in kind.__mro__:
        if each.__module__.split(".")[0] in PACKAGES:
            found |= set(vars(each)) | names_set(each)
    return {name for name in found if not name.startswith("__")}


def names_set(kind: type) -> set[str]:
    """The attributes that the methods of a class assign to `self`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(kind)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


if __name__ == "__main__":
    shared = names_of(Trainer)
    by_trainer = {name: sorted(names_of(getattr(trl, name)) - shared) for name in TRAINERS}
    made_by = {name: version(name) for name in PACKAGES}
    json.dump({"made by": made_by, "Trainer": sorted(shared), **by_trainer}, sys.stdout)
