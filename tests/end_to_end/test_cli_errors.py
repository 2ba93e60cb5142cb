"""Every mistake before a run starts is one clear message with exit code 2; flags say what a recipe says."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import product
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from posttrain.cli import COMMANDS
from posttrain.commands.arguments import split_arguments
from posttrain.commands.chat import ChatConfig
from posttrain.commands.flags import help_record
from posttrain.config import Config, IrlConfig, SftConfig
from posttrain.config.reading import checked_sections
from posttrain.config.recipes import merge, parse_yaml
from tests.support.commands import called, printed, program_of, refusal
from tests.support.refusals import mentions

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

HEAVY = ["torch", "transformers", "pydantic", "tyro", "numpy", "yaml"]

IN_A_RECIPE = {
    "rollout: {temprature: 0.5}": "recipe.yaml: rollout.temprature: no such field.  Did you mean `temperature`?",
    "rollout: {learning_rate: 0.5}": "recipe.yaml: rollout.learning_rate: no such field.  Did you mean",
    "learning_rate: 0.5": "recipe.yaml: learning_rate: no such section.  Did you mean `update.learning_rate`?",
    "rolout: {}": "recipe.yaml: rolout: no such section.  Did you mean `rollout`?",
    "sft: {}\nrollout: {}": "rollout: no such section in `posttrain sft`",
    "algorithm: {name: grpo, kl: {coefficient: 1, estimater: k1}}": "algorithm.kl.estimater: no such field.  Did you",
    "algorithm: {kl: {estimator: k1}}": "algorithm.kl.coefficient is missing",
    "task: contdown": "task.name = contdown: no such task.  Did you mean `countdown`?",
    "task: {name: countdown, path: rows.jsonl}": "recipe.yaml: task.path = rows.jsonl: the task countdown",
    "algorithm: {name: dap}": "no such algorithm.  Did you mean `dapo`?",
    "algorithm: {name: rloo, dual_clip: 3}": "algorithm.dual_clip: no such field",
    "rollout: {group_size: eight}": "rollout.group_size = 'eight' should be a whole number",
    "rollout: {group_size: '8'}": "rollout.group_size = '8' should be a whole number",
    "rollout: {group_size: true}": "rollout.group_size = true should be a whole number",
    "rollout: {group_size: null}": "rollout.group_size = null should be a whole number",
    "model: {dtype: fp16}": "model.dtype = 'fp16' should be 'auto', 'float32' or 'bfloat16'",
    "update: 5": "update = 5 should be a mapping of names to values",
    "- a\n- b": "a recipe is a mapping of sections (`rollout:`, `update:` ...); this is a list",
    "rollout:\n  a: [1\n  b: 2": "recipe.yaml:3: not YAML: expected ',' or ']'",
    "run: {seed: 1, seed: 2}": "recipe.yaml:1: not YAML: `seed` is given twice",
    "run: !!python/object:os.system x": "recipe.yaml:1: not YAML",
    "rollout: {group_size: 1}": "rollout.group_size = 1: grpo compares the completions of a prompt",
    "rollout: {prompts_per_step: 0}": "rollout.prompts_per_step = 0: must be at least 1",
    "rollout: {temperature: 0}": "rollout.temperature = 0.0 makes all completions of a group",
    "rollout: {temperature: -1}": "recipe.yaml: rollout.temperature = -1",
    "rollout: {top_p: 1.5, allow_cut_sampling: true}": "recipe.yaml: rollout.top_p = 1.5",
    "rollout: {top_k: 5}": "rollout.top_k = 5 samples from a cut distribution",
    "update: {tokens_per_microbatch: 128}": "recipe.yaml: update.tokens_per_microbatch = 128 is less than the longest",
    "{update: {minibatches_per_epoch: 5}, rollout: {prompts_per_step: 4}}": "update.minibatches_per_epoch = 5 is more",
    "reference: {refresh_every: 5}": "reference.refresh_every = 5 is only for a reference",
    "{run: {early_stop_evaluations: 2}, evaluation: {every_steps: 0}}": "run.early_stop_evaluations = 2 needs",
    "update: {learning_rate: .nan}": "update.learning_rate = nan: must be a finite number",
    "algorithm: {kl: {coefficient: 0}}": "algorithm.kl.coefficient = 0",
    "algorithm: {clip_low: -3}": "recipe.yaml: algorithm.clip_low = -3",
    "rewards: [{name: graded_format, path: a.py:f}]": "path = a.py:f with name = 'graded_format'",
    "rewards: [{path: mine.py}]": "rewards: path = mine.py must be FILE.py:FUNCTION",
    "rewards: [graded_format=much]": "the weight 'much' is not a number",
}
"""A recipe, and words of the message."""
ON_THE_COMMAND_LINE = {
    "evl": "evl: no such command.  Did you mean `eval`?",
    "config --rollout.temprature 1": "--rollout.temprature: no such flag.  Did you mean `--rollout.te",
    "config --temperature 1": "no such flag.  Did you mean `--rollout.temperature`?",
    **{
        f"config --{theirs} 1": f"--{theirs}: no such flag.  Did you mean `--{ours}`?"
        for theirs, ours in {
            "lr": "update.learning-rate",
            "steps": "run.num-steps",
            "beta": "algorithm.kl.coefficient",
            "epsilon": "algorithm.clip-low",
            "num-generations": "rollout.group-size",
            "max_completion_length": "rollout.max-completion-tokens",
            "reward-funcs": "rewards",
        }.items()
    },
    "config --task.path rows.jsonl --task.name countdown": "command line: task.path = rows.jsonl: the task countdown",
    "config --dry-run": "--dry-run: no such flag.",
    "config --rollout.no-group-size": "no such flag.  Did you mean `--rollout.group-size`?",
    "config --rollout.group-size x": "rollout.group_size = 'x' should be a whole number",
    "config --rollout.group-size": "--rollout.group-size: its value is missing",
    "config --model.dtype fp16": "line: model.dtype = 'fp16' should be 'auto'",
    "config --run.seed 3 stray": "command line: unexpected argument stray",
    "config --rollout.group-size 1": "command line: rollout.group_size = 1: grpo compares",
    "config --algorithm.name dap": "command line: algorithm.name = dap: no such algorithm",
    "rl nowhere.yaml": "nowhere.yaml: no such recipe file.  Bundled recipes, by name: ",
    "rl countdown-tny": "Did you mean the bundled recipe `countdown-tiny`?",
    "rl .": ".: is a folder, not a recipe file.",
    "rl --model.path nowhere": "model.path = nowhere: no such folder.  Give a folder",
    "rl --model.path .": "model.path = .: the folder has no config.json",
    "rl --resume nowhere": "--resume nowhere: not a run folder: config.yaml is missing.",
    "rl countdown-base": "sft: no such section in `posttrain rl`",
}
"""Arguments, and words of the message."""


def message_of(*argv: str) -> str:
    ended = called(*argv)
    assert (ended.code, ended.out, ended.err[:11]) == (2, "", "posttrain: ")
    return ended.err


@pytest.mark.parametrize(("recipe", "expected"), IN_A_RECIPE.items())
def test_a_mistake_in_a_recipe_is_told_with_its_file_and_place(recipe: str, expected: str) -> None:
    Path("recipe.yaml").write_text(recipe)
    assert expected in message_of("config", "recipe.yaml")


@pytest.mark.parametrize(("argv", "expected"), ON_THE_COMMAND_LINE.items())
def test_a_mistake_on_the_command_line_is_told_as_such(argv: str, expected: str) -> None:
    assert expected in message_of(*argv.split())


def test_all_mistakes_of_a_recipe_are_told_at_once() -> None:
    Path("recipe.yaml").write_text("run: {sed: 1}\nrollout: {group_size: x}")
    message = message_of("config", "recipe.yaml")
    mentions(message, "run.sed: no such field.  Did you mean `seed`?", "rollout.group_size = 'x'")


def test_the_source_that_had_the_last_word_is_blamed() -> None:
    Path("first.yaml").write_text("rollout: {group_size: 4}\nrun: {seed: -1}")
    Path("second.yaml").write_text("rollout: {group_size: 0}")
    assert "second.yaml: rollout.group_size" in message_of("config", "first.yaml", "second.yaml")
    assert "command line: rollout.group_size" in message_of("config", "first.yaml", "--rollout.group-size", "0")
    assert "first.yaml: run.seed = -1" in message_of("config", "first.yaml", "second.yaml", "--rollout.group-size", "8")


def test_a_recipe_that_cannot_be_decoded_is_told_apart_from_bad_yaml() -> None:
    Path("recipe.yaml").write_bytes(b"run: \xff\xfe")
    assert "recipe.yaml: not text in UTF-8" in message_of("config", "recipe.yaml")


def test_a_resumed_run_keeps_its_recipe_but_may_go_on_for_longer() -> None:
    run = Path("run")
    run.mkdir()
    (run / "config.yaml").write_text("run: {num_steps: 3}")
    refused = message_of("rl", "--resume", "run", "--update.learning-rate", "1")
    assert "--update.learning-rate: a resumed run keeps its recipe; only model.path" in refused
    assert "Leave out other.yaml" in message_of("rl", "--resume", "run", "other.yaml")
    # Reaches the check of the model, so these flags were taken.
    (run / "config.yaml").write_text("model: {path: nowhere}")
    accepted = message_of("rl", "--resume", "run", "--run.num-steps", "9", "--checkpoint.keep-last", "3")
    assert "model.path = nowhere" in accepted


def test_the_list_of_commands_loads_nothing_heavy() -> None:
    program = f"import sys\nfrom posttrain.cli import main\nmain(['--help'])\nprint(*set({HEAVY!r}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    *listing, loaded = done.stdout.splitlines()
    assert loaded == ""
    assert all(any(line.split()[:1] == [name] for line in listing) for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_its_flags(command: str) -> None:
    assert f"usage: posttrain {command} " in printed(command, "--help")


def test_the_help_of_rl_says_what_each_field_says_and_shows_the_recipe_s_values() -> None:
    Path("recipe.yaml").write_text("{rollout: {group_size: 13}, algorithm: dapo}")
    words = " ".join(printed("rl", "recipe.yaml", "--help").replace("│", " ").split())
    wanted = "--rollout.group-size INT Completions per prompt, G. Algorithms that compare the completions"
    assert wanted in words
    mentions(
        words, "(default: 13)", "--algorithm.clip-high FLOAT (default: 0.28)", "--algorithm.overlong.penalty FLOAT"
    )
    assert "--resume STR Continue the run in this folder" in words


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "check-task"])  # its help is one text
def test_no_help_of_a_flag_breaks_off_within_a_line(command: str) -> None:
    kind = {"sft": SftConfig, "irl": IrlConfig, "chat": ChatConfig}.get(command, Config)
    parser = help_record(checked_sections(kind, merge([])), program_of(command))
    assert [text for text in helps(parser) if "\n" in text] == []


def helps(annotation: object) -> Iterator[str]:
    """What is said of the flags below a section: by `Doc`, or by tyro's own `arg`."""
    for part in get_args(annotation):
        if text := getattr(part, "documentation", None) or getattr(part, "help", None):
            yield text
        if part is not annotation and not isinstance(part, str):
            yield from helps(part)
    if isinstance(annotation, type) and is_dataclass(annotation):
        for hint in get_type_hints(annotation, include_extras=True).values():
            yield from helps(hint)


