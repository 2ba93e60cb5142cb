"""The README.md of a model on the hub: the base model, the data, the tags and how it was trained."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version

import yaml

from posttrain.errors import UserError
from posttrain.schemas import did_you_mean

HEADER = {
    "dataset_name": "datasets",
    "dataset": "datasets",
    "dataset_tags": "datasets",
    "finetuned_from": "base_model",
    "language": "language",
    "license": "license",
    "tasks": "pipeline_tag",
    "dataset_args": "dataset_args",
}
"""What TRL's and transformers' cards are given, by its place in the header."""
KNOWN = ("model_name", "tags", *HEADER)


def card_text(given: Mapping[str, object], *, trainer: str, base: str, tags: Sequence[str]) -> str:
    """A card in Markdown.  Raises UserError for a name that cards do not have.

    `base` is the model that was trained, and `tags` are those of the trainer's class.
    """
    for name in given:
        if name not in KNOWN:
            raise UserError(f"a model card has no {name!r}.  {did_you_mean(name, KNOWN)}")
    method = trainer.removesuffix("Trainer").lower()
    found: dict[str, object] = {"library_name": "transformers"}
    if base:
        found["base_model"] = base
    found |= {HEADER[name]: value for name, value in given.items() if name in HEADER and value is not None}
    found["tags"] = list(dict.fromkeys(["posttrain", method, *tags, *as_tags(given.get("tags"))]))
    title = given.get("model_name") or "Model card"
    data = f" on {found['datasets']}" if "datasets" in found else ""
    return (
        f"---\n{yaml.safe_dump(found, sort_keys=False)}---\n\n# {title}\n\n"
        f"{base or 'A model'} was trained{data} with the {trainer} of posttrain {version('posttrain')}.\n"
    )


def as_tags(given: object) -> list[str]:
    """One tag, several or none, as a list."""
    return [given] if isinstance(given, str) else [str(each) for each in given] if isinstance(given, Sequence) else []
