"""The process's own sandboxes: one for all rewards that ask for the same."""

import atexit
import functools
import os
import sys
import sysconfig
import warnings
from collections.abc import Mapping, Sequence

from posttrain.errors import UserError
from posttrain.options.sandbox import SandboxOptions
from posttrain.sandbox.backends import Bubblewrap, Container, Place
from posttrain.sandbox.conversation import Sandbox
from posttrain.sandbox.execution import ServerOptions
from posttrain.sandbox.modules import MANY
from posttrain.sandbox.probes import SandboxUnavailable
from posttrain.sandbox.process_pool import Pool
from posttrain.sandbox.remote import Remote
from posttrain.sandbox.replay_sandbox import Elsewhere

_chosen = SandboxOptions()
_open: list[Sandbox] = []


def choose(options: SandboxOptions) -> None:
    """Use these options for every sandbox that is opened from now on; warn where they are none at all."""
    global _chosen  # one process, one machine, one sandbox
    if options != _chosen:
        close_all()
    _chosen = options
    if options.kind == "none":
        warnings.warn(
            "sandbox.kind = none: programs that the model writes run as you, with your files and your network",
            stacklevel=2,
        )


def chosen() -> SandboxOptions:
    """The options that are in use."""
    return _chosen


def sandbox_for(modules: tuple[str, ...] = ()) -> Sandbox:
    """Where programs of this process are run that import these modules besides the usual ones."""
    if _chosen.kind in ("sealed", "none"):
        path = site_packages() if modules else ()
        pool = shared_pool(ServerOptions(modules=(*MANY, *modules), path=path, sealed=_chosen.kind == "sealed"))
        if modules:
            require_imported(modules, pool.opened().missing)
        return pool
    return shared_elsewhere(site_packages() if modules else ())


def require_imported(modules: Sequence[str], missing: Mapping[str, str]) -> None:
    """Refuse modules that a recipe asks for and nobody has: programs that need them would all fail."""
    for name in modules:
        if name in missing:
            raise UserError(
                f"sandbox: module {name} cannot be imported: {missing[name]}.  Install it, or leave it out."
            )


def pool_with(server: ServerOptions) -> Sandbox:
    """The sandbox of a fork-server that is prepared in its own way, and sealed whatever a recipe says."""
    return shared_pool(server)


def close_all() -> None:
    """End every fork-server of this process and whatever runs elsewhere; the next program starts another."""
    shared_pool.cache_clear()
    shared_elsewhere.cache_clear()
    while _open:
        _open.pop().close()


atexit.register(close_all)


@functools.cache
def shared_pool(server: ServerOptions) -> Pool:
    """One pool for each way to start a server."""
    if sys.platform != "linux":
        raise SandboxUnavailable(
            f"sandbox: the sealed fork-server needs Linux, and this is {sys.platform}.  Set sandbox.kind: container,"
            " with docker or podman installed, or sandbox.kind: remote with the url of a service."
        )
    pool = Pool(server, at_once=_chosen.at_once or None)
    _open.append(pool)
    return pool


@functools.cache
def shared_elsewhere(path: tuple[str, ...]) -> Elsewhere:
    """One sandbox over the place that was chosen."""
    sandbox = Elsewhere(place_for(_chosen, path), at_once=_chosen.at_once or os.cpu_count() or 1)
    _open.append(sandbox)
    return sandbox


def place_for(options: SandboxOptions, path: Sequence[str] = ()) -> Place:
    """The place that these options name."""
    if options.kind == "bubblewrap":
        return Bubblewrap(path)
    if options.kind == "container":
        return Container(options.command, options.image)
    return Remote(options.url)


def site_packages() -> tuple[str, ...]:
    """Folders with this environment's packages, for modules that a recipe asks for by name."""
    return tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
