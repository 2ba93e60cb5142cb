"""The sandboxes of a session: one for all rewards that ask for the same."""

import os
import sys
import sysconfig
import warnings
from collections.abc import Sequence

from posttrain.errors import UserError
from posttrain.options.sandbox import SandboxOptions
from posttrain.sandbox.backends import Bubblewrap, Container
from posttrain.sandbox.elsewhere import Backend, Remote
from posttrain.sandbox.execution import MANY, Sandbox, ServerOptions
from posttrain.sandbox.probes import SandboxUnavailable
from posttrain.sandbox.process_pool import ProcessPool
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
        """The sandbox for programs that import these modules in addition to the usual ones."""
        path = site_packages() if modules else ()
        if self.options.kind not in ("sealed", "none"):
            if path not in self._replaying:
                at_once = self.options.at_once or os.cpu_count() or 1
                self._replaying[path] = ReplaySandbox(backend_for(self.options, path), at_once=at_once)
            return self._replaying[path]
        pool = self.started_with(
            ServerOptions(modules=(*MANY, *modules), path=path, sealed=self.options.kind == "sealed")
        )
        missing = pool.opened().missing if modules else {}
        for name in modules:
            if name in missing:
                raise UserError(f"sandbox: module {name} cannot be imported: {missing[name]}.  Install it.")
        return pool

    def started_with(self, server: ServerOptions) -> ProcessPool:
        """The pool of a fork-server with these options.  They decide whether it is sealed, whatever the recipe says."""
        if server not in self._pools:
            if sys.platform != "linux":
                raise SandboxUnavailable(
                    f"sandbox: the sealed fork-server needs Linux, and this is {sys.platform}.  Set sandbox.kind:"
                    " container (docker or podman), or sandbox.kind: remote with the url of a service."
                )
            self._pools[server] = ProcessPool(server, at_once=self.options.at_once or None)
        return self._pools[server]

    def close(self) -> None:
        """End every fork-server and every other run; the next program starts another."""
        for opened in (self._pools, self._replaying):
            while opened:
                opened.popitem()[1].close()


def backend_for(options: SandboxOptions, path: Sequence[str] = ()) -> Backend:
    if options.kind == "bubblewrap":
        return Bubblewrap(path)
    if options.kind == "container":
        return Container(options.command, options.image)
    return Remote(options.url)


def site_packages() -> tuple[str, ...]:
    return tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
