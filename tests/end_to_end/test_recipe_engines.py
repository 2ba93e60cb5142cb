"""Engines of a user: a recipe names one, it samples for every command, and its log-probs are held to a limit."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

import posttrain
from posttrain.binding import module_from
from posttrain.config import DpoConfig
from posttrain.errors import RunError
from posttrain.generation.engine import PAGE as PAGE_OF_CHANGE, Sampling, SamplingTimeout, require_engine, sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import gap_metrics, most_of
from posttrain.generation.request import Request, Sampled
from posttrain.models.loading.model_folder import load_policy, load_policy_to_train
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.rendering import renderer_of
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.records import Finish, Prompt
from posttrain.runs.alarms import GAP, GAP_LIMIT, MOST_GAPS
from tests.support.commands import printed
from tests.support.dice import dice
from tests.support.engines import ChangedSampling, EngineServer, engine_server
from tests.support.own_objects import Counts, Sums, config, policy_of
from tests.support.pages import blocks, write_files
from tests.support.refusals import refused
from tests.support.runs import metrics_of, save_tiny_model, tiny_recipe
from tests.support.tiny import STOP_IDS, request, some_prompts, tiny_policy

PAGE = blocks((Path(__file__).parents[2] / "docs" / "guides" / "your_own.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    write_files(PAGE, folder)
    return save_tiny_model(folder / "model")


@pytest.fixture
def server(model: Path) -> Iterator[EngineServer]:
    with engine_server(model) as made:
        yield made


def over_http(model: Path, server: EngineServer, **options: object) -> dict[str, Any]:
    """The section of a recipe that names the page's engine."""
    return {"path": f"{model.parent}/http_engine.py:HttpEngine", "url": f"http://127.0.0.1:{server.port}", **options}


def test_the_engine_of_the_page_is_short() -> None:
    (text,) = (text for _, name, text in PAGE if name == "http_engine.py")
    assert len(text.splitlines()) <= 60


