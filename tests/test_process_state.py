"""What a module keeps for the whole process, and the places that write files, are listed here with their reasons.

Nothing that a session sets outlives it.  What writes and is not here goes through `runs/files.py`: beside and renamed,
or appended where no link is followed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_architecture import SOURCES, each_source, module_name, nodes, syntax

KEPT_FOR_THE_PROCESS = {
    "posttrain.rewards.grading.dispatch.shared_loop": "clients that a user's async function keeps belong to"
    " the loop they were made in; it runs whatever it is given, and no setting reaches it",
    "posttrain.rewards.grading.resources.default_resources": "for rewards that are called outside any session, with"
    " default options; a session has resources of its own",
    "posttrain.rewards.grading.resources.package": "a digest of our files, which do not change while it runs",
    "posttrain.models.chat_templates.LIMIT": "the bound on the template that is being rendered",
    "posttrain.models.chat_templates.MEMORY": "the limit on memory while templates are rendered",
    "posttrain.sandbox.elsewhere.texts": "sources of this package, which do not change while it runs",
    "posttrain.rewards.grading.worker_process.loop": "in a worker, which is a process of one function",
    "posttrain.runs.checkpoint.ThreadClaim._open": "torch has one number of threads, on which sessions must agree",
}
OF_A_PROCESS_OF_ITS_OWN = {
    "posttrain.cli": "the command's own process, before torch reads how long its threads wait",
    "posttrain.commands.launching.ray_processes": "the command's own process: Ray reads its variables when it starts",
    "posttrain.commands.start_ranks": "the command's own process: torchrun hands its variables to the ranks",
    "posttrain.sandbox.inside.replay": "the program's own process, which starts itself anew with a seed",
    "posttrain.trl.configs.script_arguments": "a script's own process: its file sets variables, as TRL's does",
}
CHANGES = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"}
CHANGES |= {"setdefault", "update"}
MAKES_A_CONTAINER = {"dict", "list", "set", "defaultdict", "deque", "Counter", "OrderedDict", "WeakSet", "local"}

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def module_names(module: ast.Module) -> dict[str, ast.expr | None]:
    """The names that a module binds at its top level, with what it binds them to."""
    bound: dict[str, ast.expr | None] = {}
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = [each for target in targets for each in ast.walk(target)]
            bound |= {each.id: node.value for each in found if isinstance(each, ast.Name)}
    return bound


def is_empty_container(value: ast.expr | None) -> bool:
    """Whether it is `{}`, `[]`, `set()` or the like."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MAKES_A_CONTAINER and not value.args
    return isinstance(value, ast.Dict | ast.List) and not ast.unparse(value).strip("{[]}")


