"""Reward models made on the spot: classifiers of several families, folders of them, and their slow float64 twins."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from posttrain.models.loading.new_model import new_tokenizer

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
VOCAB = 400
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3ForSequenceClassification, Qwen3Config, {**SMALL, "num_key_value_heads": 2, "head_dim": 8}),
    "llama": (LlamaForSequenceClassification, LlamaConfig, {**SMALL, "num_key_value_heads": 2}),
    "gpt2": (
        GPT2ForSequenceClassification,
        GPT2Config,
        {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 96},
    ),
    "bert": (BertForSequenceClassification, BertConfig, SMALL),
    "roberta": (RobertaForSequenceClassification, RobertaConfig, SMALL),
}
DECODERS = ("qwen3", "llama", "gpt2")


def reward_tokenizer(*, pad: str | None = "<|pad|>", chat: bool = True) -> PreTrainedTokenizerFast:
    """Another tokenizer than a policy's only in its template and in what it pads with."""
    made = new_tokenizer()
    made.pad_token = pad
    made.chat_template = CHAT if chat else None
    return made


def classifier(kind: str = "qwen3", *, labels: Sequence[str] = ("good",), pad: int | None = 1, seed: int = 0) -> Any:
    """A random classifier whose numbers are far apart for different texts."""
    made, config, sizes = KINDS[kind]
    names = dict(enumerate(labels))
    model: PreTrainedModel = made(
        config(**sizes, pad_token_id=pad, id2label=names, label2id={name: at for at, name in names.items()})
    )
    random = np.random.Generator(np.random.Philox(seed))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name.lower() or "ln_" in name else 0.0
            spread = 0.5 * (torch.from_numpy(random.random(parameter.shape)) * 2 - 1)
            parameter.copy_(centre + spread)
    return model.eval()


def reward_folder(folder: Path, kind: str = "qwen3", *, dtype: torch.dtype = torch.float32, **given: Any) -> Path:
    """A folder of a reward model with its tokenizer."""
    pad = given.pop("tokenizer_pad", "<|pad|>")
    chat = given.pop("chat", True)
    classifier(kind, **given).to(dtype).save_pretrained(folder)
    reward_tokenizer(pad=pad, chat=chat).save_pretrained(folder)
    return folder


def twin_scores(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """One row at a time, without padding, in float64: of decoders by head and hidden states, of encoders by their own.

    Shares no code with what it is compared to.
    """
    exact = type(model)(model.config).double().eval()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    found = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([list(row)])
            if model.config.model_type in ("qwen3", "llama", "gpt2"):
                hidden = exact.base_model(input_ids=ids).last_hidden_state[0, -1]
                found.append(exact.score.weight @ hidden)
            else:
                found.append(exact(input_ids=ids).logits[0])
    return torch.stack(found)
