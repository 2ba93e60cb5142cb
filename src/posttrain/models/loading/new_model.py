"""A small language model made from nothing: its tokenizer and its untrained weights.

The tokenizer is byte-level, so it encodes any text.  It has one token per digit, four answer tags as added (not
special) tokens, and merges learned from a page of English.
"""

from typing import Any, Literal, cast

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from posttrain.models.loading.construction import ONE_AT_A_TIME
from posttrain.models.loading.devices import require_device_of
from posttrain.models.loading.model_folder import load_policy, load_policy_to_train
from posttrain.models.policy import Policy, as_policy
from posttrain.models.sharding import loaded_by_first
from posttrain.options.model import ModelOptions, NewModelOptions
from posttrain.ranks.group import ONE_RANK, RankGroup

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
END, PAD = "<|end|>", "<|pad|>"

CHAT_TEMPLATE = """\
{%- if messages | length != 1 or messages[0].role != "user" -%}
{{- raise_exception("this model knows single questions: give one message, of the user") -}}
{%- endif -%}
{{- messages[0].content | trim + "\\n" -}}
"""
"""One question on a line, as the demonstrations begin; there are no conversations."""

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

PLAIN_ENGLISH = """
The weather
I think
Once upon
In my
We had
It was
When they
The weather today is and in it will be We had inches of rain should stop at so we can People here like when because
then they said that think In my opinion Some people say but do not agree with them know thinks It costs dollars more
the most believe There are two reasons Once upon time there was who lived near went to to look for far away One day
met miles did waited nothing happened When came back everyone wanted see bought saw need three things opens closes
late paid Then took home made something eat They no left etc week My friend likes very much important thing about
found wrote book weighs pounds years old learn from ideas those hard prove Nobody knows why cold warm wet windy
sunny cloudy bright clear grey wind this year Tomorrow Later On Sunday By evening last night morning days ago may
later sun out soon expect snow hills drop go walk work garden sit by river rained dry Take coat sky blue am sure
That true Time tell Night smiled All well good bag heavy always what others before you After talked other could have
known how would turn end has been as long as anyone remember world better music children read books houses nicer
than new ones too worth gold best place live take care makes happy everything takes simple looks helps us understand
want peace truth comes fox king farmer little girl poor man young bird wise woman village forest sea mountain town
lake ring stone map clock silver bell sang song under tree walked all through asked fell asleep fire told story gave
an Dr Mr Mrs Prof Hill Brown Lee Stone Green store market shop bread milk eggs apples rice some cheese tea cake
science history nature mathematics ask questions closely again patience
"""

TURNS_TEMPLATE = f"""\
{{%- for message in messages -%}}
{{{{- "<|" + message.role + "|>\n" + message.content | trim + "{END}\n" -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- "<|assistant|>\n" -}}}}{{%- endif -%}}
"""
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")


PAGES = {"question": (PROMPT_ENGLISH, 380), "turns": (INSTRUCTIONS, 380), "text": (PLAIN_ENGLISH, 1024)}
"""The text for a tokenizer's merges and its number of tokens before the tags, by kind."""


def new_tokenizer(template: Literal["question", "turns", "text"] = "question") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text in, one token per digit, tags kept by decoding."""
    turns = template == "turns"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    page, size = PAGES[template]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, PAD, *(ROLES if turns else ())],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(page.split("\n"), trainer)
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
    """Untrained weights, a function of the seed."""
    config = new_model_config(options, tokenizer)
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config) if isinstance(config, GPT2Config) else Qwen3ForCausalLM(config)
    return cast(PreTrainedModel, model)


def new_model_config(options: NewModelOptions, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config | GPT2Config:
    """Qwen3 with rotary positions and RMS norms, or GPT-2 (Radford et al. 2019) without dropout: texts come once."""
    shared: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": torch.float32,
    }
    if options.family == "gpt2":
        return GPT2Config(
            n_embd=options.hidden_size,
            n_inner=options.mlp_size,
            n_layer=options.num_layers,
            n_head=options.num_heads,
            n_positions=options.max_positions,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            **shared,
        )
    return Qwen3Config(
        hidden_size=options.hidden_size,
        intermediate_size=options.mlp_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_kv_heads,
        head_dim=options.hidden_size // options.num_heads,
        max_position_embeddings=options.max_positions,
        **shared,
    )


def policy_of_run(
    model: ModelOptions | NewModelOptions,
    given: Policy | None,
    *,
    seed: int,
    inference: bool = False,
    saves_whole: bool = False,
    ranks: RankGroup = ONE_RANK,
) -> tuple[Policy, str]:
    """The caller's policy, or the recipe's model, loaded or new; and its name.

    With several ranks, the first one loads it.  A caller's policy must have equal weights on all of them.
    """

    def made() -> tuple[Policy, str]:
        if given is not None:
            policy, name = given, given.model.name_or_path or "a model object"
        elif isinstance(model, NewModelOptions):
            tokenizer = new_tokenizer(model.template)
            policy, name = as_policy(new_model(model, tokenizer, seed=seed), tokenizer), "new"
        elif inference:
            policy, name = load_policy(model, seed=seed, inference=True), model.path
        else:
            policy, name = load_policy_to_train(model, seed=seed, saves_whole=saves_whole), model.path
        policy.require_as_made()
        if isinstance(model, ModelOptions):
            require_device_of(policy.device, model.device)
        return policy, name

    return loaded_by_first(ranks, made, may_send=given is None)
