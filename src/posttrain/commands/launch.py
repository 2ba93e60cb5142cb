"""`posttrain launch`: start the processes of a recipe's `placement` on this machine, or print commands for several."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain.commands.arguments import LOADING, SplitArguments, TrustSwitch, split_arguments
from posttrain.commands.flags import CommandSpec, given_flags
from posttrain.commands.launching.processes import (
    POSTTRAIN,
    PlacedProcess,
    RunningProcess,
    is_of_this_machine,
    require_free_addresses,
    show_until_end,
    started,
    wait_until_ready,
)
from posttrain.commands.launching.ray_processes import started_by_ray
from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.options.model import ModelOptions
from posttrain.options.placement import PlacementOptions
from posttrain.options.rollout import HttpOptions, HttpSeconds
from posttrain.runs.interruption import kept_of_run, stopped_with_a_word

VLLM = (
    "{python} -m vllm.entrypoints.openai.api_server --model {model} --host {host} --port {port} --enable-scale-out"
    " --logprobs-mode processed_logprobs --generation-config vllm --no-enable-prefix-caching"
    """ --weight-transfer-config '{"backend":"safetensors_file"}'"""
)
"""The server of vLLM, with the flags that training needs."""
VLLM_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, kw_only=True)
class LaunchSwitches(TrustSwitch):
    """How the processes of a recipe are started."""

    by: Literal["processes", "ray"] = "processes"
    """Start child processes, or have Ray place them (extra `ray`)."""
    dry_run: bool = False
    """Print the commands to run by hand on one or several machines; start nothing."""
    resume: str = ""
    """Continue the run in this folder from its last checkpoint."""


PROGRAM = CommandSpec(
    name="posttrain launch [RECIPE.yaml ...]",
    description="Start the processes of a recipe's `placement` on this machine: sampling servers, the environment's"
    " server and `posttrain rl`, each with a log file.  It waits until all servers are ready, and stops them with the"
    " run.",
    switches=LaunchSwitches(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The processes of a run."""

    servers: tuple[PlacedProcess, ...]
    trainer: PlacedProcess
    logs: Path
    placement: PlacementOptions


def main(arguments: Sequence[str]) -> int:
    """Start everything, wait for the run, and stop everything."""
    given = split_arguments(arguments, PROGRAM)
    folder = given.switch("resume")
    config, switches = given.resumed(Config, folder) if folder else given.configured(Config, given.recipes())
    launch = launch_of(config, trainer_arguments(given))
    if switches.dry_run:
        print("\n".join(each.typed for each in (*launch.servers, launch.trainer)))
        return 0
    require_this_machine(config.placement)
    with stopped_with_a_word(lambda: kept_of_run(config.run.folder, "launch")):
        return run(launch, STARTED_BY[switches.by])


def require_this_machine(placement: PlacementOptions) -> None:
    """Reject servers on other machines, unless the user's own command starts them."""
    engines = placement.engines
    if not engines.count or engines.command:
        return
    if away := [host for host in engines.hosts if not is_of_this_machine(host)]:
        rule = "launch only starts processes on this machine"
        remedy = "Add --dry-run and type the commands there"
        raise UserError(f"placement.engines.hosts = {' '.join(away)}: {rule}.  {remedy}.")


def trainer_arguments(given: SplitArguments) -> list[str]:
    """The arguments for `posttrain rl`: all except those that only this command reads."""
    flags = [flag for flag in given_flags(given.flags) if flag.path not in ("by", "dry_run")]
    return [*given.positional, *(word for flag in flags for word in (flag.spelled, *flag.words))]


