"""`posttrain completion`: shell completion, made from the tables that `--help` prints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

from posttrain.commands import COMMANDS
from posttrain.commands.arguments import split_arguments
from posttrain.commands.flags import COMMAND_LINE, FLAG_NAMES, NO_SWITCHES, CommandSpec, read_flags
from posttrain.config.recipes import bundled_recipes
from posttrain.errors import FlagsListed, UserError

PROGRAM = CommandSpec(
    name="posttrain completion SHELL",
    description="Print a script that completes commands, flags, fixed choices of flags, recipes, models and runs.  Save"
    " it to a file, again after each update.  bash reads ~/.local/share/bash-completion/completions/posttrain.  fish"
    " reads files that end in .fish in ~/.config/fish/completions.  zsh needs the line `source FILE` in ~/.zshrc, after"
    " compinit.",
    switches=NO_SWITCHES,
)
RUNS = "runs/*/"
"""A word that a shell replaces by the folders below `runs/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedCommand:
    """A command, or a subcommand such as `course mistake`, for shell completion."""

    name: str
    flags: tuple[str, ...]
    first: tuple[str, ...] = ()
    """Choices for its first argument."""
    rest: tuple[str, ...] = ()
    """Choices for the arguments after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """All that a shell completes."""

    commands: list[CompletedCommand] = field(default_factory=list)
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Commands with subcommands, and these."""
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Flag -> the fixed choices of its value, in any command."""


def main(arguments: Sequence[str]) -> int:
    """Print the completion script of a shell."""
    shell, given = split_arguments(arguments, PROGRAM).only("SHELL")
    read_flags(given.flags, PROGRAM, {})
    if shell not in SCRIPTS:
        raise UserError(f"{COMMAND_LINE}: {shell}: no completion for this shell.  There are {', '.join(SCRIPTS)}.")
    print("\n".join(SCRIPTS[shell](completed())))
    return 0


def completed() -> Completed:
    """Every command and subcommand with its flags, as its own help would list them."""
    arguments, found = argument_choices(), Completed()
    for name, (path, _) in COMMANDS.items():
        module_name, _, function = path.partition(".")
        module = import_module(f"posttrain.commands.{module_name}")
        parts = tuple(vars(module).get("SUBCOMMANDS", ()))
        if parts:
            found.parts[name] = parts
        for part in parts or ("",):
            whole = f"{name} {part}".strip()
            listed = flags_of(getattr(module, function or "main"), *filter(None, (part,)))
            usage = listed.usage.removeprefix(f"posttrain {whole}").split()
            first, rest = ([*map(arguments.get, usage), None, None])[:2]
            if usage[-1:] == ["...]"]:
                rest = rest or first
            flags = (*listed.flags, "--help")
            found.commands.append(CompletedCommand(name=whole, flags=flags, first=first or (), rest=rest or ()))
            for flag, texts in listed.flags.items():
                if texts:
                    found.choices[flag] = tuple(sorted({*texts, *found.choices.get(flag, ())}))
    return found


def argument_choices() -> Mapping[str, tuple[str, ...]]:
    """Words of a usage -> what may be there, besides files."""
    from posttrain.commands.view import BUNDLED_RUNS
    from posttrain.course.mistakes import IGNORED_LABELS, MISTAKES
    from posttrain.course.own_version import CHECKS
    from posttrain.options.model import BUNDLED_MODELS
    from posttrain.rewards.reward_registry import BUILT_IN

    recipes = tuple(bundled_recipes())
    return {
        "[RECIPE.yaml": recipes,
        "RECIPE.yaml": recipes,
        "MODEL": (*BUNDLED_MODELS, RUNS),
        "RUN": (RUNS,),
        "[FOLDER": (*BUNDLED_RUNS, RUNS),  # of `view`; other commands make their FOLDER
        "REWARD": tuple(BUILT_IN),
        "FUNCTION": tuple(CHECKS),
        "N": tuple(str(number) for number in sorted((*MISTAKES, IGNORED_LABELS))),
        "SHELL": tuple(SCRIPTS),
    }


def flags_of(run: Callable[[Sequence[str]], int], *part: str) -> FlagsListed:
    try:
        run([*part, FLAG_NAMES])
    except FlagsListed as listed:
        return listed
    raise AssertionError(f"{run} does not have flags")


def bash(found: Completed) -> Iterator[str]:
    """A function that fills COMPREPLY."""
    yield "_posttrain() {"
    yield '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD - 1]}" command="${COMP_WORDS[1]}"'
    yield "  local place=$((COMP_CWORD - 1)) flags= first= rest= parts= offered="
    yield "  if ((COMP_CWORD == 1)); then"
    yield f"""    COMPREPLY=($(compgen -W '{" ".join(COMMANDS)} --help --version' -- "$word"))"""
    yield "    return"
    yield "  fi"
    yield '  case "$command" in'
    yield from (f"    {name}) parts='{' '.join(parts)}' ;;" for name, parts in found.parts.items())
    yield "  esac"
    yield '  [[ -n $parts ]] && ((place > 1)) && command+=" ${COMP_WORDS[2]}" && ((place--)) && parts='
    yield '  case "$command" in'
    for each in found.commands:
        words = f"flags='{' '.join(each.flags)}' first='{' '.join(each.first)}' rest='{' '.join(each.rest)}'"
        yield f"    '{each.name}') {words} ;;"
    yield "  esac"
    yield "  offered=${parts:-$rest}"
    yield "  [[ -z $parts ]] && ((place == 1)) && offered=$first"
    yield "  if [[ $word == -* ]]; then offered=$flags"
    yield '  elif [[ $before == --* ]]; then offered=; case "$before" in'
    yield from (f"    {flag}) offered='{' '.join(texts)}' ;;" for flag, texts in found.choices.items())
    yield "  esac; fi"
    yield f"  local runs=({RUNS})"
    yield "  [[ -d ${runs[0]} ]] || runs=()"
    yield f'  offered="${{offered/"{RUNS}"/"${{runs[*]%/}}"}}"'
    yield '  COMPREPLY=($(compgen -W "$offered" -- "$word"))'  # without a match bash offers files, by `-o default`
    yield "}"
    yield "complete -o default -F _posttrain posttrain"


def zsh(found: Completed) -> Iterator[str]:
    """A function for compdef."""
    tables = {
        "flags": {each.name: each.flags for each in found.commands},
        "first": {each.name: each.first for each in found.commands if each.first},
        "rest": {each.name: each.rest for each in found.commands if each.rest},
        "parts": found.parts,
        "choices": found.choices,
    }
    yield "_posttrain() {"
    described = (shell_quoted(f"{name}:{does}") for name, (_, does) in COMMANDS.items())
    yield f"  local -a commands=({' '.join(described)}) runs=({RUNS}(N)) offered=()"
    for name, table in tables.items():
        yield f"  local -A {name}=("
        yield from (f"    {shell_quoted(key)} {shell_quoted(' '.join(words))}" for key, words in table.items())
        yield "  )"
    yield "  local command=$words[2] before=$words[CURRENT-1] place=$((CURRENT - 2))"
    yield "  if ((CURRENT == 2)); then _describe command commands; return; fi"
    yield '  if [[ -n ${parts[$command]} ]] && ((place > 1)); then command+=" $words[3]"; ((place--)); fi'
    yield "  if [[ $PREFIX == -* ]]; then offered=(${=flags[$command]})"
    yield "  elif [[ $before == --* ]]; then offered=(${=choices[$before]})"
    yield "  elif [[ -n ${parts[$command]} ]]; then offered=(${=parts[$command]})"
    yield "  elif ((place == 1)); then offered=(${=first[$command]})"
    yield "  else offered=(${=rest[$command]}); fi"
    yield f"  if ((${{offered[(Ie){RUNS}]}})); then offered=(${{offered:#{shell_quoted(RUNS)}}} ${{runs%/}}); fi"
    yield "  compadd -- $offered"
    yield "  [[ $PREFIX == -* ]] || _files"
    yield "}"
    yield "compdef _posttrain posttrain"


def fish(found: Completed) -> Iterator[str]:
    """A line for each flag and for each kind of argument."""
    for name, (_, does) in COMMANDS.items():
        yield f"complete -c posttrain -n __fish_use_subcommand -f -a {name} -d {shell_quoted(does)}"
    words = "test (count (commandline -opc)) -eq"
    for name, parts in found.parts.items():
        here = shell_quoted(f"__fish_seen_subcommand_from {name}; and {words} 2")
        yield f"complete -c posttrain -n {here} -f -a {shell_quoted(' '.join(parts))}"
    for each in found.commands:
        name, _, part = each.name.partition(" ")
        seen = f"__fish_seen_subcommand_from {name}" + (f"; and __fish_seen_subcommand_from {part}" if part else "")
        place = 3 if part else 2
        for offered, here in ((each.first, f"{words} {place}"), (each.rest, f"not {words} {place}")):
            listed = " ".join(f"(string trim -r -c / {RUNS})" if word == RUNS else word for word in offered)
            if offered:
                yield f"complete -c posttrain -n {shell_quoted(f'{seen}; and {here}')} -a {shell_quoted(listed)}"
        for flag in each.flags:
            texts = found.choices.get(flag, ())
            value = f" -x -a {shell_quoted(' '.join(texts))}" if texts else ""
            yield f"complete -c posttrain -n {shell_quoted(seen)} -l {flag.removeprefix('--')}{value}"


def shell_quoted(text: str) -> str:
    """Text for a shell, in single quotes; our names and sentences do not contain backslashes."""
    return "'" + text.replace("'", "'\\''") + "'"


SCRIPTS: Mapping[str, Callable[[Completed], Iterator[str]]] = {"bash": bash, "zsh": zsh, "fish": fish}
