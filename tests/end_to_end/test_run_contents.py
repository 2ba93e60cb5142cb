"""What a run leaves behind can be read without posttrain, says what happened, and is enough to do it again."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import compute as pc, parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain.batch import TokenColumns
from posttrain.runs.run_folder import CONTENTS
from tests.support.pages import documented
from tests.support.pictures import width_and_height
from tests.support.refusals import mentions
from tests.support.runs import (
    after_training,
    command,
    metrics_of,
    records,
    require_same,
    rollout_rows,
    save_tiny_model,
    tiny_recipe,
)

ROWS = [{"prompt": f"What is {i} + {i}? ", "answer": 2 * i} for i in range(30)]

REWARDS = """
from dice import dice

def seldom(completions, answer, **columns):  # a second function, which has nothing to say of half the problems
    return [None if a % 4 else float(len(text) % 3) for a, text in zip(answer, completions)]
"""
EVALUATED = ("accuracy_sampled", "accuracy_greedy", "pass_at_8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps on rows of a file with two rewards, a KL term, and a checkpoint and an evaluation at each."""
    folder = tmp_path_factory.mktemp("contents")
    save_tiny_model(folder / "model")
    place = folder / "run-place"
    recipe = tiny_recipe(
        place,
        task={"name": "dataset", "path": str(place / "rows.jsonl"), "held_out_share": 0.3, "held_out_size": 8},
        rewards=[{"path": f"{place}/dice.py:dice"}, {"path": f"{place}/more.py:seldom", "weight": 0.5}],
        algorithm={"name": "grpo", "kl": {"coefficient": 0.1}},
        evaluation={"every_steps": 1, "samples": 8, "brief_problems": 8},
        checkpoint={"every_steps": 1, "keep_last": 1},
        run={"num_steps": 5},
    )
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (place / "more.py").write_text(REWARDS)
    ended = command("rl", recipe, folder=place, pictures=True)
    assert ended.code == 0, ended.err
    assert ended.err == ""
    return place / "run"


def test_every_file_is_there(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    files = {"format", "config.yaml", "inputs.json", "metrics.jsonl", "scores.jsonl", "alarms.jsonl", "summary.json"}
    folders = {"tokenizer", "rollouts", "evaluations", "checkpoints", "model"}
    assert names == {*files, "curves.png", ".posttrain.lock", *folders}
    assert width_and_height(run / "curves.png") == (1650, 880)
    assert len(list((run / "rollouts").iterdir())) == 5


PAGE = (Path(__file__).parents[2] / "docs" / "run_folder.md").read_text()
NAMES = set(re.findall(r"`([^`\n]+)`", PAGE.replace("/step-N.parquet", "/").replace("/step-N/", "/")))


def test_the_page_of_the_run_folder_lists_every_file_and_column(run: Path) -> None:
    assert {name for name in CONTENTS if not NAMES & {name, f"{name}/"}} == set()
    files = [*(run / "rollouts").iterdir(), *(run / "evaluations").iterdir()]
    columns = {name for file in files for name in parquet.read_schema(file).names}
    patterns = {"score": "score/FUNCTION", "outcome": "outcome/FUNCTION"}
    assert {name for name in columns if patterns.get(name.partition("/")[0], name) not in NAMES} == set()
    declared = {name for name in dir(TokenColumns) if isinstance(getattr(TokenColumns, name), property)}
    given = {each.name for each in fields(TokenColumns)} - {"known"} | declared
    assert given - NAMES == set(), "columns of an update"


def test_the_example_of_the_page_reads_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block.replace("RUN/", f"{run}/"), {})  # noqa: S102  # a page of ours
    assert len(capsys.readouterr().out.splitlines()) >= 3


