"""Where a server listens, and what requests may call it; and the extra that servers and their clients need."""

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated
from urllib.parse import urlsplit

from annotated_types import Ge, Le

from posttrain.errors import UserError

Port = Annotated[int, Ge(0), Le(65535)]
EXTRA = ("starlette", "uvicorn", "httpx", "h11", "anyio")
"""Packages of the extra `serve`, and those that they bring."""


@contextmanager
def serve_extra(who: str) -> Iterator[None]:
    """Imports of packages in the extra `serve`.  Raises UserError with the install command if one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in EXTRA:
            raise
        raise UserError(f"{who}: {package} is not installed.  Run `pip install 'posttrain[serve]'`.") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address: localhost, ::1 and 127.0.0.0/8."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_hosts(address: str, port: int) -> tuple[str, ...]:
    """Names that a request may use for this machine, which listens on an address."""
    names = dict.fromkeys(["127.0.0.1", "localhost", "[::1]", f"[{address}]" if ":" in address else address])
    return (*(f"{name}:{port}" for name in names), *(names if port == 80 else ()))


def is_origin(text: str) -> bool:
    """Whether a text is an origin as in the `Origin` header: scheme, host, and a port if it is not the default."""
    try:
        parts = urlsplit(text)
        usual = parts.port == {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return False
    plain = parts.hostname is not None and text == f"{parts.scheme}://{parts.netloc}" and "@" not in parts.netloc
    return plain and not usual and parts.scheme in ("http", "https") and text == text.lower() and text.isascii()
