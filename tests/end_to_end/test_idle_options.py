"""Every option that a command takes is read while it runs, or refused, or stands in a list with the reason.

Each command runs once on a tiny model, and what it reads of its config is recorded.  A new option that nothing reads
fails here.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from inspect import getsource
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from matplotlib.figure import Figure

from posttrain.cli import COMMANDS, main
from posttrain.commands import arguments
from posttrain.errors import UserError
from tests.support.commands import module_of, printed, program_of, refusal
from tests.support.option_reads import leaves, recorded_reads
from tests.support.pictures import save_blank
from tests.support.runs import save_tiny_model

SHORT = "--rollout.group-size 3 --rollout.prompts-per-step 2 --rollout.max-completion-tokens 4"
SMALL = "--model.hidden-size 16 --model.mlp-size 16 --model.num-layers 1 --model.num-heads 1 --model.num-kv-heads 1"
HELD_OUT = "--evaluation.every-steps 1 --evaluation.samples 1 --task.held-out-size 2 --task.held-out-share 0.5"
SCENARIOS = {
    "rl": f"rl --model.path model --task.path rows.jsonl --rewards mine.py:length {SHORT} {HELD_OUT} --run.num-steps 1",
    "sft, new model": f"sft --task.name countdown {SMALL} --sft.num-demonstrations 8 --sft.eval-size 2"
    " --run.num-steps 1",
    "sft, rows": "sft --model.path model --task.path rows.jsonl --task.held-out-share 0.5 --run.num-steps 1",
    "reward-model": "reward-model --model.path model --task.path pairs.jsonl --task.held-out-share 0.5"
    " --reward-model.num-epochs 1",
    "dpo, rows": "dpo --model.path model --task.path pairs.jsonl --task.held-out-share 0.5",
    "dpo, rounds": "dpo --model.path model --task.path rows.jsonl --rewards mine.py:length --dpo.rounds 1"
    f" --dpo.prompts-per-round 4 --dpo.steps-per-round 1 {HELD_OUT} --rollout.group-size 3"
    " --rollout.max-completion-tokens 4",
    "collect": "collect --model.path model --task.path rows.jsonl --task.held-out-share 0.5 --rewards mine.py:length"
    " --sampling.max-completion-tokens 4 --collect.num-prompts 4 --collect.group-size 3"
    " --collect.cut-off keep",
    "eval": "eval model --task.held-out-size 2 --rollout.max-completion-tokens 4 --evaluation.samples 1",
    "trace": "trace model 0 --rollout.max-completion-tokens 4 --rollout.group-size 2",
    "chat": "chat model --prompt hi --sampling.max-completion-tokens 4",
    "irl": "irl --world.size 3 --demonstrations.num-episodes 4",
    "doctor": "doctor --model model",
}
KEEP_A_RUN = ("rl", "sft", "reward-model", "dpo", "collect", "irl")
OTHERS = {
    "view": "takes folders; its own options are switches",
    "course": "reads no recipe",
    "serve": "loads a model as chat does; its own options are switches",
    "compare": "runs `rl` on each recipe",
    "phases": "takes a recipe and switches; each phase is a run of `sft`, `rl` ...",
    "behaviours": "reads the section `behaviours` alone, as `rl` does",
    "plan": "takes every flag of the run that it plans, so that one command line serves both",
    "config": "prints every option",
    "check-task": "refuses what nothing reads by itself: its sections say what replies",
    "launch": "starts `rl`, with the same flags, and servers that load a model as `serve` does",
    "replay": "reads the recipe of a run, as `rl --resume` does",
    "new": "takes a folder and a switch",
    "completion": "takes a shell",
}
"""Commands without a scenario, and why."""

HUB = "is about data on a hub; refused when a file is read"
PROGRAMS = "is about programs; whether a reward runs any is known when it is called"
PERMITS = "permits what another option asks for"
REPLIES = "is refused once it is known that nothing replies"
PLACED = "is read by `posttrain launch`"
PLACEMENT = "trainer.ranks engines.count evaluation.engine environment.command ready_seconds stop_seconds"
IDLE = {
    "sandbox.at_once": PROGRAMS,
    "sandbox.kind": PROGRAMS,
    "task.subset": HUB,
    "task.revision": HUB,
    "task.last_assistant_message": "is about rows whose last message is the assistant's",
    "grading.cache_entries": "bounds a cache, which holds scores of rewards that stand alone",
    "grading.cache_file": "is refused once the rewards are known",
    "sft.split_turns": "is about rows of several turns",
    "rollout.allow_cut_sampling": PERMITS,
    **{f"environment.{name}": REPLIES for name in ("options", "seconds", "workers", "max_failures")},
    **{f"{section}.{name}": REPLIES for section in ("rollout", "sampling") for name in ("max_turns", "multi_turn")},
    **{f"{section}.decay_adapter": PERMITS for section in ("update", "sft", "reward_model", "dpo")},
    **{f"placement.{name}": PLACED for name in PLACEMENT.split()},
    "engine.name": "has one value, the in-process engine; an engine of the user's is named by engine.path",
    "task.held_out_size": "phases of one recipe share their task, and other commands measure on held-out problems",
}
"""Options that may have no effect in one of these runs, and why."""
IDLE_BY_SCENARIO = {
    "doctor": dict.fromkeys(("environment.path", "environment.url", "tools"), "flags of them are refused with --model")
}
"""The same of one scenario."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, rows, pairs and a reward."""
    folder = tmp_path_factory.mktemp("idle")
    save_tiny_model(folder / "model")
    rows = [{"prompt": f"{i} + 1 =", "completion": str(i + 1)} for i in range(8)]
    pairs = [{"prompt": f"{i} + 1 =", "chosen": str(i + 1), "rejected": str(i)} for i in range(8)]
    for name, content in {"rows": rows, "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    source = "def length(completions, **c):\n    return [float(len(t)) + i for i, t in enumerate(completions)]\n"
    (folder / "mine.py").write_text(source)
    return folder


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_option_is_read_or_refused(scenario: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(Figure, "savefig", save_blank)
    built: list[Any] = []
    build = arguments.build
    monkeypatch.setattr(arguments, "build", lambda *a, **k: built.append(build(*a, **k)) or built[-1])
    command = SCENARIOS[scenario].split()
    if command[0] in KEEP_A_RUN:
        command += ["--run.folder", f"runs/{scenario}"]
    with recorded_reads() as read:
        assert main(command) == 0
    (config,) = built
    takes = program_of(command[0]).reads
    idle = {
        path
        for path, option in leaves(config)
        if takes(path) and option not in read and not chose_its_class(path) and not refused(config, path.split("."))
    }
    explained = IDLE.keys() | IDLE_BY_SCENARIO.get(scenario, {}).keys()
    assert idle <= explained, "nothing reads these options, and nothing refuses them"


def chose_its_class(path: str) -> bool:
    """Whether a section has its options because of this one."""
    return path in ("task.name", "judge.name", "world.name", "demonstrations.name", "features.name", "method.name")


def refused(config: Any, path: list[str]) -> bool:
    """Whether a config is refused in which this option has another value."""
    try:
        changed(config, path)
    except UserError:
        return True
    return False


def changed(config: Any, path: list[str]) -> Any:
    """The config with another value of one option."""
    name, *below = path
    value = getattr(config, name)
    new = changed(value, below) if below else another(value, get_type_hints(type(config))[name])
    return replace(config, **{name: new})


def another(value: object, annotation: object) -> object:
    """A value of this type that is not this one."""
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    match value:
        case _ if len(choices) > 1:
            return next(each for each in choices if each != value)
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
        case tuple():
            return (*value, "x")
        case Mapping():
            return {**value, "x": 1}
    return 2


def test_every_command_has_a_run_here_or_a_reason() -> None:
    assert {each.split()[0] for each in SCENARIOS.values()} | OTHERS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reads_its_switches(command: str) -> None:
    source = "".join(map(getsource, (module_of(command), arguments.SplitArguments)))  # which knows of --trust-code
    for switch in fields(program_of(command).switches):
        named = rf'"{switch.name}"|switches\.{switch.name}\b|--{switch.name}\b'
        assert re.search(named, source), f"{command} does not read --{switch.name}"


REFUSED = {
    "rl --model.path model --accept-changes": "--resume",
    "sft --model.path model --from-step 3 --dry-run": "--resume",
    "doctor --model.dtype float32": "--model",
    "doctor --model model --sandbox.kind none": "--model",
    "check-task maths --endpoint http://127.0.0.1": "--endpoint",
    "trace model 0 --rollout.prompts-per-step 3": "--rollout.prompts-per-step",
    "eval model --task.path rows.jsonl --task.subset main": "subset",
    "eval model --task.path rows.jsonl --task.generator-size 3": "generator_size",
    "rl --model.path model --task.path rows.jsonl --rewards mine.py:length"
    " --task.held-out-share 0 --grading.cache-file scores": "cache_file",
    "collect --model.path model --grading.max-unscored-steps 3": "max_unscored_steps",
    "sft --model.path model --task.path rows.jsonl --task.shuffle false": "shuffle",
    "irl --demonstrations.expert greedy --demonstrations.temperature 2": "temperature",
    "rl --model.path model --task.path rows.jsonl --rewards mine.py:length --rollout.max-turns 3": "rollout.max_turns",
    "eval model --environment.seconds 3": "environment.seconds",
    "chat model --prompt hi --sampling.multi-turn append": "sampling.multi_turn",
    'trace model 0 --tools-at {"calculator":"="}': "tools_at",
    "collect --model.path model --environment.workers 3": "environment.workers",
    "eval model --tools calculator --environment.path mine.py:Game": "environment.path",
}
"""What would have no effect, and what the message names."""


@pytest.mark.parametrize("command", REFUSED)
def test_what_would_have_no_effect_is_refused(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert REFUSED[command] in refusal(*command.split())


def test_rewards_are_measured_beside_the_measure_of_the_task(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    short = ["--task.held-out-size", "2", "--rollout.max-completion-tokens", "4", "--evaluation.samples", "2"]
    (place / "three.py").write_text("def three(completions, **c):\n    return [3.0] * len(completions)\n")
    said = dict(
        re.findall(r"^(.*?)  +([\d.]+)", printed("eval", "model", "--rewards", "three.py:three", *short), re.MULTILINE)
    )
    assert float(said["reward"]) == 3.0
    assert float(said["accuracy sampled"]) == 0.0  # Countdown's own, of four random tokens
