"""A run as one HTML file: within its size, counted, and hostile texts stay data."""

import hashlib
import html
import json
import re
from base64 import b64encode
from html.parser import HTMLParser
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

import pytest
from hypothesis import given, strategies as st

import posttrain
from posttrain.cli import main
from posttrain.errors import UserError
from posttrain.viewer.exported.chosen_rollouts import alarmed_groups, evenly
from posttrain.viewer.exported.export import ExportedFile, export_runs
from posttrain.viewer.exported.module_bundle import bundled_script
from posttrain.viewer.exported.size_limit import SizedResponses, size_in_bytes
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.viewer_responses import OpenedRuns, viewer_response
from tests.support.hostile_texts import HOSTILE
from tests.support.refusals import refused
from tests.support.viewed_folders import step_rows, write_rows, write_run

LARGE = 10_000_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, the first of which says hostile texts."""
    folder = write_run(tmp_path_factory.mktemp("exported") / "run", steps=6)
    texts = [text.encode("utf-8", "replace").decode() for text in HOSTILE.values()]
    write_rows(folder / "rollouts/step-000001.parquet", step_rows(1, group=len(texts), texts=texts))
    return folder


def exported(run: Path, limit: int) -> ExportedFile:
    return export_runs(OpenedRuns.of([run]), limit)


class Elements(HTMLParser):
    """The elements of a page, and what its scripts and styles say."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, dict[str, str | None], str]] = []
        self.parts: list[str] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.parts = [] if tag in ("script", "style") else None

    def handle_data(self, data: str) -> None:
        if self.parts is not None:
            self.parts.append(data)

    def handle_endtag(self, tag: str) -> None:
        if self.parts is not None:
            self.inside.append((*self.tags[-1], "".join(self.parts)))
        self.parts = None


def responses_of(page: str) -> dict[str, Any]:
    (data,) = (text for _, attributes, text in Elements(page).inside if attributes.get("id") == "responses")
    file = json.loads(data)
    return {path: restored(value, file["shared"]) for path, value in file["responses"].items()}


def restored(value: Any, shared: list[Any]) -> Any:
    """What `exported_responses.js` makes of a value."""

    def again(each: Any) -> Any:
        return restored(each, shared)

    match value:
        case {"$": place}:
            return again(shared[place])
        case {"$tokens": places}:
            return [again(shared[place]) for place in places]
        case {"$likeliest": flat}:
            return [again(shared[at]) | {"logprob": logprob} for at, logprob in zip(flat[::2], flat[1::2], strict=True)]
        case {"$same": [one, count]}:
            return [one] * count
        case {"$sums": steps}:
            return [*accumulate(steps)]
        case {"$entries": entries}:
            return {name: again(each) for name, each in entries}
        case dict():
            return {name: again(each) for name, each in value.items()}
    return [*map(again, value)] if isinstance(value, list) else value


def rounded(value: Any) -> Any:
    """An answer with four digits of each float, as a file has it."""
    if isinstance(value, float):
        return round(value) if abs(value) >= 10_000 else float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [*map(rounded, value)] if isinstance(value, list) else value


def test_modules_are_bundled_after_what_they_import_and_share_no_name() -> None:
    modules = {
        "main": 'import { a } from "./left.js";\nconst name = a;\n',
        "left": 'import { c } from "./base.js";\nconst name = 1;\nexport const a = c + name;\n',
        "base": "const name = 2;\nexport function c() {}\nexport async function d() {}\n",
        "other": "export const never = 1;\n",
    }
    script = bundled_script(modules, "main")
    assert [*re.findall(r"const module_(\w+) =", script)] == ["base", "left", "main"]
    assert "const { c } = module_base;" in script
    assert "return { c, d };" in script
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    assert script.count("const name") == 3, "each in a function of its own"
    cycle = {"a": 'import { b } from "./b.js";\n', "b": 'import { a } from "./a.js";\n'}
    with pytest.raises(ValueError, match="a > b > a"):
        bundled_script(cycle, "a")
    with pytest.raises(ValueError, match=r"a\.js imports b\.js"):
        bundled_script({"a": cycle["a"]}, "a")


