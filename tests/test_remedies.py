"""What a message tells a person to do can be done, in the place where it is read.

Each command, flag, function and file that a message names exists, and what is read from Python as well as from the
command line has a remedy for both.  Options by their dotted names are in test_option_names.py.
"""

import ast
import builtins
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache

import pytest

import posttrain
from posttrain.cli import COMMANDS
from posttrain.config.sections import PLAIN, section_names
from posttrain.options.reward import RewardSettings
from tests.support.commands import program_of
from tests.support.pages import attribute
from tests.test_option_names import KINDS, SOURCE, options_named, records

ROOT = SOURCE.parents[1]
PROGRAMS = (
    "course/mistakes.py",
    "course/model_laws.py",
    "sandbox/inside/",
    "sandbox/probes.py",
    "sandbox/backends.py",
    "rewards/cheap_attacks.py",
)
"""Where texts are programs, answers, templates, and flags of bubblewrap: they tell nobody anything."""
PROGRAMS_BY_NAME = {
    *["sandbox/process_pool.py:BOOTSTRAP", "sandbox/elsewhere.py:SPIN", "sandbox/elsewhere.py:replay_run"],
    "models/loading/new_model.py:CHAT_TEMPLATE",
}
"""Such constants and functions of files that have messages too."""
READ_IN_A_TERMINAL = ("commands/", "cli.py")
"""Where texts are told by a command alone."""
READ_IN_PYTHON = ("trl/",)
"""Where texts are told to who writes a script."""
LAST_WORDS = {
    "runs/interruption.py",
    "training/report.py",
    "training/sft/sft_run.py",
    "training/reward_model/reward_run.py",
}
"""Where a run that ends says by which commands to go on; who called it from Python has the `Run`."""
SHELL = "commands/completion.py"
"""Writes functions of shells."""
JSON = '{"'
"""How examples of rows begin."""
SECTIONS = {name for kind in KINDS for name in section_names(kind)}
FLAGS_OF_ALL = {"help", "version"}
OTHERS_CALLS = {
    "reset": "an environment's",
    "get_base_model": "peft's",
    "merge_and_unload": "peft's",
    "unmerge_adapter": "peft's",
    "asarray": "numpy's",
    "BitsAndBytesConfig": "transformers'",
    "isnan": "torch's",
    "where": "torch's",
    "raise_exception": "a chat template's",
    "replace": "a chat template's",
}
"""Calls that a text names and that are none of ours, with whose they are."""
OTHERS_OPTIONS = {"isolation": "SandboxFusion's"}
FLAGS_OF_VLLM = (
    *("enable-scale-out", "logprobs-mode", "generation-config", "override-generation-config", "max-model-len"),
    *("no-enable-prefix-caching", "weight-transfer-config"),
)
MADE_UP = {"FILE.py", "RECIPE.yaml", "mine.py", "my_rewards.py", "rows.jsonl"}
"""Names that stand for a person's own files."""
IN_A_RUN = {
    *["comparison.png", "comparison.json", "config.yaml", "summary.json", "metrics.jsonl", "reward.npz"],
    *["demonstrations.npz", "curves.png", "manifest.json", "calibration.png", "held_out.jsonl"],
    *["preferences.jsonl"],
}
IN_A_MODEL = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
FROM_PYTHON_ALONE = (
    *["Make one of a model", "Give an object", "groups: ", "policy: ", "engine {}", "model: a "],
    *["make one of a model", "give an object", "the episode is over", "no episode has begun"],
    *["terminal has a 0", "resume {}: the run was made with objects", "Kept: step {}", "task {}: "],
    *["{}: terms = ", "{}.  {} of the {} rollouts", "Save only the adapter", "Make the policy again"],
    " | replace({}",  # of a template
)
"""How messages begin that are about objects which only a program can hand over."""


@dataclass(frozen=True)
class Text:
    """A text of the source as it is told, `{}` for what is filled in."""

    file: str
    line: int
    says: str


def joined(node: ast.expr) -> str | None:
    """A literal text; of an f-string or a sum, with `{}` in the place of what is not literal."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [joined(left), joined(right)]
            return None if parts == [None, None] else "".join(part or "{}" for part in parts)
    return None


def name_of(statement: ast.stmt) -> str:
    """What a statement at the top of a module defines: a function, a class or a constant."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return ""


def told_in(source: str, file: str = "") -> Iterator[Text]:
    """Every text of more than a word in a source file, each once and whole; docstrings tell readers of the source."""
    module = ast.parse(source)
    module.body = [each for each in module.body if f"{file}:{name_of(each)}" not in PROGRAMS_BY_NAME]
    seen = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    for node in ast.walk(module):
        if parts := told_twice(node):
            seen |= {id(child) for part in parts for child in ast.walk(part)}
            yield Text(file, parts[0].lineno, " ".join(joined(part) or "" for part in parts))
    for node in ast.walk(module):
        if isinstance(node, ast.expr) and id(node) not in seen and (text := joined(node)) is not None:
            seen |= {id(child) for child in ast.walk(node)}
            if " " in text.strip() and not text.startswith(JSON):
                yield Text(file, node.lineno, text)


