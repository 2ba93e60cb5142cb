"""The environments of a run, from the sections `environment`, `tools` and `tools_at` of its recipe."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from posttrain.binding import arguments_for, is_name_in_file, object_in_file, object_in_module
from posttrain.environments.chat_turns import SHORT, TOOL, USER, ChatTurns
from posttrain.environments.openenv import OpenEnvEnvironment, require_server
from posttrain.environments.protocol import Environment, Environments, Own, close_now, nothing, on_own_thread
from posttrain.environments.template_check import rewritten_turn
from posttrain.environments.text_turns import TextTurns
from posttrain.environments.tool_calls import CallReader, call_id
from posttrain.environments.tool_environments import CalledTools, ToolsInText
from posttrain.environments.tools import Toolbox
from posttrain.errors import UserError
from posttrain.models import chat_templates
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.environment import EnvironmentOptions
from posttrain.schemas import Schema, did_you_mean

MultiTurn = Literal["refuse", "append"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSettings:
    """A recipe's settings for turns."""

    options: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    tools_at: Mapping[str, str] = field(default_factory=dict)
    """Stop texts by the name of the tool that answers there."""
    max_turns: int
    in_chat: bool = True
    """Whether prompts are conversations: the chat template then writes the turns."""
    multi_turn: MultiTurn = "refuse"
    """What to do if the chat template would rewrite earlier turns."""


def environments_of(
    settings: TurnSettings, toolbox: Toolbox, renderer: TokenizerRenderer, stop_ids: Sequence[int], own: Own = None
) -> Environments | None:
    """The environments; None if nothing replies.  `renderer` describes the toolbox in every prompt.

    A class is made once here, so that its mistakes are known before the first step, and a server is called.
    """
    options = settings.options
    require_one(options, toolbox, own)
    if isinstance(own, Environments):
        return own
    if settings.tools_at or toolbox:
        return tool_environments(settings, toolbox, renderer, stop_ids)
    if own is None and not options.path and not options.url:
        return None
    name, make, example = made_once(options, own)
    turns, notes = chat_turns(settings, renderer, stop_ids)
    return Environments(
        name=name,
        make=make,
        options=options,
        renderer=turns,
        max_turns=settings.max_turns,
        stop_texts=stop_texts_of(example, name),
        reproducible=bool(getattr(example, "reproducible", True)),
        notes=notes,
    )


def made_once(options: EnvironmentOptions, own: object = None) -> tuple[str, Callable[[], Environment], Environment]:
    """The name of an environment, what makes it, and one that was closed; a server is called once."""
    if options.url:
        is_class, name, make = True, f"OpenEnv at {options.url}", session_maker(options)
        require_server(options.url, options.seconds)
    else:
        found = own_environment(options.path) if own is None else own
        name = options.path or getattr(found, "__name__", f"{found!r:.60}")
        if not callable(found):
            raise UserError(f"environment: {name} is a {type(found).__name__}.  Give a class or a factory.")
        arguments = arguments_for(Schema(found), options.options, where="environment.options")
        is_class, make = isinstance(found, type), partial(made, found, arguments, name)
    try:
        with ExitStack() as closing:
            example = on_own_thread(make, options.seconds)
            closing.callback(close_now, getattr(example, "close", nothing), options.seconds)
            other = None if is_class else on_own_thread(make, options.seconds)
            if other is not example:
                closing.callback(close_now, getattr(other, "close", nothing), options.seconds)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # other people's code
        told = "".join(traceback.format_exception(error))
        raise UserError(f"environment: {name} failed when it was made and closed once.  Correct it.\n{told}") from error
    if other is example:
        raise UserError(f"environment: {name} returns the same object twice.  Return a new one for each completion.")
    return name, make, example


def require_one(options: EnvironmentOptions, toolbox: Toolbox, own: Own) -> None:
    """Raise UserError if more than one thing would reply, or if nothing reads the options."""
    named = {"environment.path": options.path, "environment.url": options.url, "tools": toolbox, "environment": own}
    given = [name for name, value in named.items() if value]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: only one can reply to the policy's turns.  Remove the others.")
    if options.options and given in ([], ["tools"]):
        raise UserError("environment.options: there is no environment.path or url to use them.  Add one, or remove it.")


def session_maker(options: EnvironmentOptions) -> Callable[[], Environment]:
    """Makes sessions of an OpenEnv server, from the options of a section."""
    schema = Schema(OpenEnvEnvironment, left_out=frozenset({"url", "seconds"}))
    arguments = arguments_for(schema, options.options, where="environment.options")
    return partial(OpenEnvEnvironment, options.url, seconds=options.seconds, **arguments)


def own_environment(path: str) -> object:
    if is_name_in_file(path):
        return object_in_file(path, where="environment", noun="class or function")
    return object_in_module(path, where="environment")


def made(made_by: Callable[..., object], arguments: Mapping[str, Any], name: str) -> Environment:
    return require_environment(made_by(**deepcopy(dict(arguments))), name)


