"""Which fields of OpenAI's requests are honoured by `posttrain serve`, which change no answer, and which are refused.

Nothing is left out in silence: a field that is not in these tables is refused by its name, and so is one that asks for
what is not done here.  A value that asks for nothing (null, false, no tools, a penalty of 0) is as if it were left out.
"""

from collections.abc import Mapping
from typing import Any

from posttrain.schemas import did_you_mean

SAMPLING = ("max_tokens", "max_completion_tokens", "n", "seed", "stop", "temperature", "top_p", "top_k", "min_p")
HONOURED = {
    False: ("model", "prompt", "logprobs", *SAMPLING),
    True: ("model", "messages", "logprobs", "top_logprobs", *SAMPLING),
}
"""By whether the request is for a chat: the fields that an answer depends on."""

HARMLESS = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "parallel_tool_calls",
)
"""Fields that change no answer, whatever they say: names for accounts, hints for speed, how tools would be called."""

WHOLE = "answers are given whole here"
NO_TOOLS = "tools are not called here; leave them out, or describe them in a message and read the text of the answer"
NO_PENALTIES = "tokens are drawn from the model's own distribution here, without penalties or biases; leave it out"
NO_SHAPE = "answers are text here; leave it out, ask for the form in the prompt, and check the text"
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "stream": ((False,), f"{WHOLE}; leave it out"),
    "stream_options": (({},), f"{WHOLE}; leave it out"),
    "echo": ((False,), "the prompt is not repeated here; leave it out and put it before the text yourself"),
    "suffix": (("",), "nothing is written before a given end here; leave it out"),
    "best_of": ((), "no completion is chosen for you here; ask for all of them with n"),
    "tools": (([],), NO_TOOLS),
    "tool_choice": (("none", "auto"), NO_TOOLS),
    "functions": (([],), NO_TOOLS),
    "function_call": (("none", "auto"), NO_TOOLS),
    "web_search_options": ((), NO_TOOLS),
    "response_format": (({"type": "text"},), NO_SHAPE),
    "modalities": ((["text"],), NO_SHAPE),
    "audio": ((), NO_SHAPE),
    "verbosity": (("medium",), NO_SHAPE),
    "reasoning_effort": (("none",), "how long a model thinks is its own matter here; leave it out, or set max_tokens"),
    "logit_bias": (({},), NO_PENALTIES),
    "presence_penalty": ((0,), NO_PENALTIES),
    "frequency_penalty": ((0,), NO_PENALTIES),
    "service_tier": (("auto", "default"), "every request waits for its turn here; leave it out"),
    "store": ((False,), "nothing is kept here; leave it out"),
}
"""Fields of what is not done: the values that ask for nothing, null beside them, and what to do instead."""


def refused_field(body: Mapping[str, Any], *, chat: bool) -> tuple[str, str] | None:
    """The first field that asks for what is not done here, and why; None where every field is honoured or harmless."""
    known = (*HONOURED[chat], *HARMLESS, *REFUSED)
    for name, value in body.items():
        if value is None or name in HONOURED[chat] or name in HARMLESS:
            continue
        if name not in REFUSED:
            return name, f"no such field here.  {did_you_mean(name[:40], known)}"
        asks_for_nothing, remedy = REFUSED[name]
        all_of_them = name == "best_of" and value == (1 if body.get("n") is None else body["n"])
        if value not in asks_for_nothing and not all_of_them:
            return name, remedy
    return None
