"""Shell completion: bash itself is asked, at a terminal, with the Tab key."""

import os
import pty
import re
import select
import shutil
import time
from pathlib import Path

import pytest

from posttrain.cli import COMMANDS
from posttrain.config.recipes import bundled_recipes
from tests.support.commands import printed, refusal


class Terminal:
    """An interactive bash that has read the completion."""

    def __init__(self, script: Path) -> None:
        self.child, self.screen = pty.fork()
        if not self.child:
            os.environ |= {"TERM": "dumb", "PS1": "ready> ", "HISTFILE": ""}
            os.chdir(script.parent)
            os.execlp("bash", "bash", "--norc", "--noprofile", "-i")
        self.typed(
            f"bind 'set bell-style none'; bind 'set completion-query-items 0'; source {script}; echo rea''d\n", "read"
        )

    def typed(self, keys: str, until: str) -> str:
        """What appears after some keys, up to a text."""
        os.write(self.screen, keys.encode())
        shown, ends = "", time.monotonic() + 20
        while not re.search(until, shown):
            assert time.monotonic() < ends, shown
            if select.select([self.screen], [], [], 0.1)[0]:
                shown += os.read(self.screen, 100_000).decode()
        return shown

    def close(self) -> None:
        os.close(self.screen)
        os.waitpid(self.child, 0)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_flags_recipes_and_files(tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(printed("completion", "bash"))
    (tmp_path / "my-own-recipe.yaml").touch()
    terminal = Terminal(script)
    try:
        for begun, whole in (
            ("posttrain check-t", "posttrain check-task "),
            ("posttrain rl countdown-tiny-lo", "posttrain rl countdown-tiny-lora "),
            ("posttrain rl my-ow", "posttrain rl my-own-recipe.yaml "),
            ("posttrain rl --rollout.group", "posttrain rl --rollout.group-size "),
            ("posttrain rl countdown-tiny --algorithm.clip-h", "posttrain rl countdown-tiny --algorithm.clip-high "),
            ("posttrain irl --method.step", "posttrain irl --method.step-size "),  # of one method only
            ("posttrain course mis", "posttrain course mistake "),
            ("posttrain sft --rollout.gr", "posttrain sft --rollout.gr"),  # which sft does not read
        ):
            shown = terminal.typed(f"{begun}\t", re.escape(whole))
            assert whole in shown
            terminal.typed("\x15echo don''e\n", "done")  # Ctrl-U clears the line
    finally:
        terminal.close()


def test_every_command_completes_the_flags_of_its_help_and_every_shell_names_them() -> None:
    scripts = {shell: printed("completion", shell) for shell in ("bash", "zsh", "fish")}
    for command in COMMANDS:
        shown = printed(command, "--help")
        of_help = {flag.split()[0] for flag in re.findall(r"^│ (--[\w.-]+)", shown, re.MULTILINE)}
        (listed,) = re.findall(rf"^    {command}\) (?:parts='.*' )?flags='(.*)' ;;$", scripts["bash"], re.MULTILINE)
        assert of_help <= {*listed.split()}, command
        assert f"    {command} '{listed}'" in scripts["zsh"]
        in_fish = re.findall(rf"__fish_seen_subcommand_from {command}' -l (\S+)$", scripts["fish"], re.MULTILINE)
        assert [f"--{flag}" for flag in in_fish] == listed.split()
    for script in scripts.values():
        assert all(re.search(rf"[ ']{name}[ '\n]", script) for name in bundled_recipes())


def test_an_unknown_shell_is_refused() -> None:
    assert "tcsh: no completion for this shell.  There are bash, zsh, fish." in refusal("completion", "tcsh")