def test_no_arguments_say_what_to_do_first_with_commands_that_exist() -> None:
    ended = called()
    assert ended.code == 2
    named = re.findall(r"^  posttrain (\S+)", ended.out, re.MULTILINE)
    assert len(named) == 3
    assert {*named} <= {*COMMANDS}
    assert all(f"  {name} " in printed("--help") for name in COMMANDS)


def resolved(*flags: str) -> dict[str, dict[str, object]]:
    """The sections that a recipe has with these flags."""
    content = parse_yaml(printed("config", "countdown-tiny", *flags))
    assert isinstance(content, dict)
    return content


def test_a_truth_value_may_be_written_out() -> None:
    for flags, value in (
        (["--model.gradient-checkpointing", "true"], True),
        (["--model.gradient-checkpointing", "false"], False),
        (["--model.gradient-checkpointing"], True),
        (["--model.no-gradient-checkpointing"], False),
    ):
        assert resolved(*flags)["model"]["gradient_checkpointing"] is value


def test_a_list_is_words_or_what_a_recipe_has() -> None:
    for flags in (["*layers.0*", "*embed*"], ['["*layers.0*", "*embed*"]']):
        assert resolved("--model.frozen", *flags)["model"]["frozen"] == ["*layers.0*", "*embed*"]


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("--world.rewards", "[[15, 1.0], [6, 0.65]]", [[15, 1.0], [6, 0.65]]),
        ("--world.rewards", "[[-1, 1]]", [[-1, 1.0]]),
        ("--world.starts", "[0, 4]", [0, 4]),
        ("--world.ends", "[-1, 3]", [-1, 3]),
    ],
)
def test_lists_of_inverse_rl_are_copied_from_a_recipe(flag: str, text: str, value: object) -> None:
    for flags in ([flag, text], [f"{flag}={text}"]):
        content = parse_yaml(printed("config", "irl-course-exact", *flags))
        assert isinstance(content, dict)
        assert content["world"][flag.removeprefix("--world.")] == value