def test_a_run_over_http_has_the_metrics_of_one_in_process(model: Path, server: EngineServer, tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": {"path": str(model)}, "run": {"num_steps": 2}}
    ours = posttrain.load_recipe(tiny_recipe(tmp_path / "ours", **given))
    theirs = posttrain.load_recipe(tiny_recipe(tmp_path / "theirs", **given, engine=over_http(model, server)))
    posttrain.train(ours)
    posttrain.train(theirs)
    assert server.versions == [0, 1, 2]
    for mine, other in zip(metrics_of(tmp_path / "ours/run"), metrics_of(tmp_path / "theirs/run"), strict=True):
        assert mine.keys() - other.keys() <= {"eval/accuracy_never_giving_up"}  # its probe suppresses tokens
        for name, value in other.items():
            assert value == pytest.approx(mine[name], rel=1e-3, abs=1e-4), name
    kept = json.loads((tmp_path / "theirs/run/inputs.json").read_text())["files"]
    assert kept.keys() >= {"engine.path"}


def test_a_recipes_engine_measures_and_samples_pairs(model: Path, server: EngineServer, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "case", model={"path": str(model)}, engine=over_http(model, server))
    config = posttrain.load_recipe(recipe)
    assert posttrain.evaluate(str(model), config)["num_problems"] == 4
    assert server.versions == [0]
    rounds = {
        "task": {"name": "countdown", "held_out_size": 4},
        "rewards": [{"path": f"{tmp_path}/case/dice.py:dice"}],
        "rollout": {"group_size": 4, "max_completion_tokens": 6},
        "dpo": {"rounds": 1, "steps_per_round": 1, "prompts_per_round": 4},
        "evaluation": {"every_steps": 0, "samples": 1},
        "run": {"folder": str(tmp_path / "dpo"), "threads": 1},
        "engine": over_http(model, server),
    }
    posttrain.train_dpo(posttrain.load_recipe(kind=DpoConfig, model={"path": str(model)}, **rounds))
    assert server.versions[1:] == [0, 0, 1]
    with refused("engine", "rounds"):
        posttrain.load_recipe(kind=DpoConfig, task={"path": "rows.jsonl"}, engine=over_http(model, server))


def test_a_server_that_hangs_is_named_with_the_seconds(model: Path, server: EngineServer) -> None:
    policy = load_policy(ModelOptions(path=str(model)), inference=True)
    made = module_from(model.parent / "http_engine.py", "test").HttpEngine
    engine = require_engine(made(policy, f"http://127.0.0.1:{server.port}", patience_seconds=0.3))
    with server.lock, refused("HttpEngine", "0.3", error=SamplingTimeout):
        sample_groups(engine, some_prompts([4]), request(3))


WRONG = {
    "mine.py:missing": "no class `missing`",
    "mine.py:made": "not a class",
    "mine.py:Old": "samples by `rollout`.*020-one-way-to-sample",
    "mine.py:NoPolicy": r"cannot be called as \(policy, \*\*options\)",
    "no-file": "is not FILE.py:CLASS, such as mine.py:MyEngine",
}


@pytest.mark.parametrize("path", WRONG)
def test_what_is_no_engine_is_refused(path: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def made(policy): ...\n\n"
        "class Old:\n    def __init__(self, policy): ...\n    def rollout(self): ...\n\n"
        "class NoPolicy:\n    def __init__(self): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    with refused("engine"):
        recipe = tiny_recipe(tmp_path / "case", model={"path": str(model)}, engine={"path": path})
        posttrain.train(posttrain.load_recipe(recipe))


def test_the_turns_of_the_page_are_sampled_and_given_in_turn(model: Path) -> None:
    (text,) = (text for _, name, text in PAGE if name == "turns.py")
    assert len(text.splitlines()) <= 60
    turns = module_from(model.parent / "turns.py", "test")
    assert [turns.result(each) for each in ("3 + 4 =", "so 12*3=", "9 - 11 =", "=", "3 + =")] == [
        "7",
        "36",
        "-2",
        "",
        "",
    ]
    policy = load_policy(ModelOptions(), inference=True)
    question = "Use all of 11, 25, 11 to make 25."
    prompts = [renderer_of(policy).render(question, id=str(number)) for number in range(4)]
    parts = turns.conversations(InProcessEngine(policy), prompts, request(), 60)
    replies = [tokens for each in parts for who, tokens in each if who == "calculator"]
    assert len(replies) > 3
    for conversation in parts:
        assert sum(len(tokens) for who, tokens in conversation if who == "policy") <= 60
        for (who, tokens), (other, reply) in pairwise(conversation):
            assert {who, other} == {"policy", "calculator"}
            if other == "calculator":
                assert policy.tokenizer.decode(reply) == turns.result(policy.tokenizer.decode(tokens))


def test_the_example_of_the_decision_is_an_engine() -> None:
    """What replaces a `rollout` of one's own, with two stand-ins for what it did."""
    page = (Path(__file__).parents[2] / PAGE_OF_CHANGE).read_text(encoding="utf-8")
    (text,) = (text for language, _, text in blocks(page) if language == "python")
    names: dict[str, Any] = {}
    exec(text, names)  # noqa: S102  # a page of ours

    class Mine(names["MyEngine"]):  # type: ignore[misc]
        def send(self, weights: Mapping[str, torch.Tensor]) -> None:
            self.names = set(weights)

        def sampled(self, prefix: tuple[int, ...], limit: int) -> tuple[list[int], list[float]]:
            return [prefix[0]] * (limit - 1) + [STOP_IDS[0]], [-1.0] * limit

    policy = tiny_policy()
    engine = require_engine(Mine(policy))
    engine.load(ExportedWeights(policy), 2)
    (group,) = sample_groups(engine, [Prompt(id="p", text="", tokens=(5, 6))], request(2, 3))
    assert engine.names >= {"model.norm.weight"}
    assert {(each.tokens, each.finish, each.weights_version) for each in group.rollouts} == {
        ((5, 5, STOP_IDS[0]), Finish.STOP, 2)
    }


class Elsewhere(Counts):
    """An engine with random numbers of its own, which changes what ours samples."""

    reproducible = False
    change: Callable[[Sampled], Sampled]

    def open(self, request: Request) -> Sampling:
        return ChangedSampling(super().open(request), lambda done: [type(self).change(each) for each in done])


class Doubling(Elsewhere):
    @staticmethod
    def change(sampled: Sampled) -> Sampled:
        return replace(sampled, logprobs=tuple(2 * value for value in sampled.logprobs))


class Answering(Elsewhere):
    """Puts tokens that it did not sample in place of the last ones, as sure of them as of a tool's reply."""

    @staticmethod
    def change(sampled: Sampled) -> Sampled:
        return replace(sampled, logprobs=(*sampled.logprobs[:-1], 0.0))


class Stating(Elsewhere):
    logprob_gap = 0.01

    @staticmethod
    def change(sampled: Sampled) -> Sampled:
        return replace(sampled, logprobs=tuple(value - 0.05 for value in sampled.logprobs))


class Near(Stating):
    logprob_gap = None


def run(model: Path, folder: Path, engine: type[Elsewhere]) -> posttrain.Run:
    policy = policy_of(model)
    return posttrain.train(config(folder), policy=policy, task=Sums(policy), engine=engine(policy), rewards=[dice])


@pytest.mark.parametrize(("engine", "limit"), [(Doubling, 0.1), (Answering, 0.1), (Stating, 0.01)])
def test_an_engine_whose_logprobs_are_not_the_policys_ends_the_run_whatever_it_says_of_its_numbers(
    engine: type[Elsewhere], limit: float, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with refused("for 3 steps", f"{limit} nats", error=RunError):
        run(model, tmp_path / "run", engine)
    first = metrics_of(tmp_path / "run")[1]
    assert first[GAP] > first[GAP_LIMIT] == limit
    assert "ALARM, step 1, sampler gap" in capsys.readouterr().out


@pytest.mark.parametrize("passes", [1, 2])
def test_an_adapters_dropout_hides_no_gap(passes: int, model: Path, tmp_path: Path) -> None:
    """In its own updates log π has the noise of dropout; the gap is measured without it."""
    policy = load_policy_to_train(ModelOptions(path=str(model), adapter=AdapterOptions(rank=2, dropout=0.5)), seed=0)
    options = replace(config(tmp_path / "run").update, epochs_per_step=passes)
    asked = replace(config(tmp_path / "run"), update=options)
    with refused("for 3 steps", "0.1 nats", error=RunError):
        posttrain.train(asked, policy=policy, task=Sums(policy), engine=Doubling(policy), rewards=[dice])
    ours = replace(asked, run=replace(asked.run, folder=str(tmp_path / "ours")))
    posttrain.train(ours, policy=policy, task=Sums(policy), rewards=[dice])
    for step in metrics_of(tmp_path / "ours")[1:4]:
        assert step[GAP] <= step[GAP_LIMIT] == 0.001


def test_an_engine_that_states_no_limit_may_be_a_tenth_of_a_nat_off(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "run", Near)
    assert metrics_of(tmp_path / "run")[1][GAP_LIMIT] == 0.1


@pytest.mark.parametrize("gap", [0, -1.0, float("inf"), float("nan"), "0.1"])
def test_a_limit_that_limits_nothing_is_refused(gap: object, model: Path) -> None:
    engine = Near(policy_of(model))
    engine.logprob_gap = gap  # type: ignore[assignment]
    with refused("logprob_gap"):
        require_engine(engine)


def test_most_gaps_are_nineteen_of_twenty() -> None:
    gaps = torch.arange(1, 21, dtype=torch.float64)
    assert most_of(gaps) == 19
    assert most_of(gaps[:1]) == 1


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture, sharp enough for rounding to choose other experts."""
    folder = save_tiny_model(tmp_path_factory.mktemp("mixture") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 8, "head_dim": 16, "initializer_range": 0.3}
    stop = json.loads((folder / "config.json").read_text())["eos_token_id"]
    made = MixtralConfig(vocab_size=len(tokenizer), eos_token_id=stop, max_position_embeddings=96, **shape, **experts)
    MixtralForCausalLM(made).save_pretrained(folder)
    return folder


def test_a_mixture_in_bfloat16_is_held_to_the_limit_by_most_tokens(mixture: Path, tmp_path: Path) -> None:
    rollout = {"max_completion_tokens": 20, "prompts_per_step": 3}
    options = {"path": str(mixture), "dtype": "bfloat16"}
    recipe = tiny_recipe(
        tmp_path / "place", model=options, rollout=rollout, evaluation={"every_steps": 0, "samples": 1}
    )
    recipe.write_text(recipe.read_text().replace("num_steps: 4", "num_steps: 3"))
    assert "mixture of experts in bfloat16" in printed("rl", recipe)
    steps = metrics_of(tmp_path / "place" / "run")[1:4]
    assert max(step[GAP] for step in steps) > 0.1  # by which three in a row would have ended it
    assert all(step[MOST_GAPS] < step[GAP_LIMIT] == 0.1 for step in steps)
    exact = load_policy(ModelOptions(path=str(mixture), dtype="float32"))
    assert GAP_LIMIT in gap_metrics(exact, InProcessEngine(exact), torch.zeros(1), None)
    assert MOST_GAPS not in gap_metrics(exact, InProcessEngine(exact), torch.zeros(1), None)
