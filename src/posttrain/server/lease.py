"""The trainer that a server samples for: one at a time, until it releases the server or is silent for too long."""

import time
from http import HTTPStatus
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from posttrain.generation.rl_protocol import OWNER_HEADER, OwnerInfo
from posttrain.server.requests import Endpoint, RefusedRequest


class Lease:
    """The trainer that holds a server.  After its lease ends, it keeps the server until another trainer takes it."""

    def __init__(self) -> None:
        self.owner, self.seconds, self.until = "", 0.0, 0.0
        self.num_owners = 0
        """Number of owner changes so far."""

    def take(self, asked: OwnerInfo) -> None:
        """Reserve the server for a trainer, or release it.  Raises RefusedRequest while another trainer has it."""
        self._require_not_of_another(asked.owner)
        if asked.renews:
            self._require_owner(asked.owner)
        owner, self.seconds = (asked.owner, asked.lease_seconds) if asked.lease_seconds else ("", 0.0)
        self.num_owners += owner != self.owner
        self.owner = owner
        self.until = time.monotonic() + self.seconds

    def checked(self, endpoint: Endpoint, *, changes: bool) -> Endpoint:
        """The endpoint, only for the trainer that has the server; others may send requests that do not change it.

        The owner is checked again after the endpoint: another trainer's weights may have sampled part of the
        completions, even if the first trainer has taken the server back since.
        """

        async def answer(request: Request) -> Response:
            asks = unquote(request.headers.get(OWNER_HEADER, ""))
            self._require(asks, changes=changes)
            num_owners = self.num_owners
            made = await endpoint(request)
            self._require(asks, changes=changes)
            if asks and self.num_owners != num_owners:
                fault = "another run had this server during the request.  Send the request again."
                raise RefusedRequest(fault, HTTPStatus.CONFLICT)
            return made

        return answer

    def _require(self, asks: str, *, changes: bool) -> None:
        if asks or changes:
            self._require_not_of_another(asks)
        if asks:
            self._require_owner(asks)
            self.until = time.monotonic() + self.seconds

    def _require_owner(self, asks: str) -> None:
        if asks == self.owner:
            return
        fault = "this server does not belong to a run: it was restarted or released.  The next update sends it weights."
        if self.owner:
            remedy = "The next update takes it back.  Give each run its own server."
            fault = f"{self.owner[-120:]} took this server, and its lease has ended.  {remedy}"
        raise RefusedRequest(fault, HTTPStatus.CONFLICT)

    def _require_not_of_another(self, asks: str) -> None:
        left = self.until - time.monotonic()
        if self.owner not in ("", asks) and left > 0:
            remedy = f"End that run, or use another server.  If it was killed, try again in {left:.0f} seconds"
            raise RefusedRequest(f"this server samples for {self.owner[-120:]}.  {remedy}.", HTTPStatus.CONFLICT)
