"""`posttrain sft`, `reward-model` and `dpo` on rows: what their one loop does, and what each leaves."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain.config import RewardModelConfig, SftConfig
from posttrain.config.reading import resolved_config
from posttrain.options.training import RunOptions
from posttrain.runs.reports import StepReport
from posttrain.training.fit import time_line
from posttrain.training.sft.sft_run import train_sft
from tests.support.accidents import Accident
from tests.support.commands import printed, refusal
from tests.support.conversations import chat_model, chat_tokenizer
from tests.support.fit_places import KINDS, place
from tests.support.own_objects import Notes
from tests.support.refusals import refused
from tests.support.runs import after_training, command, metrics_of, records

every_kind = pytest.mark.parametrize("name", KINDS)
Finished = Callable[[str], Path]


@every_kind
def test_a_run_is_measured_before_along_and_after_and_keeps_its_best_checkpoint(name: str, finished: Finished) -> None:
    kind, run = KINDS[name], finished(name) / "run"
    lines, summary = metrics_of(run), json.loads((run / "summary.json").read_text())
    counts, size = summary["rows" if name == "sft" else "pairs"], kind.options[kind.size]
    assert counts["trained"] + counts["held_out"] == len(kind.rows)
    num_steps = 2 * -(-counts["trained"] // size)
    assert [line["step"] for line in lines] == [*range(num_steps + 1)]
    measured = {line["step"]: line for line in lines if f"eval/{kind.metric}" in line}
    assert [*measured] == sorted({0, num_steps, *range(4, num_steps, 4)})
    for when, step in (("before", 0), ("after", num_steps)):
        assert summary[when][kind.metric] == measured[step][f"eval/{kind.metric}"]
    assert summary["examples" if name == "sft" else "pairs_learned"] == 2 * counts["trained"]
    scores = {step: kind.score(line) for step, line in measured.items() if step % 4 == 0 and step}
    best = [step for step, score in scores.items() if score == max(scores.values())]
    assert any((run / "checkpoints" / f"step-{step:06d}").is_dir() for step in best)


@every_kind
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_stopped_run_is_resumed_to_the_same_bits(name: str, number: int, code: int, finished: Finished) -> None:
    whole = finished(name)
    folder = place(name, whole.parent / f"stopped-{number}")
    accident = Accident(moment="open metrics.jsonl 8", signal=number)  # in the sixth step
    ended = command(name, "recipe.yaml", folder=folder, accident=accident)
    assert ended.code == code, ended.err
    resumed = command(name, "--resume", "run", folder=folder)
    assert resumed.code == 0, resumed.err
    assert metrics_of(folder / "run") == metrics_of(whole / "run")
    last = max((whole / "run" / "checkpoints").iterdir())
    files = [whole / "run" / "model" / "model.safetensors", *last.glob("*.safetensors"), *whole.glob("run/held_out.*")]
    assert len(files) == {"sft": 3, "reward-model": 5, "dpo": 5}[name], "dpo has the log-probs of the reference too"
    for file in [*files, *whole.glob("run/demonstrations/*")]:
        assert (folder / file.relative_to(whole)).read_bytes() == file.read_bytes(), file


@every_kind
def test_other_rows_are_refused_when_a_run_is_resumed(name: str, finished: Finished, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished(name), tmp_path / "changed"))
    step = int(sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())[-2][5:])
    text = (folder / "rows.jsonl").read_text()
    assert KINDS[name].changed[0] in text
    (folder / "rows.jsonl").write_text(text.replace(*KINDS[name].changed))
    refused = command(name, "--resume", "run", "--from-step", step, folder=folder)
    assert refused.code == 2
    assert "task.path = rows.jsonl has changed since the run began" in refused.err
    accepted = command(name, "--resume", "run", "--from-step", step, "--accept-changes", folder=folder)
    if name == "dpo":
        assert "dpo.reference = precomputed" in accepted.err, "what is kept is of other pairs"
    else:
        assert accepted.code == 0, accepted.err


DRY_RUNS: dict[str, tuple[list[str], list[str]]] = {
    "sft": (["--model.dtype", "bfloat16"], ["bfloat16 on cpu", "one step   5 rows, learning rate", "⟪<answer>"]),
    "reward-model": (
        ["--model.adapter.rank", "2"],
        [
            "merged into the base when the model is saved",
            "loss       -log σ(r_chosen - r_rejected), centring 0.01, margins of ",
            "chosen   ⟪yes ",
        ],
    ),
    "dpo": (
        ["--dpo.loss", "ipo", "--dpo.label-smoothing", "0.1", "--dpo.nll-weight", "0.2", "--dpo.reference", "live"],
        [
            "loss       ipo, beta 0.1, 0.1 of the labels assumed wrong, log-probs per token, 0.2 × -log π",
            "reference  the policy at the beginning, computed for each batch",
            "!<|im_end|>⟫\n",
        ],
    ),
}
"""Flags, and what the plan says of them and shows of the first rows."""


@every_kind
def test_a_dry_run_shows_the_plan_and_makes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place(name, tmp_path / "place"))
    flags, shown = DRY_RUNS[name]
    out = printed(name, "recipe.yaml", "--dry-run", *flags)
    for words in (*shown, "model      model, 0.0", "; 1", " held out\n", ": 2 epochs\n", "time       about "):
        assert words in out
    assert not Path("run").exists()
    assert "It fits" in printed("plan", "recipe.yaml")


TAKES = re.compile(
    r"^time +about \d+\.\d min: \d+\.\d\d s per step, \d+\.\d s for each of \d+ held-out measurements$", re.MULTILINE
)


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [(None, "2.0 min"), (2, "2.0 min"), (1.5, "2.0 min, ended after 1.5 by run.time_limit_minutes")],
)
def test_the_time_names_a_limit_that_ends_the_run(limit: float | None, minutes: str) -> None:
    """50 steps of 2 s, and two measurements of 10 s."""
    objective = SimpleNamespace(is_due=lambda step, count: step in (25, count))
    config = SimpleNamespace(run=RunOptions(time_limit_minutes=limit))
    session = SimpleNamespace(num_steps=50, objective=objective, config=config)
    said = time_line(session, 2.0, 10.0)  # type: ignore[arg-type]
    assert said == f"time       about {minutes}: 2.00 s per step, 10.0 s for each of 2 held-out measurements"


class Ends(posttrain.Watcher):
    """After a step at which nothing is measured."""

    def on_step(self, report: StepReport) -> None:
        self.stopping = report.step == 3


@every_kind
def test_a_run_that_a_watcher_ends_is_measured_then(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first measurement along the way: what is reported is of the weights that are saved."""
    monkeypatch.chdir(place(name, tmp_path / "place"))
    kind = KINDS[name]
    config = posttrain.load_recipe("recipe.yaml", kind=kind.config)
    run = kind.train(config, watchers=[Ends()])
    assert run.summary["steps"] == 3
    assert TAKES.search(capsys.readouterr().out), "after three steps it says how long all would take"
    (last,) = after_training(run.folder)
    assert (last["step"], last["eval/loss"]) == (3, run.summary["after"]["loss"])
    assert last["eval/loss"] != run.summary["before"]["loss"]


