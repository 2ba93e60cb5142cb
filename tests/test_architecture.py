"""The rules of layout and length that a reader relies on, read from the source; there is no allow-list."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.chosen_mutants import MUTANTS, TESTS as TESTS_OF_CHOSEN, mutated
from tests.mutations import EQUIVALENT, mutants
from tests.support.pages import one_test_of

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "posttrain"

# A module may import from its own package and from the rows below its own; packages of one row leave each other alone.
# "" is posttrain/__init__.py.
LAYERS = [
    {"__main__"},
    {"cli", ""},
    {"commands", "trl", "variance"},
    {"server", "course"},
    {"training", "irl_runs", "neural_irl"},  # irl_runs and neural_irl are users of irl/, which stands alone
    {"viewer"},
    {"behaviours"},
    {"runs"},
    {"generation", "tasks", "config"},
    {"environments"},
    {"rewards"},
    {"models", "algorithms"},
    {"sandbox", "batch"},
    {"options"},  # plain settings, read without torch
    {"records", "binding", "needs", "ranks"},
    {"schemas", "known_code", "turns"},
    {"errors"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ORDER = " > ".join(", ".join(sorted(name or "__init__" for name in names)) for names in LAYERS)
"""The order of imports in words; `python -m tests.test_architecture` prints it."""
MAY_IMPORT_IRL = {"irl_runs", "neural_irl", "course", ""}
ENTRY_POINTS = {
    "posttrain.training.rl.train",
    "posttrain.training.held_out.evaluate",
    "posttrain.training.sft.sft_run.train_sft",
    "posttrain.training.reward_model.reward_run.train_reward_model",
    "posttrain.training.dpo.dpo_run.train_dpo",
    "posttrain.commands.collection.collection.collect",
    "posttrain.rewards.grading.grade.grade",
    "posttrain.generation.generate.generate",
    "posttrain.course.one_prompt.grpo_step",
    "posttrain.trl.grpo_trainer.__init__",
    "posttrain.trl.sft_trainer.__init__",
    "posttrain.trl.dpo_trainer.__init__",
    "posttrain.trl.reward_trainer.__init__",
}
"""Functions that people call with keywords of their choice, and that may therefore take more than six arguments."""
ROWS_OF_THE_TABLE = {"posttrain.algorithms.table", "posttrain.algorithms.ppo", "posttrain.algorithms.distillation"}
"""Where rows of the table of algorithms are: a signature is the schema of a recipe's section there."""
LINES_WITHOUT_DOCSTRING = 8
STATEMENTS_WITHOUT_DOCSTRING = 2
"""Lines or statements of a function whose name and types can say what a docstring would."""
FILES_IN_A_PACKAGE = 24
NAMED_AFTER_WHAT_THEY_SERVE = {"commands", "options"}
"""Folders whose files are named after what a command runs or what a section configures."""
HEAVY = {"torch", "transformers", "jaxtyping", "numpy", "matplotlib", "pyarrow"}
RUNS_PROGRAMS = SOURCE / "sandbox" / "inside" / "runner.py"
"""The one file that runs what a model wrote: in the sandbox's own interpreter, in a process that is sealed."""
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}

INSIDE_THE_FORWARD_PASS = {"output_layer", "completion_hidden", "last_hidden_state"}
"""Attributes that lead to hidden states or to what makes logits of them."""
FROM_HIDDEN_STATES = {
    "output_layer_of",
    "model_hidden",
    "token_logprobs",
    "token_entropies",
    "token_statistics",
    "full_kl",
}
"""Functions of `models/` from hidden states to log-probs."""
TOKEN_BY_TOKEN = {SOURCE / "generation" / name for name in ("decoder_steps.py", "model_steps.py")}
"""The in-process sampler: its steps are forward passes of one token over caches, and read the layer themselves."""

SOURCES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ALL = SOURCES + TESTS + sorted((ROOT / "benchmarks").rglob("*.py")) + sorted((ROOT / "docs").glob("*.py"))

each_source, each_file = one_test_of(SOURCES), one_test_of(ALL)


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file, gone through once for all rules."""
    return tuple(ast.walk(syntax(path)))


def unit(module: str) -> str:
    """The row entry that a dotted module of ours belongs to: `posttrain.training.update` -> `training`."""
    return [*module.split("."), ""][1]


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def exists(module: str) -> bool:
    path = SOURCE.parent.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every imported module with its line, those inside functions too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full, they are read by people and by tests"
            assert node.module is not None
            for alias in node.names:  # `from posttrain import batch` imports posttrain.batch
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if exists(inner) else node.module


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Every call with the called name as written: `torch.load`, `eval`."""
    for node in nodes(path):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def keyword(call: ast.Call, name: str) -> object:
    """A literal keyword argument of a call; None where it is absent or computed."""
    for argument in call.keywords:
        if argument.arg == name and isinstance(argument.value, ast.Constant):
            return argument.value.value
    return None