def launch_of(config: Config, arguments: Sequence[str]) -> Launch:
    """The processes that a config places; `arguments` are those of the trainer."""
    placement, engines, flags = config.placement, [*engine_servers(config)], list[str]()
    if engines:
        urls = [each.health.removesuffix("/health") for each in engines]
        flags += [] if "--resume" in arguments else ["--engine.name", "http"]
        flags += ["--engine.urls", *urls[: placement.engines.count]]
        flags += ["--engine.evaluation", urls[-1]] if placement.evaluation.engine else []
    if placement.environment.command:
        host, port = placement.environment.host, placement.environment.port
        flags += ["--environment.url", f"ws://{in_address(host)}:{port}/ws"]
    if placement.trainer.ranks > 1:
        flags += ["--ranks", str(placement.trainer.ranks)]
    return Launch(
        servers=(*engines, *environment_servers(placement)),
        trainer=PlacedProcess(name="trainer", command=(*POSTTRAIN, "rl", *arguments, *flags)),
        logs=Path(f"{config.run.folder.rstrip('/')}-logs"),
        placement=placement,
    )


def engine_servers(config: Config) -> Iterator[PlacedProcess]:
    """The sampling servers, distributed over their machines, and the evaluation server."""
    engines = config.placement.engines
    for number in range(engines.count + config.placement.evaluation.engine):
        host = engines.hosts[number % len(engines.hosts)]
        port = str(engines.port + number // len(engines.hosts))
        if engines.command or engines.kind == "vllm":
            places = {"python": engines.python, "model": config.model.path, "host": host, "port": port}
            command = typed_words(engines.command or VLLM, places)
        else:
            seconds = config.engine.seconds.sample if isinstance(config.engine, HttpOptions) else HttpSeconds().sample
            command = [*POSTTRAIN, "serve", config.model.path, "--rl", "--host", host, "--port", port]
            command += [*loading_flags(config.model), "--seconds", f"{seconds:g}"]
        yield PlacedProcess(
            name=f"engine-{number}" if number < engines.count else "engine-evaluation",
            command=tuple(command),
            environment=VLLM_VARIABLES if engines.kind == "vllm" else {},
            health=f"http://{in_address(host)}:{port}/health",
        )


def environment_servers(placement: PlacementOptions) -> Iterator[PlacedProcess]:
    environment = placement.environment
    if environment.command:
        places = {"host": environment.host, "port": str(environment.port)}
        health = f"http://{in_address(environment.host)}:{environment.port}/health"
        yield PlacedProcess(name="environment", command=tuple(typed_words(environment.command, places)), health=health)


def typed_words(command: str, places: Mapping[str, str]) -> list[str]:
    """The words of a command with its placeholders filled in; other braces, such as JSON's, stay."""
    named = re.compile(r"\{(" + "|".join(places) + r")\}")
    return [named.sub(lambda found: places[found[1]], word) for word in shlex.split(command)]


def in_address(host: str) -> str:
    """A host as part of an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def loading_flags(model: ModelOptions) -> Iterator[str]:
    """The flags for model-loading options that differ from the default."""
    plain = ModelOptions()
    for name in LOADING:
        value, usual = (getattr(options, name.partition(".")[2]) for options in (model, plain))
        if value != usual:
            words = [*map(str, value)] if isinstance(value, tuple) else [str(value)]
            yield from (f"--{name.replace('_', '-')}", *words)


def run(launch: Launch, start: Callable[..., AbstractContextManager[list[RunningProcess]]]) -> int:
    """Servers first, then the trainer; Ctrl-C lets it save, then stops everything."""
    stop_seconds = launch.placement.stop_seconds
    require_free_addresses(launch.servers)
    with start(launch.servers, launch.logs, stop_seconds=stop_seconds) as servers:
        for each in servers:
            print(f"{each.process.name}: {each.process.typed}\n    log: {each.log}", flush=True)
        wait_until_ready(servers, launch.placement.ready_seconds)
        with start([launch.trainer], launch.logs, stop_seconds=stop_seconds) as (trainer,):
            print(f"trainer: {launch.trainer.typed}\n    log: {trainer.log}", flush=True)
            return show_until_end(trainer, servers)


STARTED_BY: Mapping[str, Callable[..., AbstractContextManager[list[RunningProcess]]]] = {
    "processes": started,
    "ray": started_by_ray,
}
