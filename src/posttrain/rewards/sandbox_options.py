"""The `sandbox` section of a recipe: where programs that a model wrote are run."""

from dataclasses import dataclass
from typing import Literal

from posttrain.errors import UserError, require


@dataclass(frozen=True, kw_only=True)
class SandboxOptions:
    """Where programs that a model wrote are run, and how many side by side."""

    kind: Literal["sealed", "none"] = "sealed"
    """sealed: in processes that can only compute, tried by probes before anything is run.  none: with limits alone."""
    programs_may_do_anything: bool = False
    """Say that you know what `kind: none` means: programs that a model wrote act as you, on your files and network."""
    at_once: int = 0
    """Programs side by side; 0 is one for each core."""

    def __post_init__(self) -> None:
        require(self.at_once >= 0, self, "at_once", "is no number of programs; use >= 0")
        if self.kind == "none" and not self.programs_may_do_anything:
            raise UserError(
                "kind = none runs what a model wrote as you, with your files and your network.  If that is meant, say"
                " sandbox.programs_may_do_anything: true as well."
            )
        if self.kind != "none" and self.programs_may_do_anything:
            raise UserError("programs_may_do_anything = true has no use with a sandbox; leave it out")
