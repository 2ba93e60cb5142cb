"""`posttrain doctor`: what this machine has, and whether it can run model-written programs safely."""

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from posttrain.commands.arguments import LOADING, model_layer, split_arguments
from posttrain.commands.flags import CommandSpec, given_flags
from posttrain.config import Config
from posttrain.errors import RunError, UserError
from posttrain.options.rollout import HttpOptions, InProcessOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.sandbox.probes import Finding, SandboxUnavailable
from posttrain.sandbox.process_pool import ProcessPool, ServerLost
from posttrain.sandbox.replay_sandbox import ReplaySandbox
from posttrain.sandbox.sandboxes import backend_for


@dataclass(frozen=True, kw_only=True)
class DoctorSwitches:
    """What is checked."""

    model: str = ""
    """Check this model instead of the sandbox: a folder, a run, a hub model, or `bundled`."""


PROGRAM = CommandSpec(
    name="posttrain doctor [RECIPE.yaml ...]",
    description="Show versions, devices and free memory.  Make the environment or tools of the recipes and flags,"
    " query the servers of their engine, and test their sandbox: each probe that fails is listed with its"
    " remedy.  Exit code 0 if programs can run safely, else 1.  With --model: its size and types, forward pass,"
    " context, stop tokens and tokenizer, and a test of sampling.",
    switches=DoctorSwitches(),
    only=(
        *("sandbox", "environment", "tools", "tools_at", "engine"),
        *LOADING,
        *(f"model.{name}" for name in ("chat_template", "adapter", "quantization", "gradient_checkpointing", "frozen")),
    ),
)

NOT_OF_MODELS = ("sandbox", "environment", "tools", "tools_at", "engine")
OTHERS = {"bubblewrap": "bwrap", "container (docker)": "docker", "container (podman)": "podman"}
"""Kinds of sandbox, by the program that they need."""
PACKAGES = ("posttrain", "torch", "transformers", "tokenizers", "numpy", "math-verify", "peft")
GIB = 1 << 30


def main(arguments: Sequence[str]) -> int:
    """Print the tables."""
    given = split_arguments(arguments, PROGRAM)
    layers = given.recipes()
    named = given.switch("model")
    unread, instead = (NOT_OF_MODELS, "Leave out --model") if named else (("model",), "Name it with --model MODEL")
    for flag in given_flags(given.flags):
        if (section := flag.path.partition(".")[0]) in unread:
            raise UserError(f"command line: {flag.spelled}: the {section} is not checked here.  {instead}.")
    layers = [*layers, *([model_layer(named)] if named else [])]
    config, _ = given.configured(Config, layers, loads_model=bool(named))
    if named:
        from posttrain.models.loading.folder_kinds import is_classifier_folder

        classifies = not config.model.is_bundled and is_classifier_folder(config.model.folder)
        (classifier if classifies else model)(config, named)
        return 0
    for name, says in (*machine_lines(), *((name, installed(name)) for name in PACKAGES)):
        print(f"{name:12} {says}")
    print()
    for line in (*replies(config), *servers(config)):
        print(line)
    return 0 if sandbox(config.sandbox) else 1


def replies(config: Config) -> list[str]:
    """Make the environment or the tools of a recipe, and describe them.  Raises UserError for a mistake."""
    if not config.tools and not config.environment.is_given:
        return []
    from posttrain.environments.making import made_once
    from posttrain.environments.tools import toolbox_of

    toolbox = toolbox_of([tool for tool in config.tools if tool != "python"])  # its sandbox is tried below
    asked = {
        name: f", called by {config.tools_at[name]!r}" if name in config.tools_at else "" for name in toolbox.tools
    }
    lines = [f"tool         {name}{how}" for name, how in asked.items()]
    if config.environment.is_given:
        name, _, example = made_once(config.environment)
        lines.append(f"environment  {name} makes a {type(example).__name__}")
    return [*lines, ""]


def servers(config: Config) -> list[str]:
    """What the engine's servers report about themselves."""
    if not isinstance(config.engine, HttpOptions):
        return []
    from posttrain.generation.http.server_checks import server_lines

    return [f"{'' if number else 'engine':12} {line}" for number, line in enumerate(server_lines(config.engine))]


