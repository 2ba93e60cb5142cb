"""Makes what all sides of vs_trl_ppo.py read: a policy that never ends, a reward model, and the prompts as rows.

python benchmarks/trl/ppo/_ppo_inputs.py REQUEST.json ROWS.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from _vs_trl_inputs import countdown_rows, save_endless
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

HEAD_WIDTH = 16
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD_WIDTH,
    "max_position_embeddings": 1024,
}


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    policy, seed = request["policy"], request["seed"]
    save_endless(policy, request["endless"])
    save_reward_model(policy, request["reward_model"], seed)
    rows = countdown_rows(policy, seed, request["steps"], request["prompts"])
    Path(sys.argv[2]).write_text(json.dumps([{"prompt": row["prompt"]} for row in rows]), encoding="utf-8")


def save_reward_model(policy: str, folder: str, seed: int) -> None:
    """A classifier of the policy's family and tokens, with random weights: what it thinks is of no account."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype=torch.float32,
        **SMALL,
    )
    torch.manual_seed(seed)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
