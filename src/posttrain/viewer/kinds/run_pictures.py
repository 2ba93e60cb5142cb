"""Pictures in a run's folder, as data that the page shows without another request."""

from base64 import b64encode

from posttrain.viewer.folder_files import WholeFile, content_or
from posttrain.viewer.kinds.kind_responses import PicturePage
from posttrain.viewer.opened_run import OpenedRun

PICTURES = {
    "curves": "curves.png",
    "calibration": "calibration.png",
    "comparison": "comparison.png",
    **{name: f"plots/{name}.png" for name in ("rewards", "policy", "visits", "convergence")},
}
"""Names in addresses -> files; no other file is read."""
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def pictures_of(run: OpenedRun, *names: str) -> list[str]:
    """The names whose pictures the folder has."""
    return [name for name in names if (run.folder / PICTURES[name]).is_file()]


def picture_page(run: OpenedRun, name: str) -> PicturePage:
    faults: list[str] = []
    png = content_or(b"", WholeFile(run.folder / PICTURES[name], as_png, b"").content, faults)
    return PicturePage(name=name, png=b64encode(png).decode(), faults=faults)


def as_png(content: bytes) -> bytes:
    if not content.startswith(SIGNATURE):
        raise ValueError("not a PNG picture")
    return content
