"""The `sandbox` section of a recipe: where programs that a model wrote are run."""

from dataclasses import dataclass
from typing import Literal

from posttrain.errors import UserError, require
from posttrain.options.bounds import Bounded, NonEmptyStr, NonNegativeInt
from posttrain.schemas import require_left_out, require_no_password


@dataclass(frozen=True, kw_only=True)
class SandboxOptions(Bounded):
    """Where programs that a model wrote are run, and how many side by side."""

    kind: Literal["sealed", "bubblewrap", "container", "remote", "none"] = "sealed"
    """sealed: in processes that can only compute (Linux).  bubblewrap, container: each program in a small system of
    its own, where it may write files and start processes.  remote: by a service.  none: with limits alone.  All but the
    last are tried by probes before anything is run."""
    command: NonEmptyStr = "docker"
    """For containers: docker, podman, or either with options of its own, such as `podman --runtime runc`."""
    image: str = "python:3.11-slim"
    """For containers: an image that is there already, with Python 3.10 or later."""
    url: str = ""
    """For remote: where a service with SandboxFusion's protocol listens, such as http://sandbox.internal:8080."""
    programs_may_do_anything: bool = False
    """Say that you know what `kind: none` means: programs that a model wrote act as you, on your files and network."""
    at_once: NonNegativeInt = 0
    """Programs side by side; 0 is one for each core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.image != "" and not self.image.startswith("-"), self, "image", "is no name of an image")
        require_no_password(self.url, "url", "Use the service's plain address; no password is sent to it.")
        if self.kind == "remote" and not self.url.startswith(("http://", "https://")):
            raise UserError(f"kind = remote needs the service's url, such as http://127.0.0.1:8080; url = {self.url!r}")
        if self.kind != "remote" and self.url:
            raise UserError(f"url = {self.url} has no use with kind = {self.kind}; set kind: remote, or leave it out")
        if self.kind != "container":
            require_left_out(self, ("command", "image"), f"is for kind = container, and kind = {self.kind}")
        if self.kind == "none" and not self.programs_may_do_anything:
            raise UserError(
                "kind = none runs what a model wrote as you, with your files and your network.  If that is meant, say"
                " sandbox.programs_may_do_anything: true as well."
            )
        if self.kind != "none" and self.programs_may_do_anything:
            raise UserError("programs_may_do_anything = true has no use with a sandbox; leave it out")
