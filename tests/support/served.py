"""The bundled model behind `posttrain serve`, and what it answers."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of
from posttrain.options.model import ModelOptions
from posttrain.server.model_server import ModelServer
from posttrain.server.openai_routes import MAX_REQUESTS, Service

JSON = {"Content-Type": "application/json"}
QUESTION = "Use all of 11, 25, 11 to make 25."


def serving(
    policy: Policy, *, name: str, seconds: float = 600.0, max_requests: int = MAX_REQUESTS, **how: Any
) -> ModelServer:
    service = Service(policy, renderer_of(policy), name=name, seconds=seconds, max_requests=max_requests)
    return ModelServer(service, **how)


@contextmanager
def served(policy: Policy | None = None, *, name: str = "bundled", **how: Any) -> Iterator[ModelServer]:
    """A server of a policy, the bundled model's if none is given, in a thread of this process, on a free port."""
    with serving(policy or load_policy(ModelOptions()), name=name, **how).in_thread() as made:
        yield made


def asked(
    server: ModelServer, path: str, body: Any = None, *, raw: bytes | None = None, headers: Mapping[str, str] = JSON
) -> tuple[int, Any]:
    """Status and content of the answer to a request; a body makes it a POST."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data, dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
