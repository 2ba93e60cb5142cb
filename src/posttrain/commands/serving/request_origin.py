"""Who may ask a server of ours on this machine: not the pages of other sites, and nobody without the token."""

import ipaddress
import secrets
from collections.abc import Collection
from email.message import Message


def is_loopback(host: str) -> bool:
    """Whether this machine alone reaches an address: localhost, ::1 and all of 127.0.0.0/8."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_hosts(address: str, port: int) -> tuple[str, ...]:
    """What a request may call this machine, which listens on an address."""
    names = dict.fromkeys(["127.0.0.1", "localhost", "[::1]", f"[{address}]" if ":" in address else address])
    return (*(f"{name}:{port}" for name in names), *(names if port == 80 else ()))


def foreign(headers: Message, hosts: Collection[str] | None) -> str:
    """Why a request comes from elsewhere; empty where it does not.

    A page of another site names itself as `Origin`.  One whose name was made to point here (DNS rebinding) has that
    name as `Host`.  `hosts` of None allows any, where a token protects the server or the user opened it to others.
    """
    host, origin = headers.get("Host", ""), headers.get("Origin")
    if hosts is not None and host not in hosts:
        return f"Host = {host[:80]!r}: use {' or '.join(hosts)}"
    if origin is not None and origin != f"http://{host}":
        return f"Origin = {origin[:80]!r}: is a page of another site, which may not ask here"
    return ""


def brings(given: str, token: str) -> bool:
    """Whether what a request brings is the token; compared in constant time."""
    return secrets.compare_digest(given.encode("latin-1", "replace"), token.encode())
