"""The process's own sandboxes: one fork-server for all rewards that ask for the same modules."""

import atexit
import functools
import sysconfig
import warnings

from posttrain.rewards.sandbox.modules import MANY
from posttrain.rewards.sandbox.pool import Pool
from posttrain.rewards.sandbox.records import ServerOptions
from posttrain.rewards.sandbox_options import SandboxOptions

_chosen = SandboxOptions()
_open: list[Pool] = []


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


def pool_for(modules: tuple[str, ...] = ()) -> Pool:
    """The sandbox whose programs find these modules imported besides the usual ones."""
    path = site_packages() if modules else ()
    return shared_pool(ServerOptions(modules=(*MANY, *modules), path=path, sealed=_chosen.kind == "sealed"))


def pool_with(server: ServerOptions) -> Pool:
    """The sandbox of a fork-server that is prepared in its own way, and sealed whatever a recipe says."""
    return shared_pool(server)


def close_all() -> None:
    """End every fork-server of this process; the next program starts another."""
    shared_pool.cache_clear()
    while _open:
        _open.pop().close()


atexit.register(close_all)


@functools.cache
def shared_pool(server: ServerOptions) -> Pool:
    """One pool for each way to start a server."""
    _open.append(Pool(server, at_once=_chosen.at_once or None))
    return _open[-1]


def site_packages() -> tuple[str, ...]:
    """Folders with this environment's packages, for modules that a recipe asks for by name."""
    return tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