def require_environment(candidate: object, name: str) -> Environment:
    missing = [each for each in ("reset", "reply") if not callable(getattr(candidate, each, None))]
    if missing:
        lacks = " and ".join(f"`{each}`" for each in missing)
        raise UserError(f"environment: the {type(candidate).__name__} of {name} has no {lacks}.  Add it as a method.")
    assert isinstance(candidate, Environment)
    return candidate


def stop_texts_of(environment: Environment, name: str) -> tuple[str, ...]:
    texts = getattr(environment, "stop_texts", ())
    if isinstance(texts, str) or not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"environment: stop_texts of {name} = {texts!r}: give a tuple of texts, such as ('=',).")
    return tuple(texts)


def chat_turns(
    settings: TurnSettings, renderer: TokenizerRenderer, stop_ids: Sequence[int], reader: CallReader | None = None
) -> tuple[ChatTurns, tuple[str, ...]]:
    """The turns of a tokenizer's template, checked, and lines about it for the plan."""
    turns = ChatTurns(renderer, stop_ids, reader)
    fault = rewritten_turn(turns, renderer.tools) if renderer.template and settings.in_chat else ""
    if not fault:
        return turns, ()
    if settings.multi_turn == "append":
        return turns, (f"turns are appended although the chat template would rewrite them: {fault}",)
    raise UserError(
        f"the chat template does not write turns one by one as it writes the whole conversation: {fault}.  Set"
        " model.chat_template to a template that keeps turns, or rollout.multi_turn: append to append them all the"
        " same."
    )


def tool_environments(
    settings: TurnSettings, toolbox: Toolbox, renderer: TokenizerRenderer, stop_ids: Sequence[int]
) -> Environments:
    """Tools that are called in chat, or in text with `tools_at`."""
    turns: TextTurns
    notes: tuple[str, ...] = ()
    stop_texts: tuple[str, ...] = ()
    if settings.tools_at:
        tools_at = tools_by_text(settings.tools_at, toolbox)
        make: Callable[[], Environment] = partial(ToolsInText, tools_at)
        turns, stop_texts = TextTurns(renderer, stop_ids), tuple(tools_at)
    else:
        reader = call_reader(renderer, stop_ids)
        if not settings.in_chat:
            rule = "called in a conversation, and the prompts are plain text"
            raise UserError(f"tools: they are {rule}.  Set task.prompt_format: chat, or tools_at to ask in text.")
        make = partial(CalledTools, toolbox.tools, reader)
        turns, notes = chat_turns(settings, renderer, stop_ids, reader)
    return Environments(
        name=f"tools {', '.join(toolbox.tools)}",
        make=make,
        options=settings.options,
        renderer=turns,
        max_turns=settings.max_turns,
        stop_texts=stop_texts,
        only_at_stop_texts=bool(stop_texts),
        reproducible=toolbox.reproducible,
        notes=notes,
        close=toolbox.close,
    )


def call_reader(renderer: TokenizerRenderer, stop_ids: Sequence[int]) -> CallReader:
    """A reader of the calls that the chat template writes."""
    if not renderer.template:
        raise UserError(f"tools: the model's tokenizer{chat_templates.NO_TEMPLATE}; or set tools_at to ask in text.")
    question = {"role": USER, "content": SHORT}
    reply = {"role": TOOL, "name": SHORT, "tool_call_id": call_id(0), "content": SHORT}
    opening = renderer.templated([question], "tools")
    end, _ = ChatTurns(renderer, stop_ids).behind([question], [reply], "tools")
    return CallReader(renderer.tokenizer, renderer.tools, opening=opening, end=end)


def tools_by_text(tools_at: Mapping[str, str], toolbox: Toolbox) -> dict[str, Any]:
    """The tools by their stop texts.  Raises UserError for an unknown tool, one without a text, and a text of two."""
    for name in tools_at:
        if name not in toolbox.tools:
            raise UserError(f"tools_at.{name}: `tools` has no tool of that name.  {did_you_mean(name, toolbox.tools)}")
    if idle := [name for name in toolbox.tools if name not in tools_at]:
        raise UserError(f"tools_at: {idle[0]} has no stop text, so it is never called.  Add one, or remove the tool.")
    if not all(tools_at.values()) or len({*tools_at.values()}) < len(tools_at):
        raise UserError(f"tools_at = {dict(tools_at)}: give every tool another stop text, such as calculator: '='.")
    for tool in toolbox.tools.values():
        if tool.in_text is None and not takes_one_text(tool.description):
            fault = "is asked with one text, so it needs exactly one required argument, a str"
            raise UserError(
                f"tools_at.{tool.name}: a tool in text {fault}.  Change the function, or leave tools_at out."
            )
    return {text: toolbox.tools[name] for name, text in tools_at.items()}


def takes_one_text(description: Mapping[str, Any]) -> bool:
    """Whether the only required argument of a tool is a text."""
    parameters = description["function"]["parameters"]
    required = parameters.get("required", ())
    return len(required) == 1 and "string" in parameters["properties"][required[0]].get("type", "string")
