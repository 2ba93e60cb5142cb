"""`posttrain completion`: what a shell completes, from the tables that `--help` prints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from posttrain.commands import COMMANDS
from posttrain.commands.arguments import split_arguments
from posttrain.commands.flags import COMMAND_LINE, FLAG_NAMES, NO_SWITCHES, CommandSpec, read_flags
from posttrain.config.recipes import bundled_recipes
from posttrain.errors import FlagsListed, UserError

PROGRAM = CommandSpec(
    name="posttrain completion SHELL",
    description="Print the completion of commands, flags and bundled recipes.  Save it in a file, and again after each"
    " update.  bash reads ~/.local/share/bash-completion/completions/posttrain.  fish reads files that end in .fish in"
    " ~/.config/fish/completions.  zsh needs the line `source FILE` in ~/.zshrc, after compinit.",
    switches=NO_SWITCHES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedCommand:
    """A command as shells complete it."""

    name: str
    does: str
    flags: tuple[str, ...]


def main(arguments: Sequence[str]) -> int:
    """Print the completion of a shell."""
    shell, given = split_arguments(arguments, PROGRAM).only("SHELL")
    read_flags(given.flags, PROGRAM, {})
    if shell not in SCRIPTS:
        raise UserError(f"{COMMAND_LINE}: {shell}: no completion for this shell.  There are {', '.join(SCRIPTS)}.")
    commands = [CompletedCommand(name=name, does=does, flags=flags_of(name)) for name, (_, does) in COMMANDS.items()]
    print("\n".join(SCRIPTS[shell](commands, [*bundled_recipes()])))
    return 0


def flags_of(command: str) -> tuple[str, ...]:
    """The flags of a command, as its own help would list them."""
    module, _, function = COMMANDS[command][0].partition(".")
    try:
        getattr(import_module(f"posttrain.commands.{module}"), function or "main")([FLAG_NAMES])
    except FlagsListed as listed:
        return (*listed.names, "--help")
    raise AssertionError(f"{command} reads no flags")


def bash(commands: Sequence[CompletedCommand], recipes: Sequence[str]) -> Iterator[str]:
    yield "_posttrain() {"
    yield '  local word="${COMP_WORDS[COMP_CWORD]}" flags='
    yield "  if ((COMP_CWORD == 1)); then"
    yield f"""    COMPREPLY=($(compgen -W '{" ".join(each.name for each in commands)} --help --version' -- "$word"))"""
    yield "    return"
    yield "  fi"
    yield "  if [[ $word != -* ]]; then"  # without a match bash offers files, by `-o default`
    yield f"""    COMPREPLY=($(compgen -W '{" ".join(recipes)}' -- "$word"))"""
    yield "    return"
    yield "  fi"
    yield '  case "${COMP_WORDS[1]}" in'
    for each in commands:
        yield f"    {each.name}) flags='{' '.join(each.flags)}' ;;"
    yield "  esac"
    yield '  COMPREPLY=($(compgen -W "$flags" -- "$word"))'
    yield "}"
    yield "complete -o default -F _posttrain posttrain"


def zsh(commands: Sequence[CompletedCommand], recipes: Sequence[str]) -> Iterator[str]:
    yield "_posttrain() {"
    yield "  local -a commands=(" + " ".join(quoted(f"{each.name}:{each.does}") for each in commands) + ")"
    yield "  local -A flags=("
    for each in commands:
        yield f"    {each.name} {quoted(' '.join(each.flags))}"
    yield "  )"
    yield "  if ((CURRENT == 2)); then"
    yield "    _describe command commands"
    yield "  elif [[ $PREFIX == -* ]]; then"
    yield "    compadd -- ${=flags[$words[2]]}"
    yield "  else"
    yield f"    compadd -- {' '.join(recipes)}"
    yield "    _files"
    yield "  fi"
    yield "}"
    yield "compdef _posttrain posttrain"


def fish(commands: Sequence[CompletedCommand], recipes: Sequence[str]) -> Iterator[str]:
    for each in commands:
        yield f"complete -c posttrain -n __fish_use_subcommand -f -a {each.name} -d {quoted(each.does)}"
    seen = "'not __fish_use_subcommand'"
    yield f"complete -c posttrain -n {seen} -a {quoted(' '.join(recipes))} -d recipe"
    for each in commands:
        here = quoted(f"__fish_seen_subcommand_from {each.name}")
        yield from (f"complete -c posttrain -n {here} -l {flag.removeprefix('--')}" for flag in each.flags)


def quoted(text: str) -> str:
    """Text for a shell, in single quotes; no name and no sentence of ours has a backslash."""
    return "'" + text.replace("'", "'\\''") + "'"


SCRIPTS: Mapping[str, Callable[[Sequence[CompletedCommand], Sequence[str]], Iterator[str]]] = {
    "bash": bash,
    "zsh": zsh,
    "fish": fish,
}
