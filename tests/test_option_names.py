"""Every option that a message or a help text names, by its dotted path, is one that a recipe may have."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from posttrain.commands.chat import ChatConfig
from posttrain.config.reading import COMMAND_OF
from posttrain.config.sections import PLAIN, section_names, section_schema, variants_of
from posttrain.options.reward import RewardOptions
from posttrain.schemas import Schema, record_class, unwrapped
from tests.support.pages import one_test_of

SOURCE = Path(__file__).parents[1] / "src" / "posttrain"
KINDS = (*COMMAND_OF, ChatConfig)
# Dotted words that begin like an option and are none, each with what it is.
NO_OPTIONS = {
    "run.model_folder": "a field of what posttrain.train returns",
    "algorithm.path": "names the file of an algorithm of one's own, whose options are its own",
    "engine.path": "names the file of an engine of one's own, whose options are its own",
    "evaluation.engine": "an option within `placement`",
    "rewards.nanmean": "a method of torch's tensors",
}
FILES = (".py", ".npz", ".png", ".safetensors")


def records(section: str) -> list[Any]:
    """What a section may be: a record class for each kind of recipe that has it, and for each of its variants."""
    if section == "rewards":
        return [record_class(Schema(RewardOptions))]
    names = [{"name": name} for name in variants_of(section)[1]] or [{}]
    kinds = [kind for kind in KINDS if section in section_names(kind)]
    return [record_class(section_schema(kind, section, name)) for kind in kinds for name in names]


SECTIONS = sorted({name for kind in KINDS for name in section_names(kind)} - PLAIN.keys())
NAMED = re.compile(rf"(?<![\w./{{-])(?:--)?(?:{'|'.join(SECTIONS)})(?:\.[a-z_0-9-]+)+(?![\w/(])")


def exists(record: Any, names: list[str]) -> bool:
    """Whether names lead from a record class to an option."""
    for name in names:
        if not is_dataclass(record) or name not in {each.name for each in fields(record)}:
            return False
        record = unwrapped(get_type_hints(record)[name])
    return True


def options_named(text: str) -> list[str]:
    """The dotted paths in a text, as a recipe writes them."""
    named = [found for found in NAMED.findall(text) if not found.endswith(FILES)]
    flags = [re.sub(r"^--(.*\.)(no-)?", r"\1", found) for found in named]  # `--run.no-plots` is `run.plots: false`
    return [flag.replace("-", "_") for flag in flags]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Every piece of text in a source file with its line; of an f-string, what stands between its values."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@one_test_of(sorted(SOURCE.rglob("*.py")))
def test_every_option_that_a_text_names_exists(path: Path) -> None:
    for line, text in texts(path):
        for named in options_named(text):
            section, *names = named.split(".")
            known = named in NO_OPTIONS or any(exists(record, names) for record in records(section))
            assert known, f"{path}:{line}: there is no option {named}"


def test_options_are_found_in_texts_and_what_does_not_exist_is_told() -> None:
    text = "use --rollout.group-size 4, or set `algorithm.kl.coefficient = 1`; rollout.on_error=x, posttrain.run.names,"
    named = ["rollout.group_size", "algorithm.kl.coefficient", "rollout.on_error", "run.plots"]
    assert options_named(f"{text} --run.no-plots, run.png.") == named
    assert any(exists(record, ["kl", "coefficient"]) for record in records("algorithm"))
    assert not any(exists(record, ["on_error"]) for record in records("rollout"))
    found = [named for path in SOURCE.rglob("*.py") for _, text in texts(path) for named in options_named(text)]
    assert len(found) > 50
