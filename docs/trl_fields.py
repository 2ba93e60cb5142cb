"""Writes the page of all fields of TRL's configs, docs/reference/trl_fields.md, from the tables they are checked by.

conf.py calls it whenever the documentation is built; `python docs/trl_fields.py` writes it by hand.
"""

from pathlib import Path

from posttrain.trl import DPOConfig, GRPOConfig, ModelConfig, RewardConfig, RLOOConfig, SFTConfig
from posttrain.trl.fields.dpo_config import DPO_RULES
from posttrain.trl.fields.field_rules import CheckedFields, Rule, Rules, default_values
from posttrain.trl.fields.grpo_config import GRPO_RULES
from posttrain.trl.fields.model_config import MODEL_RULES
from posttrain.trl.fields.reward_config import REWARD_RULES
from posttrain.trl.fields.rloo_config import RLOO_RULES
from posttrain.trl.fields.sft_config import SFT_RULES
from posttrain.trl.fields.training_rules import TRAINING_RULES

PAGE = Path(__file__).parent / "reference" / "trl_fields.md"
TABLES: dict[type[CheckedFields], Rules] = {
    GRPOConfig: GRPO_RULES,
    SFTConfig: SFT_RULES,
    DPOConfig: DPO_RULES,
    RewardConfig: REWARD_RULES,
    RLOOConfig: RLOO_RULES,
    ModelConfig: MODEL_RULES,
}
HEAD = """# TRL's fields

What becomes of every field of TRL 1.16's configs in [`posttrain.trl`](../guides/trl.md), and of names that TRL has
dropped and scripts still use.  **supported**: it sets the options named, or does what is said.  **renamed**: an old
name, read as the new one, with a line that says so.  **nothing to set**: what it tunes does not exist here and changes
no number; another value than the default is told in a line.  **refused**: another value than the default is an error,
which says what stands here.  Of a number it is said which ones a field may be; others are refused by its name.

This page is generated from the tables that the configs are checked by.
"""


def page() -> str:
    """The page as text."""
    parts = [HEAD]
    for config, rules in TABLES.items():
        defaults = default_values(config)
        own = [name for name in defaults if config is ModelConfig or rules[name] is not TRAINING_RULES.get(name)]
        parts.append(f"## {config.__name__}\n\n{table(own, rules, defaults)}")
    shared = [name for name in default_values(GRPOConfig) if name in TRAINING_RULES]
    parts.append(f"## All trainers\n\n{table(shared, TRAINING_RULES, default_values(GRPOConfig))}")
    return "\n".join(parts)


def table(names: list[str], rules: Rules, defaults: dict[str, object]) -> str:
    """The rows of some fields."""
    head = "| field | default | here | |\n|---|---|---|---|\n"
    return head + "".join(row(name, rules[name], defaults[name]) for name in names)


def row(name: str, rule: Rule, default: object) -> str:
    """A field, its default, and what becomes of it."""
    options = ", ".join(f"`{each.strip()}`" for each in rule.ours.split(",") if each.strip())
    numbers = rule.numbers.told if rule.numbers is not None else ""
    says = "; ".join(part for part in (options, rule.says.rstrip("."), numbers) if part)
    cells = (f"`{name}`", f"`{default!r}`", str(rule.treatment), says.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |\n"


def write() -> None:
    """Write the page where it has changed."""
    PAGE.parent.mkdir(exist_ok=True)
    if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write()
