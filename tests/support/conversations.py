"""A small tokenizer with the chat templates that tell masks right from wrong, and a tiny model that it belongs to."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.options.model import NewModelOptions

SHAPE = NewModelOptions(hidden_size=32, mlp_size=64, num_layers=2, num_heads=2, num_kv_heads=1, max_positions=160)

HEAD = "<|im_start|>{{ m.role }}\n"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + HEAD + "{{ m.content }}<|im_end|>\n{% endfor %}" + OPEN
SAID = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
TAGGED = "{% for m in messages %}" + HEAD
TAGGED += (
    "{% if m.role == 'assistant' %}" + SAID + "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}" + OPEN
)
"""ChatML that says which tokens the assistant generates."""
THOUGHTLESS = "{% for m in messages %}" + HEAD
THOUGHTLESS += "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}" + OPEN
"""Drops the thoughts of every turn but the last, as those of thinking models do."""
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
"""Drops the thoughts of every turn."""
OPENING = FORGETFUL.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""The same, and has the assistant begin with thoughts."""
WORDY = "{% for m in messages %}{{ m.role }}: {{ m.content }}</turn>\n{% endfor %}"
WORDY += "{% if add_generation_prompt %}assistant: {% endif %}"
"""Without special tokens: turns end with what is no stop token, and begin where tokens can merge."""
CLOSED = WORDY.replace("</turn>", "<|im_end|>")

PHI = CHATML.replace(OPEN, "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}")
"""Ends the whole conversation with another stop token, as those of Phi-3 and Phi-4-mini do."""


def chat_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """The tokenizer of new models with the two tokens of ChatML, the second of which ends a text."""
    made = new_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.eos_token = "<|im_end|>"
    made.chat_template = template
    return made


def chat_model(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, family: str = "qwen3") -> PreTrainedModel:
    """An untrained model that stops where its tokenizer does."""
    if family == "qwen3":
        return new_model(SHAPE, tokenizer, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(tokenizer),
                n_embd=32,
                n_layer=2,
                n_head=2,
                n_positions=160,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                resid_pdrop=0.0,
            )
        )


def save_chat_model(folder: Path, template: str = CHATML, *, seed: int = 0) -> Path:
    """A tiny untrained model that talks in turns, as a folder."""
    tokenizer = chat_tokenizer(template)
    chat_model(tokenizer, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def turns(*texts: str, system: str = "") -> list[dict[str, str]]:
    """A conversation of these texts, the user's and the assistant's by turns."""
    roles = ("user", "assistant")
    said = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *said] if system else said
