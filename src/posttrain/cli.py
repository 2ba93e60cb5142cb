"""The `posttrain` program: runs a command; turns a user's mistake into a message and an exit code.

0: done.  1: the run failed.  2: wrong usage.  130: interrupted.  Nothing heavy is imported here.
"""

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from posttrain.commands import COMMANDS

USAGE = """usage: posttrain COMMAND [ARGUMENTS]

Train language models by reward.

{commands}

`posttrain COMMAND --help` lists the flags of a command.  To begin: posttrain rl countdown-tiny
"""
FIRST_STEPS = """Train language models by reward.  Three things to do first:

  posttrain rl countdown-tiny   train the bundled model on a number puzzle: 2 to 5 minutes on 2 CPU cores
  posttrain view                look at the run in a browser, token by token
  posttrain new my-problem      make rows, a reward and a recipe to change into your own problem

--help lists all commands.
"""

OPENMP_SPINS = "10000"
"""How often an idle torch thread looks for work before it sleeps.  With GNU OpenMP's default, these threads keep the
native kernel's threads waiting for a core (docs/decisions/027)."""
MACHINE_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(FIRST_STEPS)
        return 2
    if arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands="\n".join(f"  {name:12} {does}" for name, (_, does) in COMMANDS.items())))
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"posttrain {version('posttrain')}")
        return 0
    if arguments[0] not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(arguments[0], COMMANDS, n=1)
        remedy = f"Did you mean `{near[0]}`?" if near else f"There are: {', '.join(COMMANDS)}."
        return complain(f"{arguments[0]}: no such command.  {remedy}", 2)
    return run_named_command(arguments[0], arguments[1:])


def let_threads_sleep_soon() -> None:
    """Set `OPENMP_SPINS`, which torch reads when it is loaded.  What the caller has set stays."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)


def run_named_command(command: str, arguments: Sequence[str]) -> int:
    """Run one command; a user's mistake is printed without a traceback."""
    import atexit
    import gc
    from traceback import walk_tb

    from posttrain.errors import HelpShown, StoppedAtOnce, ToldElsewhere, UserError, exit_call

    let_threads_sleep_soon()
    atexit.register(gc.freeze)  # the interpreter would look for garbage in all of torch: 1.3 s at the end of a command
    module, _, function = COMMANDS[command][0].partition(".")
    try:
        return int(getattr(import_module(f"posttrain.commands.{module}"), function or "main")(arguments))
    except ToldElsewhere as error:
        return error.exit_code
    except UserError as error:
        return complain(error.command, error.exit_code)
    except StoppedAtOnce as stop:
        return complain(f"{stop}{typed_again(stop.same_command, command, arguments)}", 130)
    except KeyboardInterrupt:  # while the command was read, or in one that makes nothing
        return complain(
            f"SIGINT: interrupted.  Nothing was kept.{typed_again('Start again with', command, arguments)}", 130
        )
    except BrokenPipeError:  # `posttrain config ... | head`
        sys.stdout = None
        return 0
    except OSError as error:
        if error.errno not in MACHINE_TROUBLE:
            raise
        return complain(f"{error.filename or 'this machine'}: {error.strerror}", 1)
    except HelpShown:
        return 0
    except SystemExit as leave:  # of the user's code: a run that ends so has failed
        *_, (frame, line) = walk_tb(leave.__traceback__)
        return complain(f"{frame.f_code.co_filename}, line {line}: it calls {exit_call(leave)}", 1)


def typed_again(verb: str, command: str, arguments: Sequence[str]) -> str:
    """A hint to run the command again as typed; empty without a verb."""
    from shlex import join

    return f"  {verb}   {join(['posttrain', command, *arguments])}" if verb else ""


def complain(message: str, exit_code: int) -> int:
    print(f"posttrain: {message}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
