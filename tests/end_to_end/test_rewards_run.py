"""What rewards do in whole runs: they log, mark steps of the way, and are asked in workers; so do resumed runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

import posttrain
from posttrain import ProcessReward, Span
from posttrain.generation.engine import sample_groups
from posttrain.rewards.grading.function import TrainerState
from posttrain.runs.prompt_preview import graded_lines
from posttrain.training.session import CallerObjects, open_session
from tests.support.own_objects import config_for
from tests.support.pages import documented
from tests.support.runs import command, metrics_of, require_same, tiny_recipe

STATES: list[TrainerState] = []


def lengths(completions: Sequence[str], log_extra: Any, log_metric: Any, trainer_state: TrainerState) -> list[float]:
    STATES.append(trainer_state)
    log_extra("letters", [sum(map(str.isalpha, text)) for text in completions])
    log_metric("shortest", min(map(len, completions)))
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    return [float(len(text)) for text in completions]


OWN: dict[str, Any] = {
    "rows": [{"prompt": f"{i} and {i} make ", "answer": i} for i in range(1, 9)],
    "held_out_rows": [{"prompt": "9 and 9 make ", "answer": 9}],
    "rewards": [lengths, lengths],
}


def logging(model: Path, folder: Path) -> posttrain.Config:
    return config_for(
        model,
        folder,
        algorithm={"name": "grpo", "reward_aggregation": "normalize_then_sum"},
        rollout={"prompts_per_step": 4, "group_size": 3},
        evaluation={"every_steps": 2, "samples": 2, "brief_problems": 1},
        checkpoint={"every_steps": 1, "keep_last": 9},
        run={"num_steps": 3},
    )


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return posttrain.train(logging(model, tmp_path_factory.mktemp("logging") / "run"), **OWN).folder


def test_metrics_have_what_was_logged_beside_ours_and_of_each_function_apart(run: Path) -> None:
    lines = metrics_of(run)
    assert [line["logged/lengths/progress"] for line in lines[1:]] == [0, 1 / 3, 2 / 3]
    assert [line["eval/logged/lengths_2/progress"] for line in (lines[0], lines[2])] == [0, 2 / 3]
    assert lines[1]["logged/lengths/shortest"] == lines[1]["logged/lengths_2/shortest"]
    assert all(documented(name) for line in lines for name in line if "logged" in name)
    assert json.loads((run / "summary.json").read_text())["after"]["logged"]["lengths/progress"] == 1
    states = {(state.global_step, state.max_steps, state.epoch) for state in STATES}
    assert states == {(0, 3, 0.0), (1, 3, 0.5), (2, 3, 1.0), (3, 3, 1.5)}


def test_every_completion_has_what_was_logged_of_it(run: Path) -> None:
    for row in parquet.read_table(run / "rollouts" / "step-000002.parquet").to_pylist():
        assert row["extra/lengths_2/letters"] == sum(map(str.isalpha, row["completion"]))


def test_a_step_that_is_taken_again_is_journalled_again_word_for_word(run: Path, model: Path) -> None:
    journal, metrics = (run / "scores.jsonl").read_text(), metrics_of(run)
    assert '"extra"' in journal
    posttrain.train(logging(model, run), **OWN, resume=True, from_step=1)
    assert ((run / "scores.jsonl").read_text(), metrics_of(run)) == (journal, metrics)


def test_what_is_shown_of_a_completion_has_it_too(model: Path, tmp_path: Path) -> None:
    with open_session(logging(model, tmp_path / "other"), CallerObjects(**OWN)) as session:
        (group,) = sample_groups(session.engine, session.task.held_out(), session.collector.request(1))
        lines = graded_lines(group, session.collector.grade([group]), 0, session.policy.tokenizer)
    letters = sum(map(str.isalpha, group.rollouts[0].text))
    assert lines[-2:] == [f"logged     lengths: letters = {letters}", f"logged     lengths_2: letters = {letters}"]


# Process rewards.

THROWS = [{"prompt": f"Throw {n}. "} for n in range(12)]


def steps_of_the_way(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[Any]:
    """A digit earns .5, and an even token .25; the score is the text's length."""
    return [
        ProcessReward(
            len(text) / 4,
            [0.25 if token % 2 == 0 else None for token in ids],
            [Span(i, i + 1, 0.5) for i, character in enumerate(text) if character.isdigit()],
        )
        for text, ids in zip(completions, completion_ids, strict=True)
    ]


