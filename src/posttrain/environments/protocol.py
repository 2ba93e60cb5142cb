"""What replies to a policy's turns: a calculator, a game, a simulated user.

    class Guess:
        def reset(self, row, seed):
            self.number = random.Random(seed).randint(1, 9)
            return "Guess a number from 1 to 9.\n"

        def reply(self, said):
            if said.strip() == str(self.number):
                return Reply("Right.\n", reward=1.0, done=True)
            return Reply("Wrong.\n")

Each completion has its own object.
"""

import asyncio
import inspect
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from posttrain.options.environment import EnvironmentOptions
from posttrain.records import Prompt
from posttrain.turns import ToolCall

Result = TypeVar("Result")
Messages = Sequence[Mapping[str, object]]
"""Chat turns, each with `role` and `content`."""
Said = str | Messages
"""Text for a plain prompt; for a conversation text is one message of the role `user`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment answers to a turn."""

    content: Said
    """What the policy reads next; may be empty."""
    reward: float | None = None
    """What the turn earned."""
    done: bool = False
    """Whether the conversation is over: the policy has no further turn."""
    calls: tuple[ToolCall, ...] = ()
    """The tools that were called, for metrics."""


@runtime_checkable
class Environment(Protocol):
    """Replies to the turns of one completion.  Both methods may be `async`.

    Three attributes are optional.  `reproducible = False`: replies are not a function of row, seed and what was said;
    the run then keeps them, and a resumed step reads them.  `stop_texts`: texts that end a turn, like the stop tokens,
    after the token that completes one.  `close()` is called once, after the rewards have read the object, or when its
    completion is dropped.
    """

    def reset(self, row: Mapping[str, object], seed: int) -> Said | Awaitable[Said | None] | None:
        """Start.  Returns an addition to the prompt; None adds nothing.

        `row` has the columns of the problem's row.  `seed` is the same for all completions of a prompt in a step, and
        so must the addition be.
        """

    def reply(self, said: str) -> Reply | Awaitable[Reply | None] | None:
        """The reply to a turn; None accepts the answer, and the completion ends."""


def nothing() -> None:
    """Closes nothing."""


def close_now(close: Callable[[], object], seconds: float) -> None:
    """Call a `close` that may be async, and wait for it.  Raises TimeoutError after the time limit."""

    async def closed() -> None:
        if inspect.isawaitable(closing := close()):
            await closing

    on_own_thread(lambda: asyncio.run(closed()), seconds)


def on_own_thread(call: Callable[[], Result], seconds: float) -> Result:
    """The result of other people's code, or what it raises; the caller, such as a notebook, may be on an event loop.

    Raises TimeoutError after the time limit, with a note that says where the call hangs; its thread is abandoned.
    """
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(called(call))
        except EnvironmentFailure as failed:
            result.set_exception(failed.__cause__)

    thread = threading.Thread(target=run, name="environment", daemon=True)
    thread.start()
    thread.join(seconds)
    if not result.done() and (frame := sys._current_frames().get(thread.ident or 0)) is not None:
        late = TimeoutError(f"it took longer than {seconds:g} seconds (environment.seconds)")
        late.add_note("".join(traceback.format_stack(frame)))
        raise late
    return result.result(0)


class EnvironmentFailure(Exception):
    """What an environment raised, as its cause."""


def called(call: Callable[[], Result]) -> Result:
    """The result of other people's code.  Raises EnvironmentFailure for whatever it raises."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise EnvironmentFailure from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Makes the environments of a run's completions, and says how they are used."""

    name: str
    """Its name in messages and plans."""
    make: Callable[[], Environment]
    options: EnvironmentOptions
    renderer: "TurnRenderer"
    max_turns: int
    """Most turns of the policy in a completion."""
    stop_texts: tuple[str, ...] = ()
    only_at_stop_texts: bool = False
    """Whether a turn that ends with a stop token, not with a stop text, ends its completion without asking."""
    reproducible: bool = True
    notes: tuple[str, ...] = ()
    """Lines of the plan."""
    close: Callable[[], None] = nothing
    """Closes what the environments share, such as a sandbox; called once, with the session."""


Own = Environments | Callable[..., Environment] | None
"""The argument `environment` in Python: a class, a factory, an `Environments` record, or None."""


@runtime_checkable
class TurnRenderer(Protocol):
    """From turns to tokens and back.  Only new text is rendered and encoded; earlier ids stay."""

    def opened(self, prompt: Prompt, added: Said) -> Prompt:
        """The prompt with what `reset` added, before anything is sampled."""

    def said(self, tokens: Sequence[int]) -> str:
        """The text of a turn, its stop token removed."""

    def reply_tokens(self, prompt: Prompt, turns: Sequence["SaidAndReply"]) -> tuple[int, ...]:
        """The tokens after the last sampled token.

        They are the end of the policy's last turn as the template writes it, the reply, and the beginning of the
        policy's next turn.
        """

    def messages(self, turns: Sequence["SaidAndReply"], said: str | None) -> tuple[Mapping[str, object], ...]:
        """A completion as messages: the policy's turns with their calls, the replies, and the turn without a reply."""


@dataclass(frozen=True, slots=True)
class SaidAndReply:
    """A turn of the policy as text, and the reply to it."""

    said: str
    reply: Said
    stopped: bool = True
    """Whether a stop token ended the turn; a stop text ends one without."""
