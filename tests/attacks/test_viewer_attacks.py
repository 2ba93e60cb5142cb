"""Nobody else reads runs through the viewer, nothing in a folder runs or hangs, and no damage is more than a line."""

import fcntl
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from posttrain.server.viewer_routes import PAGE
from posttrain.viewer.folder_files import Unreadable
from posttrain.viewer.row_selections import WrongQuery
from posttrain.viewer.viewer_responses import ADDRESSES, NoSuchResponse, OpenedRuns, viewer_response
from tests.support.viewed_folders import add_line, add_step, ask, requested, viewing, write_rows, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("viewed") / "run")


OTHERS = {
    "no token": ({}, None),
    "another token": ({}, "A" * 32),
    "a token beyond Latin-1": ({"X-Posttrain-Token": "\xff\xfe"}, None),
    "a token elsewhere": ({"Authorization": "Bearer x", "Cookie": "token=x"}, None),
    "another origin": ({"Origin": "http://example.org"}, ""),
    "the origin of a file": ({"Origin": "null"}, ""),
    "another port's origin": ({"Origin": "http://127.0.0.1:1"}, ""),
    "a name that was made to point here": ({"Host": "example.org"}, ""),
    "our address as a part of a name": ({"Host": "127.0.0.1.example.org"}, ""),
}


@pytest.mark.parametrize(("headers", "token"), OTHERS.values(), ids=OTHERS)
def test_nobody_else_reads(headers: dict[str, str], token: str | None, run: Path) -> None:
    with viewing(run) as server:
        for path in ("/api/runs", "/api/run/0/rows", "/api/none"):
            status, _, content = requested(server, path, headers=headers, token=token)
            assert status == 403
            assert b"longer text" not in content


