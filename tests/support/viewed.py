"""Runs that the viewer shows in this process, and what tests ask of its page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from posttrain.server.viewer_routes import RunViewer
from posttrain.viewer.viewer_responses import OpenedRuns

PLANTED = Path(__file__).parents[2] / "src" / "posttrain" / "assets" / "planted-hack"
"""A run that comes with the package, with alarms."""
VIEWS = {
    "runs": "/",
    "overview": "/run/0",
    "step": "/run/0/step/1",
    "rollouts of a step": "/run/0/step/1?view=rollouts",
    "group": "/run/0/group/rollouts/1/0",
    "rollout": "/run/0/rollout/rollouts/1/0/0",
    "rollouts": "/run/0/rows",
    "evaluations": "/run/0/rows?source=evaluations",
    "problems": "/run/0/problems",
    "problem": "/run/0/problem/held-out%2F0",
    "held-out": "/run/0/held-out",
    "behaviours": "/run/0/behaviours",
    "compare": "/compare?a=0&b=1",
}
"""Addresses behind `#` of every view."""
LOADED = (
    "!!document.querySelector('main h1, main .empty') &&"
    " !document.querySelector('main .skeleton, main .row > .bone, [inert]')"
)
"""True in the page once it has its answers."""
OVERFLOW = "document.documentElement.scrollWidth > innerWidth"
LEAST_CONTRAST = """
(() => {
  const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const over = (colours) => {
    for (const colour of colours) { pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1); }
    return luminance(pixel.getImageData(0, 0, 1, 1).data);
  };
  const has_text = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  const found = [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility() && has_text(node)
    && !node.closest("svg, .u-wrap, select, option") && node.getBoundingClientRect().width > 2);
  const ratios = found.map((node) => {
    const chain = [];
    for (let at = node; at; at = at.parentElement) chain.unshift(getComputedStyle(at).backgroundColor);
    const [below, text] = [over(["white", ...chain]), over(["white", ...chain, getComputedStyle(node).color])];
    const ratio = (Math.max(below, text) + 0.05) / (Math.min(below, text) + 0.05);
    return { ratio, text: node.textContent.slice(0, 40), name: node.className };
  });
  return ratios.sort((a, b) => a.ratio - b.ratio)[0];
})()
"""
"""The text of the page that stands out least from what is behind it (WCAG 2.2's contrast ratio)."""


@contextmanager
def viewing(*runs: Path) -> Iterator[RunViewer]:
    """A server in a thread of this process, on a free port."""
    with RunViewer(OpenedRuns.of(runs)).in_thread() as server:
        yield server


def with_texts(run: Path, texts: list[str], folder: Path) -> Path:
    """A copy of a run whose first step says these texts; without its tokenizer, so that they are all that is shown."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("tokenizer", "model", "checkpoints"))
    file = folder / "rollouts" / "step-000001.parquet"
    table = parquet.read_table(file)
    rows = [texts[place % len(texts)].encode("utf-8", "surrogatepass") for place in range(table.num_rows)]
    for name in ("completion", "prompt"):
        values = pa.array(rows, pa.binary()).cast(pa.string(), safe=False)
        table = table.set_column(table.column_names.index(name), name, values)
    parquet.write_table(table, file)
    return folder
