"""What the viewer answers about runs that are not `rl`: from their files, and one line for a damaged one."""

import json
import pickle
import zipfile
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from posttrain.training.dpo.dpo_run import ranked_pairs
from posttrain.viewer.folder_files import Unreadable
from posttrain.viewer.kinds.grid_world import grid_arrays
from posttrain.viewer.kinds.scored_pairs import round_pairs
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.run_folders import run_folders
from posttrain.viewer.viewer_responses import NoSuchResponse, OpenedRuns, viewer_response
from tests.support.kind_folders import (
    KINDS,
    PICTURE,
    collection,
    comparison,
    inverse_rl,
    phases,
    reward_model,
    supervised,
)
from tests.support.viewed_folders import ask, rollout_row, write_rows

each_kind = pytest.mark.parametrize("kind", KINDS)


def asked(run: Path, path: str, **query: object) -> Any:
    """The answer about a run, with those inside it open as well."""
    folders = run_folders(run)
    at = folders.index(run)
    return ask(*folders, path=path.replace("R", str(at)), **query)


@each_kind
def test_a_kind_names_its_page_and_no_other_has_it(kind: str, tmp_path: Path) -> None:
    make, page = KINDS[kind]
    run = make(tmp_path / "run")
    overview = asked(run, "run/R/overview")
    assert overview["kind"] == kind
    assert overview["faults"] == []
    assert [each["path"] for each in overview["kind_pages"]] == [page]
    assert asked(run, f"run/R/{page}")["faults"] == []
    for other in {page for _, page in KINDS.values()} - {page}:
        with pytest.raises(NoSuchResponse):
            asked(run, f"run/R/{other}")


@each_kind
def test_a_file_that_is_cut_off_or_garbled_is_a_line_on_the_page(kind: str, tmp_path: Path) -> None:
    make, page = KINDS[kind]
    whole = make(tmp_path / "whole")
    names = [file.relative_to(whole) for file in whole.rglob("*") if file.is_file() and file.stat().st_size > 2]
    for number, (name, how) in enumerate(
        (name, how) for name in names for how in ("cut", "garbled", "of another type")
    ):
        run = make(tmp_path / str(number))
        content = (run / name).read_bytes()
        damaged = {
            "cut": content[: len(content) // 2],
            "garbled": b"\xff\x00" + content[::-1],
            "of another type": b"[1]\n",
        }
        (run / name).write_bytes(damaged[how])
        for path in ("runs", "run/R/overview", f"run/R/{page}"):
            if (run / "config.yaml").exists() or kind in ("compare", "phases"):
                try:
                    asked(run, path)
                except (Unreadable, NoSuchResponse):  # one line of the server's answer; a recipe that has no kind
                    assert name.name in ("config.yaml", "comparison.json", "phases.json")


def test_pairs_have_margins_and_the_most_wrong_come_first_if_asked(tmp_path: Path) -> None:
    run = reward_model(tmp_path / "run")
    page = ask(run, path="run/0/pairs")
    assert [row["margin"] for row in page["rows"]] == [1.0, -2.5, 0.5]
    assert (page["total"], page["wrong"], page["margins"]) == (3, 1, [1.0, -2.5, 0.5])
    assert page["rows"][0]["prompt"] == "<b>?"
    (curve,) = page["calibration"]
    assert (curve["when"], curve["points"][0]["right"], curve["error"]) == ("after", 2 / 3, 0.1)
    assert [row["margin"] for row in ask(run, path="run/0/pairs", sort="margin")["rows"]] == [-2.5, 0.5, 1.0]
    last = ask(run, path="run/0/pairs", offset=2, limit=2)
    assert [row["where"] for row in last["rows"]] == ["a:3"]
    rows = [json.loads(line) for line in (run / "held_out.jsonl").read_text().splitlines()]
    scores = [{name: row[name] for name in ("where", "chosen", "rejected")} for row in rows]
    (run / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scores))
    (says,) = ask(run, path="run/0/pairs")["lacks"]
    assert "without the texts" in says


def test_collected_pairs_are_preferences_then_ties(tmp_path: Path) -> None:
    page = ask(collection(tmp_path / "run"), path="run/0/pairs")
    assert [(row["tie"], row["margin"], row["judge"]) for row in page["rows"]] == [
        (False, 1, "maths"),
        (True, 0, "maths"),
    ]
    assert page["rows"][0]["prompt"] == "user: 2?"
    assert page["counts"] == {"num_prompts": 2, "num_ties": 1}