def told_twice(node: ast.AST) -> list[ast.expr]:
    """The texts of an error that tells whoever typed a command something else than a program in Python; else none."""
    by_command = [each.value for each in node.keywords if each.arg == "command"] if isinstance(node, ast.Call) else []
    return [*node.args[:1], *by_command] if by_command and isinstance(node, ast.Call) else []


@cache
def all_texts() -> tuple[Text, ...]:
    names = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
    told = {name: path for name, path in names.items() if not name.startswith(PROGRAMS)}
    return tuple(text for name, path in told.items() for text in told_in(path.read_text(encoding="utf-8"), name))


@cache
def known_flags() -> frozenset[str]:
    """The flags without a dot, of all commands."""
    switches = [program_of(command).switches for command in COMMANDS]
    names = {field.name.replace("_", "-") for each in switches for field in fields(each)}
    return frozenset(names | SECTIONS | FLAGS_OF_ALL)


def commands_named(text: str) -> list[str]:
    """The commands in a text: the word after the program's name, in backquotes or where a line shows what to type."""
    shown = re.findall(r"`posttrain ([a-z-]+)|(?:^|\n|: |  )\s*(?:usage: )?posttrain ([a-z-]+)", text)
    return [either or other for either, other in shown]


def flags_named(text: str) -> list[str]:
    """The flags in a text that are no dotted options, and no other program's."""
    found = re.findall(r"(?<![\w-])--([a-z][a-z-]*)(?![\w.-]*\.[a-z{])", text)
    return [] if "run --rm" in text else found


def calls_named(text: str) -> list[tuple[str, list[str]]]:
    """The calls in a text: what is called, and the keywords that it is given."""
    found = re.findall(r"(?<![\w.\\])([A-Za-z_][\w.]*)\(([^()]*)\)", text)
    called = [(name, inside) for name, inside in found if inside == "" or re.search(r"[=,]|\.\.\.|config", inside)]
    return [(name, re.findall(r"(\w+)=", inside)) for name, inside in called]


def dotted_names(text: str) -> list[str]:
    """The names in our package that a text gives in full."""
    return re.findall(r"(?<![\w/.-])posttrain(?:\.[A-Za-z_]\w*)+", text)


def files_named(text: str) -> list[str]:
    return re.findall(r"(?<![\w{}.*/])[\w./-]*\w\.(?:py|md|ya?ml|jsonl?|npz|png|jinja)(?!\w)", text)


def extras_named(text: str) -> list[str]:
    return re.findall(r"posttrain\[(\w+)\]", text)