@each_source
def test_imports_point_down_the_list(path: Path) -> None:
    module = module_name(path)
    mine = unit(module)
    if mine == "irl":
        return  # a rule of its own, below
    assert mine in LEVEL, f"{module}: {mine!r} has no place in the order yet: {ORDER}"
    for line, imported in imports(path):
        if imported.split(".")[0] != "posttrain":
            continue
        theirs = unit(imported)
        if theirs == "irl":
            assert mine in MAY_IMPORT_IRL, f"{path}:{line}: {mine} may not import irl"
            continue
        assert theirs in LEVEL, f"{path}:{line}: {imported} has no place in the order yet: {ORDER}"
        below = theirs == mine or LEVEL[theirs] > LEVEL[mine]
        assert below, f"{path}:{line}: {mine or '__init__'} may not import {imported}.  The order is {ORDER}"


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES}), ids=lambda path: path.name)
def test_a_folder_holds_no_more_than_one_can_take_in(folder: Path) -> None:
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= FILES_IN_A_PACKAGE, f"{folder}: {len(files)} files, the limit is {FILES_IN_A_PACKAGE}"


def test_no_two_files_have_one_name() -> None:
    """Apart from those that are named after what they command or configure."""
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        where = path.relative_to(SOURCE)
        if path.stem != "__init__" and where.parts[0] not in NAMED_AFTER_WHAT_THEY_SERVE:
            homes.setdefault(path.stem, []).append(where.as_posix())
    assert {stem: files for stem, files in homes.items() if len(files) > 1} == {}


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in syntax(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path.relative_to(SOURCE).as_posix())
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_classical_irl_stands_alone() -> None:
    """numpy, scipy and shapes; nothing of ours but the errors that a person can mend, which import nothing."""
    for path in SOURCES:
        if unit(module_name(path)) == "irl":
            for line, imported in imports(path):
                root = imported.split(".")[0]
                known = root in sys.stdlib_module_names or root in {"numpy", "scipy", "jaxtyping", "posttrain"}
                assert known, f"{path}:{line}: irl needs no {root}"
                allowed = {"irl", "errors"}
                assert root != "posttrain" or unit(imported) in allowed, f"{path}:{line}: irl stands alone"
    assert [*imports(SOURCE / "errors.py")] == []


def test_settings_are_read_without_torch() -> None:
    options = [module_name(path) for path in SOURCES if unit(module_name(path)) == "options"]
    assert options
    program = f"import sys, {', '.join(options)}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "", "an options module loads these"


