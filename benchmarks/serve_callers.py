"""32 callers of `posttrain serve bundled` at once, beside one caller who asks for 32 completions; and the first token.

    python benchmarks/serve_callers.py [--repeats 7] [--native]

The ways to ask take turns, so that a busy machine slows all of them.  Every round has its own seeds: the number of
steps is the length of the longest completion, which one seed may make short.  Given are medians of seconds of wall
clock and of the server's CPU.  Linux only: it reads the server's time from /proc.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import httpx
from serve_rl import cpu_seconds

CALLERS, LIMIT = 32, 100
ASKS: dict[str, Any] = {"prompt": "Use all of 11, 25, 11 to make 25.\n", "max_tokens": LIMIT}


async def whole(client: httpx.AsyncClient, **fields: object) -> int:
    """The tokens of an answer."""
    said = await client.post("/v1/completions", json={**ASKS, **fields})
    return int(said.raise_for_status().json()["usage"]["completion_tokens"])


async def streamed(client: httpx.AsyncClient, firsts: list[float], **fields: object) -> int:
    """The same in chunks; notes the seconds until the first."""
    began, tokens = time.perf_counter(), 0
    body = {**ASKS, **fields, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as said:
        async for line in said.raise_for_status().aiter_lines():
            if line.startswith("data: {"):
                if not tokens:
                    firsts.append(time.perf_counter() - began)
                tokens += 1
                last = line
    return int(json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"])


async def measure(url: str, server: int, repeats: int) -> None:
    firsts: dict[str, list[float]] = {"alone": [], "among 31 others": []}
    seconds: dict[str, list[tuple[float, float]]] = {}
    tokens: dict[str, list[int]] = {}
    number = 0
    limits = httpx.Limits(max_connections=CALLERS)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def callers(ask: Callable[..., Awaitable[int]]) -> int:
            return sum(await asyncio.gather(*(ask(seed=CALLERS * number + caller) for caller in range(CALLERS))))

        ways: dict[str, Callable[[], Awaitable[int]]] = {
            f"one caller, n = {CALLERS}": lambda: whole(client, n=CALLERS, seed=number),
            f"{CALLERS} callers": lambda: callers(lambda **seed: whole(client, **seed)),
            f"{CALLERS} callers, streamed": lambda: callers(
                lambda **seed: streamed(client, firsts["among 31 others"], **seed)
            ),
            "one caller, streamed": lambda: streamed(client, firsts["alone"], seed=number),
        }
        for number in range(repeats + 1):  # the first one warms up
            if number == 1:
                for each in firsts.values():
                    each.clear()
            for name, way in ways.items():
                began, before = time.perf_counter(), cpu_seconds(server)
                sampled = await way()
                taken = time.perf_counter() - began, cpu_seconds(server) - before
                if number:
                    seconds.setdefault(name, []).append(taken)
                    tokens.setdefault(name, []).append(sampled)
    (one, *_) = seconds.values()
    for name, values in seconds.items():
        wall, cpu = median(each for each, _ in values), median(each for _, each in values)
        print(f"{name}: {median(tokens[name]):.0f} tokens in {wall:.2f} s, {cpu:.2f} s of CPU", end="; ")
        walls, cpus = ([after[i] / before[i] for before, after in zip(one, values, strict=True)] for i in (0, 1))
        print(f"over the first: {median(walls):.2f} and {median(cpus):.2f}")
    for name, waits in firsts.items():
        print(f"first token {name}: {1000 * median(waits):.0f} ms, slowest {1000 * max(waits):.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--native", action="store_true", help="sample with the kernel in C")
    given = parser.parse_args()
    command = [sys.executable, "-m", "posttrain", "serve", "bundled", "--port", "0"]
    command += ["--native"] if given.native else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://[^/]*", server.stdout.readline())
            assert found is not None
            asyncio.run(measure(found[0], server.pid, given.repeats))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