def test_held_out_completions_are_those_that_the_summary_was_made_of(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    for step, when in ((0, "before"), (5, "after")):
        table = parquet.read_table(run / "evaluations" / f"step-{step:06d}.parquet").to_pylist()
        rows = [row for row in table if row["evaluation"] == when]
        for name, greedy, each in (("accuracy_sampled", False, 8), ("accuracy_greedy", True, 1)):
            right = [row["judged"] >= 1 for row in rows if row["greedy"] is greedy]
            assert len(right) == 8 * each
            assert np.mean(right) == pytest.approx(summary[when][name], abs=1e-12)
        paid = [row["reward"] for row in rows if not row["greedy"]]
        assert np.mean(paid) == pytest.approx(summary[when]["reward"], abs=1e-12)
        assert {row["reward"] for row in rows if row["greedy"]} == {None}
    brief = [row["evaluation"] for row in table].count("brief")
    assert brief == 8, "the last step is measured in brief as well"


def test_every_metric_is_documented(run: Path) -> None:
    steps = records(run / "metrics.jsonl")
    assert [step["step"] for step in steps] == [*range(6), 5]
    assert {name for step in steps for name in step if not documented(name)} == set()
    assert all(step["num_non_finite"] == 0 for step in steps)
    assert {"reward", "kl", "loss", "seconds/update", "eval/accuracy_sampled", "rewards/seldom/mean"} <= steps[3].keys()


def test_the_summary_has_results_with_intervals_before_and_after(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    results = ["before", "after", "seconds", "tokens", "peak_memory_bytes", "versions", "device"]
    assert list(summary) == [*results, "steps", "algorithm", "rewards", "training_reward", "recipe", "machine"]
    for when in ("before", "after"):
        for name in (*EVALUATED, "reward"):
            low, high = summary[when][f"{name}_interval"]
            assert 0 <= low <= summary[when][name] <= high <= 2
        assert summary[when]["mean_length"] > 0
    steps = [row for step in range(1, 6) for row in rollout_rows(run, step)]
    assert summary["tokens"]["completion"] == sum(len(row["tokens"]) for row in steps)
    assert summary["seconds"]["total"] > 0
    assert (summary["steps"], summary["algorithm"], summary["rewards"]) == (5, "grpo", {"dice": 1.0, "seldom": 0.5})
    lines = metrics_of(run)
    assert summary["training_reward"] == {"first_step": lines[1]["reward"], "last_step": lines[5]["reward"]}
    assert (Path(summary["recipe"]).name, summary["machine"]["threads"]) == ("recipe.yaml", 1)
    assert summary["machine"]["cores"] >= 1


def test_the_last_line_of_metrics_is_what_was_measured_after_training(run: Path) -> None:
    (line,) = after_training(run)
    after = json.loads((run / "summary.json").read_text())["after"]
    for name in (*EVALUATED, "reward"):
        low, high = after[f"{name}_interval"]
        assert [line[f"eval/{name}{end}"] for end in ("", "_low", "_high")] == [after[name], low, high]
    assert {name for name in line if not name.startswith("eval/")} == {"step", "num_non_finite"}


def test_the_model_loads_without_posttrain_and_says_what_it_is(run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    inputs = tokenizer("What is 3 + 3? ", return_tensors="pt", return_token_type_ids=False)
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] > inputs["input_ids"].shape[1]
    card = (run / "model" / "README.md").read_text()
    mentions(card, "library_name: transformers", "grpo on dataset for 5 steps of 4 × 4 rollouts")


def test_rewards_and_advantages_can_be_worked_out_from_the_rollouts(run: Path) -> None:
    metrics = {step["step"]: step for step in metrics_of(run)}
    journal = records(run / "scores.jsonl")
    for step in range(1, 6):
        rows = rollout_rows(run, step)
        assert [(row["draw"], row["sample"]) for row in rows] == [(d, s) for d in range(4) for s in range(4)]
        # seldom says nothing where the answer is no multiple of 4
        assert all((row["score/seldom"] is None) == bool(json.loads(row["columns"])["answer"] % 4) for row in rows)
        rewards = np.array([row["score/dice"] + 0.5 * (row["score/seldom"] or 0.0) for row in rows])
        assert [row["reward"] for row in rows] == rewards.tolist()
        assert metrics[step]["reward"] == pytest.approx(rewards.mean(), abs=1e-15)
        groups = rewards.reshape(4, 4)
        deviation = groups.std(axis=1, keepdims=True)
        centred = groups - groups.mean(axis=1, keepdims=True)
        expected = np.divide(centred, deviation, where=deviation > 0, out=0 * groups)
        assert np.array([row["advantage"] for row in rows]) == pytest.approx(expected.flatten(), abs=1e-12)
        written = [line["scores"]["dice"] for line in journal if line["step"] == step]
        assert np.array(written).flatten().tolist() == [row["score/dice"] for row in rows]
        assert {row["weights_version"] for row in rows} == {sum(metrics[s]["num_updates"] for s in range(1, step))}


def test_rollouts_hold_tokens_their_log_probs_and_the_text_that_they_decode_to(run: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run / "tokenizer")
    rows = rollout_rows(run, 1)
    for row in rows:
        body = row["tokens"][:-1] if row["finish"] == "stop" else row["tokens"]
        assert tokenizer.decode(body) == row["completion"]
        assert tokenizer.decode(row["prompt_tokens"]) == row["prompt"]
        assert len(row["logprobs"]) == len(row["tokens"]) <= 6
        assert max(row["logprobs"]) <= 0
    # Untrained weights on 390 tokens: about ln 390 = 5.97 nats each.
    assert np.mean([value for row in rows for value in row["logprobs"]]) == pytest.approx(-np.log(390), abs=0.3)


def test_the_newest_and_the_best_checkpoint_are_kept(run: Path) -> None:
    accuracy = {step["step"]: step["eval/accuracy_sampled"] for step in metrics_of(run)[1:]}
    best = max(accuracy, key=lambda step: (accuracy[step], step))
    assert best != 5, "of no use: the last is the best"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"step-{best:06d}", "step-000005"]


def test_the_saved_config_gives_the_same_run_again(run: Path) -> None:
    assert "overwrite: false" in (run / "config.yaml").read_text()
    again = run.parent / "again"
    ended = command("rl", run / "config.yaml", "--run.folder", again, folder=run.parent)
    assert ended.code == 0, ended.err
    require_same(again, run)


PASSES = {"epochs_per_step": 2, "minibatches_per_epoch": 2}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kl": {"coefficient": 0.1}, "clip_low": 1e-3, "clip_high": 1e-3},
    "ppo": {},
}


