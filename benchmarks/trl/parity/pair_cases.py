"""What trl_parity.py puts through TRL's DPOTrainer and RewardTrainer: rows, models and the settings of each case."""

from random import Random
from typing import Any

import parity_cases

WORDS = ("<pad>", "<end>", "<user>", "<bot>", "\n", *"abcdefghijklmn")
"""Tokens by id; a text is words with a blank between them."""
TEMPLATE = (
    "{% for each in messages %}{{ ('<user> ' if each.role == 'user' else '<bot> ') + each.content + ' <end> \n ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
)
"""With a line's end behind each turn, as ChatML has it."""
SHAPE = {**parity_cases.SHAPE, "vocab_size": len(WORDS), "max_position_embeddings": 64, "num_labels": 1}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}

FIELDS = {**parity_cases.PLAIN, "per_device_train_batch_size": 6, "learning_rate": 0.3}
"""Of both configs, in every case that says nothing else."""

MICRO = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}


def cases() -> dict[str, dict[str, Any]]:
    """Name -> trainer, rows, what else the trainer is given, and fields beside those of FIELDS and TRL's defaults."""
    dpo: dict[str, dict[str, Any]] = {
        "dpo": {},
        "dpo, a large beta": {"beta": 1.0},
        "dpo, hinge": {"loss_type": ["hinge"], "beta": 0.5},
        "dpo, ipo": {"loss_type": ["ipo"], "beta": 0.5},
        "dpo, sigmoid_norm": {"loss_type": ["sigmoid_norm"], "beta": 2.0},
        "dpo, robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
        "dpo, micro-batches": MICRO,
        "dpo, precomputed": {"precompute_ref_log_probs": True},
        "dpo, conversational": {},
        "dpo, implicit prompt": {},
        "dpo, conversational with an implicit prompt": {"loss_type": ["ipo"], "beta": 0.5},
        "dpo, cut": {"max_length": 9},
        "dpo, another reference": {"beta": 0.5},
        "dpo, LoRA": {},
    }
    reward: dict[str, dict[str, Any]] = {
        "reward": {},
        "reward, margins": {},
        "reward, centred": {"center_rewards_coefficient": 0.1},
        "reward, micro-batches": MICRO,
        "reward, conversational": {},
        "reward, implicit prompt": {},
        "reward, long ones left out": {"max_length": 10},
        "reward, LoRA": {},
    }
    return {
        name: {
            "trainer": name.split(",")[0],
            "rows": next((kind for kind in given()["rows"] if kind in name), "standard"),
            "lora": "LoRA" in name,
            "reference": "another reference" in name,
            "fields": fields,
        }
        for name, fields in {**dpo, **reward}.items()
    }


def given() -> dict[str, Any]:
    """Rows of each kind, which are evaluated too."""
    random = Random("trl pairs")

    def words(least: int, most: int) -> str:
        return " ".join(random.choices(WORDS[5:], k=random.randint(least, most)))

    standard = []
    for number in range(6):
        prompt, end = words(2, 4), WORDS[5 + number]
        # The answers begin with other words, so that what both texts have in common is the prompt.
        standard.append({"prompt": prompt, "chosen": f" {end} {words(1, 5)}", "rejected": f" n {words(2, 7)}"})
    chats = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"].strip()}],
            "rejected": [{"role": "assistant", "content": row["rejected"].strip()}],
        }
        for row in standard
    ]
    rows: dict[str, Any] = {
        "conversational with an implicit prompt": [
            {name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in chats
        ],
        "conversational": chats,
        "implicit prompt": [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in standard],
        "margins": [{**row, "margin": 0.3 * number} for number, row in enumerate(standard)],
        "standard": standard,
    }
    return {"words": WORDS, "template": TEMPLATE, "shape": SHAPE, "lora": LORA, "rows": rows}