def model(config: Config, name: str) -> None:
    """Load a model, describe it, and test it as a run does before its first step."""
    from posttrain.generation.parity import engine_in_parity, largest_gap, tried_length
    from posttrain.models.loading.description import policy_summary, unused_options
    from posttrain.models.loading.model_folder import load_policy

    policy = load_policy(config.model)
    if isinstance(config.engine, InProcessOptions) and config.engine.native:
        policy = replace(policy, native_reason=None)
    longest = tried_length(policy, policy.max_positions)
    engine = engine_in_parity(policy, max_rows=config.rollout.max_rows, longest=longest)
    unused = (f"not used   {each}" for each in unused_options(engine.policy, config.model))
    print("\n".join([*policy_summary(engine.policy, name), *unused]))
    own = "the model's own forward pass" + (" without a cache" if engine.policy.cache_refusal is not None else "")
    way = "the shared-prompt pass" if engine.policy.forward_reason is None else own
    gap = largest_gap(engine, longest)
    print(f"sampling   by {way}; its log-probs are within {gap:.1g} nats of the trainer's up to {longest} tokens")


def classifier(config: Config, name: str) -> None:
    """Load a reward model, describe it, and test it."""
    from posttrain.models.adapters.adaptable import num_parameters
    from posttrain.rewards.model import RewardModel, label_names

    how = {each: getattr(config.model, each) for each in ("dtype", "device", "trust_remote_code")}
    found = RewardModel(name, label=0, **how)
    shown = ", ".join(f"{place} ({label})" for place, label in enumerate(label_names(found.model)))
    millions = num_parameters(found.model) / 1e6
    print(f"model      {name}: {type(found.model).__name__}, {millions:.1f} M parameters, {found.model.dtype}")
    print(f"labels     {shown}; as a reward: {{model: {name}, label: …}}")
    reads = "conversations and plain text" if found.text.renderer.template else "plain text, without a chat template"
    print(f"reads      up to {found.limit} tokens, {reads}")
    print(f"scored by  {found.scores.reading.value}; a row alone and in a batch have the same score")


def machine_lines() -> list[tuple[str, str]]:
    """Interpreter, cores, memory, devices."""
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    disk = shutil.disk_usage(".").free
    return [
        ("python", f"{platform.python_version()}, {platform.system()} {platform.release()}, {platform.machine()}"),
        ("cores", f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads"),
        ("memory", f"{free / GIB:.1f} GiB unused, disk {disk / GIB:.1f} GiB free here"),
        ("devices", ", ".join(devices) or "no CUDA device: everything runs on the CPU"),
    ]


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def sandbox(options: SandboxOptions) -> bool:
    """Test the sandbox and print what its probes found; returns whether it is safe."""
    if options.kind == "none":
        print("sandbox      none: model-written programs run as you, with only resource limits")
        return False
    found = sealed() if options.kind == "sealed" else elsewhere(options)
    for finding in found:
        print(f"  {finding.line()}")
    safe = bool(found) and all(finding.passed for finding in found)
    print(f"  {'safe: every probe passed' if safe else 'NOT SAFE: posttrain will not run programs here'}")
    others = [name for name, command in OTHERS.items() if shutil.which(command) and name != options.kind]
    if options.kind == "sealed" and others:
        print(f"  also here  {', '.join(others)}: `posttrain doctor --sandbox.kind ...` tests them")
    return safe


def sealed() -> Sequence[Finding]:
    """What the fork-server's probes found; empty if it does not start."""
    print("sandbox      sealed fork-server")
    if sys.platform != "linux":
        print(
            f"  not on {sys.platform}: it needs seccomp, which only Linux has.  Use sandbox.kind: container or remote."
        )
        return []
    with ProcessPool() as pool:
        try:
            server = pool.opened()
        except SandboxUnavailable:
            server = None
        except (RunError, ServerLost) as error:
            print(f"  the fork-server does not start: {error}")
            return []
        if server is not None:
            landlock = f"version {server.landlock}" if server.landlock else "not in this kernel; only seccomp"
            user = f"nobody ({server.uid})" if server.uid is not None else f"this one ({os.getuid()})"
            print(f"  layers     resource limits, Landlock ({landlock}), seccomp; programs run as {user}")
            for name, reason in server.missing.items():
                print(f"  missing    module {name}: {reason}")
        return pool.found


def elsewhere(options: SandboxOptions) -> Sequence[Finding]:
    with ReplaySandbox(backend_for(options), at_once=os.cpu_count() or 1) as there:
        print(f"sandbox      {there.backend.name}")
        try:
            there.probe()
        except SandboxUnavailable as unavailable:
            if not there.found:
                print(f"  {unavailable}")
        return there.found
