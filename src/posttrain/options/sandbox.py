"""The `sandbox` section of a recipe: where model-written programs run."""

from dataclasses import dataclass
from typing import Literal

from posttrain.options.bounds import Bounded, NonEmptyStr, NonNegativeInt, Rule, Unused
from posttrain.schemas import require_no_password


@dataclass(frozen=True, kw_only=True)
class SandboxOptions(Bounded):
    """Where model-written programs run, and how many at a time."""

    kind: Literal["sealed", "bubblewrap", "container", "remote", "none"] = "sealed"
    """sealed: in processes that can only compute (Linux).  bubblewrap, container: each program in a small separate
    system, where it may write files and start processes.  remote: on a service.  none: only with resource limits.
    Probes test all kinds except `none` before anything runs."""
    command: NonEmptyStr = "docker"
    """For containers: docker or podman, with options if needed, such as `podman --runtime runc`."""
    image: str = "python:3.11-slim"
    """For containers: an image on this machine, with Python 3.10 or later."""
    url: str = ""
    """For remote: the address of a service with SandboxFusion's protocol, such as http://sandbox.internal:8080."""
    programs_may_do_anything: bool = False
    """Confirm the risk of `kind: none`: model-written programs can use your files and your network."""
    at_once: NonNegativeInt = 0
    """Programs at a time; 0: one per core."""

    def __post_init__(self) -> None:
        require_no_password(self.url, "url", "Use the service's plain address; no password is sent to it.")
        super().__post_init__()

    rules = (
        Rule(
            "image",
            lambda o: o.image and not o.image.startswith("-"),
            "is not the name of an image.  Use one such as python:3.12-slim.",
        ),
        Rule(
            "kind",
            lambda o: o.kind != "remote" or o.url.startswith(("http://", "https://")),
            "needs the service's address, and url = {o.url!r}.  Set url, such as http://127.0.0.1:8080.",
        ),
        Unused("url", {"kind": "remote"}),
        Unused("command image", {"kind": "container"}),
        Rule(
            "kind",
            lambda o: o.kind != "none" or o.programs_may_do_anything,
            "runs model-written programs with your files and your network.  If you want that, set"
            " sandbox.programs_may_do_anything: true as well.",
        ),
        Unused("programs_may_do_anything", {"kind": "none"}),
    )