ROWS = KINDS["sft"].rows


def test_a_base_model_learns_to_stop_at_the_token_that_ends_turns(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.eos_token = "<|end|>"
    policy = posttrain.as_policy(chat_model(tokenizer), tokenizer)
    options: dict[str, Any] = {
        "task": {"name": "dataset", "held_out_share": 0},
        "run": {"folder": str(tmp_path / "run"), "num_steps": 1, "threads": 1},
    }
    with refused("rows:1, message 1", "'<|end|>'"):
        posttrain.train_sft(posttrain.load_recipe(kind=SftConfig, **options), rows=ROWS, policy=policy)
    policy = posttrain.as_policy(chat_model(tokenizer), tokenizer, stop_tokens=["<|im_end|>"])
    run = posttrain.train_sft(posttrain.load_recipe(kind=SftConfig, **options), rows=ROWS, policy=policy)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    folder = run.model_folder
    saved = posttrain.as_policy(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    assert saved.stop_ids == (0, end)


@pytest.fixture
def whole(finished: Callable[[str], Path]) -> Path:
    return finished("reward-model")


def test_a_run_leaves_a_classifier_that_is_right_and_its_scores_of_held_out_pairs(whole: Path) -> None:
    summary = json.loads((whole / "run" / "summary.json").read_text())
    after, apart = summary["after"], summary["pairs"]["held_out"]
    assert after["accuracy"] == 1.0
    assert after["accuracy_interval"] == [pytest.approx(0.78, abs=0.05), 1.0], "few prompts, all right: no point"
    assert sum(each["num_pairs"] for each in after["calibration"]) == apart
    assert summary["before"]["loss"] > after["loss"]
    told = records(whole / "run" / "held_out.jsonl")
    assert len(told) == apart
    assert all(each["chosen"] > each["rejected"] and each["where"].startswith("rows.jsonl:") for each in told)
    assert all("yes" in each["chosen_text"] and "no" in each["rejected_text"] and each["prompt"] for each in told)
    margins = [each["chosen"] - each["rejected"] for each in told]
    assert after["margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-6)
    assert (whole / "run" / "model" / "README.md").read_text().startswith("# Reward model")


def test_dpo_on_rows_leaves_its_held_out_pairs_with_their_implicit_rewards(finished: Finished) -> None:
    run = finished("dpo") / "run"
    rows, after = records(run / "held_out.jsonl"), json.loads((run / "summary.json").read_text())["after"]
    for side in ("chosen", "rejected"):
        mean = sum(row[side] for row in rows) / len(rows)
        assert mean == pytest.approx(after[f"rewards/{side}"], rel=1e-6)
    assert all(row["rejected_text"].removesuffix("\n").endswith("!<|im_end|>") for row in rows)


def test_sft_keeps_the_log_probs_of_held_out_rows_at_each_measurement(finished: Finished) -> None:
    run = finished("sft") / "run"
    measured = {line["step"]: line["eval/loss"] for line in records(run / "metrics.jsonl") if "eval/loss" in line}
    files = {int(file.stem[5:]): file for file in (run / "demonstrations").iterdir()}
    assert files.keys() == measured.keys()
    for step, file in files.items():
        rows = pq.read_table(file).to_pylist()
        logprobs = [each for row in rows for each in row["logprobs"]]
        assert [sum(row["learned"]) for row in rows] == [len(row["logprobs"]) for row in rows]
        assert [len(row["learned"]) for row in rows] == [len(row["tokens"]) for row in rows]
        assert -sum(logprobs) / len(logprobs) == pytest.approx(measured[step], rel=1e-5), "all are kept: fewer than 32"


def test_a_reward_models_adapter_is_merged() -> None:
    adapter = posttrain.load_recipe(kind=RewardModelConfig, task="dataset", model={"adapter": {"rank": 4}})
    assert adapter.model.adapter.save == "merged"
    again = posttrain.as_recipe(adapter)
    assert posttrain.load_recipe(kind=RewardModelConfig, **yaml.safe_load(again)) == resolved_config(adapter)


DEMONSTRATIONS: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 16, "mlp_size": 24, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
    "sft": {
        "learning_rate": 2e-2,
        "schedule": "cosine",
        "weight_decay": 0.01,
        "tokens_per_batch": 512,
        "tokens_per_microbatch": 256,
        "eval_every": 4,
        "eval_size": 8,
    },
    "checkpoint": {"every_steps": 4},
    "run": {"num_steps": 12, "threads": 1},
}


def demonstrations(place: Path) -> Path:
    place.mkdir()
    content = {**DEMONSTRATIONS, "run": {**DEMONSTRATIONS["run"], "folder": str(place / "run")}}
    (place / "recipe.yaml").write_text(yaml.safe_dump(content))
    return place / "recipe.yaml"


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    place = tmp_path_factory.mktemp("sft") / "whole"
    ended = command("sft", demonstrations(place), folder=place.parent)
    assert ended.code == 0, ended.err
    return place / "run"


def test_a_watcher_of_ones_own_sees_steps_evaluations_checkpoints_and_the_end(demonstrated: Path) -> None:
    place, notes = demonstrated.parent.parent / "watched", Notes("own/tokens", lambda report: report.num_tokens)
    run = train_sft(posttrain.load_recipe(demonstrations(place), kind=SftConfig), watchers=[notes])
    assert run.model_folder == place / "run" / "model"
    assert json.loads((run.folder / "summary.json").read_text()) == run.summary
    (first, *lines), tokens = metrics_of(place / "run"), 0
    for line in lines:
        tokens += line.pop("own/tokens")
        assert tokens == line["num_tokens"]
    assert [first, *lines] == metrics_of(demonstrated), "a watcher changes nothing"
    measured = {
        line["step"]: {name: value for name, value in line.items() if name.startswith("eval/")}
        for line in [first, *lines]
        if "eval/loss" in line
    }
    assert {report.step: report.results for report in notes.evaluations} == measured
    assert list(measured) == [0, *(step for step, _ in notes.saves)] == [0, 4, 8, 12]
    (end,) = notes.ends
    assert end.summary["eval_loss"] == measured[12]["eval/loss"]


def test_the_loss_falls_and_the_model_loads_without_posttrain(demonstrated: Path) -> None:
    before, *steps = metrics_of(demonstrated)
    losses = [step["loss"] for step in steps]
    # From ln 390 = 5.97 nats, a uniform guess, to far below the 4.8 of knowing the digits and tags from the rest.
    assert losses[0] == pytest.approx(5.97, abs=0.3)
    assert losses[-1] < 4.0
    summary = json.loads((demonstrated / "summary.json").read_text())
    measured = [step["eval/loss"] for step in steps if "eval/loss" in step]
    assert (summary["before"]["loss"], summary["after"]["loss"]) == (before["eval/loss"], measured[-1])
    assert summary["eval_loss"] == measured[-1], "the loss of the weights that are saved"
    assert summary["best_eval_loss"] == min(measured)
    manifest = json.loads((demonstrated / "checkpoints" / "step-000012" / "manifest.json").read_text())
    assert manifest["score"] == -measured[-1], "the best checkpoint is the one with the lowest loss"
    model, tokenizer = (kind.from_pretrained(demonstrated / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert tokenizer.decode(tokenizer.encode("<think>1+2=3</think>")) == "<think>1+2=3</think>"
    assert model.config.vocab_size == len(tokenizer)


def test_a_diverging_run_says_which_rate_to_lower(tmp_path: Path) -> None:
    said = refusal("sft", demonstrations(tmp_path / "place"), "--sft.learning-rate", "1e38", code=1)
    assert "No step was taken.  Start again with a lower sft.learning_rate." in said
