"""Shell completion: the shells themselves are asked; bash and zsh at a terminal, with the Tab key."""

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from posttrain.cli import COMMANDS
from posttrain.commands.course import SUBCOMMANDS
from posttrain.config.recipes import bundled_recipes
from tests.support.commands import printed, refusal

CASES = (
    ("posttrain check-t", "posttrain check-task"),
    ("posttrain rl countdown-tiny-lo", "posttrain rl countdown-tiny-lora"),
    ("posttrain rl my-ow", "posttrain rl my-own-recipe.yaml"),
    ("posttrain rl --rollout.group", "posttrain rl --rollout.group-size"),
    ("posttrain rl countdown-tiny --algorithm.clip-h", "posttrain rl countdown-tiny --algorithm.clip-high"),
    ("posttrain rl --algorithm.name di", "posttrain rl --algorithm.name distill"),
    ("posttrain new mine --kind to", "posttrain new mine --kind tools"),
    ("posttrain irl --method.step", "posttrain irl --method.step-size"),  # of one method only
    ("posttrain course mis", "posttrain course mistake"),
    ("posttrain course check compute_adv", "posttrain course check compute_advantages"),
    ("posttrain view ha", "posttrain view hack"),
    ("posttrain view runs/ear", "posttrain view runs/earlier"),
    ("posttrain eval bundled-pr", "posttrain eval bundled-prose"),
    ("posttrain eval runs/earlier countdown-tiny-lo", "posttrain eval runs/earlier countdown-tiny-lora"),
)
"""What is typed before Tab, and the line after it."""
NOTHING = (
    "posttrain sft --rollout.gr",  # which sft does not read
    "posttrain view countdown-tiny-lo",  # a recipe, and view shows runs
    "posttrain course check noteb",  # a subcommand, and one is there already
    "posttrain new countdown-tiny-lo",
)
"""Where Tab has nothing to add."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script for each shell, a recipe and a run."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        (folder / f"completion.{shell}").write_text(printed("completion", shell))
    (folder / "my-own-recipe.yaml").touch()
    (folder / "runs" / "earlier").mkdir(parents=True)
    return folder


class Terminal:
    """An interactive shell in a folder, with a terminal."""

    def __init__(self, folder: Path, begin: str, *command: str) -> None:
        self.child, self.screen = pty.fork()
        if not self.child:
            os.environ |= {"TERM": "dumb", "PS1": "ready> ", "PROMPT": "ready> ", "HISTFILE": ""}
            os.chdir(folder)
            os.execlp(command[0], *command)
        self.typed(f"{begin}; echo rea''d\n", "read")

    def typed(self, keys: str, until: str) -> str:
        """What appears after some keys, up to a text."""
        os.write(self.screen, keys.encode())
        shown, ends = "", time.monotonic() + 20
        while not re.search(until, shown):
            assert time.monotonic() < ends, shown
            if select.select([self.screen], [], [], 0.1)[0]:
                shown += os.read(self.screen, 100_000).decode()
        return shown

    def completed(self, begun: str) -> str:
        """The line after Tab; Ctrl-A, Ctrl-K and an echo print it and clear the line."""
        shown = self.typed(f"{begun}\t\x01echo '<\x05>'\n", "\n<.*>\r?\n")
        return re.findall(r"\n<(.*)>\r?\n", shown)[-1]

    def close(self) -> None:
        os.close(self.screen)
        os.waitpid(self.child, 0)


INTERACTIVE = {
    "bash": (
        "bind 'set bell-style none'; bind 'set completion-query-items 0'; source completion.bash",
        ("bash", "--norc", "--noprofile", "-i"),
    ),
    "zsh": (
        "setopt no_beep no_auto_menu; autoload -Uz compinit; compinit -u -D; source completion.zsh",
        ("zsh", "-f", "-i"),
    ),
}


@pytest.mark.parametrize("shell", INTERACTIVE)
def test_the_tab_key_completes_what_fits_there(shell: str, place: Path) -> None:
    begin, command = INTERACTIVE[shell]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    terminal = Terminal(place, begin, *command)
    try:
        for begun, whole in CASES:
            assert terminal.completed(begun).rstrip(" /") == whole
        for begun in NOTHING:
            assert terminal.completed(begun).rstrip() == begun
    finally:
        terminal.close()


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_what_fits_there(place: Path) -> None:
    lines = [*(begun for begun, _ in CASES), *NOTHING]
    asked = "; ".join(f"echo '# {line}'; complete -C '{line}'" for line in lines)
    program = ["fish", "--no-config", "-c", f"source completion.fish; {asked}"]
    environment = {**os.environ, "HOME": str(place)}
    shown = subprocess.run(program, cwd=place, env=environment, capture_output=True, text=True, check=True).stdout
    offered = {begun: found.split("\n") for begun, _, found in (each.partition("\n") for each in shown.split("# ")[1:])}
    for begun, whole in CASES:
        assert whole.split()[-1] in {line.split("\t")[0].rstrip("/") for line in offered[begun]}, begun
    assert [offered[begun] for begun in NOTHING] == [[""]] * len(NOTHING)


def test_every_command_completes_the_flags_of_its_help_in_every_shell(place: Path) -> None:
    scripts = {shell: (place / f"completion.{shell}").read_text() for shell in ("bash", "zsh", "fish")}
    for command in [*(COMMANDS.keys() - {"course"}), *(f"course {part}" for part in SUBCOMMANDS)]:
        shown = printed(*command.split(), "--help")
        of_help = {flag.split()[0] for flag in re.findall(r"^│ (--[\w.-]+)", shown, re.MULTILINE)}
        (listed,) = re.findall(rf"^    '{command}'\) flags='(.*?)' ", scripts["bash"], re.MULTILINE)
        assert of_help <= {*listed.split()}, command
        assert f"    '{command}' '{listed}'" in scripts["zsh"]
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.split())
        in_fish = re.findall(rf"^complete -c posttrain -n '{seen}' -l (\S+)", scripts["fish"], re.MULTILINE)
        assert [f"--{flag}" for flag in in_fish] == listed.split()
    for script in scripts.values():
        assert all(re.search(rf"[ ']{name}[ '\n]", script) for name in bundled_recipes())


def test_an_unknown_shell_is_refused() -> None:
    assert "tcsh: no completion for this shell.  There are bash, zsh, fish." in refusal("completion", "tcsh")