def test_the_token_may_not_be_in_the_query(run: Path) -> None:
    with viewing(run) as server:
        assert requested(server, f"/api/runs?token={server.token}", token=None)[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/page/index.html", "/api/runs"])
def test_nothing_can_be_changed(method: str, path: str, run: Path) -> None:
    with viewing(run) as server:
        status, headers, _ = requested(server, path, method=method)
        assert status == 405
        assert headers["allow"] == "GET"
        assert not [name for name in headers if name.startswith("access-control")]


PATHS = (
    *("/page/../index.html", "/page/%2e%2e/viewer_routes.py", "/page/..%2f..%2f..%2fetc%2fpasswd", "/page//etc/passwd"),
    *("/page/", "/page/vendor", "/page/index.html/", "/page/index.html%00", "/page/__pycache__", "//example.org/"),
    *("/index.html", "/api/../page/index.html", "/run", "/%2e%2e/%2e%2e/etc/passwd", "/page/./index.html"),
    *(
        "/api/run/0/../1/overview",
        "/api/run/7/overview",
        "/api/run/-1/rows",
        "/api/run/0/step/0x1",
        "/api/run/%D9%A0/rows",
    ),
)


@pytest.mark.parametrize("path", PATHS)
def test_no_other_path_is_there(path: str, run: Path) -> None:
    with viewing(run) as server:
        assert requested(server, path)[0] in (404, 400)


def test_every_answer_forbids_what_the_page_does_not_need_and_holds_no_token(run: Path) -> None:
    with viewing(run) as server:
        names = [path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*.js")]
        for path in ("/", *(f"/page/{name}" for name in names), "/api/runs", "/api/none", "/none"):
            _, headers, content = requested(server, path)
            policy = dict(each.strip().split(" ", 1) for each in headers["content-security-policy"].split(";"))
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert {policy[name] for name in ("default-src", "base-uri", "form-action", "frame-ancestors")} == {
                "'none'"
            }
            others = {"x-content-type-options": "nosniff", "x-frame-options": "DENY", "cache-control": "no-store"}
            assert {**others, "referrer-policy": "no-referrer"}.items() <= headers.items()
            assert server.token.encode() not in content
            assert server.token not in str(headers)
        assert server.socket.getsockname()[0] == "127.0.0.1"
        assert server.address == f"http://127.0.0.1:{server.port}/#token={server.token}"
        assert len(server.token) >= 32


WRONG = (
    *("run/0/rows?source=model", "run/0/rows?step=-1", "run/0/rows?offset=1e9", "run/0/rows?limit=many"),
    *("run/0/rows?low=much", "run/0/steps?source=", "compare?a=0&b=x", "compare?a=0", "run/0/rows?step=²"),
    *("run/0/rows?low=nan", "run/0/rows?sort=nosuch", "run/0/rows?term=nosuch&low=0"),
    "run/0/rows?source=evaluations&sampling=nosuch",
)


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_query_is_refused_with_its_name(path: str, run: Path) -> None:
    with viewing(run) as server:
        status, _, content = requested(server, f"/api/{path}".replace("²", "%C2%B2"))
        assert status == 400
        assert b" = " in content


ASKED = (
    *("runs", "run/0/state", "run/0/overview", "run/0/steps", "run/0/rows", "run/0/step/2", "run/0/problems"),
    *("run/0/group/rollouts/2/1", "run/0/rollout/rollouts/2/1/0", "run/0/rollout/evaluations/3/after-0/0"),
    *("run/0/held-out", "run/0/behaviours", "run/0/problem?id=held-out/0", "compare?a=0&b=0"),
    *("run/0/rows?outcome=maths:wrong", "run/0/rows?sort=-length", "run/0/rows?source=evaluations"),
)
DAMAGED = (
    *("metrics.jsonl", "alarms.jsonl", "scores.jsonl", "summary.json", "config.yaml", "format"),
    *("rollouts/step-000002.parquet", "evaluations/step-000003.parquet", "tokenizer/tokenizer.json"),
)
DAMAGES = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "garbled": lambda content: content[:40] + bytes(255 - byte for byte in content[40:80]) + content[80:],
    "noise": lambda content: bytes(range(256)) * 8,
    "a list": lambda content: b"[1, 2, 3]\n",
    "deep": lambda content: b"[" * 100_000 + b"\n",
    "other types": lambda content: b'{"step": "x", "rollouts": 5, "seconds": [], "before": 3, "model": 5, "run": 7}\n',
    "a deep object": lambda content: b'{"step": 1, "a": ' + b"[" * 5000 + b"]" * 5000 + b"}\n",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_a_line_on_the_page_and_never_an_error_of_the_server(
    name: str, damage: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run")
    add_line(run, "scores.jsonl", {"step": 2, "draw": 1, "details": {"maths": [None, {"tests": []}]}})
    file = run / name
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    opened, told = OpenedRuns.of([run]), ""
    for each in ASKED:
        path, _, query = each.partition("?")
        try:
            found = viewer_response(opened, path, dict(pair.split("=") for pair in query.split("&") if pair))
            told += json.dumps(found, allow_nan=False)
        except (Unreadable, NoSuchResponse) as fault:
            told += str(fault)
    assert "\n" not in told
    noticed = {"empty": name.endswith((".parquet", "tokenizer.json"))}
    if noticed.get(damage, damage in ("noise", "deep", "garbled") and name not in ("scores.jsonl", "config.yaml")):
        assert Path(name).name in told
    # The other files are shown as they are.
    if name != "rollouts/step-000002.parquet":
        assert len(ask(run, path="run/0/rows")["rows"]) == 36
    else:
        assert {row["step"] for row in ask(run, path="run/0/rows")["rows"]} >= {1, 3}


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "summary.json", "rollouts/step-000002.parquet", "tokenizer/tokenizer.json"):
        (run / name).unlink()
        os.mkfifo(run / name)
    (run / "alarms.jsonl").unlink()
    (run / "alarms.jsonl").mkdir()
    for path in ("runs", "run/0/overview", "run/0/rows", "run/0/step/1", "run/0/rollout/rollouts/1/0/0"):
        assert ask(run, path=path) is not None


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "metrics.jsonl", "scores.jsonl"])
def test_a_link_out_of_the_folder_is_not_followed(name: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text('{"step": 2, "draw": 1, "before": {"reward": 271828}, "details": {"maths": "271828"}}\n')
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    told = json.dumps([ask(run, path=path) for path in ("run/0/overview", "run/0/rollout/rollouts/2/1/0")])
    assert "271828" not in told
    assert f"{name}: cannot be read" in told
    assert "is a link" in told


def test_columns_of_another_type_count_as_missing(tmp_path: Path) -> None:
    rows = [{"draw": "0", "sample": 0, "prompt_id": "x", "prompt": "p", "completion": "c", "reward": 1.0}]
    add_step(tmp_path, 1, rows)
    add_step(tmp_path, 2, [{**rows[0], "draw": 0, "reward": "much", "score/f": [1.0], "outcome/f": 5}])
    page = ask(tmp_path, path="run/0/rows")
    assert [(row["step"], row["reward"], row["scores"]) for row in page["rows"]] == [(2, None, {})]
    [fault] = page["faults"]
    assert "step-000001.parquet" in fault
    assert "draw" in fault


def test_rows_with_columns_of_all_wrong_types_are_shown_without_them(tmp_path: Path) -> None:
    row = {"draw": 0, "sample": 0, "prompt_id": "x", "prompt": "p", "completion": "c", "finish": None, "columns": "["}
    wrong = {"tokens": ["a"], "logprobs": 5, "sampled": "yes", "alternative_tokens": [1], "turn_ends": [[1]]}
    more = {"turn_calls": "{", "marks/f": "[1]", "score/f": None, "token_advantages": ["a"], "prompt_tokens": {"a": 1}}
    add_step(tmp_path, 1, [{**row, **wrong, **more}, {**row, **wrong, **more, "draw": None}])
    write_rows(tmp_path / "token_columns/step-000001.parquet", [{"draw": 0, "sample": 0, "update": 1, "ratio": ["x"]}])
    for path in (
        "rows",
        "step/1",
        "group/rollouts/1/0",
        "rollout/rollouts/1/0/0",
        "problems",
        "behaviours",
        "rows?sort=length",
    ):
        name, _, query = path.partition("?")
        assert ask(tmp_path, path=f"run/0/{name}", **dict(pair.split("=") for pair in query.split("&") if pair))
    page = ask(tmp_path, path="run/0/rollout/rollouts/1/0/0")
    assert (page["completion"], page["quantities"], page["turns"], page["spans"]) == ([], [], [], [])


def without_texts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "prompt_id": None, "prompt": None, "draw": None} for row in rows]


