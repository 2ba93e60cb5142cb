"""`posttrain view`: look at runs in a browser on this machine."""

import os
import shlex
import subprocess
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.commands.arguments import split_arguments
from posttrain.commands.flags import COMMAND_LINE, CommandSpec, read_flags
from posttrain.errors import UserError
from posttrain.options.bounds import Bounded
from posttrain.server.addresses import Port, serve_extra

if TYPE_CHECKING:
    from posttrain.viewer.viewer_responses import OpenedRuns


@dataclass(frozen=True, kw_only=True)
class ViewSwitches(Bounded):
    """Where the page is served."""

    port: Port = 0
    """Port of 127.0.0.1 to listen on; 0: a free one."""
    live: bool = True
    """Follow active runs: new steps appear without a reload."""
    open: bool = True
    """Open a browser if there is a display; the address is always printed."""
    export: str = ""
    """Instead of serving, write the page with its data to this HTML file, which opens without a server."""
    size: str = "20MB"
    """Maximum size of the exported file, such as 500KB or 20MB.  Rollouts that do not fit are left out and counted."""


PROGRAM = CommandSpec(
    name="posttrain view [FOLDER ...]",
    description="Show runs in a browser: every step, group and completion, token by token.  Without a folder it lists"
    " the runs below `runs/`; several folders are compared.  The page follows an active run.  Ctrl-C stops it."
    "  `posttrain view hack` opens a small example run with something to find.",
    switches=ViewSwitches(),
)
BUNDLED_RUNS = {"hack": "planted-hack"}
"""Names of runs that come with the package -> their folders."""
RUNS = Path("runs")
"""Where to look for runs if none is named."""
FIRST_PAGES = {1: "&/run/0", 2: "&/compare?a=0&b=1"}
"""The first page by number of named folders; of more runs the list opens, where two can be chosen."""


def main(arguments: Sequence[str]) -> int:
    """Serve the page until interrupted."""
    given = split_arguments(arguments, PROGRAM)
    _, switches = read_flags(given.flags, PROGRAM, {})
    folders = [run_folder(each) for each in given.positional]
    missing = [folder for folder in folders if not folder.is_dir()]
    if missing:
        raise UserError(f"{COMMAND_LINE}: {missing[0]}: the folder does not exist.  Name the folder of a run.")
    from posttrain.viewer.run_folders import holds_runs, is_run, run_folders
    from posttrain.viewer.viewer_responses import OpenedRuns

    alone = len(folders) == 1 and (holds_runs(folders[0]) or not is_run(folders[0]))
    single = folders[0] if alone else None
    below = RUNS if not folders else single
    runs = OpenedRuns.of(folders) if below is None else OpenedRuns.of(run_folders(below), below=below)
    if not runs.shown:
        raise UserError(
            f"{COMMAND_LINE}: {below}: does not contain a run.  Name the folder of a run, or train one first."
        )
    if switches.export:
        return export(runs, switches)
    with serve_extra("posttrain view"):
        from posttrain.server.viewer_routes import RunViewer
    server = RunViewer(replace(runs, live=switches.live), port=switches.port)
    address = server.address + ("" if below else FIRST_PAGES.get(len(folders), ""))
    print(f"{address}\n(Ctrl-C stops it)", flush=True)
    if switches.open and has_display():
        webbrowser.open(address)
    server.serve_until_signal()
    return 0


def run_folder(name: str) -> Path:
    """The folder of that name, or of a run that comes with the package."""
    if name in BUNDLED_RUNS and not Path(name).exists():
        return Path(str(files("posttrain") / "assets" / BUNDLED_RUNS[name]))
    return Path(name)


def export(runs: "OpenedRuns", switches: ViewSwitches) -> int:
    """Write the runs to one file."""
    from posttrain.runs.files import write_atomically, writing
    from posttrain.viewer.exported.export import export_runs
    from posttrain.viewer.exported.size_limit import size_in_bytes

    target = Path(switches.export)
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{COMMAND_LINE}: --export {target}: must end in .html.  Name the file to write.")
    try:
        limit = size_in_bytes(switches.size)
    except ValueError as error:
        raise UserError(f"{COMMAND_LINE}: --{error}.") from error
    made = export_runs(runs, limit)
    with writing(target, target.parent):
        write_atomically(target, made.html.encode())
    print(f"{target}: {len(made.html.encode()) / 1e6:.1f} MB, {made.num_rollouts:,} of {made.of_rollouts:,} rollouts")
    return 0


def view_beside_run(folder: str) -> None:
    """Serve one run, which may not exist yet, until standard input closes, when the parent process ends."""
    from posttrain.server.viewer_routes import RunViewer
    from posttrain.viewer.viewer_responses import OpenedRuns

    with RunViewer(OpenedRuns.of([Path(folder)])).in_thread() as server:
        print(server.address, flush=True)
        if has_display():
            webbrowser.open(server.address)
        sys.stdin.read()


@contextmanager
def viewer_beside(folder: str) -> Iterator[None]:
    """A viewer of a run in its own process, which ends with the block or with this process.

    It has its own session, so Ctrl-C only reaches the run, which then saves its step.
    """
    with serve_extra("posttrain rl --view"):
        import uvicorn  # noqa: F401, so that it is missed here and not in the other process
    command = [sys.executable, "-m", "posttrain.commands.view", folder]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        print(f"viewer       {address or 'did not start; the run continues'}", flush=True)
        yield
    finally:
        process.stdin.close()
        process.wait()
        print(f"look again   {shlex.join(['posttrain', 'view', folder])}", flush=True)


def has_display() -> bool:
    """Whether there is a display for a browser."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


if __name__ == "__main__":
    view_beside_run(sys.argv[1])