def two_steps(folder: Path, name: str, *, keep: bool) -> Path:
    """Two steps of two passes each."""
    recipe = tiny_recipe(
        folder,
        algorithm={"name": name, **ALGORITHMS[name]},
        rewards=[{"path": f"{folder}/dice.py:dice"}],
        update={"learning_rate": 1e-2, "tokens_per_microbatch": 128, "measure_entropy": True, **PASSES},
        run={"num_steps": 2, "folder": str(folder / "run"), "threads": 1, "keep_token_columns": keep},
    )
    return posttrain.train(posttrain.load_recipe(recipe)).folder


def assert_scored_by(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """`policy_logprobs` are those that plain transformers computes with the saved model."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for row in rows:
        prompt, tokens = row["prompt_tokens"], row["tokens"]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).flatten()
        assert row["policy_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_columns_of_every_update_agree_with_the_metrics_and_change_no_number(name: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    on, off = two_steps(tmp_path / "on", name, keep=True), two_steps(tmp_path / "off", name, keep=False)
    kept = sorted((on / "token_columns").iterdir())
    assert [path.name for path in kept] == ["step-000001.parquet", "step-000002.parquet"]
    assert not (off / "token_columns").exists()
    means = {"ratio": "ratio/mean", "entropy": "entropy"}
    means_of = {"grpo": {"kl": "kl", "clipped": "clip_ratio/region_mean"}, "ppo": {"value/loss": "value/loss"}}
    means |= means_of[name]  # PPO's policy does not move yet
    for path, line in zip(kept, metrics_of(on)[1:], strict=True):
        whole = parquet.read_table(path)
        table = whole.filter(pc.field("update").is_valid()).to_pydict()
        assert set(table["update"]) == set(range(1, int(line["num_updates"]) + 1))
        for column, metric in means.items():
            values = [value for row in table[column] for value in row]
            assert len(values) == line["tokens/trained"]
            assert sum(values) / len(values) == pytest.approx(line[metric], rel=1e-5, abs=1e-8)
        assert ("new_values" in table) == (name == "ppo")
        rollouts = parquet.read_table(on / "rollouts" / path.name).to_pylist()
        sampled = {(row["draw"], row["sample"]): row for row in rollouts}
        for draw, sample, behaviour in zip(
            *(table[each] for each in ("draw", "sample", "behaviour_logprobs")), strict=True
        ):
            assert behaviour == sampled[draw, sample]["logprobs"]
        after = [row for row in whole.to_pylist() if row["update"] is None]
        assert {(row["draw"], row["sample"]) for row in after} == {*sampled}
        clip = {"grpo": 1e-3, "ppo": 0.2}[name]
        for row in after:
            own = sampled[row["draw"], row["sample"]]
            ratios, advantages = row["ratio"], own["token_advantages"]
            assert ratios == pytest.approx(np.exp(np.subtract(row["policy_logprobs"], own["logprobs"])), rel=1e-5)
            left = [
                (r > 1 + clip and a > 0) or (r < 1 - clip and a < 0) for r, a in zip(ratios, advantages, strict=True)
            ]
            assert row["clipped"] == left
    assert_scored_by(on / "model", rows=[{**sampled[row["draw"], row["sample"]], **row} for row in after])
    for path in kept:
        path.unlink()
    kept[0].parent.rmdir()
    require_same(on, off)