ODD: dict[str, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]] = {
    "no rows": lambda rows: [],
    "greedy rows only": lambda rows: [{**row, "greedy": True, "evaluation": "after"} for row in rows],
    "rows without an id": without_texts,
}


@pytest.mark.parametrize("source", ["rollouts", "evaluations"])
@pytest.mark.parametrize("odd", ODD)
def test_odd_rows_are_no_error_of_the_server(odd: str, source: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for file in (run / source).iterdir():
        table = parquet.read_table(file)
        rows = ODD[odd](table.to_pylist())
        columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else table.column_names)}
        types = {name: table.schema.field(name).type for name in table.column_names}
        arrays = {name: pa.array(values, types.get(name)) for name, values in columns.items()}
        parquet.write_table(pa.table(arrays), file)
    for path in (*ASKED, "run/0/problem?id=", "run/0/step/1", "run/0/rows?sort=-reward"):
        name, _, query = path.partition("?")
        try:
            assert ask(run, path=name, **dict(pair.split("=") for pair in query.split("&") if pair))
        except NoSuchResponse:
            assert "group" in path or "rollout" in path or "id=" in path


def test_whether_a_run_goes_on_is_seen_by_its_lock_and_a_writer_is_not_disturbed(tmp_path: Path) -> None:
    from posttrain.runs.folder import LOCK, lock_folder

    run = write_run(tmp_path / "run", finished=False)
    assert ask(run, path="run/0/state")["state"] == "stopped"
    writer = lock_folder(run)
    assert ask(run, path="run/0/state")["state"] == "running"
    os.close(writer)
    looking = os.open(run / LOCK, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    from threading import Timer

    Timer(0.01, os.close, [looking]).start()  # a look that is under way ends, and the writer gets in
    os.close(lock_folder(run))
    (run / "summary.json").write_text("{}")
    assert ask(run, path="run/0/state")["state"] == "finished"
    assert ask(tmp_path / "later", path="run/0/state")["state"] == "not begun"


def test_older_folders_say_what_they_lack(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", finished=False)
    (run / "format").unlink()
    for folder in ("tokenizer", "evaluations"):
        for file in (run / folder).iterdir():
            file.unlink()
        (run / folder).rmdir()
    page = ask(run, path="run/0/overview")
    assert any("format 1" in each for each in page["lacks"])
    assert any("stopped" in each for each in page["lacks"])
    shown = ask(run, path="run/0/rollout/rollouts/1/0/0")
    assert (shown["completion"], shown["completion_text"]) == ([], "one")
    assert "tokenizer.json" in shown["faults"][0]
    (run / "format").write_text("3\n")
    assert any("format" in each for each in ask(run, path="run/0/overview")["faults"])


def test_every_address_of_the_table_is_asked_here() -> None:
    import re

    paths = [each.partition("?")[0] for each in ASKED]
    ours = [pattern for pattern in ADDRESSES if not any(re.fullmatch(pattern, path) for path in paths)]
    known = ("pairs", "demonstrations", "grid", "comparison", "phases", "picture")
    assert [each for each in ours if not any(name in each for name in known)] == []
    with pytest.raises(WrongQuery):
        viewer_response(OpenedRuns.of([]), "compare", {})
