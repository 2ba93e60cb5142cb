"""What trl_parity.py puts through TRL's DPOTrainer and RewardTrainer: rows, models and the settings of each case."""

from random import Random
from typing import Any

WORDS = ("<pad>", "<end>", "<user>", "<bot>", "\n", *"abcdefghijklmn")
"""Tokens by id; a text is words with a blank between them."""
TEMPLATE = (
    "{% for each in messages %}{{ ('<user> ' if each.role == 'user' else '<bot> ') + each.content + ' <end> \n ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
)
"""With a line's end behind each turn, as ChatML has it."""
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "num_labels": 1,
}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}

FIELDS = {
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 1,
    "max_steps": 2,
    "learning_rate": 0.3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,  # never clipped
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
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
