"""Chat templates in the manner of well-known families, for the laws of turns: what each does that others do not.

They are written here, and shorter than the models' own.
"""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from tests.support.conversations import CHATML, CLOSED, FORGETFUL, OPENING, PHI, THOUGHTLESS, chat_tokenizer

TOOLS = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
RESPONSE = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN = (
    TOOLS
    + "{% for m in messages %}{% if m.role == 'tool' %}"
    + RESPONSE
    + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}"
    + ASK
)
"""Replies of tools share one message of the user."""
LAST_QUERY = (
    "{% set last = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
)
THINKING = (
    TOOLS
    + LAST_QUERY
    + "{% for m in messages %}{% if m.role == 'tool' %}"
    + RESPONSE
    + "{% else %}<|im_start|>{{ m.role }}\n"
    + "{{ m.content if loop.index0 >= last.at else m.content.split('</think>')[-1].lstrip('\n') }}"
    + CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}"
    + ASK
)
"""Drops thoughts before the user's last message, and keeps them between calls."""
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "<|head|>assistant<|text|>\n\n<tool_call>{{ m.tool_calls[0].function | tojson }}</tool_call><|eot|>"
    "{% else %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|text|>\n\n"
    "{% if loop.first and tools %}{{ tools | tojson }}\n{% endif %}"
    "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|text|>\n\n{% endif %}"
)
"""Opens with BOS, writes replies as JSON, trims, and knows one call per turn."""
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|head|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|head|>model\n{% endif %}"
)
"""Roles alternate, and there are no tools."""
MISTRAL = (
    "{{ bos_token }}{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    '[RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/RESULTS]'
    "{% elif m.tool_calls %}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|eot|>"
    "{% else %} {{ m.content }}<|eot|>{% endif %}{% endfor %}"
)
"""Nothing opens the assistant's turn, and calls have ids of nine characters."""

FAITHFUL = {"chatml": CHATML, "closed": CLOSED, "phi": PHI, "qwen": QWEN, "llama": LLAMA, "gemma": GEMMA}
"""Write turns with replies of a user as the whole conversation."""
REWRITING = {"thinking": THINKING, "thoughtless": THOUGHTLESS, "forgetful": FORGETFUL, "opening": OPENING}
"""Drop thoughts of earlier turns."""
CALLING = {"qwen": QWEN, "thinking": THINKING, "llama": LLAMA, "mistral": MISTRAL}
"""Write calls of tools that are read between tags, and keep the thoughts before a call where they write any."""


def turn_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer for any of these templates; `<tool_call>` is an added token that is not special, as in Qwen's."""
    made = chat_tokenizer(template)
    made.add_special_tokens({"bos_token": "<|begin|>"})
    made.add_tokens([AddedToken(text, special=True) for text in ("<|head|>", "<|text|>", "<|eot|>")])
    made.add_tokens([AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>")])
    return made


STOPS = ("<|im_end|>", "<|eot|>")


def stop_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    return tuple(int(tokenizer.convert_tokens_to_ids(text)) for text in STOPS)


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """One that begins every text with a space, as Llama 2's: characters of ASCII, BOS, and two control tokens."""
    vocab = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", "▁", *map(chr, range(33, 127)), "\n"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    return made
