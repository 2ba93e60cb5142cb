"""`posttrain serve`: a model behind a small OpenAI-compatible endpoint, to try it or to use it as a small judge."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from annotated_types import Gt

from posttrain.commands.arguments import LOADING, TEMPLATE, model_layer, split_arguments
from posttrain.commands.chat import ChatConfig
from posttrain.commands.flags import CommandSpec
from posttrain.errors import UserError
from posttrain.options.bounds import Bounded, PositiveInt, Rule
from posttrain.server.addresses import Port, is_loopback, is_origin, serve_extra

TOKEN_VARIABLE = "POSTTRAIN_SERVE_TOKEN"
"""The environment variable with the token, if no flag gives one."""


@dataclass(frozen=True, kw_only=True)
class ServeSwitches(Bounded):
    """Where the server listens, and who may send requests."""

    host: str = "127.0.0.1"
    """Address to listen on; if other machines can reach it, a token or --public is required."""
    port: Port = 8000
    """Port to listen on; 0: a free one."""
    public: bool = False
    """Answer everybody who can reach the port, without a token."""
    token: str = ""
    """Answer only requests with `Authorization: Bearer TOKEN`; clients call it api_key.  `ps` shows flags to everybody
    on this machine: prefer the variable POSTTRAIN_SERVE_TOKEN.  Nothing is encrypted."""
    seconds: Annotated[float, Gt(0)] = 600.0
    """Time limit of a request, and of its wait in the queue."""
    max_requests: PositiveInt = 1024
    """Maximum number of requests in progress or waiting; more get status 429 with `Retry-After`."""
    cors: tuple[str, ...] = ()
    """Origins of web pages that may send requests, such as http://localhost:3000; other pages may not."""
    rl: bool = False
    """Also serve the routes for training: token ids in, token ids and log-probs out, and new weights."""
    transfer_folder: str = ""
    """With --rl: folder to read files of weights from; empty: a temporary one, for weights sent by the trainer."""
    max_rows: PositiveInt = 256
    """Completions decoded at a time: limits the key/value cache and does not change completions."""
    native: bool = False
    """Sample with the small kernel in C, as `engine.native` of a recipe does, if model and machine support it: it needs
    less CPU time.  New requests start, and chunks are sent, after up to 16 tokens."""

    rules = (
        Rule(
            "cors",
            lambda o: all(map(is_origin, o.cors)),
            "must be origins in lower case: http or https, a host, and a port if it is not the default.  Write"
            " --cors http://localhost:3000, without a path or a final slash.",
        ),
        Rule(
            "cors", lambda o: not (o.cors and o.rl), "would let a web page replace the weights.  Leave out one of them."
        ),
        Rule(
            "transfer_folder", lambda o: o.rl or not o.transfer_folder, "is only for --rl.  Add --rl, or leave it out."
        ),
        Rule(
            "public",
            lambda o: not (o.public and o.rl),
            "would let anybody replace the weights.  Use a token with --rl.",
        ),
    )


PROGRAM = CommandSpec(
    name="posttrain serve MODEL",
    description="Serve a model (a folder, a run or `bundled`) at http://HOST:PORT/v1: models, completions and"
    " chat/completions, as OpenAI's clients expect them; with --rl also to a training run (`engine: {name: http}`)."
    "  Ctrl-C stops it.",
    switches=ServeSwitches(),
    only=(*LOADING, *TEMPLATE),
)


def main(arguments: Sequence[str]) -> int:
    """Serve until interrupted."""
    model, given = split_arguments(arguments, PROGRAM).only("MODEL")
    config, switches = given.configured(ChatConfig, [model_layer(model)])
    token = token_of(switches)
    with serve_extra("posttrain serve"):
        from posttrain.server.model_server import ModelServer
    from posttrain.models.loading.model_folder import load_policy
    from posttrain.models.native.native_decoder import native_refusal
    from posttrain.models.rendering import renderer_of
    from posttrain.server.openai_routes import Service

    policy, seconds = load_policy(config.model), min(switches.seconds, threading.TIMEOUT_MAX)
    if switches.native:
        policy = replace(policy, native_reason=None)
    renderer = renderer_of(policy, config.model.template_options)
    limits = {"max_rows": switches.max_rows, "max_requests": switches.max_requests}
    service = Service(policy, renderer, name=model.rstrip("/"), seconds=seconds, **limits)
    with transfer_folder_of(switches) as folder:
        server = ModelServer(
            service, host=switches.host, port=switches.port, token=token, origins=switches.cors, transfer_folder=folder
        )
        print(f"{model} at http://{switches.host}:{server.port}/v1   (Ctrl-C stops it)", flush=True)
        if switches.native and (refusal := native_refusal(service.policy)) is not None:
            print(f"Not sampled by the native kernel: {refusal}.", flush=True)
        if token and not switches.token:
            print(f"Requests need the token in {TOKEN_VARIABLE} (clients call it api_key).", flush=True)
        server.serve_until_signal()
    return 0


@contextmanager
def transfer_folder_of(switches: ServeSwitches) -> Iterator[Path | None]:
    """The folder to read weights from; a temporary one is removed at the end.  None without --rl."""
    if not switches.rl or switches.transfer_folder:
        yield Path(switches.transfer_folder) if switches.rl else None
        return
    with TemporaryDirectory(prefix="posttrain-weights-") as made:
        yield Path(made)


def token_of(switches: ServeSwitches) -> str:
    """The token that requests need, or "".  Raises UserError if other machines could send requests without one."""
    source, token = "--token", switches.token
    if not token and TOKEN_VARIABLE in os.environ:
        source, token = TOKEN_VARIABLE, os.environ[TOKEN_VARIABLE]
        if not token:
            raise UserError(f"{TOKEN_VARIABLE}: is empty.  Set it to a token, or unset it.")
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise UserError(f"{source}: must be printable ASCII without spaces, since it travels in a header")
    if token and switches.public:
        given = "--token is given" if switches.token else f"{TOKEN_VARIABLE} is set"
        raise UserError(f"--public does not require a token, but {given}.  Leave one of them out.")
    if not is_loopback(switches.host) and not (token or switches.public):
        rule = f"lets other machines send requests.  Set {TOKEN_VARIABLE}, or add --token TEXT or --public"
        raise UserError(f"--host {switches.host} {rule}.")
    if is_loopback(switches.host) and switches.public:
        raise UserError(f"--public has no effect with --host {switches.host}, which only this machine can reach")
    return token
