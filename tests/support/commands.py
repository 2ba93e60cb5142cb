"""Commands in the process of the test: what one prints, and what one says where it ends with an error."""

from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from types import ModuleType

from posttrain.cli import COMMANDS, main
from posttrain.commands.flags import CommandSpec
from tests.support.runs import Ended


def module_of(command: str) -> ModuleType:
    return import_module(f"posttrain.commands.{COMMANDS[command][0].partition('.')[0]}")


def program_of(command: str) -> CommandSpec:
    """The usage and switches of a command."""
    module = module_of(command)
    program = module.PROGRAMS[command] if "PROGRAMS" in vars(module) else module.PROGRAM
    assert isinstance(program, CommandSpec)
    return program


def called(*argv: object) -> Ended:
    """`posttrain ARGV`."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main([str(each) for each in argv])
    return Ended(code, out.getvalue(), err.getvalue())


def printed(*argv: object) -> str:
    """What a command prints that does what it is asked to."""
    ended = called(*argv)
    assert ended.code == 0, ended.err
    return ended.out


def refusal(*argv: object, code: int = 2) -> str:
    """The one message with which a command ends."""
    ended = called(*argv)
    assert ended.code == code, ended.out + ended.err
    assert "Traceback" not in ended.err
    return ended.err