def test_several_data_sets_make_the_task_that_reads_them() -> None:
    given = "[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]"
    task = resolved("--task.sources", given)["task"]
    assert task["name"] == "dataset"
    assert isinstance(task["sources"], list)
    assert [(each["path"], each["weight"]) for each in task["sources"]] == [("a.jsonl", 2), ("b.jsonl", 1)]


def test_what_is_no_yaml_is_told_with_its_flag() -> None:
    for flag in ("--task.sources", "--model.frozen"):
        said = refusal("config", "countdown-tiny", flag, "[{path: a.jsonl")
        assert f"command line: {flag}: '[{{path: a.jsonl' is not YAML" in said


OF_TASKS = ("rl", "dpo", "collect", "compare", "eval", "trace", "plan", "config", "launch")
OF_ALGORITHMS = ("rl", "compare", "trace", "plan", "config", "launch")
TAKEN = {*product(OF_TASKS, ["task.path"]), *product(OF_ALGORITHMS, ["algorithm.path"])}
FLAGS = ("task.path", "algorithm.path", "judge.path", "world.path", "features.path", "demonstrations.path")
NAMED = {
    **{name: ["bundled"] for name in ("eval", "chat", "serve", "behaviours", "check-task")},
    "trace": ["bundled", "0"],
    "compare": ["countdown-tiny"],
    "dpo": ["--dpo.rounds", "2"],
    "phases": ["phases.yaml"],
    "replay": ["run"],
    "completion": ["bash"],
    "new": ["problem"],
}
"""Commands that are about something named by position."""