@cache
def our_functions() -> dict[str, list[Callable[..., object]]]:
    """What a program can call by name: what is public at the top of a module."""
    found: dict[str, list[Callable[..., object]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(lambda module=module, name=node.name: f"{module}.{name}")
    return found


def accepts(call: Callable[..., object], keyword: str) -> bool:
    """Whether a function of ours can be given a keyword; further ones are fields of a reward, or sections."""
    parameters = inspect.signature(call).parameters
    further = {field.name for field in fields(RewardSettings)} | SECTIONS
    rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return keyword in parameters or (rest and keyword in further)


def callable_as(name: str, keywords: list[str]) -> bool:
    """Whether there is a function or class of ours by this name that takes these keywords."""
    if name.rpartition(".")[2] in OTHERS_CALLS or hasattr(builtins, name):
        return True
    if name.startswith("posttrain."):
        return callable(attribute(name))
    full = [name_of() for name_of in our_functions().get(name, [])]
    candidates = [getattr(posttrain, name)] if name in posttrain.__all__ else [attribute(str(each)) for each in full]
    return any(callable(each) and all(accepts(each, keyword) for keyword in keywords) for each in candidates)


def is_file(name: str) -> bool:
    known = MADE_UP | IN_A_RUN | IN_A_MODEL
    return name in known or (ROOT / name).exists() or (SOURCE / name).exists()


def resolves(name: str) -> bool:
    try:
        attribute(name)
    except (AssertionError, AttributeError):
        return False
    return True


def for_python(text: str) -> bool:
    """Whether a text says what to do in Python: by a call, or by an option's dotted name without dashes."""
    return bool(options_named(re.sub(r"--\S+", "", text)) or calls_named(text) or dotted_names(text))


def for_a_recipe(text: str) -> bool:
    """Whether a text says what to do in a recipe or on the command line."""
    return bool(re.search(r"`\w+: |recipe|\w\.py:\w|--[a-z]", text) or options_named(text))


@cache
def extras() -> frozenset[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return frozenset(project["optional-dependencies"])


def offends(text: Text) -> str:
    """What a text names and there is not, if anything."""
    says = re.sub(rf"--({'|'.join(FLAGS_OF_VLLM)})\b", "", text.says)
    wrong = [f"no command {name}" for name in commands_named(says) if name not in COMMANDS]
    wrong += [f"no flag --{name}" for name in flags_named(says) if name not in known_flags()]
    calls = [] if text.file == SHELL else calls_named(says)
    wrong += [f"no {name}({', '.join(words)})" for name, words in calls if not callable_as(name, words)]
    wrong += [f"no file {name}" for name in files_named(says) if not is_file(name)]
    wrong += [f"no extra {name}" for name in extras_named(says) if name not in extras()]
    wrong += [f"nothing called {name}" for name in dotted_names(says) if not resolves(name)]
    named = re.findall(r"`(\w+): [^`]*`", says)
    wrong += [f"no option {name}" for name in named if name not in every_option() | SECTIONS | OTHERS_OPTIONS.keys()]
    if not text.file.startswith(READ_IN_A_TERMINAL) and text.file not in LAST_WORDS:
        if flags_and_options(says) and not for_python(says):
            wrong.append("a flag alone, where Python reads it too")
        for_programs = text.file.startswith(READ_IN_PYTHON) or says.startswith(FROM_PYTHON_ALONE)
        if calls_named(says) and not for_a_recipe(says) and not for_programs:
            wrong.append("a call alone, where a recipe's author reads it too")
    return "; ".join(wrong)


def flags_and_options(text: str) -> list[str]:
    """All flags in a text, the dotted ones too."""
    return re.findall(r"(?<![\w-])--[a-z][\w.-]*", text) if "run --rm" not in text else []


@cache
def every_option() -> frozenset[str]:
    """The names of all options of all sections."""
    kinds = (record for section in SECTIONS - PLAIN.keys() for record in records(section))
    return frozenset(each.name for record in kinds for each in fields(record))


def test_what_messages_name_exists_where_they_are_read() -> None:
    wrong = [(text, offence) for text in all_texts() if (offence := offends(text))]
    assert not wrong, "\n".join(f"{text.file}:{text.line}: {text.says!r}: {offence}" for text, offence in wrong)


@pytest.mark.parametrize(
    ("file", "says", "offence"),
    [
        ("runs/x.py", "see `posttrain evaluate` of it", "no command evaluate"),
        ("commands/x.py", "continue     posttrain lr --resume {}", "no command lr"),
        ("commands/x.py", "choose another with --place", "no flag --place"),
        ("rewards/x.py", "grade(error='none') in the recipe", "no grade(error)"),
        ("rewards/x.py", "reward_function(call, nome=...) in the recipe", "no reward_function(nome)"),
        ("rewards/x.py", "load_recipe(..., runs={}) or run.folder", "no load_recipe(runs)"),
        ("rewards/x.py", "regrade(call, name=...) or run.folder", "no regrade(name)"),
        ("rewards/x.py", "give it `wokers: 1` in the recipe", "no option wokers"),
        ("models/x.py", "see posttrain.models.policy.absent there", "nothing called posttrain.models.policy.absent"),
        ("models/x.py", "make it with recipes/absent.yaml first", "no file recipes/absent.yaml"),
        ("models/x.py", "it needs `pip install posttrain[maths]` first", "no extra maths"),
        ("runs/x.py", "choose another folder with --run.folder", "a flag alone, where Python reads it too"),
        ("runs/x.py", "call grade(on_error='none') in its place", "a call alone, where a recipe's author reads it too"),
    ],
)
def test_a_remedy_that_cannot_be_followed_is_found(file: str, says: str, offence: str) -> None:
    assert offends(Text(file, 1, says)) == offence


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("runs/x.py", "choose another run.folder (--run.folder)"),
        ("runs/x.py", "continue with --resume {} (in Python train(config, resume=True))"),
        ("commands/x.py", "choose another folder with --run.folder, or `posttrain rl --help`"),
        ("rewards/x.py", "give it `workers: 1` in the recipe, reward_function(call, workers=1) in Python"),
        ("runs/x.py", "groups: call grade(on_error='none') once for each size"),
    ],
)
def test_a_remedy_that_can_be_followed_is_left_alone(file: str, says: str) -> None:
    assert offends(Text(file, 1, says)) == ""


def test_texts_are_found_whole_and_once() -> None:
    source = 'def f(a):\n    """A docstring --no-flag."""\n    raise E(f"one {a}" " two" + g(a) + "three four")\n'
    assert [text.says for text in told_in(source)] == ["one {} two{}three four"]
    named = [[text for text in all_texts() if names(text.says)] for names in (flags_named, calls_named, files_named)]
    assert [len(texts) > least for texts, least in zip(named, (15, 8, 15), strict=True)] == [True] * 3
    assert len([text for text in all_texts() if commands_named(text.says)]) > 15
