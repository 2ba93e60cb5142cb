"""Probes, which only one task has, and behaviours: measured over a run, kept, shown, and read again by the command."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

import posttrain
from posttrain.behaviours.behaviour_reader import BehaviourReader, read_history
from posttrain.behaviours.behaviour_table import chosen_rows
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.task import CountdownOptions
from posttrain.records import Finish, Group
from posttrain.tasks.countdown_task import CountdownTask
from tests.support.commands import printed, refusal
from tests.support.dice import dice
from tests.support.own_objects import Counts, Notes, Sums, config, policy_of
from tests.support.pages import documented
from tests.support.pictures import width_and_height
from tests.support.runs import command, metrics_of, records, save_tiny_model, tiny_recipe

LIMIT = 5
"""Tokens of a completion."""


def even_share(groups: Sequence[Group]) -> float:
    tokens = [token for group in groups for rollout in group.rollouts for token in rollout.tokens]
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


class Probed(Sums):
    """Sums with a probe of each kind; what they were given is kept."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.read: list[Sequence[Group]] = []
        self.sampled: list[Sequence[Group]] = []

    def probes(self) -> Mapping[str, posttrain.Probe]:
        return {
            "even": posttrain.Probe(
                readings={"even_share": posttrain.Reading("even token ids"), "num_read": posttrain.Reading("read", 0)},
                measure=self.even,
            ),
            "endless": posttrain.Probe(
                readings={"endless_length": posttrain.Reading("length without an end", digits=2)},
                measure=self.length,
                suppressed=("0",),
                endless=True,
            ),
            "of no token": posttrain.Probe(
                readings={"never": posttrain.Reading("never")}, measure=self.length, suppressed=("no single token",)
            ),
        }

    def even(self, groups: Sequence[Group]) -> dict[str, float]:
        self.read.append(groups)
        return {"even_share": even_share(groups), "num_read": float(len(groups))}

    def length(self, groups: Sequence[Group]) -> dict[str, float]:
        self.sampled.append(groups)
        lengths = [len(rollout.tokens) for group in groups for rollout in group.rollouts]
        return {"endless_length": sum(lengths) / len(lengths)}


@pytest.fixture(scope="module")
def probed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[posttrain.Run, Probed, Notes, Counts]:
    policy = policy_of(model)
    task, keeps, engine = Probed(policy), Notes(), Counts(policy)
    made = config(
        tmp_path_factory.mktemp("run") / "run", 2, evaluation={"every_steps": 1, "samples": 3, "brief_problems": 2}
    )
    run = posttrain.train(made, policy=policy, task=task, engine=engine, rewards=[dice], watchers=[keeps])
    return run, task, keeps, engine


def test_a_probe_reads_completions_before_and_after(probed: tuple[posttrain.Run, Probed, Notes, Counts]) -> None:
    run, task, keeps, _ = probed
    summary = json.loads((run.folder / "summary.json").read_text())
    full = [report.groups for report in keeps.evaluations if report.groups]
    assert len(task.read) == len(full) == 2, "before and after, and no evaluation in brief"
    for when, read, sampled in zip(("before", "after"), task.read, full, strict=True):
        assert list(read) == list(sampled)
        assert [len(group.rollouts) for group in read] == [3, 3, 3]
        assert summary[when]["even_share"] == even_share(read)
        assert summary[when]["num_read"] == 3
        assert summary[when]["endless_length"] == LIMIT
        assert "never" not in summary[when]


def test_a_probe_with_texts_that_may_not_be_sampled_has_completions_of_its_own_without_them(
    probed: tuple[posttrain.Run, Probed, Notes, Counts],
) -> None:
    _, task, _, engine = probed
    (zero,) = engine.tokenizer.encode("0", add_special_tokens=False)
    assert len(task.sampled) == 2, "that of two tokens has none"
    for groups in task.sampled:
        assert [group.prompt.id for group in groups] == ["held-out/0", "held-out/1", "held-out/2"]
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            assert (len(rollout.tokens), rollout.finish) == (LIMIT, Finish.LENGTH)
            assert not {zero, *engine.stop_ids} & set(rollout.tokens)