@pytest.mark.parametrize(("command", "flag"), product(COMMANDS, FLAGS))
def test_a_path_is_imported_where_it_is_read(command: str, flag: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("import pathlib\n\npathlib.Path('imported').touch()\n")
    Path("phases.yaml").write_text("phases: [{name: a}]")
    error = refusal(command, *NAMED.get(command, []), f"--{flag}", "mine.py:Name")
    assert error.startswith("posttrain: ")
    assert error.count("\n") == 1 or command == "check-task"  # which prints its usage
    assert Path("imported").exists() == ((command, flag) in TAKEN), error
    assert (f"mine.py has no {'class' if 'task' in flag else 'function'} `Name`" in error) == Path("imported").exists()
    assert flag in error or (command, flag) in TAKEN, error


@pytest.mark.parametrize("command", ["chat", "serve", "behaviours", "doctor"])
@pytest.mark.parametrize("flag", ["task.name", "algorithm.name"])
def test_a_name_is_refused_by_commands_that_do_not_read_it(command: str, flag: str) -> None:
    error = refusal(command, *NAMED.get(command, []), f"--{flag}", "countdown")
    section = flag.partition(".")[0]
    assert f"--{flag}: no such flag.  `posttrain {command}` does not read the section {section}." in error


def test_help_offers_a_path_only_where_it_is_read() -> None:
    assert ".path" not in printed("behaviours", "--help")


def test_a_recipe_may_stand_behind_flags() -> None:
    given = split_arguments(["a.yaml", "--run.seed", "1", "b.yaml"], program_of("rl"))
    assert (given.positional, given.flags) == (["a.yaml", "b.yaml"], ["--run.seed", "1"])


@pytest.mark.parametrize("flag", ["--judge.principles", "--behaviours.file"])
def test_a_file_behind_a_flag_of_files_is_its_value(flag: str) -> None:
    for flags in ([flag, "mine.yaml"], [f"{flag}=mine.yaml"]):
        given = split_arguments(["a.yaml", *flags, "b.yaml"], program_of("rl"))
        assert (given.positional, given.flags) == (["a.yaml", "b.yaml"], flags)
