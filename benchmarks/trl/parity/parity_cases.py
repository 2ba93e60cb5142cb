"""What trl_parity.py puts through TRL: the prompts, completions and scores, and the settings of each case."""

from random import Random
from typing import Any

WORDS = ("<pad>", "<end>", *"abcdefghijklmn")
"""Tokens by id."""
END = 1
GROUP_SIZE, MAX_COMPLETION_LENGTH = 4, 8
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 0,
}
"""Of a Qwen3 with 952 parameters, so that every gradient can be kept."""

PLAIN = {
    "gradient_accumulation_steps": 1,
    "max_steps": 2,
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
"""Of every config."""
FIELDS = {
    **PLAIN,
    "per_device_train_batch_size": 12,
    "num_generations": GROUP_SIZE,
    "max_completion_length": MAX_COMPLETION_LENGTH,
    "num_iterations": 2,
    "shuffle_dataset": False,
    "reward_weights": [1.0, 0.5],
    "learning_rate": 1.0,
}
"""Of GRPOConfig, in every case that says nothing else."""

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo")
NARROW = {"epsilon": 0.05, "epsilon_high": 0.08}
CISPO = {"loss_type": "cispo", "epsilon_high": 1.15}
"""TRL's bound of cispo is the largest weight itself."""
SEQUENCE = {"importance_sampling_level": "sequence"}
KL = {"beta": 0.04}
GDPO = {"multi_objective_aggregation": "normalize_then_sum"}
RLOO_KL = {"beta": 0.05, **NARROW, "max_steps": 4, "learning_rate": 0.3}
"""The same completions twice: in the first two updates the policy is still the reference where they are sampled."""
MASKED = {"mask_truncated_completions": True}


def cases() -> dict[str, dict[str, Any]]:
    """Name -> fields of GRPOConfig, or RLOOConfig where the name says so; others are of FIELDS, or TRL's defaults."""
    made: dict[str, dict[str, Any]] = {}
    for loss in CLIPPED:
        made[loss] = {"loss_type": loss}
        made[f"{loss} with a KL"] = {"loss_type": loss, **KL}
        made[f"{loss} of sequences"] = {"loss_type": loss, **SEQUENCE, **NARROW}
    made |= {
        "cispo": CISPO,
        "cispo with a KL": {**CISPO, **KL},
        "cispo of sequences": {**CISPO, **SEQUENCE, "epsilon_high": 1.02},
        "luspo": {"loss_type": "luspo", **SEQUENCE, **NARROW, "learning_rate": 0.2},
        "scaled by the batch": {"loss_type": "dapo", "scale_rewards": "batch"},
        "cispo scaled by the batch": {**CISPO, "scale_rewards": "batch"},
        "not scaled": {"loss_type": "grpo", "scale_rewards": "none"},
        "cispo not scaled": {**CISPO, "scale_rewards": "none"},
        "dr_grpo as in its paper": {"loss_type": "dr_grpo", "scale_rewards": "none", **NARROW},
        "clip-higher": {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28},
        "a narrow clip": {"loss_type": "grpo", **NARROW},
        "a bound on both sides": {"loss_type": "grpo", **NARROW, "delta": 1.1},
        "a bound on both sides, of sequences": {"loss_type": "dapo", **SEQUENCE, **NARROW, "delta": 1.09, **KL},
        "a temperature": {"loss_type": "dapo", "temperature": 0.7, **KL},
        "a KL without its ratio": {"loss_type": "grpo", **KL, "use_bias_correction_kl": False},
        "micro-batches": {
            "loss_type": "dapo",
            **KL,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 3,
        },
        "normalised, then summed": {"loss_type": "dapo", **GDPO},
        "normalised, then summed, with a KL": {"loss_type": "grpo", **GDPO, **KL},
        "dapo, some unscored": {"loss_type": "dapo"},
        "grpo with a KL, some unscored": {"loss_type": "grpo", **KL},
        "normalised, then summed, some unscored": {"loss_type": "dapo", **GDPO},
        "grpo, truncated masked": {"loss_type": "grpo", **MASKED},
        "dapo with a KL, truncated masked": {"loss_type": "dapo", **KL, **MASKED},
        "dr_grpo, truncated masked": {"loss_type": "dr_grpo", **MASKED},
        "cispo, truncated masked, some unscored": {**CISPO, **MASKED},
        "rloo": {"beta": 0.0, **NARROW},
        "rloo with a KL": RLOO_KL,
        "rloo with a KL, normalised": {**RLOO_KL, "normalize_advantages": True, "learning_rate": 0.2},
        "rloo with a KL, rewards clipped": {**RLOO_KL, "reward_clip_range": [0.25, 0.8]},
        "rloo with a KL, some unscored": RLOO_KL,
        "rloo in micro-batches": {**RLOO_KL, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
        "rloo with a KL, truncated masked": {**RLOO_KL, **MASKED},
    }
    return made


def scores_of(case: str, data: dict[str, Any]) -> list[list[list[float | None]]]:
    """What the two reward functions say in a case."""
    return data["scores with unscored"] if "unscored" in case else data["scores"]


def completions(prompts: list[list[int]]) -> list[list[list[int]]]:
    """Four different ones for each prompt, of 1 to 8 tokens; the last of each runs into the limit."""
    random = Random("trl parity completions")
    made = []
    for _ in prompts:
        group = [[*random.choices(range(2, len(WORDS)), k=length), END] for length in random.sample(range(7), k=3)]
        group.append(random.choices(range(2, len(WORDS)), k=MAX_COMPLETION_LENGTH))
        made.append(group)
    return made


def given() -> dict[str, Any]:
    """Prompts, completions, and what two reward functions say of them; None is "not applicable"."""
    random = Random("trl parity prompts")
    prompts = [random.choices(range(2, len(WORDS)), k=length) for length in (3, 5, 2)]
    scores = [
        # The last group's rewards are all 1, a number whose mean is exact in float32: TRL too has advantages of 0.
        [[0.9, 0.1, 0.3, 0.2], [1.0, 0.0, 0.0, 0.7], [1.0, 1.0, 1.0, 1.0]],
        [[0.4, None, 1.0, 0.2], [None, None, 0.6, None], [None, None, None, None]],
    ]
    some_unscored = [  # the second completion of the first group, and the third of the last
        [[0.9, None, 0.3, 0.2], [1.0, 0.0, None, 0.7], [0.5, 1.0, None, 0.25]],
        [[0.4, None, 1.0, 0.2], [None, None, 0.6, None], [None, None, None, None]],
    ]
    return {
        "words": WORDS,
        "prompts": prompts,
        "completions": completions(prompts),
        "scores": scores,
        "scores with unscored": some_unscored,
    }
