"""`posttrain completion`: shell completion, made from the tables that `--help` prints."""

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
    description="Print a script that completes commands, flags and recipes.  Save it to a file, again after each"
    " update.  bash reads ~/.local/share/bash-completion/completions/posttrain.  fish reads files that end in .fish in"
    " ~/.config/fish/completions.  zsh needs the line `source FILE` in ~/.zshrc, after compinit.",
    switches=NO_SWITCHES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedCommand:
    """A command for shell completion."""

    name: str
    does: str
    parts: tuple[str, ...]
    """Its subcommands."""
    flags: tuple[str, ...]


def main(arguments: Sequence[str]) -> int:
    """Print the completion script of a shell."""
    shell, given = split_arguments(arguments, PROGRAM).only("SHELL")
    read_flags(given.flags, PROGRAM, {})
    if shell not in SCRIPTS:
        raise UserError(f"{COMMAND_LINE}: {shell}: no completion for this shell.  There are {', '.join(SCRIPTS)}.")
    print("\n".join(SCRIPTS[shell]([completed(name) for name in COMMANDS], [*bundled_recipes()])))
    return 0


def completed(command: str) -> CompletedCommand:
    """A command with its subcommands, and its own or their flags."""
    path, does = COMMANDS[command]
    name, _, function = path.partition(".")
    module = import_module(f"posttrain.commands.{name}")
    parts = tuple(vars(module).get("SUBCOMMANDS", ()))
    run = getattr(module, function or "main")
    flags = dict.fromkeys(flag for part in parts or ("",) for flag in flags_of(run, *filter(None, (part,))))
    return CompletedCommand(name=command, does=does, parts=parts, flags=(*flags, "--help"))


def flags_of(run: Callable[[Sequence[str]], int], *part: str) -> tuple[str, ...]:
    """The flags of a command, as its own help would list them."""
    try:
        run([*part, FLAG_NAMES])
    except FlagsListed as listed:
        return listed.names
    raise AssertionError(f"{run} does not have flags")


def bash(commands: Sequence[CompletedCommand], recipes: Sequence[str]) -> Iterator[str]:
    """A function that fills COMPREPLY."""
    yield "_posttrain() {"
    yield f"""  local word="${{COMP_WORDS[COMP_CWORD]}}" flags= parts='{" ".join(recipes)}'"""
    yield "  if ((COMP_CWORD == 1)); then"
    yield f"""    COMPREPLY=($(compgen -W '{" ".join(each.name for each in commands)} --help --version' -- "$word"))"""
    yield "    return"
    yield "  fi"
    yield '  case "${COMP_WORDS[1]}" in'
    for each in commands:
        parts = f"parts='{' '.join(each.parts)}' " if each.parts else ""
        yield f"    {each.name}) {parts}flags='{' '.join(each.flags)}' ;;"
    yield "  esac"
    yield "  [[ $word == -* ]] && parts=$flags"  # without a match bash offers files, by `-o default`
    yield '  COMPREPLY=($(compgen -W "$parts" -- "$word"))'
    yield "}"
    yield "complete -o default -F _posttrain posttrain"


def zsh(commands: Sequence[CompletedCommand], recipes: Sequence[str]) -> Iterator[str]:
    """A function for compdef."""
    yield "_posttrain() {"
    yield "  local -a commands=(" + " ".join(shell_quoted(f"{each.name}:{each.does}") for each in commands) + ")"
    yield "  local -A flags=("
    yield from (f"    {each.name} {shell_quoted(' '.join(each.flags))}" for each in commands)
    yield "  )"
    yield "  local -A parts=("
    yield from (f"    {each.name} {shell_quoted(' '.join(each.parts))}" for each in commands if each.parts)
    yield "  )"
    yield "  if ((CURRENT == 2)); then"
    yield "    _describe command commands"
    yield "  elif [[ $PREFIX == -* ]]; then"
    yield "    compadd -- ${=flags[$words[2]]}"
    yield "  elif [[ -n ${parts[$words[2]]} ]]; then"
    yield "    compadd -- ${=parts[$words[2]]}"
    yield "  else"
    yield f"    compadd -- {' '.join(recipes)}"
    yield "    _files"
    yield "  fi"
    yield "}"
    yield "compdef _posttrain posttrain"


def fish(commands: Sequence[CompletedCommand], recipes: Sequence[str]) -> Iterator[str]:
    """A line for each word."""
    for each in commands:
        yield f"complete -c posttrain -n __fish_use_subcommand -f -a {each.name} -d {shell_quoted(each.does)}"
    seen = "'not __fish_use_subcommand'"
    yield f"complete -c posttrain -n {seen} -a {shell_quoted(' '.join(recipes))} -d recipe"
    for each in commands:
        here = shell_quoted(f"__fish_seen_subcommand_from {each.name}")
        if each.parts:
            yield f"complete -c posttrain -n {here} -a {shell_quoted(' '.join(each.parts))}"
        yield from (f"complete -c posttrain -n {here} -l {flag.removeprefix('--')}" for flag in each.flags)


def shell_quoted(text: str) -> str:
    """Text for a shell, in single quotes; our names and sentences do not contain backslashes."""
    return "'" + text.replace("'", "'\\''") + "'"


SCRIPTS: Mapping[str, Callable[[Sequence[CompletedCommand], Sequence[str]], Iterator[str]]] = {
    "bash": bash,
    "zsh": zsh,
    "fish": fish,
}
