"""What a run is told where its sampler's log-probs are not its trainer's: by an engine elsewhere, and of mixtures."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

import posttrain
from posttrain.errors import RunError
from posttrain.generation.engine import Sampling, require_engine
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import gap_metrics, most_of
from posttrain.generation.request import Request, Sampled
from posttrain.models.loading.model_folder import load_policy, load_policy_to_train
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.runs.alarms import GAP, GAP_LIMIT, MOST_GAPS
from tests.support.commands import printed
from tests.support.dice import dice
from tests.support.engines import ChangedSampling
from tests.support.own_objects import Counts, Sums, config, policy_of
from tests.support.refusals import refused
from tests.support.runs import metrics_of, save_tiny_model, tiny_recipe


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
