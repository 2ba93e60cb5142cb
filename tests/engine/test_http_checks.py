"""Servers that hold other weights, or could not sample for a policy: found before a token is trained on."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RunError, UserError
from posttrain.generation.http import probe
from posttrain.generation.http.http_engine import HttpEngine
from posttrain.generation.rl_protocol import GENERATE, UPDATE, WEIGHT_INFO
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy
from posttrain.options.rollout import HttpOptions, SamplingParams
from posttrain.ranks.group import RankGroup
from tests.support.fake_inference import FakeInference, fake_inference
from tests.support.faulty_endpoint import raw, reply, status
from tests.support.http_engines import LONGEST, engine_of, move, ready, servers
from tests.support.refusals import refused
from tests.support.tiny import tiny_policy, twin


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


@pytest.fixture(autouse=True)
def short_probe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences are enough for tests of something else."""
    if "the_probe" not in request.node.name:
        monkeypatch.setattr(probe, "NUM_SEQUENCES", 2)


def test_a_server_that_keeps_its_old_weights_ends_the_run_before_a_token_is_trained_on(policy: Policy) -> None:
    trained = twin(policy)
    with ready(policy, 2) as (engine, (_, bad)):
        move(trained)
        bad.keeps_old_weights = True
        with refused(bad.url, "probe of weights 1", "3e-05", "older weights", error=RunError):
            engine.load(ExportedWeights(trained), 1)


def test_the_probe_reaches_the_longest_sequence_and_the_whole_vocabulary(policy: Policy) -> None:
    with ready(policy) as (_, (fake,)):
        prefixes = [body["token_ids"] for path, body in fake.asked if path == GENERATE]
    lengths = [len(each) for each in prefixes]
    assert len(lengths) == 8
    assert (min(lengths), max(lengths) + 4) == (1, LONGEST)
    assert len({token for each in prefixes for token in each}) > 20  # of 24


