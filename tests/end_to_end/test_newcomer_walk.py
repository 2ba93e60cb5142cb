"""A newcomer's walk: the commands of README and of the pages to start with, in their order, in one empty folder.

Runs are short; all else is as the pages have it.  `make test-walk`.
"""

import json
import re
import shlex
import signal
import subprocess
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from posttrain.commands.new import commands_in
from tests.support.pages import blocks, commands, programs, python, write_files
from tests.support.runs import command, metrics_of, start

pytestmark = [pytest.mark.scale, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    *(f"docs/start/{name}.md" for name in ("install", "demo", "your_problem", "your_model")),
    "docs/guides/viewer.md",
    "docs/learn/index.md",
]
STANDS_FOR = {"MODEL": "bundled", "runs/other": "runs/own-model"}
STEPS = ("--run.num-steps", "2", "--run.threads", "1")
SHORT = {
    "rl": (
        *(*STEPS, "--rollout.prompts-per-step", "2", "--rollout.group-size", "4"),
        *("--rollout.max-completion-tokens", "64", "--evaluation.samples", "1", "--evaluation.every-steps", "0"),
    ),
    "sft": ("--run.threads", "1"),
    "sft countdown-base": ("--run.num-steps", "2", "--sft.eval-size", "8"),
    "dpo": (
        *("--run.threads", "1", "--task.held-out-size", "8", "--dpo.rounds", "1", "--dpo.prompts-per-round", "8"),
        *("--dpo.steps-per-round", "1", "--rollout.max-completion-tokens", "64", "--evaluation.samples", "1"),
    ),
    "reward-model": ("--run.threads", "1"),
    "rl recipes/countdown-tiny.yaml": ("--task.held-out-size", "8"),
}
"""Flags by the first words of a command: less to train and to measure."""


def typed(line: str, folder: Path) -> None:
    """Run a command of a page in the folder; it ends well."""
    _, *words = shlex.split(line, comments=True)
    words = [STANDS_FOR.get(word, word) for word in words]
    if words[0] == "view" and "--export" not in words:
        return looked_at(words, folder)
    for beginning, flags in SHORT.items():
        if " ".join(words).startswith(beginning + " "):
            words += flags
    ended = command(*words, folder=folder)
    assert ended.code == 0, f"{line}\n{ended.out}\n{ended.err}"
    assert ended.out or words[0] == "chat"  # without input it asks nothing
    return None


def looked_at(words: list[str], folder: Path) -> None:
    """The viewer shows the run until Ctrl-C."""
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    viewer = start(*words, "--no-open", folder=folder, logs=logs)
    viewer.wait_until(lambda: viewer.log.exists() and "#token=" in viewer.log.read_text())
    address, token = re.search(r"(http://\S+)/#token=([\w-]+)", viewer.log.read_text()).groups()
    overview = urlopen(Request(f"{address}/api/run/0/overview", headers={"X-Posttrain-Token": token})).read()
    assert json.loads(overview)["curves"]
    viewer.signal(signal.SIGINT)
    assert viewer.ended().code == 130


def test_every_command_of_the_first_pages_works_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    for text in texts:
        write_files(blocks(text), tmp_path)
    (demo,) = re.findall(
        r"posttrain rl .*", subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True).stdout
    )
    done = set[str]()
    for text in texts:
        for line in commands(text):
            line = demo if line.split("#")[0].strip() == "make demo" else line
            if line.startswith("posttrain ") and line not in done:
                typed(line, tmp_path)
            done.add(line)
    assert [line for line in done if not line.startswith(("posttrain ", "make test"))] == [
        "pip install 'posttrain[serve]'"
    ]
    assert metrics_of(tmp_path / "runs/demo")[-1]["step"] == 2
    assert len([*(tmp_path / "lessons").glob("*.ipynb")]) == 14
    assert "<html" in (tmp_path / "hack.html").read_text(encoding="utf-8")

    for line in commands_in(tmp_path / "my-problem" / "README.md"):  # own rows, and a rule of one's own
        typed(line, tmp_path / "my-problem")

    for program in programs(blocks(texts[0])):
        ended = python(program, tmp_path)
        assert ended.code == 0, ended.err
    assert (tmp_path / "runs/brief/model/model.safetensors").is_file()
