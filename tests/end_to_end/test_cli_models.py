"""`eval`, `chat` and `trace` on a tiny random model: what they print is what the model did."""

import json
import math
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

from posttrain.cli import main
from posttrain.commands import chat, evaluate, serve, trace
from posttrain.commands.arguments import LOADING, TEMPLATE
from posttrain.commands.serving.completion_service import Service
from posttrain.generation.decoder_steps import DecoderSteps, KeyValueSlots
from posttrain.models.forward import PlainForward
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.model import ModelOptions, NewModelOptions
from tests.support.commands import printed, refusal

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
    assert f"shown are 12 of {len(logprobs)} tokens: those with a log-prob of at most {middle:g}" in printed(
        *ask, "--below", str(middle)
    )
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
    out = printed("eval", model, *flags, "--output", "results.json")
    results = json.loads(Path("results.json").read_text())
    assert results["num_problems"] == 6
    assert results["samples_per_problem"] == 2
    low, high = results["accuracy_sampled_interval"]
    assert f"{results['accuracy_sampled']:.3f}  [{low:.3f}, {high:.3f}]" in out
    assert 0 <= results["accuracy_never_giving_up"] <= 1
    assert results["pass_at_8"] is None  # of two samples it cannot be said
    assert "pass at 8" not in out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("eval", "MODEL is missing: posttrain eval MODEL [RECIPE.yaml ...]"),
        ("trace bundled", "PROMPT is missing: posttrain trace MODEL PROMPT"),
        ("chat bundled more", "no use for more: posttrain chat MODEL"),
        ("eval nowhere", "model.path = nowhere: no such folder."),
        ("eval nowhere --rollout.group-size 4", "--rollout.group-size: no such flag."),
        ("chat nowhere --sampling.top-p 7", "command line: sampling.top_p = 7.0: must be greater than 0 and at most 1"),
        ("trace . hello", "model.path = .: the folder has no config.json"),
    ],
)
def test_a_mistake_is_one_message(argv: str, expected: str) -> None:
    assert expected in refusal(*argv.split())


def test_a_file_that_cannot_be_written_is_told_before_the_evaluation(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for output in ("nowhere/results.json", "."):
        assert main(["eval", model, "--output", output]) == 2
        printed = capsys.readouterr()
        assert f"--output {output}: name a file in a folder that exists" in printed.err
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
    for given, said in (("3", "name algorithms, as a recipe writes them"), ("[rloo, rloo]", "rloo is named twice")):
        assert said in refusal(*ask, "--beside", given)
    for picture in ("nowhere/advantages.png", "advantages.txt"):
        assert f"--picture {picture}: name a file in a folder that exists" in refusal(*ask, "--picture", picture)