def changed_in_functions(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Names that functions change and do not bind: `X.append(...)`, `X[...] = ...`, `X.field = ...`, `del X[...]`."""
    for function in (node for node in ast.walk(module) if isinstance(node, FUNCTIONS)):
        own = {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
        own |= {
            each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                changes = isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES
                places = [node.func] if changes else []
            else:
                stores = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
                places = [node] if isinstance(node, ast.Attribute | ast.Subscript) and stores else []
            for place in places:
                if isinstance(place.value, ast.Name) and place.value.id not in own:
                    yield node.lineno, place.value.id


def writes_to_the_environment(module: ast.Module) -> Iterator[int]:
    """Lines that change os.environ, under whatever name it was imported, or go past it with putenv."""
    names = {"os.environ", "environ", "os.environb", "environb"}
    for node in ast.walk(module):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            written = ast.unparse(node.value) in names
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = node.func
            written = called.attr in CHANGES and ast.unparse(called.value) in names
            written = written or ast.unparse(called) in {"os.putenv", "os.unsetenv"}
        else:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            written = isinstance(node, ast.Assign | ast.AugAssign) and any(
                isinstance(each, ast.Attribute | ast.Name) and ast.unparse(each) in names for each in targets
            )
        if written:
            yield node.lineno


def kept(path: Path) -> Iterator[str]:
    """Objects with state that a module or class holds, and cached results of functions without arguments."""
    module = syntax(path)
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            cached = any("cache" in ast.unparse(decorator) for decorator in node.decorator_list)
            if cached and not ast.unparse(node.args):
                yield f"{module_name(path)}.{node.name}"
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    for name, value in module_names(module).items():
        made = classes.get(ast.unparse(value.func)) if isinstance(value, ast.Call) else None
        if made and any(isinstance(each, ast.FunctionDef) and each.name == "__init__" for each in made.body):
            yield f"{module_name(path)}.{name}"
    for each in classes.values():
        for name, value in module_names(ast.Module(each.body, [])).items():
            if is_empty_container(value):
                yield f"{module_name(path)}.{each.name}.{name}"


@each_source
def test_no_function_rebinds_a_name_of_its_module(path: Path) -> None:
    for node in nodes(path):
        assert not isinstance(node, ast.Global), f"{path}:{node.lineno}: global {', '.join(node.names)}"


@each_source
def test_no_module_has_a_container_that_is_filled_while_it_runs(path: Path) -> None:
    names = module_names(syntax(path))
    empty = [name for name, value in names.items() if is_empty_container(value)]
    assert empty == [], f"{path}: empty, so they are there to be filled: give them to who owns what they hold"
    for line, name in changed_in_functions(syntax(path)):
        assert name not in names, f"{path}:{line}: changes {name} of the module: give it to who owns it"


@each_source
def test_no_function_changes_the_environment_of_the_process(path: Path) -> None:
    if module_name(path) not in OF_A_PROCESS_OF_ITS_OWN:
        lines = [*writes_to_the_environment(syntax(path))]
        assert lines == [], f"{path}: os.environ is one for all sessions: give it in `env=` of what is started"


def test_what_may_change_its_environment_does_so() -> None:
    changing = {module_name(path) for path in SOURCES if [*writes_to_the_environment(syntax(path))]}
    assert changing == set(OF_A_PROCESS_OF_ITS_OWN)


def test_what_is_kept_for_the_process_is_what_is_listed_with_a_reason() -> None:
    assert {name for path in SOURCES for name in kept(path)} == set(KEPT_FOR_THE_PROCESS)


@pytest.mark.parametrize(
    "source",
    [
        "SPENT: dict[str, int] = {}",
        "_open = list()",
        "SEEN = {0}\ndef see(x):\n    SEEN.add(x)",
        "TABLE = {0: 1}\ndef put(x):\n    TABLE[x] = 1",
        "TABLE = {0: 1}\ndef drop(x):\n    del TABLE[x]",
        "STATE = make()\ndef put(x):\n    STATE.chosen = x",
    ],
)
def test_state_of_a_module_is_found(source: str) -> None:
    module = ast.parse(source)
    names = module_names(module)
    changed = {name for _, name in changed_in_functions(module)} & names.keys()
    assert changed or any(is_empty_container(value) for value in names.values())


WRITES = {"write_text", "write_bytes", "touch", "savefig", "save_file", "save_pretrained", "savez", "savez_compressed"}
WRITES |= {"copyfile", "copytree", "write_table"}
"""Functions that write to a path that they are given, or to a file that is open already."""
WHOLE_FOLDER = "fills a folder that `whole_folder` or a checkpoint renames, or one that a caller in Python names"
IN_MEMORY = "to memory, which `write_atomically` writes"
WRITERS = {
    "commands/evaluate.py": "to a pipe or a terminal that the user names; to a file by `write_atomically`",
    "commands/launching/processes.py": "a log, to whose end a process writes; no link is followed",
    "commands/new.py": "to a folder that was empty; an interruption leaves nothing that anybody had",
    "course/notebooks.py": "to a folder that a caller names",
    "generation/http/weights_files.py": "to a name of its own, renamed when it is whole and has its digest",
    "irl/demonstrations.py": "to a file that a caller in Python names",
    "irl_runs/run.py": IN_MEMORY,
    "known_code.py": "one write to the end of a file of the user's own",
    "models/adapters/peft_format.py": WHOLE_FOLDER,
    "models/adapters/peft_layers.py": WHOLE_FOLDER,
    "models/classifiers/saved_classifier.py": WHOLE_FOLDER,
    "models/loading/adapter_folder.py": WHOLE_FOLDER,
    "models/loading/saving.py": WHOLE_FOLDER,
    "runs/checkpoint.py": WHOLE_FOLDER,
    "runs/interruption.py": "a log, to whose end a process writes; no link is followed",
    "runs/files.py": "the writers that all others use",
    "runs/folder.py": "the lock, no link is followed; makes empty journals where nothing is",
    "runs/rollout_file.py": IN_MEMORY,
    "runs/run_folder.py": "makes empty journals where nothing is",
    "runs/shards.py": WHOLE_FOLDER,
    "sandbox/probes.py": "bait in a temporary folder of its own",
    "sandbox/inside/main.py": "/dev/null",
    "sandbox/sandboxed_process.py": "a file in memory, which a program reads",
    "server/transfer_folder.py": "a new file in the server's own folder, renamed when it is whole and has its digest",
    "tasks/row_files/generator_rows.py": "a pipe to the process that started it",
    "training/critic.py": WHOLE_FOLDER,
    "trl/peft_models.py": "peft's own save_pretrained, which a script calls",
    "trl/saved_models.py": "into a checkpoint, to which `checkpoint-N` leads once all is written",
}


def writes(call: ast.Call) -> bool:
    """Whether a call may write to a file."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in WRITES:
        return True
    if name not in ("open", "fdopen"):
        return False
    said = [*call.args, *(each.value for each in call.keywords)]
    modes = [each.value for each in said if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    flags = {each.attr for argument in said for each in ast.walk(argument) if isinstance(each, ast.Attribute)}
    return any(set(mode) <= set("rwxabt+") and set(mode) & set("wxa+") for mode in modes) or bool(
        flags & {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND"}
    )


def test_every_file_that_writes_is_known_and_says_why_it_may() -> None:
    called = {path: (node for node in nodes(path) if isinstance(node, ast.Call)) for path in SOURCES}
    found = {str(path).partition("src/posttrain/")[2] for path, calls in called.items() if any(map(writes, calls))}
    assert found == {*WRITERS}