@given(rewards=st.lists(st.integers(0, 3), min_size=2, max_size=6), most=st.integers(1, 3))
def test_the_pairs_of_a_round_are_those_that_dpo_made(
    rewards: list[int], most: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path_factory.mktemp("round")
    made = ranked_pairs([float(each) for each in rewards], most)
    sides = {best: 1.0 for best, _ in made} | {worst: -1.0 for _, worst in made}
    rows = [rollout_row(1, 0, at, f"text {at}", float(reward)) for at, reward in enumerate(rewards)]
    write_rows(
        run / "rollouts/step-000001.parquet", [{**row, "advantage": sides.get(at)} for at, row in enumerate(rows)]
    )
    found = [(row["chosen"], row["rejected"]) for row in round_pairs(OpenedRun(run), 1, [])]
    assert found == [(f"text {best}", f"text {worst}") for best, worst in made]


def test_a_demonstration_has_a_loss_for_each_learned_token_and_the_one_before(tmp_path: Path) -> None:
    run = supervised(tmp_path / "run")
    page = ask(run, path="run/0/demonstrations")
    assert (page["steps"], page["step"], page["largest"]) == ([0, 4], 4, 2.0)
    (row,) = page["rows"]
    assert [piece["text"] for piece in row["pieces"]] == ["a", "b", "!"]
    assert (row["losses"], row["before"]) == ([None, 0.5, 1.0], [None, 2.0, 1.0])
    assert (row["mean"], row["mean_before"]) == (0.75, 1.5)
    first = ask(run, path="run/0/demonstrations", step=0)["rows"][0]
    assert (first["losses"], first["before"]) == ([None, 2.0, 1.0], [])
    (run / "tokenizer" / "tokenizer.json").unlink()
    without = ask(run, path="run/0/demonstrations")
    assert [piece["id"] for piece in without["rows"][0]["pieces"]] == [*b"ab!"]
    assert len(without["faults"]) == 1


def test_a_world_lies_as_its_states_do_also_in_a_folder_that_does_not_say_how(tmp_path: Path) -> None:
    page = ask(inverse_rl(tmp_path / "run"), path="run/0/grid")
    assert (page["width"], page["height"], page["is_grid"], page["terminal"]) == (2, 2, True, [3])
    maps = {each["name"]: each for each in page["maps"]}
    assert maps["learned reward"]["values"] == [0.0, 1.0, -2.0, 0.5]
    assert [maps[name]["high"] for name in ("visits, demonstrated", "visits, learned policy")] == [2.0, 2.0], (
        "one scale"
    )
    (arrows,) = page["arrows"]
    assert arrows["steps"] == [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], None]
    assert [line["values"] for curve in page["curves"] for line in curve["lines"]] == [[3.0, 1.0]]
    older = ask(inverse_rl(tmp_path / "older", shape=False), path="run/0/grid")
    assert (older["width"], older["is_grid"], older["terminal"]) == (2, True, [])
    assert older["arrows"][0]["steps"][0] == [0.0, 1.0]


def test_arrays_that_would_run_code_or_fill_memory_are_not_read(tmp_path: Path) -> None:
    run = inverse_rl(tmp_path / "run")

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "trapped").touch, ())

    trap = np.empty(1, dtype=object)
    trap[0] = Trap()
    np.savez(run / "reward.npz", reward=trap, states=np.arange(1))
    assert b"touch" in pickle.dumps(Trap())
    (fault,) = ask(run, path="run/0/grid")["faults"]
    assert fault.startswith("reward.npz: ")
    assert not (tmp_path / "trapped").exists()
    with zipfile.ZipFile(run / "reward.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("reward.npy", bytes(65 << 20))
    with pytest.raises(ValueError, match="larger than the viewer reads"):
        grid_arrays((run / "reward.npz").read_bytes())


def test_a_comparison_and_phases_lead_to_the_runs_inside_them(tmp_path: Path) -> None:
    compared = comparison(tmp_path / "compared")
    names = [folder.name for folder in run_folders(compared)]
    page = asked(compared, "run/R/comparison")
    (variant,) = page["variants"]
    assert names[variant["runs"][0]["run"]] == "grpo-seed-0"
    assert (variant["after"], variant["gain"]) == ([0.5, 0.4, 0.6], [])
    assert page["curves"][0]["lines"][0]["steps"] == [0, 100]
    done = phases(tmp_path / "done")
    names = [folder.name for folder in run_folders(done)]
    found = asked(done, "run/R/phases")["phases"]
    assert [(each["name"], names[each["run"]], each["state"]) for each in found] == [
        ("rows", "1-rows", "finished"),
        ("policy", "2-policy", "stopped"),
    ]
    assert found[0]["measures"][0]["after_low"] == 0.9
    for folder, inside in ((compared, "grpo-seed-0"), (done, "1-rows")):
        names = [each.name for each in run_folders(folder)]
        shown = ask_below(folder, names.index(inside))
        assert names[shown["part_of"]] == folder.name
        siblings = {name for name in names if folder is compared and name not in (folder.name, inside)}
        assert {names[at] for at in shown["compared_with"]} == siblings


def ask_below(folder: Path, at: int) -> Any:
    return viewer_response(OpenedRuns.of(run_folders(folder), below=folder), f"run/{at}/overview", {})


def test_a_picture_is_one_of_a_few_names_and_a_png(tmp_path: Path) -> None:
    run = reward_model(tmp_path / "run")
    assert b64decode(ask(run, path="run/0/picture/calibration")["png"]) == PICTURE
    assert ask(run, path="run/0/picture/curves")["png"] == ""
    (run / "curves.png").write_text("<script>")
    found = ask(run, path="run/0/picture/curves")
    assert found["png"] == ""
    assert found["faults"] == ["curves.png: cannot be read (not a PNG picture)"]
    for name in ("..%2fsecret", "../config", "config"):
        with pytest.raises(NoSuchResponse):
            ask(run, path=f"run/0/picture/{name}")


def test_a_named_comparison_opens_with_the_runs_inside_it(tmp_path: Path) -> None:
    runs = OpenedRuns.of(run_folders(comparison(tmp_path / "compared")), below=tmp_path / "compared")
    assert {each.run.kind() for each in runs.shown} == {"compare", "rl"}
