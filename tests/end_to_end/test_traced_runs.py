"""`posttrain trace RUN` credits tokens as the run did: by its trained critic, its reference and its whitening."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from posttrain.algorithms.table import build_algorithm
from posttrain.cli import main
from posttrain.commands.arguments import layers_for_model, split_arguments
from posttrain.commands.trace_table import TracedRun, traced, traced_run
from posttrain.config import Config, build
from posttrain.runs.rollout_file import read_rollouts
from posttrain.training.session import CallerObjects, open_session
from tests.support.commands import printed, program_of, refusal
from tests.support.runs import metrics_of, save_tiny_model, tiny_recipe

ALGORITHM = {
    "name": "ppo",
    "critic": {"fit_steps": 0},
    "gae": {"lambda_policy": 0.9},
    "kl": {"coefficient": 0.5, "estimator": "k1", "place": "reward"},
    "adaptive_kl": {"target": 0.001, "horizon": 20.0},
}
SECTIONS: dict[str, Any] = {
    "algorithm": ALGORITHM,
    "rollout": {"prompts_per_step": 8, "group_size": 1},
    "evaluation": {"every_steps": 0, "samples": 1},
    "run": {"num_steps": 2},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of two steps, and the same run after its third."""
    made = tmp_path_factory.mktemp("traced")
    save_tiny_model(made / "model")
    run = made / "at" / "run"
    assert main(["rl", str(tiny_recipe(made / "at", **SECTIONS))]) == 0
    shutil.copytree(run, made / "two")
    assert main(["rl", "--resume", str(run), "--run.num-steps", "3"]) == 0
    return made / "two", run


def known(run: Path) -> TracedRun:
    found = traced_run(str(run))
    assert found is not None
    return found


def test_a_stored_rollout_is_credited_as_the_step_that_sampled_it_did(runs: tuple[Path, Path]) -> None:
    """Step 3 sampled and credited with what two steps had made: policy, critic, coefficients and scales."""
    two, three = runs
    run = known(two)
    config = build(Config, layers_for_model(str(two), split_arguments([], program_of("trace"))))
    config, algorithm = run.with_reference(config, build_algorithm(config.algorithm)), build_algorithm(config.algorithm)
    file = three / "rollouts" / "step-000003.parquet"
    rows = pq.read_table(file).to_pylist()
    whitening = known(three).whitening(config)
    assert whitening is not None
    assert whitening[0] == 3
    with open_session(config, CallerObjects(algorithm=run.with_critic(algorithm))) as session:
        run.restore(session.learner, config)
        for group, row in zip(read_rollouts(file)[0], rows, strict=True):
            [credit] = traced(session, group, 0, whitening=whitening).credits.values()
            assert credit.values == pytest.approx(row["token_values"], abs=1e-6)
            assert credit.advantages == pytest.approx(row["token_advantages"], abs=1e-5)
    # None of it would hold of a new critic, of the trained policy as its own reference, or of the first coefficient.
    assert max(abs(value) for row in rows for value in row["token_values"]) > 0.01
    kl = [line["kl_completion"] for line in metrics_of(three) if "kl_completion" in line]
    coefficients = [line["kl_coefficient"] for line in metrics_of(three) if "kl_coefficient" in line]
    assert abs(kl[2]) > 0.001
    assert coefficients[2] != coefficients[0]


def column(out: str, name: str) -> list[float]:
    """The numbers of a column of the table, counted from the right."""
    lines = out.splitlines()
    [heads] = [line.split() for line in lines if line.split()[:2] == ["t", "state"]]
    place = heads.index(name) - len(heads)
    return [float(line.split()[place]) for line in lines if line.strip()[:1].isdigit()]


def test_the_command_takes_the_run_s_critic_and_says_so(runs: tuple[Path, Path]) -> None:
    out = printed("trace", runs[1], "0", "--beside", "{name: ppo, whitening: none}")
    assert f"V is the critic {runs[1]}/critic" in out
    assert len(set(column(out, "V"))) > 1
    assert "V of" not in out  # the other algorithm's is the same critic
    [line] = [line for line in metrics_of(runs[1]) if line.get("step") == 3 and "whitening/mean" in line]
    rule = f"mean {line['whitening/mean']:z.3f}, deviation {line['whitening/deviation']:.3f}"
    assert f"advantages are whitened as in step 3 of the run: {rule}" in out
    assert "-0.000" not in out


def test_a_critic_that_is_new_and_advantages_that_are_raw_are_told(runs: tuple[Path, Path]) -> None:
    """Of one completion, whitened by itself, the advantages would have mean 0, whatever it earned."""
    model = str(runs[1] / "model")
    ask = [model, "0", "--algorithm.name", "ppo", "--rollout.group-size", "1", "--rewards", "mine.py:seven"]
    recipe = Path(runs[1].parent / "mine.py")
    recipe.write_text("def seven(completions, **columns):\n    return [7.0 for _ in completions]\n")
    ask[-1] = f"{recipe}:seven"
    out = printed("trace", *ask, "--algorithm.gae.lambda-policy", "1", "--algorithm.critic.head", "linear")
    assert "V is a new critic, which knows nothing" in out
    assert set(column(out, "V")) == {7.0}
    assert "advantages are not whitened, in units of reward" in out
    assert set(column(out, "advantage")) == {0.0}  # it earned what was expected


def test_a_reference_that_is_gone_is_an_error(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = runs[0].parent / "model"
    model.rename(model.with_name("elsewhere"))
    try:
        said = refusal("trace", runs[1], "0")
        assert "a KL to the model that the run began with" in said
        assert str(model) in said
        elsewhere = str(model.with_name("elsewhere"))
        assert main(["trace", str(runs[1]), "0", "--reference.path", elsewhere]) == 0
        assert main(["trace", str(runs[1]), "0", "--algorithm.kl", "None", "--algorithm.adaptive-kl", "None"]) == 0
    finally:
        model.with_name("elsewhere").rename(model)


def test_a_reference_that_was_an_object_is_an_error(runs: tuple[Path, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs[0], tmp_path / "run")
    inputs = json.loads((run / "inputs.json").read_text())
    inputs["objects"] = {"policy": {"is": "Qwen3ForCausalLM of 1 parameters", "sha256": "d"}}
    (run / "inputs.json").write_text(json.dumps(inputs))
    assert "the model that the run began with, which was an object in Python" in refusal("trace", run, "0")


def test_a_problem_without_columns_has_a_reward_and_typed_text_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The opening of a sentence is a problem of its task, and has nothing but its text."""
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    asked = ["period-count-ppo", "--model.path", "model", "--run.num-steps", "1", "--rollout.prompts-per-step", "4"]
    asked += ["--rollout.max-completion-tokens", "4", "--evaluation.samples", "1", "--task.held-out-size", "2"]
    assert main(["rl", *asked, "--run.folder", "run"]) == 0
    of_problem = printed("trace", "run", "0")
    assert "nan" not in of_problem
    assert "rewards of the group" in of_problem
    of_text = printed("trace", "run", "The cat")
    assert "nan" not in of_text
    assert "No reward: the text is not a problem of the task." in of_text
    row = next(line for line in of_text.splitlines() if line.lstrip().startswith("0 "))
    assert len(row.rstrip().split("  ")[-1].split()) == 1, "neither a reward nor an advantage is made up"