def test_probes_that_sample_can_be_left_out(model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    task, engine = Probed(policy), Counts(policy)
    made = config(tmp_path / "run", 1, evaluation={"every_steps": 0, "samples": 3, "sampling_probes": False})
    run = posttrain.train(made, policy=policy, task=task, engine=engine, rewards=[dice])
    assert (len(task.read), task.sampled) == (2, [])
    after = cast(dict[str, float], run.summary["after"])
    assert "even_share" in after
    assert "endless_length" not in after


def test_readings_are_metrics_of_step_0_on_their_page(probed: tuple[posttrain.Run, Probed, Notes, Counts]) -> None:
    run, task, _, _ = probed
    first, *others = metrics_of(run.folder)
    readings = {name for probe in task.probes().values() for name in probe.readings}
    assert first["eval/even_share"] == run.summary["before"]["even_share"]
    assert first["eval/endless_length"] == LIMIT
    assert [name for name in first if not documented(name, probes=readings)] == []
    assert {name for name in first if not documented(name)} == {
        "eval/even_share",
        "eval/num_read",
        "eval/endless_length",
    }
    assert not [name for line in others for name in line if name.removeprefix("eval/") in readings]


def test_the_end_of_a_run_and_the_model_card_show_readings_by_their_labels(model: Path, tmp_path: Path, capsys) -> None:
    policy = policy_of(model)
    run = posttrain.train(config(tmp_path / "run", 1), policy=policy, task=Probed(policy), rewards=[dice])
    printed = capsys.readouterr().out
    card = (run.model_folder / "README.md").read_text()
    before, after = (run.summary[when] for when in ("before", "after"))
    for label, name, digits in (
        ("even token ids", "even_share", 3),
        ("read", "num_read", 0),
        ("length without an end", "endless_length", 2),
    ):
        cells = [f"{results[name]:.{digits}f}" for results in (before, after)]
        assert f"| {label} | {cells[0]} | {cells[1]} |" in card
        assert re.search(rf"^{label} +{re.escape(cells[0])} +{re.escape(cells[1])}$", printed, flags=re.MULTILINE)
    assert "never" not in printed + card


def test_every_probe_of_countdown_is_on_the_page_of_metrics(model: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "place", model={"path": str(model)}, run={"num_steps": 1})
    assert command("rl", recipe, folder=tmp_path / "place").code == 0
    first, *_ = metrics_of(tmp_path / "place" / "run")
    assert {"eval/format_rate", "eval/accuracy_never_giving_up"} <= first.keys()
    countdown = CountdownTask(CountdownOptions(), TokenizerRenderer(policy_of(model).tokenizer), seed=0)
    readings = {f"eval/{name}" for probe in countdown.probes().values() for name in probe.readings}
    assert [name for name in {*first, *readings} if not documented(name)] == []


DRAWS = True
OWN = {"has_digit": {"any": ["[0-9]"]}}


def measuring(folder: Path, **behaviours: Any) -> posttrain.Config:
    return posttrain.load_recipe(
        model={"path": str(folder / "model")},
        task={"name": "countdown", "held_out_size": 4},
        rollout={"prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 8},
        evaluation={"every_steps": 0, "samples": 2},
        checkpoint={"every_steps": 0},
        behaviours=behaviours,
        run={"folder": str(folder / "run"), "num_steps": 3, "threads": 1, "overwrite": True},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("behaviours")
    save_tiny_model(folder / "model")
    return posttrain.train(measuring(folder, measure=["several_tries"], patterns=OWN)).folder


def test_rates_are_metrics_of_every_step_and_of_both_evaluations(run: Path) -> None:
    lines = records(run / "metrics.jsonl")
    names = {f"behaviour{kind}/{row}" for kind in ("", "_signs") for row in ("several_tries", "has_digit")}
    for step in lines[1:4]:
        assert {name for name in step if name.startswith("behaviour")} == names
    for evaluation in (lines[0], lines[4]):
        assert {name for name in evaluation if "behaviour" in name} == {f"eval/{name}" for name in names}
    summary = json.loads((run / "summary.json").read_text())
    assert names <= summary["before"].keys() & summary["after"].keys()
    assert all(documented(name) and documented(f"eval/{name}") for name in names)
    # A random model of 380 tokens, ten of which are digits and more of which hold one, writes some.
    assert 0 < max(step["behaviour/has_digit"] for step in lines[1:4]) <= 1


def test_what_is_read_afterwards_is_what_the_run_measured(run: Path) -> None:
    history = read_history(run, BehaviourReader(chosen_rows(posttrain.load_recipe(run / "config.yaml").behaviours)))
    lines = records(run / "metrics.jsonl")[1:4]
    for name in ("several_tries", "has_digit"):
        steps, shares = history.shares(name)
        assert (steps, shares) == ([1, 2, 3], pytest.approx([line[f"behaviour/{name}"] for line in lines]))
        assert history.signs(name)[1] == pytest.approx([line[f"behaviour_signs/{name}"] for line in lines])


def test_the_command_shows_a_table_and_draws_a_picture(run: Path) -> None:
    said = printed("behaviours", run)
    assert f"{run}: 24 completions of 3 steps" in said
    assert [line.split("|")[1].strip() for line in said.splitlines() if line.startswith("| `")] == ["`has_digit`"]
    assert "\nNot seen in any completion: `several_tries`.\n" in said  # of a random model
    assert width_and_height(run / "behaviours.png")[0] == 1540  # 14 inches of 110 dots

    picture = run / "others.png"
    assert "`verification`" in printed("behaviours", run, "--behaviours.measure", "prose", "--picture", picture)
    assert picture.is_file()


def test_a_folder_without_rollouts_is_told_and_a_run_that_measures_nothing_has_no_such_metrics(tmp_path: Path) -> None:
    assert "has no rollouts/step-N.parquet" in refusal("behaviours", tmp_path)
    (tmp_path / "config.yaml").write_text("demonstrator: {num_examples: 3}\n")  # of another kind
    assert "has no rollouts/step-N.parquet" in refusal("behaviours", tmp_path)
    save_tiny_model(tmp_path / "model")
    with posttrain.steps(measuring(tmp_path)) as steps:
        assert not [name for name in next(steps).metrics if name.startswith("behaviour")]
    said = refusal("behaviours", tmp_path / "run", "--picture", tmp_path / "no" / "where.png")
    assert "name a file in an existing folder" in said
