"""`eval`, `chat` and `trace` on a tiny random model: what they print is what the model did, or a run of it.

`posttrain trace RUN` credits tokens as the run did: by its trained critic, its reference and its whitening.
"""

import json
import math
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from torch import Tensor

from posttrain.algorithms.table import build_algorithm
from posttrain.cli import main
from posttrain.commands import chat, evaluate, serve, trace
from posttrain.commands.arguments import LOADING, TEMPLATE, layers_for_model, split_arguments
from posttrain.commands.trace_table import TracedRun, traced, traced_run
from posttrain.config import Config, build
from posttrain.generation.decoder_steps import DecoderSteps, KeyValueSlots
from posttrain.models.forward import PlainForward
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.model import ModelOptions, NewModelOptions
from posttrain.runs.rollout_file import read_rollouts
from posttrain.server.openai_routes import Service
from posttrain.training.session import CallerObjects, open_session
from tests.support.commands import printed, program_of, refusal
from tests.support.runs import metrics_of, save_tiny_model, tiny_recipe

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

PROBLEM = "Use all of 11, 25, 11 to make 25."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    shape = NewModelOptions(hidden_size=16, mlp_size=16, num_layers=1, num_heads=2, num_kv_heads=1)
    tokenizer = new_tokenizer()
    new_model(shape, tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_trace_shows_every_action_and_the_reward_with_the_last(model: str) -> None:
    Path("mine.py").write_text("def size(completion_ids, **columns):\n    return [7.0 for ids in completion_ids]\n")
    out = printed(
        "trace", model, "hello", "--rollout.max-completion-tokens", "5", "--rewards", "mine.py:size", "--sample", "1"
    )
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert 1 <= len(rows) <= 5
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    # A reward of 7 for all: it comes with the last action, and nobody did better than the siblings.
    assert [float(row[-2]) for row in rows] == [0.0] * (len(rows) - 1) + [7.0]
    assert {float(row[-1]) for row in rows} == {0.0}
    total = float(out.split("log-prob of the completion: ")[1].split(" nats")[0])
    assert math.isclose(total, sum(float(row[-3]) for row in rows), abs_tol=0.001 * len(rows))


def test_a_trace_may_leave_out_what_is_likely(model: str) -> None:
    ask = ["trace", model, "hello", "--rollout.max-completion-tokens", "24"]

    def rows(*flags: str) -> list[str]:
        return [line for line in printed(*ask, *flags).splitlines() if line.strip()[:1].isdigit()]

    logprobs = sorted(float(row.split()[-1]) for row in rows())
    middle = sum(logprobs[11:13]) / 2  # the twelve least likely lie below
    assert logprobs[11] < middle < logprobs[12]
    kept = [row for row in rows() if float(row.split()[-1]) < middle]
    assert rows("--below", str(middle)) == kept
    said = printed(*ask, "--below", str(middle))
    assert f"shown are 12 of {len(logprobs)} tokens: those with a log-prob of at most {middle:g}" in said
    assert "--below = 1.0: must be at most 0" in refusal(*ask, "--below", "1")


def test_a_trace_grades_a_countdown_problem_typed_as_the_bundled_model_knows_it(model: str) -> None:
    out = printed("trace", model, PROBLEM, "--rollout.max-completion-tokens", "3")
    assert "countdown: truncated" in out or "countdown: no_answer" in out
    by_number = printed("trace", model, "0", "--rollout.max-completion-tokens", "3")
    assert "countdown: " in by_number


def test_the_same_question_with_the_same_seed_gets_the_same_answer(model: str) -> None:
    ask = ["chat", model, "--prompt", "hello", "--sampling.max-completion-tokens", "8"]
    first, again, other = printed(*ask), printed(*ask), printed(*ask, "--seed", "1")
    assert first == again != other
    assert " tokens, ended by " in first


def test_chat_reads_questions_until_there_are_none(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter([PROBLEM, "hello", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    out = printed("chat", model, "--sampling.max-completion-tokens", "4", "--sampling.temperature", "0")
    assert out.count("tokens, ended by ") == 2


def wrong_step(steps: DecoderSteps, tokens: Tensor, slots: KeyValueSlots) -> Tensor:
    """One that gives every token the logit of the one before it."""
    return STEP(steps, tokens, slots).roll(1, dims=1)


STEP = DecoderSteps.step


@pytest.mark.parametrize("command", ["chat", "trace"])
def test_a_model_that_the_quick_way_to_sample_gets_wrong_is_asked_in_another(
    command: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = {"chat": "sampling", "trace": "rollout"}[command]
    ask = [command, model, *(["--prompt"] if command == "chat" else []), "hello", f"--{limit}.max-completion-tokens"]
    right = printed(*ask, "8")
    monkeypatch.setattr(DecoderSteps, "step", wrong_step)
    assert printed(*ask, "8") == right


def test_a_server_does_so_too(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(ModelOptions(path=model))
    monkeypatch.setattr(DecoderSteps, "step", wrong_step)
    service = Service(policy, TokenizerRenderer(policy.tokenizer), name="it", seconds=60)
    assert isinstance(service.engine.policy.forward, PlainForward)
    assert service.policy is service.engine.policy


def test_an_evaluation_writes_what_it_prints(model: str) -> None:
    flags = ["--task.held-out-size", "6", "--rollout.max-completion-tokens", "4", "--evaluation.samples", "2"]
    flags += ["--evaluation.pass-at-8-problems", "4", "--evaluation.probe-problems", "3"]
    out = printed("eval", model, *flags, "--output", "results.json")
    results = json.loads(Path("results.json").read_text())
    assert results["num_problems"] == 6
    assert results["samples_per_problem"] == 2
    low, high = results["accuracy_sampled_interval"]
    assert f"{results['accuracy_sampled']:.3f}  [{low:.3f}, {high:.3f}]" in out
    assert 0 <= results["accuracy_never_giving_up"] <= 1
    assert "pass at 8, 4 problems" in out
    assert "accuracy never giving up, 3 problems" in out
    none = printed("eval", model, *flags, "--evaluation.pass-at-8-problems", "0")
    assert "accuracy sampled" in none
    assert "pass at 8" not in none


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("eval", "MODEL is missing.  Usage: posttrain eval MODEL [RECIPE.yaml ...]"),
        ("trace bundled", "PROMPT is missing.  Usage: posttrain trace MODEL PROMPT"),
        ("chat bundled more", "unexpected argument more.  Usage: posttrain chat MODEL"),
        ("eval nowhere", "model.path = nowhere: no such folder."),
        ("eval nowhere --rollout.group-size 4", "--rollout.group-size: no such flag."),
        ("chat nowhere --sampling.top-p 7", "command line: sampling.top_p = 7.0: must be greater than 0 and at most 1"),
        ("trace . hello", "model.path = .: the folder has no config.json"),
    ],
)
def test_a_mistake_is_one_message(argv: str, expected: str) -> None:
    assert expected in refusal(*argv.split())


def test_a_file_that_cannot_be_written_is_told_before_the_evaluation(model: str, capsys) -> None:
    for output in ("nowhere/results.json", "."):
        assert main(["eval", model, "--output", output]) == 2
        printed = capsys.readouterr()
        assert f"--output {output}: name a file in an existing folder" in printed.err
        assert printed.out == ""


def test_a_sample_or_problem_that_does_not_exist_is_told(model: str) -> None:
    assert "--sample = 8: must be less than rollout.group_size = 8" in refusal("trace", model, "hello", "--sample", "8")
    assert "PROMPT 512: there are 512 held-out problems, numbered from 0" in refusal("trace", model, "512")


@pytest.mark.parametrize("command", [chat, evaluate, serve, trace])
def test_whatever_asks_a_model_loads_it_by_the_same_options(command: ModuleType) -> None:
    assert {*LOADING, *TEMPLATE} <= set(command.PROGRAM.only)


def test_a_trace_shows_and_draws_what_other_algorithms_make_of_the_same_completion(model: str, tmp_path: Path) -> None:
    Path("mine.py").write_text(
        "def first(completion_ids, **columns):\n    return [float(ids[0]) for ids in completion_ids]\n"
    )
    ask = ["trace", model, "hello", "--rollout.max-completion-tokens", "5", "--rewards", "mine.py:first"]
    beside = ["--beside", "[rloo, {name: reinforce, baseline: batch_mean}]", "--picture", "advantages.png"]
    alone, out = printed(*ask), printed(*ask, *beside)

    def rows(text: str) -> list[list[str]]:
        return [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]

    assert [row[-1] for row in rows(alone)] == [row[-3] for row in rows(out)]
    # Of 8 completions: r - mean of the others is 8/7 of r - mean of all.
    own, mean = (float(rows(out)[0][place]) for place in (-2, -1))
    assert mean != 0
    assert math.isclose(own, mean * 8 / 7, abs_tol=0.001)
    assert "reinforce, baseline: batch mean" in out
    assert Path("advantages.png").read_bytes().startswith(b"\x89PNG")
    for given, said in (("3", "must name algorithms, as in a recipe"), ("[rloo, rloo]", "rloo is named twice")):
        assert said in refusal(*ask, "--beside", given)
    for picture in ("nowhere/advantages.png", "advantages.txt"):
        assert f"--picture {picture}: name a file in an existing folder" in refusal(*ask, "--picture", picture)


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
    assert f"V is from the critic {runs[1]}/critic" in out
    assert len(set(column(out, "V"))) > 1
    assert "V of" not in out  # the other algorithm's is the same critic
    [line] = [line for line in metrics_of(runs[1]) if line.get("step") == 3 and "whitening/mean" in line]
    rule = f"mean {line['whitening/mean']:z.3f}, standard deviation {line['whitening/deviation']:.3f}"
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
    assert "V is from a new, untrained critic" in out
    assert set(column(out, "V")) == {7.0}
    assert "advantages are not whitened, in units of reward" in out
    assert set(column(out, "advantage")) == {0.0}  # it earned what was expected


def test_a_reference_that_is_gone_is_an_error(runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = runs[0].parent / "model"
    model.rename(model.with_name("elsewhere"))
    try:
        said = refusal("trace", runs[1], "0")
        assert "a KL to the run's first model" in said
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
    assert "the run's first model, which was an object in Python" in refusal("trace", run, "0")


def test_a_problem_without_columns_has_a_reward_and_typed_text_none(tmp_path: Path, monkeypatch) -> None:
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