def marked(model: Path, folder: Path, credit: str = "steps") -> posttrain.Config:
    kl = {"coefficient": 0.01, "estimator": "k1", "place": "reward"}
    return config_for(
        model,
        folder,
        algorithm={"name": "grpo", "credit": credit, "kl": kl},
        rollout={"prompts_per_step": 2, "max_completion_tokens": 6},
        checkpoint={"every_steps": 2, "keep_last": 1, "keep_best": False},
        run={"num_steps": 4},
    )


def test_a_resumed_run_with_marks_is_the_run_that_was_never_stopped(model: Path, tmp_path: Path) -> None:
    rewards = [posttrain.reward_function(steps_of_the_way, weight=0.5)]
    whole = posttrain.train(marked(model, tmp_path / "whole"), rows=THROWS, rewards=rewards).folder
    with posttrain.steps(marked(model, tmp_path / "parts"), rows=THROWS, rewards=rewards) as parts:
        assert [next(parts).step for _ in range(3)] == [1, 2, 3]
    posttrain.train(marked(model, tmp_path / "parts"), rows=THROWS, rewards=rewards, resume=True)
    require_same(tmp_path / "parts", whole)

    rows = parquet.read_table(whole / "rollouts" / "step-000004.parquet").to_pylist()
    journal = [json.loads(line) for line in (whole / "scores.jsonl").read_text().splitlines()]
    told = [each for line in journal if line["step"] == 4 for each in line["marks"]["steps_of_the_way"]]
    assert [json.loads(row["marks/steps_of_the_way"]) for row in rows] == told
    for row, marks in zip(rows, told, strict=True):
        # The penalties are small beside the marks: the policy has learned next to nothing yet.
        total = 0.5 * sum([value or 0.0 for value in marks["tokens"]] + [span[2] for span in marks["spans"]])
        assert len(row["token_rewards"]) == len(row["tokens"])
        assert sum(row["token_rewards"]) == pytest.approx(total, abs=0.1)


@pytest.mark.parametrize("credit", ["completion", "reward_to_go"])
def test_levels_of_credit_give_tokens_what_they_say(model: Path, tmp_path: Path, credit: str) -> None:
    with posttrain.steps(marked(model, tmp_path / "run", credit), rows=THROWS, rewards=[steps_of_the_way]) as steps:
        record = next(steps)
    assert record.token_rewards is not None
    assert len(record.token_rewards) == sum(len(r.tokens) for group in record.groups for r in group.rollouts)
    assert record.metrics["process_rewards/steps_of_the_way/mean"] > 0
    assert record.metrics["frac_zero_advantage"] < 1


# Workers, and scores in a file.


def test_workers_change_no_number_of_a_run_and_a_second_run_finds_every_score_in_the_file(folder: Path) -> None:
    kept = {"cache_file": "../scores.db", "seconds": 100.0}
    limits = {"workers": 2, "item_seconds": 20.0, "cache": True}
    scores, seen = [], []
    for name, grading, options in (("plain", {}, {}), ("first", kept, limits), ("second", kept, limits)):
        recipe = tiny_recipe(folder / name, grading=grading, rewards=[{"path": "../dice.py:dice", **options}])
        (folder / "dice.py").write_text((folder / name / "dice.py").read_text())
        ended = command("rl", recipe, folder=folder / name)
        assert ended.code == 0, ended.err
        scores.append((folder / name / "run" / "scores.jsonl").read_text())
        seen.append(metrics_of(folder / name / "run"))
    assert scores[0] == scores[1] == scores[2]
    cached = [[line.pop("num_cached_scores", None) for line in lines] for lines in seen]
    assert seen[0] == seen[1] == seen[2]
    assert cached[0] == [None, 0, 0, 0, 0]
    assert cached[1][1] < 16  # of four prompts and four completions each; step 0 is an evaluation
    assert cached[2] == [None, 16, 16, 16, 16]


def test_a_limit_that_cannot_be_kept_is_told_before_anything_is_trained(folder: Path) -> None:
    ended = command("rl", tiny_recipe(folder / "refused", grading={"seconds": 100.0}), folder=folder / "refused")
    assert ended.code == 2
    assert "grading.seconds = 100 cannot end reward 'dice', a plain function in the trainer's process" in ended.err
    assert not (folder / "refused" / "run").exists()
