"""A run in a notebook: the exported page in a frame, without a server."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from posttrain.errors import UserError
from posttrain.viewer.exported.export import export_runs
from posttrain.viewer.exported.size_limit import size_in_bytes
from posttrain.viewer.run_folders import holds_runs, is_run, run_folders
from posttrain.viewer.viewer_responses import OpenedRuns


@dataclass(frozen=True, slots=True)
class NotebookPage:
    """The viewer's page of one run; a notebook shows it as the result of a cell."""

    html: str
    height: int

    def _repr_html_(self) -> str:
        """One block of HTML.  The frame only runs the page's own scripts, and cannot access anything outside itself."""
        look = f'width="100%" height="{self.height}" style="border: 0"'
        return f'<iframe title="posttrain run" sandbox="allow-scripts" {look} srcdoc="{escape(self.html)}"></iframe>'


def notebook_page(folder: Path, *, size: str, height: int) -> NotebookPage:
    """The page of the run in a folder, with as many rollouts as fit `size`."""
    try:
        limit = size_in_bytes(size)
    except ValueError as error:
        raise UserError(f"show: {error}.") from error
    if not is_run(folder):
        raise UserError(f"show: {folder}: is not the folder of a run.  Name the folder of a run.")
    runs = OpenedRuns.of(run_folders(folder), below=folder) if holds_runs(folder) else OpenedRuns.of([folder])
    return NotebookPage(export_runs(runs, limit).html, height)