@pytest.mark.parametrize("limit", [260_000, 300_000, 420_000, LARGE])
def test_a_file_is_within_its_size_and_counts_what_it_leaves_out(limit: int, run: Path) -> None:
    made = exported(run, limit)
    assert len(made.html.encode()) <= limit
    responses = responses_of(made.html)
    rollouts = {path for path in responses if "/rollout/" in path}
    rows = len(HOSTILE) * 3 + 5 * 12
    held_out = 3 * 4 + 2 + 3 * 4  # before, along the way and after, the greedy ones with them
    assert made.num_rollouts == len(rollouts)
    assert made.of_rollouts == rows + held_out
    note = responses["export"]
    assert (note["rollouts"], note["of"]) == (made.num_rollouts, made.of_rollouts)
    listed = {
        f"/api/run/0/rollout/{row['at']}"
        for path, page in responses.items()
        if path.startswith("/api/run/0/rows?") and "step=" not in path
        for row in page["rows"]
    }
    assert listed == rollouts
    if limit == LARGE:
        assert made.num_rollouts == made.of_rollouts
        assert made.left_out == ()


def test_a_file_has_the_responses_of_the_server_with_four_digits(run: Path) -> None:
    runs = OpenedRuns.of([run])
    found = responses_of(export_runs(runs, LARGE).html)
    asked = [path for path in found if path.startswith("/api/run/0/") and "/rows?" not in path and "/step/" not in path]
    assert {path.split("/")[4].partition("?")[0] for path in asked} >= {"group", "overview", "problem", "rollout"}
    for path in asked:
        address, _, query = path.removeprefix("/api/").partition("?")
        expected = dict(viewer_response(runs, unquote(address), dict(parse_qsl(query))))
        expected.pop("graded", None)  # the page does not read it
        assert found[path] == rounded(expected), path


HOSTILE_KEYS = st.sampled_from(["$", "$tokens", "$same", "__proto__", "name", ""])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=40),
    lambda inside: (
        st.lists(inside, max_size=6)
        | st.dictionaries(HOSTILE_KEYS, inside, max_size=3)
        | st.lists(st.sampled_from([0, 1, 0.5, None]), min_size=4, max_size=9)
    ),
    max_leaves=12,
)


@given(values=st.lists(VALUES, max_size=4))
def test_any_answer_comes_back_from_its_short_form(values: list[Any]) -> None:
    sized = SizedResponses(10**9)
    assert sized.add({str(at): value for at, value in enumerate(values)})
    shared = [json.loads(text) for text in sized.shared.places]
    for at, value in enumerate(values):
        assert restored(json.loads(sized.texts[str(at)]), shared) == rounded(value)


def test_tokens_and_rows_are_in_a_file_once_and_what_does_not_fit_leaves_nothing() -> None:
    text = "the same completion, in full"
    piece = {"text": "the", "id": 7, "special": False, "sampled": True, "partial": False}
    rollout = {"completion": [piece] * 100, "text": text, "values": [0.0] * 100, "offsets": [*range(0, 400, 4)]}
    sized = SizedResponses(10_000)
    assert sized.add({"/a": rollout})
    after_one = sized.used + sized.shared.size
    assert sized.add({"/b": {**rollout, "more": text}})
    assert sized.used + sized.shared.size - after_one < 350, "places, and the offsets"
    before = [*sized.shared.places], sized.shared.size
    assert not sized.add({"/c": {"long": "another text" * 1000, "completion": [{**piece, "id": 8}]}})
    assert ([*sized.shared.places], sized.shared.size) == before
    assert before[1] == sum(len(each) + 1 for each in before[0])


def test_rollouts_of_alarms_come_first(run: Path) -> None:
    (group,) = alarmed_groups(OpenedRun(run))
    assert group == ("rollouts", 3, "1")
    files = (found for size in range(240_000, 500_000, 5_000) if (found := smallest(run, size)) is not None)
    kept = ({path for path in responses_of(made.html) if "/group/rollouts/" in path} for made in files)
    assert next(groups for groups in kept if groups) == {"/api/run/0/group/rollouts/3/1"}, "no other group of training"


