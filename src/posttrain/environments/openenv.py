"""A client of OpenEnv environments (meta-pytorch/OpenEnv), by their wire protocol: JSON over a WebSocket.

    {"type": "reset", "data": {"seed": …}}       {"type": "observation", "data": {"observation": {…}, "reward", "done"}}
    {"type": "step", "data": {action}}           the same
    {"type": "close"}                            {"type": "error", "data": {"message", "code"}}, in place of an answer

A connection is a session of the server.  Each completion has one, which ends with it.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from posttrain.environments.protocol import Reply
from posttrain.errors import UserError

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

CONNECT_SECONDS = 10.0
MOST_BYTES = 16 << 20
"""Longest message of a server."""
MOST_CHARACTERS = 20_000
"""Longest observation that the policy is shown; the rest is cut off."""
INSTALL = "Install it with: pip install 'posttrain[openenv]'."


class OpenEnvFailure(Exception):
    """The server is gone, or reports an error: the completion fails."""


class OpenEnvEnvironment:
    """A session of a server.  We assume that its replies are not a function of what was said."""

    reproducible = False

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        observation: str = "",
        reset: Mapping[str, object] | None = None,
        columns: tuple[str, ...] = (),
        seconds: float = 30.0,
    ) -> None:
        """Options of the section `environment`.

        action        the field of an action that holds what was said; empty: what was said is the action, as JSON
        observation   the field of an observation that the policy reads; empty: the only text, else all of it as JSON
        reset         what `reset` sends in addition to the seed
        columns       columns of the row that `reset` sends as well
        """
        self.url, self.action, self.observation, self.seconds = url, action, observation, seconds
        self.sent, self.columns = dict(reset or {}), columns
        self.connection: ClientConnection | None = None
        self.session = ExitStack()

    def reset(self, row: Mapping[str, object], seed: int) -> str:
        self.connection = websocket_to(self.session, self.url, self.seconds)
        columns = {name: row[name] for name in self.columns}
        answer = self.asked({"type": "reset", "data": {"seed": seed % 2**31, **columns, **self.sent}})
        return self.text(answer)

    def reply(self, said: str) -> Reply:
        answer = self.asked({"type": "step", "data": self.action_of(said)})
        reward, done = answer.get("reward"), answer.get("done")
        return Reply(self.text(answer), reward=None if reward is None else float(reward), done=bool(done))

    def action_of(self, said: str) -> object:
        if self.action:
            return {self.action: said}
        try:
            return json.loads(said)
        except (ValueError, RecursionError):
            return {}

    def asked(self, message: Mapping[str, object]) -> Mapping[str, Any]:
        """The data of the server's answer.  Raises OpenEnvFailure."""
        from websockets.exceptions import ConnectionClosed

        if self.connection is None:
            raise OpenEnvFailure(f"{self.url}: `reply` before `reset`")
        try:
            self.connection.send(json.dumps(message, default=str))
            answer = json.loads(self.connection.recv(timeout=self.seconds))
        except (ConnectionClosed, TimeoutError, OSError, ValueError, RecursionError) as error:
            raise OpenEnvFailure(f"{self.url}: {message['type']}: {type(error).__name__}: {error}") from error
        data = answer.get("data") if isinstance(answer, Mapping) else None
        if not isinstance(data, Mapping) or answer.get("type") != "observation":
            raise OpenEnvFailure(f"{self.url}: {message['type']}: the server said {str(answer)[:500]}")
        return data

    def text(self, answer: Mapping[str, Any]) -> str:
        seen = answer.get("observation")
        if isinstance(seen, Mapping) and self.observation:
            seen = seen.get(self.observation, "")
        elif isinstance(seen, Mapping):
            texts = [value for value in seen.values() if isinstance(value, str)]
            seen = texts[0] if len(texts) == 1 else seen
        text = seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)
        return text[:MOST_CHARACTERS]

    def close(self) -> None:
        from websockets.exceptions import WebSocketException

        if self.connection is not None:
            with suppress(OSError, WebSocketException):  # it is gone already
                self.connection.send(json.dumps({"type": "close"}))
            self.connection = None
        self.session.close()


def websocket_to(session: ExitStack, url: str, seconds: float) -> "ClientConnection":
    """A connection, which ends with `session`.  Raises OpenEnvFailure if the server refuses it."""
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    try:
        opening = connect(
            url, open_timeout=min(seconds, CONNECT_SECONDS), close_timeout=1, max_size=MOST_BYTES, proxy=None
        )
        return session.enter_context(opening)
    except (OSError, TimeoutError, WebSocketException) as error:
        raise OpenEnvFailure(f"{url}: cannot connect: {error}") from error


def require_server(url: str, seconds: float) -> None:
    """Connect once.  Raises UserError if the server does not answer, or without the extra."""
    try:
        with ExitStack() as session:
            websocket_to(session, url, seconds)
    except ImportError as error:
        raise UserError(f"environment.url: OpenEnv needs the package websockets.  {INSTALL}") from error
    except OpenEnvFailure as error:
        raise UserError(f"environment.url: {error}.  Start the server, or correct the address.") from error
