"""`posttrain view`: look at runs in a browser on this machine."""

import os
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.commands.arguments import split_arguments
from posttrain.commands.flags import COMMAND_LINE, CommandSpec, read_flags
from posttrain.errors import UserError
from posttrain.options.bounds import Bounded
from posttrain.server.addresses import Port, serve_extra


@dataclass(frozen=True, kw_only=True)
class ViewSwitches(Bounded):
    """Where the page is served."""

    port: Port = 0
    """Port of 127.0.0.1 to listen on; 0 takes a free one."""
    open: bool = True
    """Open a browser where there is a display; the address is printed in any case."""


PROGRAM = CommandSpec(
    name="posttrain view [FOLDER ...]",
    description="Show runs in a browser: every step, group and completion, token by token.  Without a folder it lists"
    " the runs below `runs/`; several folders are compared.  The page follows a run that goes on.  Ctrl-C ends it.",
    switches=ViewSwitches(),
)
RUNS = Path("runs")
"""Where runs are looked for if none is named."""


def main(arguments: Sequence[str]) -> int:
    """Serve the page until interrupted."""
    given = split_arguments(arguments, PROGRAM)
    _, switches = read_flags(given.flags, PROGRAM, {})
    folders = [Path(each) for each in given.positional]
    missing = [folder for folder in folders if not folder.is_dir()]
    if missing:
        raise UserError(f"{COMMAND_LINE}: {missing[0]}: the folder does not exist.  Name the folder of a run.")
    with serve_extra("posttrain view"):
        from posttrain.server.viewer_routes import RunViewer
    from posttrain.viewer.run_folders import is_run, run_folders
    from posttrain.viewer.viewer_answers import OpenedRuns

    single = folders[0] if len(folders) == 1 and not is_run(folders[0]) else None
    below = RUNS if not folders else single
    runs = OpenedRuns.of(folders) if below is None else OpenedRuns.of(run_folders(below), below=below)
    if not runs.shown:
        raise UserError(f"{COMMAND_LINE}: {below}: no run there.  Name the folder of a run, or train one first.")
    server = RunViewer(runs, port=switches.port)
    print(f"{server.address}\n(Ctrl-C ends it)", flush=True)
    if switches.open and has_display():
        webbrowser.open(server.address)
    server.serve_until_signal()
    return 0


def has_display() -> bool:
    """Whether a browser would have somewhere to appear."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