@each_file
def test_a_file_fits_in_a_sitting(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= 400, f"{path}: {num_lines} lines, the limit is 400; 250 is usual"


@each_file
def test_a_function_fits_on_a_screen(path: Path) -> None:
    for function in functions(path):
        num_lines = function.end_lineno - function.lineno + 1
        where = f"{path}:{function.lineno}: {function.name}"
        assert num_lines <= 60, f"{where} has {num_lines} lines, the limit is 60; 35 is usual"


@each_source
def test_a_public_function_says_what_it_is_for(path: Path) -> None:
    """Unless it is private, or short: then a docstring is for what its name and types do not say."""
    for node in syntax(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            num_lines = node.end_lineno - node.lineno + 1
            short = num_lines <= LINES_WITHOUT_DOCSTRING or len(node.body) <= STATEMENTS_WITHOUT_DOCSTRING
            assert short or ast.get_docstring(node), f"{path}:{node.lineno}: {node.name} says nothing of itself"


@each_source
def test_a_function_takes_at_most_six_arguments(path: Path) -> None:
    if module_name(path) in ROWS_OF_THE_TABLE:
        return
    for function in functions(path):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        names = [argument.arg for argument in arguments if argument.arg not in {"self", "cls"}]
        where = f"{path}:{function.lineno}: {function.name}"
        entry = f"{module_name(path)}.{function.name}" in ENTRY_POINTS
        assert len(names) <= 6 or entry, f"{where} takes {len(names)} arguments ({', '.join(names)}): it wants a record"


@each_file
def test_annotations_are_real_objects(path: Path) -> None:
    """`from __future__ import annotations` would turn them into strings, and blind the shape checks."""
    assert all(imported != "__future__" for _, imported in imports(path)), path


@each_source
def test_there_are_no_abstract_base_classes(path: Path) -> None:
    """What can be plugged in is a protocol, and what is shared is a part or a function."""
    assert all(imported.partition(".")[0] != "abc" for _, imported in imports(path)), path


@each_source
def test_a_broad_except_raises_again(path: Path) -> None:
    """Else a bug looks like a bad rollout; only the sandbox, whose guest may do anything, may swallow."""
    if module_name(path).startswith("posttrain.sandbox"):
        return
    for node in nodes(path):
        if isinstance(node, ast.ExceptHandler):
            caught = "BaseException" if node.type is None else ast.unparse(node.type)
            broad = {"Exception", "BaseException"} & set(caught.strip("()").replace(" ", "").split(","))
            assert not broad or isinstance(node.body[-1], ast.Raise), f"{path}:{node.lineno}: swallows {caught}"


@each_source
def test_nothing_read_or_sampled_can_run_as_code(path: Path) -> None:
    for line, imported in imports(path):
        assert imported.split(".")[0] not in UNSAFE_MODULES, f"{path}:{line}: {imported} runs what it reads"
    for call, name in calls(path):
        where = f"{path}:{call.lineno}: {name}"
        if path != RUNS_PROGRAMS:
            assert name not in {"eval", "exec", "os.system", "builtins.eval", "builtins.exec"}, where
        assert name != "torch.load" or keyword(call, "weights_only") is True, f"{where} without weights_only=True"
        assert keyword(call, "allow_pickle") is not True, f"{where} with allow_pickle"
        assert keyword(call, "trust_remote_code") is not True, f"{where} with trust_remote_code"
        assert keyword(call, "shell") is not True, f"{where} with shell=True"


@pytest.mark.parametrize("file", sorted({file for file, _ in EQUIVALENT}))
def test_a_mutant_that_is_called_equivalent_is_one_that_is_made(file: str) -> None:
    """Else its line has changed, and the reason may no longer hold."""
    made = {mutant.after for mutant in mutants(file)}
    assert {line for name, line in EQUIVALENT if name == file} <= made


def test_each_chosen_mutant_changes_a_line_that_is_there_and_has_tests() -> None:
    for file, old, new, occurrence in MUTANTS:
        mutated((SOURCE / file).read_text(encoding="utf-8"), old, new, occurrence)
    assert [test for each in TESTS_OF_CHOSEN.values() for test in each if not (ROOT / "tests" / test).exists()] == []


@each_source
def test_log_probs_of_completions_come_from_the_forward_contract_alone(path: Path) -> None:
    """So that sharding, tensor parallelism or a fused kernel has one thing to replace: `ForwardPass`."""
    if SOURCE / "models" in path.parents or path in TOKEN_BY_TOKEN:
        return
    read = {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)} & INSIDE_THE_FORWARD_PASS
    imports = [node for node in nodes(path) if isinstance(node, ast.ImportFrom) and "models" in str(node.module)]
    read |= {name.name for node in imports for name in node.names} & FROM_HIDDEN_STATES
    assert not read, f"{path} reads {read}: use completion_logprobs of a policy or of its forward pass"


if __name__ == "__main__":
    print(ORDER.replace(" > ", "\n  > "))


@each_source
def test_frozen_records_hold_nothing_but_their_fields(path: Path) -> None:
    """What `replace`, `asdict` and `==` do not see is lost in a copy: only declared fields are ever filled in."""
    for record in (node for node in nodes(path) if isinstance(node, ast.ClassDef)):
        declared = {
            node.target.id: ast.unparse(node.annotation)
            for node in record.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        filled = {
            call.args[1].value
            for call in ast.walk(record)
            if isinstance(call, ast.Call)
            and ast.unparse(call.func) == "object.__setattr__"
            and isinstance(call.args[1], ast.Constant)
        }
        hidden = {name for name in filled if "ClassVar" in declared.get(str(name), "ClassVar")}
        assert not hidden, f"{path}: {record.name} keeps {hidden} that is no field of it"
    outside = [
        call
        for node in syntax(path).body
        if isinstance(node, ast.FunctionDef)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "object.__setattr__"
    ]
    assert not outside, f"{path}:{outside[0].lineno}: a record is filled in by its own class, or by replace()"
