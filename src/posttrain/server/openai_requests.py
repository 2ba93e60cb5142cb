"""The body of a request to `posttrain serve`, as OpenAI's clients write it, read and checked.

An unknown or unsupported field is refused, and the message names it.
A value without effect (null, false, no tools, a penalty of 0) counts as a missing field.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import UserError
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.rollout import SamplingOptions
from posttrain.records import Prompt
from posttrain.schemas import did_you_mean
from posttrain.server.requests import RefusedRequest, brief

MAX_COMPLETIONS = 128
"""Maximum completions of one request, over all its prompts."""
MAX_STOPS = 16
MAX_ALTERNATIVES = 20
"""Maximum number of likeliest tokens per position, with their log-probs."""
SAMPLING = ("max_tokens", "max_completion_tokens", "n", "seed", "stop", "temperature", "top_p", "top_k", "min_p")
STREAMING = ("stream", "stream_options")
HONOURED = {
    False: ("model", "prompt", "logprobs", *STREAMING, *SAMPLING),
    True: ("model", "messages", "logprobs", "top_logprobs", *STREAMING, *SAMPLING),
}
"""The fields that an answer depends on, for chat requests and others."""
HARMLESS = (
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prediction", "parallel_tool_calls"),
)
"""Fields without effect on the completion: account names, hints for speed, how tools would be called."""
NO_TOOLS = "this server does not call tools; leave them out, or describe them in a message and parse the completion"
NO_PENALTIES = "this server does not change the model's distribution; leave it out"
NO_SHAPE = "this server returns plain text; leave it out, ask for the format in the prompt, and check the text"
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "echo": ((False,), "this server does not repeat the prompt; leave it out and add the prompt yourself"),
    "suffix": (("",), "this server cannot complete text before a suffix; leave it out"),
    "best_of": ((), "this server does not choose a completion; ask for all of them with n"),
    "tools": (([],), NO_TOOLS),
    "tool_choice": (("none", "auto"), NO_TOOLS),
    "functions": (([],), NO_TOOLS),
    "function_call": (("none", "auto"), NO_TOOLS),
    "web_search_options": ((), NO_TOOLS),
    "response_format": (({"type": "text"},), NO_SHAPE),
    "modalities": ((["text"],), NO_SHAPE),
    "audio": ((), NO_SHAPE),
    "verbosity": (("medium",), NO_SHAPE),
    "reasoning_effort": (("none",), "this server does not limit reasoning; leave it out, or set max_tokens"),
    "logit_bias": (({},), NO_PENALTIES),
    "presence_penalty": ((0,), NO_PENALTIES),
    "frequency_penalty": ((0,), NO_PENALTIES),
    "service_tier": (("auto", "default"), "all requests have the same priority; leave it out"),
    "store": ((False,), "this server stores nothing; leave it out"),
}
"""Unsupported fields: the values without effect, besides null, and what to do instead."""


@dataclass(frozen=True)
class CompletionRequest:
    """A request, read and checked."""

    prompts: list[Prompt]
    count: int
    options: SamplingOptions
    seed: int
    stops: tuple[str, ...]
    logprobs: int | None
    """Number of likeliest tokens per position, besides the sampled one; None: no log-probs."""
    chat: bool
    stream: bool
    """Whether the answer is streamed in chunks."""
    stream_usage: bool
    """Whether the last chunk counts tokens."""


def read_completion_request(
    body: Mapping[str, Any], policy: Policy, renderer: TokenizerRenderer, *, chat: bool
) -> CompletionRequest:
    """Check a request.  Raises RefusedRequest."""
    require_supported(body, chat=chat)
    count = integer_in(body, "n", 1)
    contents = [messages_in(body.get("messages"))] if chat else prompts_in(body.get("prompt"))
    if count < 1 or count * len(contents) > MAX_COMPLETIONS:
        rule = f"must be 1 to {MAX_COMPLETIONS} completions in all"
        raise RefusedRequest(f"n = {count} for {len(contents)} prompts: {rule}")
    stream, stream_usage = stream_in(body)
    stop = body.get("stop")
    stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if len(stops) > MAX_STOPS or not all(isinstance(one, str) for one in stops):
        raise RefusedRequest(f"stop = {brief(stop)}: must be a text or a list of at most {MAX_STOPS} texts")
    most = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    try:
        prompts = [prompt_in(content, f"{i} of the request", policy, renderer) for i, content in enumerate(contents)]
        room = max(policy.max_positions - len(prompt.tokens) for prompt in prompts)
        options = SamplingOptions(
            max_completion_tokens=min(integer_in(body, most, 512 if chat else 16), max(1, room)),
            temperature=number_in(body, "temperature", 1.0),
            top_p=number_in(body, "top_p", 1.0),
            top_k=integer_in(body, "top_k", 0),
            min_p=number_in(body, "min_p", 0.0),
        )
    except UserError as error:
        raise RefusedRequest(str(error)) from error
    return CompletionRequest(
        prompts=prompts,
        count=count,
        options=options,
        seed=integer_in(body, "seed", secrets.randbelow(1 << 31)),
        stops=tuple(filter(None, stops)),
        logprobs=logprobs_in(body, chat=chat),
        chat=chat,
        stream=stream,
        stream_usage=stream_usage,
    )


def require_supported(body: Mapping[str, Any], *, chat: bool) -> None:
    """Reject the first field that is unknown, or not supported."""
    for name, value in body.items():
        if value is None or name in HONOURED[chat] or name in HARMLESS:
            continue
        nothing, remedy = REFUSED.get(name, ((), ""))
        if not remedy:
            remedy = f"no such field.  {did_you_mean(name[:40], (*HONOURED[chat], *HARMLESS, *REFUSED))}"
        all_of_them = name == "best_of" and value == (1 if body.get("n") is None else body["n"])
        if value not in nothing and not all_of_them:
            raise RefusedRequest(f"{name[:40]} = {brief(value)}: {remedy}")


def stream_in(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether the answer is streamed in chunks, and whether the last chunk counts tokens."""
    stream = flag_in(body, "stream")
    options = {} if body.get("stream_options") is None else body["stream_options"]
    if not isinstance(options, dict):
        raise RefusedRequest(f"stream_options = {brief(options)}: must be an object")
    for name, value in options.items():
        if value and name != "include_usage":
            rule = "only include_usage is supported.  Leave it out"
            raise RefusedRequest(f"stream_options.{name[:40]} = {brief(value)}: {rule}")
    usage = flag_in(options, "include_usage", "stream_options.")
    if usage and not stream:
        raise RefusedRequest("stream_options = an object: is only for stream = true.  Set stream, or leave both out")
    return stream, usage


