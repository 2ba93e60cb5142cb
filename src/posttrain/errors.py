"""Errors for users: each message says where, what is wrong and what to do."""


class UserError(ValueError):
    """A mistake of the user's.  The command prints it without a traceback.  `exit_code` is 2 for wrong usage."""

    exit_code = 2

    def __init__(self, message: str, *, command: str = "") -> None:
        """`command` is the message for the command line, where the remedy has another name than in Python."""
        super().__init__(message)
        self.command = command or message


class RunError(UserError):
    """The run must stop: a full disk, a failing reward, a non-finite loss."""

    exit_code = 1


class ToldElsewhere(RunError):
    """The run has failed, and another of its processes prints the message."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StoppedAtOnce(KeyboardInterrupt):
    """A signal ended the work.  The message says what is kept and, if another command continues it, which one."""

    def __init__(self, says: str, *, same_command: str = "") -> None:
        """`same_command` is the typed command, if that one continues or starts again."""
        super().__init__(says)
        self.same_command = same_command


class HelpShown(SystemExit):
    """`--help` was printed."""


class FlagsListed(HelpShown):
    """A command's usage and flags, for shell completion."""

    def __init__(self, usage: str, flags: dict[str, tuple[str, ...]]) -> None:
        """`flags` has the fixed choices of each flag's value; none if the value is free."""
        super().__init__()
        self.usage, self.flags = usage, flags


def exit_call(leave: SystemExit) -> str:
    """The call that raised it, for a message about a user's program."""
    return f"sys.exit({'' if leave.code is None else repr(leave.code)})"


def require(holds: bool, options: object, name: str, rule: str) -> None:
    """Raise UserError with "name = value" and the rule unless it holds."""
    if not holds:
        raise UserError(f"{name} = {getattr(options, name)} {rule}")