CAUSES: dict[str, tuple[Callable[[FakeInference], object], dict[str, Any], str]] = {
    "tied head": (lambda fake: setattr(fake, "keeps_old_weights", True), {}, "tied to the embedding"),
    "cut": (lambda fake: setattr(fake, "adds", SamplingParams(top_k=2)), {}, "--generation-config vllm"),
    "raw": (lambda fake: setattr(fake, "raw_logprobs", True), {"temperature": 2.0}, "at temperature 1, not 2"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_probe_says_what_is_likely_wrong(cause: str, policy: Policy) -> None:
    arrange, sampling, says = CAUSES[cause]
    with servers(policy, ours=False) as (fake,):
        arrange(fake)
        trained = twin(policy)
        if cause == "tied head":
            move(trained)
        with engine_of(trained, [fake], sampling=SamplingParams(**sampling)) as engine:
            assert not engine.reproducible
            with refused(fake.url, "probe of weights 0", says, error=RunError):
                engine.load(ExportedWeights(trained), 0)


def model(**settings: Any) -> Callable[[FakeInference], object]:
    return lambda fake: fake.settings.update(model_config=settings)


def facts(**said: Any) -> Callable[[FakeInference], object]:
    return lambda fake: fake.facts.update(said)


def other_size(fake: FakeInference) -> None:
    fake.faults[GENERATE].append(status(400))


def no_route(route: str) -> Callable[[FakeInference], object]:
    return lambda fake: fake.faults[route].append(status(404))


REFUSALS: dict[str, tuple[bool, Callable[[FakeInference], object], tuple[str, ...]]] = {
    "other vocabulary": (True, facts(vocabulary=25), ("25 logits", "24", "Serve the model")),
    "other tokenizer": (True, facts(tokenizer_digest="00"), ("tokenizer has other tokens",)),
    "short context": (True, facts(max_positions=20), ("context has 20 tokens", "needs 40")),
    "no weight routes": (True, no_route(WEIGHT_INFO), ("VLLM_SERVER_DEV_MODE", "--enable-scale-out")),
    "a wrong key": (True, lambda fake: fake.faults[WEIGHT_INFO].append(status(401)), ("key", "engine.key_env")),
    "no JSON": (True, lambda fake: fake.faults[WEIGHT_INFO].append(raw("hello")), ("not a WeightInfo",)),
    "vLLM, other vocabulary": (False, other_size, ("fewer than 24 tokens",)),
    "vLLM, other tokenizer": (
        False,
        lambda fake: fake.faults["/tokenize"].append(raw('{"tokens": [1]}')),
        ("tokenizer has other tokens",),
    ),
    "vLLM, short context": (False, model(max_model_len=20), ("--max-model-len 40",)),
    "vLLM, no generate": (False, no_route(GENERATE), ("--enable-scale-out",)),
    "vLLM, dead engine": (
        False,
        lambda fake: fake.faults[GENERATE].append(lambda body, connection: reply(connection, 500, "")),
        ("no text", "width of 8", "160"),
    ),
    "vLLM, raw log-probs": (False, model(logprobs_mode="raw_logprobs"), ("--logprobs-mode processed_logprobs",)),
    "vLLM, sampling options": (False, model(generation_config="auto"), ("--generation-config vllm",)),
    "vLLM, more of them": (False, model(override_generation_config={"top_p": 0.9}), ("top_p", "--override")),
    "vLLM, prefix cache": (
        False,
        lambda fake: fake.settings.update(cache_config={"enable_prefix_caching": True}),
        ("--no-enable-prefix-caching",),
    ),
    "vLLM, no word of a prefix cache": (
        False,
        lambda fake: fake.hidden.add("cache_config"),
        ("not a VllmFacts", "cache_config"),
    ),
    "vLLM, no weight transfer": (
        False,
        lambda fake: fake.settings.update(weight_transfer_config={"backend": "nccl"}),
        ("posttrain-vllm", "safetensors_file"),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_server_that_cannot_sample_for_a_policy_is_refused_by_one_message(case: str, policy: Policy) -> None:
    ours, arrange, says = REFUSALS[case]
    with servers(policy, ours=ours) as (fake,):
        arrange(fake)
        with pytest.raises(UserError) as found, engine_of(policy, [fake], sampling=SamplingParams(temperature=0.7)):
            pass
    for words in (fake.url, *says):
        assert words in str(found.value)
    assert "\n" not in str(found.value)


def test_a_server_that_is_not_there_is_refused(policy: Policy) -> None:
    with pytest.raises(UserError, match=r"127.0.0.1:9: .*Start it, or correct engine.urls"):
        HttpEngine(policy, HttpOptions(urls=("http://127.0.0.1:9",)), longest=9, sampling=SamplingParams())


def test_cuts_are_for_our_servers_only(policy: Policy) -> None:
    cut = SamplingParams(top_k=3)
    with (
        servers(policy, ours=False) as fakes,
        pytest.raises(UserError, match="before the cut"),
        engine_of(policy, fakes, sampling=cut),
    ):
        pass


def test_a_folder_that_the_server_does_not_see_is_refused(policy: Policy) -> None:
    with servers(policy, ours=False) as (fake,), engine_of(policy, [fake]) as engine:
        fake.faults[UPDATE].append(lambda body, connection: reply(connection, 500, '{"error": "x: no such file"}'))
        with refused(fake.url, "weights 0: update", "engine.transfer_folder"):
            engine.load(ExportedWeights(policy), 0)


@pytest.mark.parametrize("transport", ["auto", "folder", "put"])
def test_weights_go_by_the_way_that_the_recipe_says(transport: str, policy: Policy, tmp_path: Path) -> None:
    with fake_inference(policy, folder=tmp_path) as fake, engine_of(policy, [fake], transport=transport) as engine:
        engine.transfer_in(tmp_path / "weights")
        engine.load(ExportedWeights(policy), 0)
        assert bool(fake.uploads) == (transport == "put")
        assert any("PUT" in line for line in engine.describe()) == (transport == "put")
        assert len(list((tmp_path / "weights").glob("*.safetensors"))) == 1
    assert not (tmp_path / "weights").exists()


class NotLed(RankGroup):
    """Of several ranks, where calls that all of them make would wait for ever."""

    size = 2

    def leading(self, call: str, *given: object) -> AbstractContextManager[None]:
        raise AssertionError(call)


def test_whole_weights_are_sent_without_the_other_ranks(policy: Policy) -> None:
    alone = replace(policy, ranks=NotLed())
    with ready(alone) as (engine, (fake,)):
        assert (engine.weights_version, fake.version) == (0, "0")
