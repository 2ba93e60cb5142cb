"""A voting page that is served in this process, and requests to it."""

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from posttrain.commands.collection.ballot import Ballot
from posttrain.server.voting_page import TOKEN_HEADER, VotingPage

Answer = tuple[int, Mapping[str, str], bytes]
"""Status, headers by their names in small letters, and body."""


@contextmanager
def voting(*ballots: Ballot, question: str = "Which answer is better?") -> Iterator[VotingPage]:
    """A server in a thread of this process, on a free port."""
    with VotingPage(ballots, question).in_thread() as page:
        yield page


def token_of(server: VotingPage, rater: str = "anna") -> str:
    return next(token for token, ballot in server.ballots.items() if ballot.rater == rater)


def asked(
    server: VotingPage,
    path: str,
    body: object = None,
    *,
    method: str = "",
    headers: Mapping[str, str] | None = None,
    token: str | None = "",
) -> Answer:
    """The answer to a request with the first rater's token, unless it is to have another one or, by None, none."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    given = {"Content-Type": "application/json"}
    if token is not None:
        given[TOKEN_HEADER] = token or next(iter(server.ballots))
    payload = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, payload, {**given, **(headers or {})})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def state(server: VotingPage, rater: str = "anna") -> dict[str, Any]:
    """What the page shows now."""
    status, _, content = asked(server, "/state", token=token_of(server, rater))
    assert status == 200, content
    found: dict[str, Any] = json.loads(content)
    return found


def vote(server: VotingPage, choice: str, pair: str = "", rater: str = "anna") -> tuple[int, dict[str, Any]]:
    """Status and new state after a vote on the pair that is shown, or on another."""
    body = {"pair": pair or state(server, rater)["pair"]["id"], "choice": choice}
    status, _, content = asked(server, "/vote", body, token=token_of(server, rater))
    return status, json.loads(content)
