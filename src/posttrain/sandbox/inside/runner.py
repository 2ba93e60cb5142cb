"""The work of a sealed process: run a program, answer calls to its functions, or run tests against another process."""

import _sitebuiltins
import _thread
import atexit
import builtins
import importlib
import io
import json
import os
import sys
import types
from collections.abc import Callable

import frames
import plain

SEED: "int | None" = None
"""Seeds a program's random numbers if it is run again and has to draw the same ones."""
thread_count = vars(_thread)["_count"]
exit_functions = vars(atexit)["_ncallbacks"]

STOPPING = (StopIteration, StopAsyncIteration)
"""Exceptions that would end a loop of the tests as if it had finished."""
PROGRAM = "program.py"
"""The name that a program sees."""
MAX_MESSAGE = 2000
"""Characters of an error that are passed on."""


def open_streams() -> None:
    """Make `sys.stdin`, `sys.stdout` and `sys.stderr` of descriptors 0, 1 and 2, whatever these become later.

    Once, in the server: making them takes a tenth of a small program's time.  They are made from pipes, as later, so
    that Python does not treat them as seekable files.
    """
    reader, writer = os.pipe()
    for descriptor, end in ((0, reader), (1, writer), (2, writer)):
        os.dup2(end, descriptor)
    os.close(reader)
    os.close(writer)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding="utf-8", write_through=True)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))


def be_like_a_script() -> None:
    """Set `exit`, `quit` and `sys.argv` as for `python program.py`.  Once, before any program is read."""
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))  # as `site` does, which is not read
    sys.argv[:] = [PROGRAM]


def run_kind(kind: str, channel: "frames.Channel") -> int:
    """Do what the job is, with the source that the channel sends first; returns the exit status.

    The first message reports on compiling.  The program cannot forge it, as none of the source has run by then.  It
    also means that the process is sealed.
    """
    source = frames.receive(channel).decode("utf-8", "surrogatepass")
    if "random" in source and (SEED is not None or "random" in sys.modules):
        importlib.import_module("random").seed(SEED)  # else it would draw the numbers that all others draw
    if kind == "tests":
        frames.send(channel, b'["compiled"]')
        return tests(source, channel)
    try:
        compiled = compile(source, "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        frames.send(channel, b'["syntax_error"]')
        return 1
    frames.send(channel, b'["compiled"]')
    return 0 if kind == "syntax" else {"program": program, "calls": calls}[kind](compiled, channel)


def program(compiled: types.CodeType, channel: "frames.Channel") -> int:
    """A whole program, as `python program.py` would run it."""
    channel.close()
    status = 0
    try:
        execute(compiled, fresh_main())
    except SystemExit as ending:
        status = exit_status(ending)
    except BaseException:  # noqa: BLE001  # a program may raise anything, KeyboardInterrupt too: print it as Python does
        sys.__excepthook__(*sys.exc_info())
        status = 1
    # As at the interpreter's own end: threads are waited for, then exit functions run, where there are any.
    if thread_count() and "threading" in sys.modules:
        vars(sys.modules["threading"])["_shutdown"]()
    if exit_functions():
        vars(atexit)["_run_exitfuncs"]()
    return flushed(status)


def calls(compiled: types.CodeType, channel: "frames.Channel") -> int:
    """A program whose functions are called from outside, with plain data and for plain data."""
    module = fresh_main()
    send_answer(channel, call_answer(lambda: defined(compiled, module)))
    while True:
        try:
            name, arguments, named = plain.load(frames.receive(channel))
        except frames.ChannelClosed:
            return flushed(0)
        send_answer(channel, call_answer(lambda: find(module, name)(*arguments, **named)))  # noqa: B023  # called at once


def defined(compiled: types.CodeType, module: types.ModuleType) -> None:
    """Let a program define its functions; if it then exits with success, that is a normal end."""
    try:
        execute(compiled, module)
    except SystemExit as ending:
        if exit_status(ending):
            raise


def find(module: types.ModuleType, name: str) -> Callable[..., object]:
    """The function of a program, or the method `name` of the class `Solution` that some problems ask for."""
    if hasattr(module, name):
        found: Callable[..., object] = getattr(module, name)
        return found
    solution = getattr(module, "Solution", None)
    if solution is None or not hasattr(solution, name):
        raise NameError(f"the program defines no {name}")
    method: Callable[..., object] = getattr(solution(), name)
    return method


def call_answer(action: Callable[[], object]) -> list[object]:
    """["value", its plain form] or ["error", type, message]."""
    try:
        return ["value", plain.dump(action()).decode("utf-8", "surrogatepass")]
    except plain.NotPlainError as error:
        return ["not_plain", "", str(error)[:MAX_MESSAGE]]
    except BaseException as error:  # noqa: BLE001  # a program may raise anything: the caller gets its name
        # The built-in exception that it is or derives from: the tests may expect that.
        names = (each.__name__ for each in type(error).__mro__ if vars(builtins).get(each.__name__) is each)
        return ["error", next(names), str(error)[:MAX_MESSAGE]]


def send_answer(channel: "frames.Channel", said: list[object]) -> None:
    frames.send(channel, json.dumps(said).encode())


def tests(source: str, channel: "frames.Channel") -> int:
    """Tests, in their own process, of functions in another process: they only see plain data.

    `source` is JSON: {"entry": names of functions, "setup": source, "tests": sources}.  Every test's result is sent.
    """
    job = json.loads(source)
    module = fresh_main()
    for name in job["entry"]:
        setattr(module, name, proxy(name, channel))
    prepared = call_answer(lambda: execute(job["setup"], module))
    for test in job["tests"]:
        result = call_answer(lambda: execute(test, module)) if prepared[0] == "value" else prepared  # noqa: B023
        frames.send(channel, json.dumps(["result", result]).encode())
    return flushed(0)


def proxy(name: str, channel: "frames.Channel") -> Callable[..., object]:
    """A function that is called in the other process."""

    def call(*arguments: object, **named: object) -> object:
        request = plain.dump([name, list(arguments), named]).decode("utf-8", "surrogatepass")
        frames.send(channel, json.dumps(["call", request]).encode())
        kind, first, *rest = json.loads(frames.receive(channel))
        if kind == "value":
            return plain.load(first.encode("utf-8", "surrogatepass"))
        found = getattr(builtins, first, None)  # a built-in exception, so that tests can expect it
        if not isinstance(found, type) or not issubclass(found, Exception) or found in STOPPING:
            found = RuntimeError
        raise found(*rest)

    call.__name__ = name
    return call


def fresh_main() -> types.ModuleType:
    module = types.ModuleType("__main__")
    vars(module)["__file__"] = PROGRAM
    sys.modules["__main__"] = module
    return module


def execute(code: str | types.CodeType, module: types.ModuleType) -> None:
    exec(code, module.__dict__)  # noqa: S102  # sealed: this is what the sandbox is for


def exit_status(ending: SystemExit) -> int:
    """What `sys.exit` was given, as the interpreter reads it."""
    if ending.code is None:
        return 0
    if isinstance(ending.code, int):
        return ending.code & 0xFF
    sys.stderr.write(f"{ending.code}\n")
    return 1


def flushed(status: int) -> int:
    """The status after flushing; a closed output is a failure, as for any program."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return status or 120
    return status
