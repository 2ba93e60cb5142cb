"""The `placement` section of a recipe: which processes `posttrain launch` starts, and where they listen."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from posttrain.options.bounds import (
    GIVEN,
    Bounded,
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Unused,
)

ListeningPort = Annotated[int, Ge(1), Le(65535)]


@dataclass(frozen=True, kw_only=True)
class TrainerPlacement(Bounded):
    """The process that trains."""

    ranks: PositiveInt = 1
    """Processes that share the model (`posttrain rl --ranks`)."""


@dataclass(frozen=True, kw_only=True)
class EnginesPlacement(Bounded):
    """The servers that sample."""

    count: NonNegativeInt = 0
    """Servers that sample for training; 0 samples in the trainer."""
    kind: Literal["posttrain", "vllm"] = "posttrain"
    """`posttrain`: `posttrain serve MODEL --rl`.  `vllm`: vLLM's API server; its environment needs posttrain-vllm."""
    python: str = ".venv-vllm/bin/python"
    """The Python executable of vLLM's environment."""
    command: str = ""
    """A command instead of the usual one, split as a shell does; {model}, {host} and {port} are filled in."""
    hosts: tuple[NonEmptyStr, ...] = ("127.0.0.1",)
    """Addresses of the servers' machines, as the trainer reaches them.  Servers are distributed over them in turn.  For
    other machines, set a `command` that starts servers there, or use `posttrain launch --dry-run`, which prints what to
    type there."""
    port: ListeningPort = 8100
    """Port of the first server of each machine; its other servers use the next ports."""

    rules = (
        Rule(
            "port",
            lambda o: o.port + o.count <= 65535,
            "leaves too few ports for count = {o.count} servers.  Lower it.",
        ),
        Unused("python", {"kind": "vllm"}),
        Unused("kind python command hosts port", {"count": GIVEN}),
        Rule("hosts", lambda o: o.hosts, "is empty.  Name a machine, such as 127.0.0.1."),
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationPlacement(Bounded):
    """The server that evaluates."""

    engine: bool = False
    """Start one more server, which samples for evaluations while the rest sample for training."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentPlacement(Bounded):
    """The server of the environment."""

    command: str = ""
    """The command of an OpenEnv server, split as a shell does; {host} and {port} are filled in.  Empty: no server."""
    host: NonEmptyStr = "127.0.0.1"
    """Address of its machine, as the trainer reaches it; other machines only work with --dry-run."""
    port: ListeningPort = 8300
    """Port of that server."""

    rules = (Unused("host port", {"command": GIVEN}),)


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(Bounded):
    """Processes of a run.  Only `posttrain launch` reads this section."""

    trainer: TrainerPlacement = field(default_factory=TrainerPlacement)
    engines: EnginesPlacement = field(default_factory=EnginesPlacement)
    evaluation: EvaluationPlacement = field(default_factory=EvaluationPlacement)
    environment: EnvironmentPlacement = field(default_factory=EnvironmentPlacement)
    ready_seconds: PositiveFloat = 600.0
    """Time limit in seconds until every server answers /health."""
    stop_seconds: PositiveFloat = 120.0
    """After an interruption, seconds for the trainer to save and for a server to stop; then the process is killed."""

    rules = (
        Rule(
            "evaluation.engine",
            lambda o: not o.evaluation.engine or o.engines.count > 0,
            "needs servers.  Set placement.engines.count to at least 1.",
        ),
    )
