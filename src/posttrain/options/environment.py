"""The `environment` section of a recipe: what replies to a policy's turns."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.options.bounds import Bounded, PositiveFloat, PositiveInt, Share
from posttrain.schemas import require_no_password


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions(Bounded):
    """Who replies to the policy's turns, and within which limits."""

    path: str = ""
    """Your class or factory as FILE.py:NAME, called as `NAME(**options)` once per completion.  Leave it out if you use
    `tools`, which make an environment."""
    url: str = ""
    """An OpenEnv server, such as ws://127.0.0.1:8000/ws, instead of `path` (extra `openenv`)."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Arguments of your class or factory, or of the client of an OpenEnv server."""
    seconds: PositiveFloat = 30.0
    """Time limit of a reply in seconds.  A later reply ends its completion as `failed`."""
    workers: PositiveInt = 8
    """Number of replies made at the same time."""
    max_failures: Share = 0.05
    """Largest share of a step's completions that may end as `failed`; above it the run stops."""

    def __post_init__(self) -> None:
        require_no_password(self.url, "url", "Use the server's plain address; no password is sent to it.")
        super().__post_init__()

    @property
    def is_given(self) -> bool:
        """Whether the section names something that replies."""
        return bool(self.path or self.url)


def tool_name(source: str) -> str:
    """The name by which the policy calls a tool of a recipe: its function's name."""
    return source.rpartition(":")[2]
