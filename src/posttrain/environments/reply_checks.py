"""Checks of what an environment returned.  Their errors become the failure of its completion."""

import math
from collections.abc import Mapping, Sequence
from typing import SupportsFloat, cast

from posttrain.environments.protocol import Reply, Said
from posttrain.models.messages import ASSISTANT, checked_message
from posttrain.turns import ToolCall

MOST_CHARACTERS = 1_000_000
"""Longest reply."""


def checked_reply(returned: object) -> Reply | None:
    """What `reply` returned.  Raises TypeError or ValueError."""
    if returned is None:
        return None
    if not isinstance(returned, Reply):
        raise TypeError(f"reply returned {returned!r:.60} ({type(returned).__name__}).  Return a Reply, or None.")
    calls, told = returned.calls, cast(object, returned.reward)
    reward = None if told is None else float(told) if isinstance(told, SupportsFloat) else math.nan
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"reply returned reward = {told!r:.60}.  Give a finite number, or None.")
    if not isinstance(returned.done, bool):
        raise TypeError(f"reply returned done = {returned.done!r:.60}.  Give True or False.")
    if not all(isinstance(call, ToolCall) for call in calls):
        raise TypeError(f"reply returned calls = {calls!r:.60}.  Give ToolCall records.")
    return Reply(checked_said(returned.content), reward, returned.done, tuple(calls))


def checked_addition(returned: object) -> Reply | None:
    """What `reset` returned, as a reply; None adds nothing."""
    return None if returned is None else Reply(checked_said(returned))


def checked_said(content: object) -> Said:
    """Text, or messages other than the policy's."""
    if isinstance(content, str):
        messages, texts, said = [], [content], cast(Said, content)
    else:
        listed = content if isinstance(content, Sequence) else ()
        if not listed or not all(isinstance(each, Mapping) for each in listed):
            kind = type(content).__name__
            raise TypeError(
                f"the content is {content!r:.60} ({kind}).  Give text, or messages with `role` and `content`."
            )
        messages = [checked_message(each, f"message {number} of the reply") for number, each in enumerate(listed)]
        texts, said = [each["content"] for each in messages], tuple(messages)
    if any(each["role"] == ASSISTANT for each in messages):
        raise ValueError(f"a reply has a message of the role {ASSISTANT}, which only the policy has.  Use another.")
    if (count := sum(map(len, texts))) > MOST_CHARACTERS:
        raise ValueError(f"a reply has {count} characters, and {MOST_CHARACTERS} are allowed.  Shorten it.")
    return said
