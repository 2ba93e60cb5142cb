"""Running programs on another machine: a client of the `/run_code` protocol of SandboxFusion.

Request: {code, language, stdin, run_timeout, compile_timeout}.  Reply: {status: Success | Failed | SandboxError,
message, run_result: {status: Finished | Error | TimeLimitExceeded, return_code, stdout, stderr, execution_time}}.
"""

import json
import random
import time
import urllib.error
import urllib.request
from dataclasses import replace
from typing import IO, Any

from posttrain.sandbox.backends import lost
from posttrain.sandbox.execution import Exit
from posttrain.sandbox.probes import SPIN, SPIN_SECONDS
from posttrain.sandbox.replay_script import Conditions, ReplayRun, RunEnd

TRIES = 3
TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
WAIT_SECONDS = 0.5
"""Before the second try; twice that before the third."""
GRACE_SECONDS = 30.0
"""Time for queues and starting, beyond the program's."""
REPLY_BYTES = 64 << 20
READ_BYTES = 1 << 16
EARLY = 0.9
"""Share of the requested time; a program that was ended earlier met a limit of the service."""
BUSY = 2.0
"""Seconds by the clock per second of processor time, above which programs there count as starved."""
OUTPUT_KEPT = 1 << 20
"""Output that the service keeps; it drops the rest without notice."""


class Remote:
    """A service that runs programs; threads may share it."""

    conditions = Conditions(processes=0)  # who else runs there as the same user is not ours to know
    start_seconds = GRACE_SECONDS
    here, bounded_as_a_whole, tells_cpu = False, True, False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") + "/run_code"
        self.name = f"remote ({url})"
        self.remedy = (
            "programs there must not reach this machine: run the service on another one or in a container, not with"
            " `isolation: none` on a trainer's"
        )

    def stop(self) -> None:
        """Requests under way end at their time limit."""

    def run(self, run: ReplayRun) -> RunEnd:
        ended = self.run_for(run.text, run.stdin.decode("utf-8", "surrogatepass"), run.limits.wall_seconds)
        return replace(ended, starved=True) if ended.stopped is Exit.WALL_LIMIT and self.busy() else ended

    def run_for(self, code: str, stdin: str, seconds: float) -> RunEnd:
        """The end of a run that has some seconds by the clock."""
        began = time.monotonic()
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "run_timeout": seconds,
            "compile_timeout": seconds,
        }
        try:
            reply = self.asked(json.dumps(body).encode(), timeout=seconds + GRACE_SECONDS)
            return read_reply(reply, time.monotonic() - began, seconds)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return lost(f"{self.name}: {type(error).__name__}: {error}", time.monotonic() - began)

    def busy(self) -> bool:
        """Whether programs wait for a processor there, measured by a program that computes for a known time.

        The service does not say why a program was late: it may have slept, which is its fault, or starved.
        """
        ended = self.run_for(SPIN, "", 10 * SPIN_SECONDS)
        try:
            return ended.status != 0 or float(ended.stdout) > BUSY * SPIN_SECONDS
        except ValueError:
            return True

    def asked(self, body: bytes, *, timeout: float) -> dict[str, Any]:
        """The service's reply.  Raises OSError or ValueError where there is none after a few tries."""
        request = urllib.request.Request(self.url, data=body, headers={"Content-Type": "application/json"})
        until = time.monotonic() + timeout
        for left in reversed(range(TRIES)):
            try:
                with urllib.request.urlopen(request, timeout=max(1.0, until - time.monotonic())) as response:
                    reply: dict[str, Any] = json.loads(read_within(response, until))
                    return reply
            except (OSError, ValueError) as error:
                refused = isinstance(error, urllib.error.HTTPError) and error.code not in TRY_AGAIN
                if refused or left == 0 or time.monotonic() > until:
                    raise
                time.sleep(WAIT_SECONDS * 2 ** (TRIES - 1 - left) * random.uniform(0.5, 1.5))
        raise AssertionError("the last try returns or raises")


def read_within(response: IO[bytes], until: float) -> bytes:
    """All of a reply.  Raises OSError where it is late, even if parts of it keep coming."""
    content = bytearray()
    while part := response.read1(READ_BYTES):  # type: ignore[attr-defined]  # as every HTTP response has it
        content += part
        if time.monotonic() > until or len(content) > REPLY_BYTES:
            raise OSError(f"a reply of more than {len(content):,} bytes, or later than it should be")
    return bytes(content)


def read_reply(reply: dict[str, Any], wall_seconds: float, allowed: float) -> RunEnd:
    """The end of a run that was allowed some seconds, as the service reports it."""
    result = reply.get("run_result")
    if reply["status"] == "SandboxError" or result is None:
        return lost(f"the service failed: {str(reply.get('message'))[:1000]}", wall_seconds)
    stdout = (result.get("stdout") or "").encode("utf-8", "surrogatepass")
    timed_out = result["status"] == "TimeLimitExceeded"
    if timed_out and (ran := result.get("execution_time")) is not None and ran < EARLY * allowed:
        return lost(
            f"the service ended it after {ran:.3g} s by a limit of the service; {allowed:.3g} s were requested", ran
        )
    stopped = Exit.WALL_LIMIT if timed_out else Exit.OUTPUT_LIMIT if len(stdout) >= OUTPUT_KEPT else None
    return RunEnd(
        status=-9 if timed_out else int(result["return_code"]),
        stdout=stdout,
        stderr=(result.get("stderr") or "").encode("utf-8", "surrogatepass"),
        wall_seconds=wall_seconds,
        stopped=stopped,
    )
