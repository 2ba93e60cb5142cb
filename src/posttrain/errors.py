"""Mistakes that a person can make, told so that the person can mend them."""


class UserError(ValueError):
    """A mistake in what the user gave: the message says where, what was given, the rule and the remedy.

    The command prints it without a traceback.  `exit_code` is 2 for wrong usage, 1 for what went wrong while running.
    """

    exit_code = 2

    def __init__(self, message: str, *, command: str = "") -> None:
        """`command` says the same to whoever typed a command, where its remedy has another name than in Python."""
        super().__init__(message)
        self.command = command or message


class RunError(UserError):
    """The run cannot go on, for a reason outside the program: a full disk, a failing reward, a non-finite loss."""

    exit_code = 1


class HelpShown(SystemExit):
    """`--help` has been printed, and that is all."""


def exit_call(leave: SystemExit) -> str:
    """The call that raised it, for a message: a program of the user's left where it should have returned."""
    return f"sys.exit({'' if leave.code is None else repr(leave.code)})"


def require(holds: bool, options: object, name: str, rule: str) -> None:
    """Refuse a section of options unless its field `name` obeys a rule; `rule` goes on from "name = value"."""
    if not holds:
        raise UserError(f"{name} = {getattr(options, name)} {rule}")
