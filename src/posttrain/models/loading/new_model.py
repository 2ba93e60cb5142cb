"""A small language model made from nothing: its tokenizer and its untrained weights.

The tokenizer is byte-level, so it encodes any text, with one token per digit, four answer tags as added (not special)
tokens, and merges learned from a page of prompt English.
"""

from typing import Literal, cast

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from posttrain.models.loading.construction import ONE_AT_A_TIME
from posttrain.options.new_model import NewModelOptions

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
END, PAD = "<|end|>", "<|pad|>"

CHAT_TEMPLATE = """\
{%- if messages | length != 1 or messages[0].role != "user" -%}
{{- raise_exception("this model knows single questions: give one message, of the user") -}}
{%- endif -%}
{{- messages[0].content | trim + "\\n" -}}
"""
"""One question on a line of its own, as the demonstrations begin; there is no conversation to go on with."""

PROMPT_ENGLISH = """
Use all of the numbers to make the target. Use some of the numbers to make the target.
You may use each number exactly once. You may use each number at most once. Each number must be used once.
Using these numbers, create an equation that equals the target. Show your work in the think tags.
You can use basic arithmetic operations, addition, subtraction, multiplication and division.
Return the final answer in the answer tags, for example. Think step by step about the reasoning process in your mind.
A conversation between a user and an assistant. The user asks a question and the assistant solves it.
Use all of these to make this. Use some of these to make this. Use all of them. Use some of them to make it.
What is the result of this? Write the answer, then stop. Question and answer. Add, subtract, multiply, divide.
"""


INSTRUCTIONS = """
You are a helpful assistant. Think first, then answer. Reply in this form alone. You are a helpful assistant.
Think about the question first, then give the answer. Think first, then answer. Reply in this form alone, as asked.
If you add this and that, what is the result? What is the sum? What's this plus that? The result is. \
The sum of these is.
The answer is. The sum of this and that is. Add the ones, then the tens.
"""

TURNS_TEMPLATE = f"""\
{{%- for message in messages -%}}
{{{{- "<|" + message.role + "|>\n" + message.content | trim + "{END}\n" -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- "<|assistant|>\n" -}}}}{{%- endif -%}}
"""
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")


def new_tokenizer(template: Literal["question", "turns"] = "question") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text in, one token per digit, tags kept by decoding."""
    turns = template == "turns"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    words = (INSTRUCTIONS if turns else PROMPT_ENGLISH).split("\n")
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=[END, PAD, *(ROLES if turns else ())],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=TURNS_TEMPLATE if turns else CHAT_TEMPLATE,
    )


def new_model(options: NewModelOptions, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> PreTrainedModel:
    """Untrained Qwen3-architecture weights, a function of the seed."""
    config = new_model_config(options, tokenizer)
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cast(PreTrainedModel, Qwen3ForCausalLM(config))
    return model


def new_model_config(options: NewModelOptions, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """The architecture of such a model."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=options.mlp_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_kv_heads,
        head_dim=options.hidden_size // options.num_heads,
        max_position_embeddings=options.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
