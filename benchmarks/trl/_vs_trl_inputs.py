"""Makes what both sides of vs_trl.py read: a model folder, and the prompts of every step as rows.

python benchmarks/trl/_vs_trl_inputs.py REQUEST.json ROWS.json
"""

import json
import string
import sys
from pathlib import Path
from random import Random
from typing import Any

import torch
from _vs_trl_shapes import Network
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.task import CountdownOptions
from posttrain.tasks.countdown_task import CountdownTask

END, PAD = "<|end|>", "<|pad|>"
CHARACTERS = string.ascii_letters + string.digits + " .,:;?!+-*/()="
MAX_POSITIONS = 2048
FAMILIES: dict[str, Any] = {
    "gpt2": (GPT2Config, GPT2LMHeadModel),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
"""GPT-2's config knows most names of the others, and takes its MLP to be four times as wide as the rest."""


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder, seed, steps, prompts = (request[key] for key in ("model", "seed", "steps", "prompts"))
    if request["network"] is None:
        rows = countdown_rows(folder, seed, steps, prompts)
        save_endless(folder, request["endless"])
    else:
        network = Network(**request["network"])
        save_random_model(network, Path(folder), seed)
        step = random_rows(seed, prompts, request["prompt_tokens"])
        rows = step * steps
    Path(sys.argv[2]).write_text(json.dumps(rows), encoding="utf-8")


def countdown_rows(folder: str, seed: int, steps: int, prompts: int) -> list[dict[str, Any]]:
    """The prompts that the Countdown task gives the steps 1, 2, ... of a run with this seed."""
    task = CountdownTask(CountdownOptions(), TokenizerRenderer(AutoTokenizer.from_pretrained(folder)), seed=seed)
    chosen = [prompt for step in range(1, steps + 1) for prompt in task.prompts(step, range(prompts))]
    return [{"prompt": prompt.text, **prompt.columns} for prompt in chosen]


def save_endless(folder: str, endless: str) -> None:
    """The same weights with an end token past the last row of the output matrix, which nothing can sample."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    end = tokenizer.eos_token_id
    assert end >= model.config.vocab_size, "the output matrix has rows to spare, and the new end token got one"
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    model.save_pretrained(endless)
    tokenizer.save_pretrained(endless)


def random_rows(seed: int, prompts: int, length: int) -> list[dict[str, Any]]:
    """Prompts of random characters, each of them one token."""
    random = Random(f"vs_trl prompts {seed}")
    return [{"prompt": "".join(random.choices(CHARACTERS, k=length))} for _ in range(prompts)]


def save_random_model(network: Network, folder: Path, seed: int, *, ends: bool = False) -> None:
    """A model with untrained weights and a tokenizer of one token a character.

    Unless it `ends`, the end token's id lies one past the output matrix: nothing can sample it, so every completion has
    the full length on both sides, and neither side pays for suppressing a token.
    """
    config_type, model_type = FAMILIES[network.family]
    tokenizer = character_tokenizer(network.vocab)
    config = config_type(
        vocab_size=network.vocab + ends,
        hidden_size=network.hidden,
        intermediate_size=network.mlp,
        num_hidden_layers=network.layers,
        num_attention_heads=network.heads,
        num_key_value_heads=network.kv_heads,
        head_dim=network.hidden // network.heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    torch.manual_seed(seed)
    model_type(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def character_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Characters as tokens, names for the ids that no character takes, and an end token with the id `vocab`."""
    names = [PAD, *CHARACTERS]
    names += [f"<{number}>" for number in range(len(names), vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate([*names, END])}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


if __name__ == "__main__":
    main()
