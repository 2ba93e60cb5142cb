"""Every place in the source that writes a file, and why what it writes is whole, or its user's own affair.

What is not here goes through `runs/files.py`: written beside and renamed, or appended where no link is followed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "posttrain"
CALLS = {
    "write_text",
    "write_bytes",
    "touch",
    "savefig",
    "save_file",
    "save_pretrained",
    "savez",
    "savez_compressed",
    "copyfile",
    "copytree",
    "write_table",
}
"""Functions that write to a path that they are given, or to a file that is open already."""
WHOLE_FOLDER = "fills a folder that `whole_folder` or a checkpoint renames, or one that a caller in Python names"
IN_MEMORY = "to memory, which `write_atomically` writes"
WRITERS = {
    "commands/evaluate.py": "to a pipe or a terminal that the user names; to a file by `write_atomically`",
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
    "sandbox/probes.py": "bait in a temporary folder of its own",
    "sandbox/inside/main.py": "/dev/null",
    "sandbox/sandboxed_process.py": "a file in memory, which a program reads",
    "tasks/row_files/generator_rows.py": "a pipe to the process that started it",
    "training/critic.py": WHOLE_FOLDER,
    "trl/peft_models.py": "peft's own save_pretrained, which a script calls",
    "trl/saved_models.py": "into a checkpoint, to which `checkpoint-N` leads once all is written",
}


def writes(call: ast.Call) -> bool:
    """Whether a call may write to a file."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in CALLS:
        return True
    if name not in ("open", "fdopen"):
        return False
    said = [*call.args, *(each.value for each in call.keywords)]
    modes = [each.value for each in said if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    flags = {each.attr for argument in said for each in ast.walk(argument) if isinstance(each, ast.Attribute)}
    return any(set(mode) <= set("rwxabt+") and set(mode) & set("wxa+") for mode in modes) or bool(
        flags & {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND"}
    )


def writers() -> Iterator[str]:
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.Call) and writes(node) for node in ast.walk(tree)):
            yield path.relative_to(SOURCE).as_posix()


def test_every_file_that_writes_is_known_and_says_why_it_may() -> None:
    assert {*writers()} == {*WRITERS}
