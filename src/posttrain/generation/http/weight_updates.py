"""New weights for one server, by the routes that vLLM 0.32 has for it."""

import time
from pathlib import Path
from urllib.parse import unquote

from posttrain.generation.http.server_calls import ServerCalls, ServerFault
from posttrain.generation.http.weights_files import WeightsFile
from posttrain.generation.rl_protocol import (
    FINISH,
    INIT,
    PAUSE,
    RESUME,
    START,
    UPDATE,
    UPLOAD,
    WEIGHT_INFO,
    Facts,
    FinishRequest,
    InitRequest,
    OwnerInfo,
    OwnFacts,
    UpdateInfo,
    UpdateRequest,
    WeightInfo,
    written,
)

LEASE_SECONDS = 60.0
"""How long a server is kept for a run after its last call: a run renews it every third of this time."""
SHARED = "Name a folder that trainer and server see under one path in engine.transfer_folder"


def uploads(facts: Facts, path: Path, transport: str) -> bool:
    """Whether a server gets files of weights by PUT, and does not read them from the folder `path`."""
    if transport != "auto":
        return transport == "put"
    return isinstance(facts, OwnFacts) and not (
        facts.transfer_folder and path.resolve().is_relative_to(facts.transfer_folder)
    )


async def take_server(
    calls: ServerCalls, phase: str, *, seconds: float, keep: bool = True, renews: bool = False
) -> None:
    """Keep a server for this run, or give it back.  Raises ServerFault if another run has it.

    With `renews`, also raises it if another run had the server meanwhile, or it was restarted: it then has other
    weights.
    """
    info = OwnerInfo(owner=unquote(calls.owner), lease_seconds=LEASE_SECONDS if keep else 0.0, renews=renews)
    await calls.ask(phase, INIT, written(InitRequest(init_info=info)), seconds=seconds)


async def send_weights(calls: ServerCalls, file: WeightsFile, *, upload: bool) -> float:
    """Give a server the weights of a file; the seconds that it was paused.  Completions in progress continue with them.

    Raises ServerFault; the server then has its last weights, or stays paused, so that nothing is sampled from half a
    model.
    """
    until = time.monotonic() + calls.seconds.update

    async def call(step: str, path: str, body: bytes | Path = b"") -> None:
        seconds = max(0.0, until - time.monotonic())
        await calls.ask(f"weights {file.version}: {step}", path, body, seconds=seconds)

    await take_server(calls, f"weights {file.version}: init", seconds=calls.seconds.update)
    if upload:
        await call("upload", UPLOAD.format(sha256=file.sha256), file.path)
    unstarted: ServerFault | None = None
    try:
        await call("start", START)
    except ServerFault as fault:
        if fault.status is None:
            raise
        unstarted = fault  # an update that an earlier trainer began and did not finish is open: it takes a file too
    try:
        info = UpdateInfo(sha256=file.sha256, path="" if upload else str(file.path), adapter=file.adapter)
        await call("update", UPDATE, written(UpdateRequest(update_info=info)))
    except ServerFault as fault:
        raise unstarted or fault from None
    began = time.monotonic()
    await call("pause", f"{PAUSE}?mode=keep")
    await call("finish", FINISH, written(FinishRequest(weight_version=str(file.version))))
    await call("resume", RESUME)
    paused = time.monotonic() - began
    phase, seconds = f"weights {file.version}: version", max(0.0, until - time.monotonic())
    said = await calls.ask_for(WeightInfo, phase, WEIGHT_INFO, seconds=seconds)
    if said.weight_version != str(file.version):
        raise ServerFault(
            calls.url, phase, f"it says that it has weights {said.weight_version[:40]!r} after the update"
        )
    return paused
