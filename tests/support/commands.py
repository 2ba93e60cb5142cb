"""Commands in the process of the test: what one prints, and what one says where it ends with an error."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from posttrain.cli import main
from tests.support.runs import Ended


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
