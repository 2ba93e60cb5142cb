"""The sandboxes of a session: one for all rewards that ask for the same."""

import os
import sys
import sysconfig
import warnings
from collections.abc import Mapping, Sequence

from posttrain.errors import UserError
from posttrain.options.sandbox import SandboxOptions
from posttrain.sandbox.backends import Backend, Bubblewrap, CommandBackend, Container
from posttrain.sandbox.execution import MANY, Sandbox, ServerOptions
from posttrain.sandbox.probes import SandboxUnavailable
from posttrain.sandbox.process_pool import ProcessPool
from posttrain.sandbox.remote import Remote
from posttrain.sandbox.replay_sandbox import ReplaySandbox


class Sandboxes:
    """Sandboxes with the same options, opened when first needed; for one thread at a time."""

    def __init__(self, options: SandboxOptions | None = None) -> None:
        self.options = options or SandboxOptions()
        self._pools: dict[ServerOptions, ProcessPool] = {}
        self._replaying: dict[tuple[str, ...], ReplaySandbox] = {}
        """By the folders with modules that a backend shows."""
        if self.options.kind == "none":
            warnings.warn(
                "sandbox.kind = none: programs that the model writes run as you, with your files and your network",
                stacklevel=2,
            )

    def __enter__(self) -> "Sandboxes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def importing(self, modules: tuple[str, ...] = ()) -> Sandbox:
        """The sandbox for programs that import these modules besides the usual ones."""
        path = site_packages() if modules else ()
        if self.options.kind not in ("sealed", "none"):
            return self._over_backend(path)
        pool = self.started_with(
            ServerOptions(modules=(*MANY, *modules), path=path, sealed=self.options.kind == "sealed")
        )
        if modules:
            require_imported(modules, pool.opened().missing)
        return pool

    def started_with(self, server: ServerOptions) -> ProcessPool:
        """The pool of a fork-server with these options, sealed where they say so whatever the recipe says."""
        if server not in self._pools:
            require_linux()
            self._pools[server] = ProcessPool(server, at_once=self.options.at_once or None)
        return self._pools[server]

    def close(self) -> None:
        """End every fork-server and everything elsewhere; the next program starts another."""
        while self._pools:
            self._pools.popitem()[1].close()
        while self._replaying:
            self._replaying.popitem()[1].close()

    def _over_backend(self, path: tuple[str, ...]) -> ReplaySandbox:
        if path not in self._replaying:
            at_once = self.options.at_once or os.cpu_count() or 1
            self._replaying[path] = ReplaySandbox(backend_for(self.options, path), at_once=at_once)
        return self._replaying[path]


def require_linux() -> None:
    if sys.platform != "linux":
        raise SandboxUnavailable(
            f"sandbox: the sealed fork-server needs Linux, and this is {sys.platform}.  Set sandbox.kind: container,"
            " with docker or podman installed, or sandbox.kind: remote with the url of a service."
        )


def require_imported(modules: Sequence[str], missing: Mapping[str, str]) -> None:
    """Refuse modules that cannot be imported: programs that need them would all fail."""
    for name in modules:
        if name in missing:
            raise UserError(
                f"sandbox: module {name} cannot be imported: {missing[name]}.  Install it, or leave it out."
            )


def backend_for(options: SandboxOptions, path: Sequence[str] = ()) -> Backend:
    """The backend that these options name."""
    if options.kind == "bubblewrap":
        return CommandBackend(Bubblewrap(path))
    if options.kind == "container":
        return CommandBackend(Container(options.command, options.image))
    return Remote(options.url)


def site_packages() -> tuple[str, ...]:
    return tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
