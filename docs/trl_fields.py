"""Writes the page of all fields of TRL's configs, docs/reference/trl_fields.md, from the rules that check them.

conf.py calls it whenever the documentation is built; `python docs/trl_fields.py` writes it by hand.
"""

from pathlib import Path

from posttrain.trl import DPOConfig, GRPOConfig, ModelConfig, RewardConfig, RLOOConfig, SFTConfig
from posttrain.trl.configs.field_rules import CheckedFields, FieldRule, default_values
from posttrain.trl.configs.training_fields import TrainingFields

PAGE = Path(__file__).parent / "reference" / "trl_fields.md"
CONFIGS: tuple[type[CheckedFields], ...] = (GRPOConfig, SFTConfig, DPOConfig, RewardConfig, RLOOConfig, ModelConfig)
HEAD = """# TRL's fields

What becomes of every field of TRL 1.16's configs in [`posttrain.trl`](../guides/trl.md), and of names that TRL has
dropped and scripts still use.

- **supported**: it sets the options in the last column, or does what that column says.
- **renamed**: an old name, read as the new one, with a line that says so.
- **nothing to set**: what it tunes does not exist here and changes no number.  Any value but the default prints a line.
- **refused**: any value but the default is an error that names the alternative.

The last column also says which values a field may have.  This page is generated from the rules that check the configs.
"""


def page() -> str:
    """The page as text."""
    parts = [HEAD]
    for config in CONFIGS:
        differs = [name for name, rule in config.field_rules.items() if rule != TrainingFields.field_rules.get(name)]
        parts.append(f"## {config.__name__}\n\n{table(config, differs)}")
    parts.append(f"## All trainers\n\n{table(TrainingFields, [*TrainingFields.field_rules])}")
    return "\n".join(parts)


def table(config: type[CheckedFields], names: list[str]) -> str:
    """The rows of some fields."""
    head = "| field | default | here | |\n|---|---|---|---|\n"
    defaults = default_values(config)
    return head + "".join(row(name, config.field_rules[name], defaults[name]) for name in names)


def row(name: str, rule: FieldRule, default: object) -> str:
    """A field, its default, and what becomes of it."""
    options = ", ".join(f"`{each.strip()}`" for each in rule.ours.split(",") if each.strip())
    values = "" if rule.values is None else str(rule.values)
    says = "; ".join(part for part in (options, rule.says.rstrip("."), values) if part)
    cells = (f"`{name}`", f"`{default!r}`", str(rule.treatment), says.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |\n"


def write() -> None:
    """Write the page where it has changed."""
    PAGE.parent.mkdir(exist_ok=True)
    if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write()