def flag_in(fields: Mapping[str, Any], name: str, where: str = "") -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise RefusedRequest(f"{where}{name} = {brief(value)}: must be true or false")
    return bool(value)


def logprobs_in(body: Mapping[str, Any], *, chat: bool) -> int | None:
    """Number of likeliest tokens per position; None if log-probs are not requested."""
    name = "top_logprobs" if chat else "logprobs"
    wanted = flag_in(body, "logprobs") if chat else body.get(name) is not None and body[name] is not False
    count = integer_in({name: body.get(name) or 0}, name, 0) if chat or wanted else 0
    if not 0 <= count <= MAX_ALTERNATIVES:
        raise RefusedRequest(f"{name} = {brief(count)}: must be 0 to {MAX_ALTERNATIVES}")
    if count and not wanted:
        raise RefusedRequest(f"{name} = {count}: is only for logprobs = true.  Set logprobs, or leave both out")
    return count if wanted else None


def prompts_in(prompt: object) -> list[str | list[int]]:
    listed: list[Any] = prompt if isinstance(prompt, list) and not all(map(is_id, prompt)) else [prompt]
    if not all(one and (isinstance(one, str) or (isinstance(one, list) and all(map(is_id, one)))) for one in listed):
        rule = "must be a text, a list of texts, a list of token ids or a list of such lists, none of them empty"
        raise RefusedRequest(f"prompt: {rule}")
    return listed


def is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def messages_in(messages: object) -> list[dict[str, str]]:
    """The messages of a chat, with only role and content: other keys may break a template."""
    if not isinstance(messages, list) or not messages:
        raise RefusedRequest("messages: must be a list of at least one message")
    known = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RefusedRequest(f'messages[{i}] must be an object such as {{"role": "user", "content": "…"}}')
        if not isinstance(message.get("role"), str):
            raise RefusedRequest(f"messages[{i}].role = {brief(message.get('role'))}: must be a text")
        if further := [name for name in message if name not in ("role", "content", "name") and message[name]]:
            raise RefusedRequest(f"messages[{i}].{further[0][:40]}: only role and content are supported.  Leave it out")
        content = content_in(message.get("content"), f"messages[{i}].content")
        known.append({"role": message["role"], "content": content})
    return known


def content_in(content: object, where: str) -> str:
    """The text of a message, which may consist of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RefusedRequest(f"{where} = {brief(content)}: must be a text, or a list of parts of text")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            form = '{"type": "text", "text": "…"}'
            raise RefusedRequest(f"{where}[{i}] has the type {brief(kind)}: must be a text part, such as {form}")
    return "".join(part["text"] for part in content)


def prompt_in(
    content: str | list[int] | list[dict[str, str]], id: str, policy: Policy, renderer: TokenizerRenderer
) -> Prompt:
    """Text or messages as the model reads them; token ids unchanged."""
    ids = [] if isinstance(content, str) else [one for one in content if isinstance(one, int)]
    if wrong := [token for token in ids if not 0 <= token < policy.num_logits]:
        raise RefusedRequest(f"prompt: token id {brief(wrong[0])}: must be 0 to {policy.num_logits - 1}")
    if ids:
        prompt = Prompt(id=id, text=str(policy.tokenizer.decode(ids)), tokens=tuple(ids))
    else:
        prompt = renderer.render(content, id=id)
    if len(prompt.tokens) >= policy.max_positions:
        rule = f"{len(prompt.tokens)} tokens do not leave room in the model's context of {policy.max_positions}"
        raise RefusedRequest(f"prompt {id}: {rule}.  Send at most {policy.max_positions - 1}")
    return prompt


def integer_in(body: Mapping[str, Any], name: str, default: int) -> int:
    """A field, or its default if it is null or left out."""
    value = default if body.get(name) is None else body[name]
    if not is_id(value):
        raise RefusedRequest(f"{name} = {brief(value)}: must be a whole number")
    return int(value)


def number_in(body: Mapping[str, Any], name: str, default: float) -> float:
    value = default if body.get(name) is None else body[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RefusedRequest(f"{name} = {brief(value)}: must be a number")
    try:
        return float(value)
    except OverflowError as error:
        raise RefusedRequest(f"{name}: is too large") from error