def smallest(run: Path, size: int) -> ExportedFile | None:
    try:
        return exported(run, size)
    except UserError:
        return None


def test_hostile_texts_are_data_and_only_the_pages_own_code_is_allowed(run: Path) -> None:
    page = exported(run, LARGE).html
    found = Elements(page)
    scripts = [text for tag, attributes, text in found.inside if tag == "script" and "type" not in attributes]
    styles = [text for tag, _, text in found.inside if tag == "style"]
    assert len(scripts) == 5, "Preact, its hooks, htm, uPlot, and the modules"
    assert {tag for tag, _ in found.tags} <= {
        *("html", "head", "meta", "title", "link", "style", "script", "body", "div", "noscript")
    }
    (policy,) = (each["content"] or "" for tag, each in found.tags if each.get("http-equiv"))
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed["default-src"] == "'none'"
    assert allowed["img-src"] == "data:"
    for name, code in (("script-src", scripts), ("style-src", styles)):
        digests = {f"'sha256-{b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in code}
        assert digests == {*allowed[name].split()}
    addresses = [each for _, attributes in found.tags for name in ("src", "href") if (each := attributes.get(name))]
    assert addresses == ["data:,"]
    responses = responses_of(page)
    texts = {row["completion"] for path, each in responses.items() if "/rows?" in path for row in each["rows"]}
    assert {text.encode("utf-8", "replace").decode() for text in HOSTILE.values()} <= texts
    (data,) = (text for _, attributes, text in found.inside if attributes.get("id") == "responses")
    assert data.isascii()
    assert not set("<>&") & set(data)


def test_a_size_that_is_too_small_says_what_is_needed_and_a_strange_one_what_to_write(run: Path) -> None:
    with refused("size = 0.1MB", "need 0.2", "larger"):
        exported(run, 100_000)
    assert [size_in_bytes(text) for text in ("20MB", "1.5 mb", "300KB", "7")] == [20_000_000, 1_500_000, 300_000, 7]
    for text in ("", "20GB", "-1MB", "lots"):
        with pytest.raises(ValueError, match="such as 20MB"):
            size_in_bytes(text)


@given(count=st.integers(1, 200))
def test_any_beginning_of_the_order_is_spread_over_all_steps(count: int) -> None:
    steps = [*range(5, 5 + count)]
    order = evenly(steps)
    assert sorted(order) == steps
    assert {*order[:2]} == {steps[0], steps[-1]}
    for taken in range(2, count + 1):
        places = sorted(order[:taken])
        widest = max(b - a for a, b in pairwise(places))
        assert widest <= 2 * -(-(count - 1) // (taken - 1)), "no gap is twice as wide as it need be"


def test_a_notebook_gets_one_frame_that_may_only_run_its_own_scripts(run: Path) -> None:
    block = posttrain.open_run(run).show(size="400KB", height=300)._repr_html_()
    ((tag, attributes),) = Elements(block).tags
    assert tag == "iframe"
    assert attributes["sandbox"] == "allow-scripts"
    assert attributes["height"] == "300"
    assert attributes["srcdoc"] is not None
    assert html.unescape(block.split('srcdoc="')[1].split('"></iframe>')[0]) == attributes["srcdoc"]
    assert responses_of(attributes["srcdoc"])["export"]["rollouts"] > 0
    with refused("show: size", "20MB"):
        posttrain.open_run(run).show(size="huge")


def test_the_command_writes_the_file_and_says_what_it_has(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "run.html"
    assert main(["view", str(run), "--export", str(target), "--size", "500KB"]) == 0
    assert target.stat().st_size <= 500_000
    assert re.search(r"run\.html: 0\.\d MB, \d+ of 152 rollouts", capsys.readouterr().out)
    assert main(["view", str(run), "--export", str(tmp_path / "run.txt")]) == 2
    assert "must end in .html" in capsys.readouterr().err
    assert main(["view", "hack", "--export", str(target), "--size", "500KB"]) == 0
    assert responses_of(target.read_text())["/api/runs"]["runs"][0]["name"] == "planted-hack"
