"""New weights for one server, by the routes that vLLM 0.32 has for it."""

import time
from pathlib import Path

from posttrain.generation.http.server_calls import ServerCalls, ServerFault
from posttrain.generation.http.server_checks import Facts
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
    FinishRequest,
    InitRequest,
    UpdateInfo,
    UpdateRequest,
    WeightInfo,
    written,
)

SHARED = "Name a folder that trainer and server see under one path in engine.transfer_folder"


def uploads(facts: Facts, path: Path, transport: str) -> bool:
    """Whether a server gets files of weights by PUT, and does not read them from the folder `path`."""
    if transport != "auto":
        return transport == "put"
    return facts.ours and not (facts.transfer_folder and path.resolve().is_relative_to(facts.transfer_folder))


async def send_weights(calls: ServerCalls, file: WeightsFile, *, upload: bool) -> float:
    """Give a server the weights of a file; the seconds that it was paused.  Completions under way continue with them.

    Raises ServerFault; the server then stays paused, so that nothing is sampled from half a model.
    """
    until = time.monotonic() + calls.seconds.update

    async def post(phase: str, path: str, body: bytes = b"") -> bytes:
        return await calls.ask(
            f"weights {file.version}: {phase}", "POST", path, body, seconds=max(0.0, until - time.monotonic())
        )

    if upload:
        seconds = max(0.0, until - time.monotonic())
        await calls.ask(
            f"weights {file.version}: upload", "PUT", UPLOAD.format(sha256=file.sha256), file.path, seconds=seconds
        )
    info = UpdateInfo(sha256=file.sha256, path="" if upload else str(file.path), adapter=file.adapter)
    began = time.monotonic()
    await post("pause", f"{PAUSE}?mode=keep")
    await post("init", INIT, written(InitRequest(init_info={})))
    try:
        await post("start", START)
    except ServerFault as fault:
        if fault.status is None:
            raise
        try:  # an update that an earlier trainer began and did not finish is still open: it takes a file as well
            await post("update", UPDATE, written(UpdateRequest(update_info=info)))
        except ServerFault:
            raise fault from None
    else:
        await post("update", UPDATE, written(UpdateRequest(update_info=info)))
    await post("finish", FINISH, written(FinishRequest(weight_version=str(file.version))))
    await post("resume", RESUME)
    paused = time.monotonic() - began
    phase = f"weights {file.version}: version"
    said = await calls.ask_for(WeightInfo, phase, WEIGHT_INFO, seconds=max(0.0, until - time.monotonic()))
    if said.weight_version != str(file.version):
        raise ServerFault(
            calls.url, phase, f"it says that it has weights {said.weight_version[:40]!r} after the update"
        )
    return paused
