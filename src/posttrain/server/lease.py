"""Who a server samples for: one trainer at a time, until it gives the server back or is silent for too long."""

import time
from http import HTTPStatus
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from posttrain.generation.rl_protocol import OWNER_HEADER, OwnerInfo
from posttrain.server.requests import Endpoint, RefusedRequest


class Lease:
    """The trainer that has taken a server.  After the lease's end it keeps the server until another takes it."""

    def __init__(self) -> None:
        self.owner, self.seconds, self.until = "", 0.0, 0.0
        self.num_owners = 0
        """Changes of the owner so far."""

    def take(self, asked: OwnerInfo) -> None:
        """Keep the server for a trainer, or give it back.  Raises RefusedRequest while another one has it."""
        self._require_not_of_another(asked.owner)
        if asked.renews:
            self._require_owner(asked.owner)
        owner, self.seconds = (asked.owner, asked.lease_seconds) if asked.lease_seconds else ("", 0.0)
        self.num_owners += owner != self.owner
        self.owner = owner
        self.until = time.monotonic() + self.seconds

    def checked(self, endpoint: Endpoint, *, changes: bool) -> Endpoint:
        """The endpoint, for the trainer that has the server; others may ask what `changes` nothing.

        It is checked again after the endpoint: another trainer's weights may have sampled a part of the completions,
        even if the server has been taken back since.
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
        fault = "this server belongs to no run: it was restarted or given back.  The next update sends it weights."
        if self.owner:
            remedy = "The next update takes it back.  Give each run its own server."
            fault = f"this server was taken by {self.owner[-120:]}, whose lease has ended.  {remedy}"
        raise RefusedRequest(fault, HTTPStatus.CONFLICT)

    def _require_not_of_another(self, asks: str) -> None:
        left = self.until - time.monotonic()
        if self.owner not in ("", asks) and left > 0:
            remedy = f"End that run, or use another server; if it was killed, try again in {left:.0f} seconds"
            raise RefusedRequest(f"this server samples for {self.owner[-120:]}.  {remedy}.", HTTPStatus.CONFLICT)
