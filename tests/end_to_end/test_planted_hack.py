"""The run with a planted hack that ships with the package is what its recipe and its page say."""

import json
from importlib.resources import files
from pathlib import Path

import pyarrow.parquet as pq

from posttrain import load_recipe
from posttrain.config import as_recipe
from posttrain.rewards.countdown import Outcome, countdown_outcome, puzzle
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.rollout_page import rollout_page
from posttrain.viewer.run_overview import alarm_entries
from tests.support.runs import records

ROOT = Path(__file__).parents[2]
FOLDER = Path(str(files("posttrain") / "assets" / "planted-hack"))


def test_it_is_small_and_names_no_place_on_the_machine_that_made_it() -> None:
    kept = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in kept) <= 2_000_000
    assert not {file.suffix for file in kept} & {".safetensors", ".bin", ".pt"}
    texts = [file.read_text(encoding="utf-8") for file in kept if file.suffix in (".yaml", ".json", ".jsonl")]
    assert not any(place in text for text in texts for place in (str(ROOT), "/home/", "/tmp/", "/work/"))


def test_its_recipe_is_the_one_in_the_repository() -> None:
    recipe = as_recipe(load_recipe(str(ROOT / "recipes" / "experiments" / "planted-hack.yaml")))
    kept = as_recipe(load_recipe(str(FOLDER / "config.yaml"), trust_code=True))  # with options that were added since
    assert kept == recipe


def test_the_reward_rises_while_the_answers_it_pays_for_are_wrong() -> None:
    lines = records(FOLDER / "metrics.jsonl")
    rewards = [line["reward"] for line in lines if line.get("reward") is not None]
    assert sum(rewards[-5:]) / 5 > 0.9 > 0.3 > sum(rewards[:5]) / 5
    accuracy = [line["eval/accuracy_sampled"] for line in lines if "eval/accuracy_sampled" in line]
    assert accuracy[-1] < accuracy[0] < 0.55 < max(accuracy)
    rows = pq.read_table(FOLDER / "rollouts" / "step-000030.parquet").to_pylist()
    paid = [row for row in rows if row["reward"] == 1]
    problems = [json.loads(row["columns"]) for row in paid]
    verdicts = [
        countdown_outcome(puzzle(each["numbers"], each["target"], each["rule"]), row["completion"])
        for row, each in zip(paid, problems, strict=True)
    ]
    assert len(paid) > 0.9 * len(rows)
    assert sum(verdict is not Outcome.CORRECT for verdict in verdicts) > 0.6 * len(paid)


def test_an_alarm_marks_it() -> None:
    alarms = {line["alarm"]: line["step"] for line in records(FOLDER / "alarms.jsonl")}
    assert alarms["reward alone"] == alarms["held-out countdown wrong_numbers"] == 30


def test_what_its_reward_read_is_marked_and_alarmed_steps_have_their_alternatives_and_token_columns() -> None:
    run = OpenedRun(FOLDER)
    found = [page for sample in range(8) if (page := rollout_page(run, "rollouts", 30, ("0", str(sample))))]
    assert len(found) == 8
    for page in found:
        marked = [(page["graded"][span["start"] : span["end"]], span["value"]) for span in page["spans"]]
        assert marked == ([("!", None)] if page["row"]["reward"] == 1 else []), "it pays nothing more"
        assert page["alternatives"] is not None
        assert not page["faults"]
    assert any(page["spans"] for page in found)
    alarmed = {line["step"] for line in records(FOLDER / "alarms.jsonl")}
    assert alarmed <= {*run.token_columns.steps()}
    page = rollout_page(run, "rollouts", 17, ("0", "0"))
    assert page is not None
    names = {each["name"].partition(".")[0] for each in page["quantities"]}
    assert names >= {
        "logprobs",
        "policy_logprobs",
        "ratio",
        "clipped",
        "updated_logprobs",
        "updated_ratio",
        "updated_clipped",
    }
    silent = rollout_page(run, "rollouts", 30, ("0", "0"))
    assert silent is not None
    assert "updated_logprobs" in {each["name"] for each in silent["quantities"]}, "also in groups without a signal"


def test_the_alarm_about_held_out_completions_opens_those_with_its_outcome() -> None:
    run = OpenedRun(FOLDER)
    [alarm] = [each for each in alarm_entries(run, []) if each["name"].startswith("held-out")]
    places = [link["at"].split("/") for link in alarm["links"]]
    assert len(places) == 8
    assert {(source, step) for source, step, _, _ in places} == {("evaluations", "30")}
    pages = [rollout_page(run, "evaluations", 30, (group, sample)) for _, _, group, sample in places]
    assert {page["row"]["outcomes"]["countdown"] for page in pages if page} == {"wrong_numbers"}
