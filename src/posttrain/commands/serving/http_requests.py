"""What a request to `posttrain serve` asks for: the body as OpenAI's clients write it, read and checked.

Whatever a client sends is either a request that can be answered or a `BadRequest` with words that say what to change.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from posttrain.errors import UserError
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.rollout import SamplingOptions
from posttrain.records import Prompt
from posttrain.schemas import did_you_mean

MAX_COMPLETIONS = 128
"""Completions of one request, over all its prompts."""
MAX_STOPS = 16


class BadRequest(Exception):
    """A request that cannot be answered, with its status and, where another method would do, that method."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST, *, allowed: str = "") -> None:
        super().__init__(message)
        self.status, self.allowed = status, allowed


@dataclass(frozen=True)
class CompletionRequest:
    """A request, read and checked."""

    prompts: list[Prompt]
    count: int
    options: SamplingOptions
    seed: int
    stops: tuple[str, ...]
    logprobs: bool
    """Whether the log-probs of the sampled tokens are wanted."""


def json_object(text: bytes) -> dict[str, Any]:
    """The JSON object of a request's body, all of it proper Unicode.  Raises BadRequest."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(
            "the body holds half of a surrogate pair (\\ud800 to \\udfff), which is no character"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadRequest("the body must be a JSON object")
    return found


def read_completion_request(
    body: Mapping[str, Any], policy: Policy, renderer: TokenizerRenderer, *, chat: bool
) -> CompletionRequest:
    """Check a request.  Raises BadRequest."""
    if refused := refused_field(body, chat=chat):
        raise BadRequest(f"{refused[0][:40]} = {brief(body[refused[0]])}: {refused[1]}")
    asked_tokens = value_or(body, "max_completion_tokens", value_or(body, "max_tokens", 512 if chat else 16))
    count, seed = request_integer(value_or(body, "n", 1), "n"), body.get("seed")
    contents = [messages_in(body.get("messages"))] if chat else prompts_in(body.get("prompt"))
    if count < 1 or count * len(contents) > MAX_COMPLETIONS:
        raise BadRequest(f"n = {count} for {len(contents)} prompts: must be 1 to {MAX_COMPLETIONS} completions in all")
    try:
        prompts = [prompt_in(content, f"{i} of the request", policy, renderer) for i, content in enumerate(contents)]
        room = max(policy.max_positions - len(prompt.tokens) for prompt in prompts)
        options = SamplingOptions(
            max_completion_tokens=min(request_integer(asked_tokens, "max_tokens"), max(1, room)),
            temperature=request_number(value_or(body, "temperature", 1.0), "temperature"),
            top_p=request_number(value_or(body, "top_p", 1.0), "top_p"),
            top_k=request_integer(value_or(body, "top_k", 0), "top_k"),
            min_p=request_number(value_or(body, "min_p", 0.0), "min_p"),
        )
    except UserError as error:
        raise BadRequest(str(error)) from error
    drawn = secrets.randbelow(1 << 31) if seed is None else request_integer(seed, "seed")
    return CompletionRequest(
        prompts=prompts,
        count=count,
        options=options,
        seed=drawn,
        stops=stops_in(body.get("stop")),
        logprobs=logprobs_in(body, chat=chat),
    )


def logprobs_in(body: Mapping[str, Any], *, chat: bool) -> bool:
    """Whether log-probs are asked for: those of the sampled tokens are known, those of others are not."""
    asked = body.get("logprobs")
    others = body.get("top_logprobs", 0) if chat else asked
    if chat and not isinstance(asked, bool | None):
        raise BadRequest(f"logprobs = {brief(asked)}: must be true or false")
    if request_integer(others or 0, "top_logprobs" if chat else "logprobs") != 0:
        name = "top_logprobs" if chat else "logprobs"
        rule = "the log-probs of other tokens than the sampled ones are not known here; use 0, which gives those"
        raise BadRequest(f"{name} = {brief(others)}: {rule}")
    return asked is True if chat else asked is not None and asked is not False


def value_or(body: Mapping[str, Any], name: str, default: object) -> object:
    """What is given by a name; null is as if it were left out."""
    value = body.get(name)
    return default if value is None else value


def prompts_in(prompt: object) -> list[str | list[int]]:
    """One prompt or many, each a text or a list of token ids."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(is_id(one) for one in prompt)):
        prompt = [prompt]
    needed = "prompt: a text, a list of texts, a list of token ids or a list of such lists is needed, and none empty"
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest(needed)
    for one in prompt:
        ids = isinstance(one, list) and all(is_id(each) for each in one)
        if not one or not (isinstance(one, str) or ids):
            raise BadRequest(needed)
    return prompt


def is_id(value: object) -> bool:
    """Whether it may be a token id."""
    return isinstance(value, int) and not isinstance(value, bool)


def messages_in(messages: object) -> list[dict[str, str]]:
    """The messages of a chat, with nothing but role and content: a template may stumble over anything else."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: a list of at least one is needed")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequest(f'messages[{i}] must be an object such as {{"role": "user", "content": "…"}}')
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{i}].role = {brief(message.get('role'))}: must be a text")
        if further := [name for name in message if name not in ("role", "content", "name") and message[name]]:
            raise BadRequest(f"messages[{i}].{further[0][:40]}: only role and content are known here; leave it out")
    return [
        {"role": message["role"], "content": content_in(message.get("content"), f"messages[{i}].content")}
        for i, message in enumerate(messages)
    ]


def content_in(content: object, where: str) -> str:
    """The text of a message, which may come in parts that follow one another."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{where} = {brief(content)}: must be a text, or a list of parts of text")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            form = '{"type": "text", "text": "…"}'
            raise BadRequest(f"{where}[{i}] has the type {brief(kind)}: a part must be a text, such as {form}")
    return "".join(part["text"] for part in content)


def prompt_in(
    content: str | list[int] | list[dict[str, str]], id: str, policy: Policy, renderer: TokenizerRenderer
) -> Prompt:
    """Text or messages as the model reads them; token ids as they are."""
    ids = [] if isinstance(content, str) else [one for one in content if isinstance(one, int)]
    size = policy.num_logits
    if wrong := [token for token in ids if not 0 <= token < size]:
        raise BadRequest(f"prompt: token id {brief(wrong[0])}: must be 0 to {size - 1}")
    if ids:
        prompt = Prompt(id=id, text=str(policy.tokenizer.decode(ids)), tokens=tuple(ids))
    else:
        prompt = renderer.render(content, id=id)
    if len(prompt.tokens) >= policy.max_positions:
        raise BadRequest(
            f"prompt {id}: {len(prompt.tokens)} tokens leave no room in the model's context of {policy.max_positions};"
            f" send at most {policy.max_positions - 1}"
        )
    return prompt


def stops_in(stop: object) -> tuple[str, ...]:
    """The texts that end a completion."""
    stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
    texts = [one for one in stops if isinstance(one, str)]
    if len(stops) > MAX_STOPS or len(texts) < len(stops):
        raise BadRequest(f"stop = {brief(stop)}: must be a text or a list of at most {MAX_STOPS} texts")
    return tuple(text for text in texts if text)


def request_integer(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name} = {brief(value)}: must be a whole number")
    return value


def request_number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} = {brief(value)}: must be a number")
    try:
        return float(value)
    except OverflowError as error:
        raise BadRequest(f"{name}: is far too large") from error


def brief(value: object) -> str:
    """What was given, short enough for a message; a list or an object by its type, since it may be deep."""
    if value is None or isinstance(value, str | int | float):
        return "null" if value is None else repr(value[:80] if isinstance(value, str) else value)[:90]
    return f"a {type(value).__name__}"


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
