"""Whether a chat template writes turns one by one as it writes the whole conversation.

    T(messages up to a reply, the policy speaks next)   must begin   T(the same and one more turn with its reply, …)

It does not if a template drops the thoughts of earlier turns, or begins an open turn differently from a finished one.
Then the appended ids differ from those of the whole conversation, which is what a server would send the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.environments.chat_turns import TOOL, USER, ChatTurns, call_message
from posttrain.environments.tool_calls import BEGIN, END, ReadCall, call_id
from posttrain.errors import UserError
from posttrain.models.messages import ASSISTANT

QUESTION, THOUGHT, SAID, REPLY = "ask", "muse", "tell", "hear"
THINK, END_THINK = "<think>", "</think>"
ROUNDS = 3
SHOWN = 40
"""Characters of a difference that a message shows."""
WHERE = "a conversation of several turns"


@dataclass(frozen=True, slots=True)
class Round:
    """A turn of the policy and the reply to it, as messages, with texts that must be written."""

    turn: Mapping[str, Any]
    reply: Mapping[str, Any]
    texts: tuple[str, ...]
    call: ReadCall | None = None


def rounds(turns: ChatTurns, tools: Sequence[Mapping[str, Any]], opened: str) -> Iterator[Round]:
    """Every kind of turn that the template may get: plain ones or calls, with and without thoughts.

    If the template opens the policy's turn with <think>, every turn has thoughts.
    """
    thoughts = f"{THINK}\n{THOUGHT}\n{END_THINK}\n\n"
    thinks = ("", thoughts) if END_THINK in turns.renderer.template else ("",)
    for think in (thoughts,) if opened.rstrip().endswith(THINK) else thinks:
        thought = (THOUGHT,) if think else ()
        if tools:
            function = tools[0]["function"]
            names = [*function.get("parameters", {}).get("properties", {})][:1]
            call = ReadCall(str(function["name"]), dict.fromkeys(names, SAID))
            turn = call_message(think, call.name, call.arguments, call_id(0))
            reply = {"role": TOOL, "name": call.name, "tool_call_id": call_id(0), "content": REPLY}
            yield Round(turn, reply, (*thought, call.name), call)
        else:
            turn = {"role": ASSISTANT, "content": f"{think}{SAID}"}
            yield Round(turn, {"role": USER, "content": REPLY}, (*thought, SAID))


def rewritten_turn(turns: ChatTurns, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """How the template rewrites a turn; empty if it writes turns one by one as the whole.

    Raises UserError if it writes calls in a way that cannot be read back.
    """
    question = {"role": USER, "content": QUESTION}
    opened = turns.renderer.templated([question], WHERE)
    for each in rounds(turns, tools, opened):
        messages: list[Mapping[str, Any]] = [question]
        before = opened
        for number in range(1, ROUNDS + 1):
            end, behind = turns.behind(messages, [each.reply], WHERE)
            messages += [each.turn, each.reply]
            whole = turns.renderer.templated(messages, WHERE)
            if not whole.startswith(before):
                place = next(i for i, (old, new) in enumerate(zip(before, whole, strict=False)) if old != new)
                now, then = whole[place : place + SHOWN], before[place : place + SHOWN]
                return f"once turn {number} has a reply, it writes {now!r} where it wrote {then!r}"
            said = whole.removeprefix(before)
            if not said.endswith(end + behind):
                return f"it ends turn {number} and writes its reply differently than after another turn"
            said = said.removesuffix(end + behind)
            lost = [text for text in each.texts if text not in said]
            if lost:
                what = "thoughts" if lost == [THOUGHT] else "calls" if each.call else "text"
                return f"it leaves out the {what} of turn {number} once it has a reply"
            if each.call is not None and turns.reader is not None and turns.reader.calls(said) != [each.call]:
                raise UserError(
                    f"tools: the chat template writes a call as {said[:100]!r}, which is not read back.  Give the"
                    f" tokenizer a `response_template`, or set model.chat_template to one that writes {BEGIN}, a JSON"
                    f" object and {END}."
                )
            before = whole
    return ""
