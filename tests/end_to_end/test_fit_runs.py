"""`posttrain sft`, `reward-model` and `dpo` on rows: what their one loop does is so for each of them."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import posttrain
from posttrain.runs.reports import StepReport
from tests.support.accidents import Accident
from tests.support.commands import printed
from tests.support.fit_places import KINDS, place
from tests.support.runs import after_training, command, metrics_of

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
    assert len(files) == {"sft": 3, "reward-model": 5, "dpo": 4}[name], "dpo has the log-probs of the reference too"
    for file in files:
        assert (folder / file.relative_to(whole)).read_bytes() == file.read_bytes(), file


@every_kind
def test_other_rows_are_refused_when_a_run_is_resumed_unless_that_is_accepted(
    name: str, finished: Finished, tmp_path: Path
) -> None:
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
            "merged into the base when it is saved",
            "loss       -log σ(r_chosen - r_rejected), centring 0.01, margins of ",
            "chosen   ⟪yes ",
        ],
    ),
    "dpo": (
        ["--dpo.loss", "ipo", "--dpo.label-smoothing", "0.1", "--dpo.nll-weight", "0.2", "--dpo.reference", "live"],
        [
            "loss       ipo, beta 0.1, 0.1 of the labels taken to be wrong, log-probs per token, 0.2 × -log π",
            "reference  the policy at the beginning, computed for each batch",
            "!<|im_end|>⟫\n",
        ],
    ),
}
"""Flags, and what the plan says of them and shows of the first rows."""


@every_kind
def test_a_dry_run_shows_the_plan_and_the_first_rows_and_makes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place(name, tmp_path / "place"))
    flags, shown = DRY_RUNS[name]
    out = printed(name, "recipe.yaml", "--dry-run", *flags)
    for words in (*shown, "model      model, 0.0", "; 1", " held out\n", ": 2 epochs\n", "time       about "):
        assert words in out
    assert not Path("run").exists()
    assert "It fits" in printed("plan", "recipe.yaml")


class Ends(posttrain.Watcher):
    """After a step at which nothing is measured."""

    def on_step(self, report: StepReport) -> None:
        self.stopping = report.step == 3


@every_kind
def test_a_run_that_a_watcher_ends_is_measured_as_it_ended(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first measurement along the way: what is reported is of the weights that are saved."""
    monkeypatch.chdir(place(name, tmp_path / "place"))
    kind = KINDS[name]
    config = posttrain.load_recipe("recipe.yaml", kind=kind.config)
    run = kind.train(config, watchers=[Ends()])
    assert run.summary["steps"] == 3
    (last,) = after_training(run.folder)
    assert (last["step"], last["eval/loss"]) == (3, run.summary["after"]["loss"])
    assert last["eval/loss"] != run.summary["before"]["loss"]
