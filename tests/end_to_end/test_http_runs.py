"""Runs whose completions are sampled by `posttrain serve --rl`: the bits of a run in one process."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import posttrain
from posttrain.cli import main
from posttrain.config import CollectConfig, DpoConfig
from posttrain.errors import UserError
from posttrain.generation.http.http_engine import HttpEngine
from posttrain.generation.request import Continuation, Request, StreamKey
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.loading.model_folder import load_policy, load_policy_to_train
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.options.rollout import HttpOptions, SamplingParams
from posttrain.runs.alarms import GAP, GAP_LIMIT
from posttrain.server.model_server import ModelServer
from tests.support.commands import printed
from tests.support.rank_runs import by_ranks
from tests.support.rl_server import own_server
from tests.support.runs import files_of, metrics_of, rollout_rows, save_tiny_model, tiny_recipe
from tests.support.served import served


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("http") / "model")


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ModelServer]:
    with own_server(model, tmp_path / "server") as made:
        assert made.server is not None
        yield made.server


def url(server: ModelServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def engine(*servers: ModelServer, **options: object) -> dict[str, Any]:
    return {"name": "http", "urls": [url(each) for each in servers], **options}


def run(model: Path, folder: Path, **sections: Any) -> Path:
    posttrain.train(posttrain.load_recipe(tiny_recipe(folder, model={"path": str(model)}, **sections)))
    return folder / "run"


def of_rollouts(run: Path) -> Mapping[str, bytes]:
    return {
        name: content
        for name, content in files_of(run).items()
        if re.match(r"rollouts|evaluations|model/m|adapter/", name)
    }


def test_a_run_over_http_has_the_bits_of_a_run_in_one_process(
    model: Path, server: ModelServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = run(model, tmp_path / "ours")
    capsys.readouterr()
    theirs = run(model, tmp_path / "theirs", engine=engine(server))
    told = capsys.readouterr().out
    assert f"engine     {url(server)} (posttrain serve, float32)" in told
    assert "weights by PUT, all weights" in told
    assert metrics_of(ours) == metrics_of(theirs)
    assert of_rollouts(ours) == of_rollouts(theirs)
    assert not (theirs / "weights").exists()  # transport only: the run's model is in model/


ECHO = """def echo(text: str) -> str:
    '''Says how much was said.

    Args:
        text: what was said
    '''
    return str(len(text))
"""


def test_a_run_over_two_servers_has_the_bits_of_a_run_in_one_process(
    model: Path, server: ModelServer, tmp_path: Path
) -> None:
    ours = run(model, tmp_path / "ours")
    with own_server(model, tmp_path / "second") as made:
        assert made.server is not None
        theirs = run(model, tmp_path / "theirs", engine=engine(server, made.server))
    assert metrics_of(ours) == metrics_of(theirs)
    assert of_rollouts(ours) == of_rollouts(theirs)


@pytest.mark.parametrize("adapter", [{}, {"rank": 2}], ids=["all weights", "adapter"])
def test_two_ranks_with_a_server_have_the_bits_of_two_that_sample(
    model: Path, server: ModelServer, tmp_path: Path, adapter: Mapping[str, object]
) -> None:
    served_model = {"path": str(model), **({"adapter": adapter} if adapter else {})}
    small = {"model": served_model, "update": {"tokens_per_microbatch": 128}, "run": {"num_steps": 2}}
    ours, theirs = (
        tiny_recipe(tmp_path / name, **small, **more)
        for name, more in (("ours", {}), ("theirs", {"engine": engine(server)}))
    )
    for recipe in (ours, theirs):
        ended = by_ranks("rl", recipe, folder=recipe.parent)
        assert ended.code == 0, ended.err
    sent = "the adapter" if adapter else "all weights"
    assert f"weights by PUT, {sent}" in ended.out
    found, expected = (of_rollouts(each.parent / "run") for each in (theirs, ours))
    assert found == expected
    assert any(name.startswith("adapter/" if adapter else "model/") for name in found)


def test_turns_over_http_are_those_of_one_process(model: Path, server: ModelServer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ECHO)
    tools = {"tools": [f"{tmp_path}/mine.py:echo"], "tools_at": {"echo": "e"}, "run": {"num_steps": 1}}
    ours = run(model, tmp_path / "ours", **tools, rollout={"max_completion_tokens": 20})
    theirs = run(model, tmp_path / "theirs", **tools, rollout={"max_completion_tokens": 20}, engine=engine(server))
    expected, found = (rollout_rows(each, 1) for each in (ours, theirs))
    assert sum(False in row["sampled"] for row in expected) > 4  # a tool has replied
    for mine, other in zip(found, expected, strict=True):
        assert (mine["tokens"], mine["sampled"], mine["finish"]) == (other["tokens"], other["sampled"], other["finish"])
        assert mine["logprobs"] == other["logprobs"]


def test_weights_reach_a_server_while_it_samples_the_next_step(
    model: Path, server: ModelServer, tmp_path: Path
) -> None:
    ahead = {"max_staleness": 1, "max_completion_tokens": 20}
    steps = metrics_of(run(model, tmp_path / "ahead", rollout=ahead, engine=engine(server)))[1:]
    assert max(step.get("staleness/max", 0) for step in steps) == 1
    assert all(step[GAP] < step[GAP_LIMIT] == 0.001 for step in steps[:1])


def test_a_run_goes_on_with_another_server_and_is_the_one_that_never_stopped(
    model: Path, server: ModelServer, tmp_path: Path
) -> None:
    whole = run(model, tmp_path / "whole", engine=engine(server))
    first = run(model, tmp_path / "first", engine=engine(server), run={"num_steps": 2})
    with served(load_policy(ModelOptions(path=str(model))), transfer_folder=tmp_path / "other") as other:
        seconds = {"sample": 30, "update": 30}
        given = posttrain.load_recipe(
            tiny_recipe(tmp_path / "first", model={"path": str(model)}, engine=engine(other, seconds=seconds))
        )
        posttrain.train(given, resume=True)  # the server has version 0 of other weights, and is sent those of step 2
    assert of_rollouts(first) == of_rollouts(whole)
    assert metrics_of(first) == metrics_of(whole)


def test_weights_are_read_from_a_folder_that_both_see(model: Path, server: ModelServer, tmp_path: Path) -> None:
    place = tmp_path / "server"
    run(model, tmp_path / "case", engine=engine(server, transfer_folder=str(place)), run={"num_steps": 1})
    assert not list(place.rglob("uploaded-*"))
    assert not list(place.rglob("*.safetensors"))  # removed at the end
    elsewhere = engine(server, transport="folder", transfer_folder=str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match=r"403.*transfer folder"):
        run(model, tmp_path / "other", engine=elsewhere)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_other_commands_sample_there_too(
    model: Path, server: ModelServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe(tmp_path / "case", model={"path": str(model)}, engine=engine(server))
    config = posttrain.load_recipe(recipe)
    results = posttrain.evaluate(str(model), config)
    own = posttrain.load_recipe(tiny_recipe(tmp_path / "own", model={"path": str(model)}))
    assert results == posttrain.evaluate(str(model), own)
    plan = printed("plan", recipe)
    assert f"sampled by {url(server)}, which get weights as files in the run folder or by PUT" in plan
    capsys.readouterr()
    main(["doctor", str(recipe)])  # whose exit code is the sandbox's
    assert f"engine       {url(server)} (posttrain serve), with weights of version 0" in capsys.readouterr().out
    collected = posttrain.load_recipe(
        kind=CollectConfig,
        model={"path": str(model)},
        rewards=[{"path": f"{tmp_path}/case/dice.py:dice"}],
        sampling={"max_completion_tokens": 6},
        collect={"num_prompts": 2, "group_size": 2, "cut_off": "keep"},
        engine=engine(server),
        run={"folder": str(tmp_path / "pairs")},
    )
    posttrain.collect(collected)
    assert (tmp_path / "pairs").is_dir()


def test_a_run_of_dpo_writes_its_weights_to_its_own_folder(model: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "case", model={"path": str(model)})
    content: dict[str, Any] = yaml.safe_load(recipe.read_text())
    del content["algorithm"], content["update"], content["rollout"]["prompts_per_step"], content["run"]["num_steps"]
    content["dpo"] = {"rounds": 1, "steps_per_round": 1, "prompts_per_round": 6, "pairs_per_batch": 3}
    with own_server(model, tmp_path) as made:
        assert made.server is not None
        posttrain.train_dpo(posttrain.load_recipe(kind=DpoConfig, **{**content, "engine": engine(made.server)}))
    assert (tmp_path / "case" / "run").is_dir()
    assert not list(tmp_path.glob("uploaded-*"))  # the server read them there


def adapted(model: Path) -> Policy:
    """A policy with an adapter that is not 0."""
    policy = load_policy_to_train(ModelOptions(path=str(model), adapter=AdapterOptions(rank=2)), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in lora_layers(policy.model).values():
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return policy


def test_a_server_of_the_base_gets_the_adapter_alone(model: Path, server: ModelServer, tmp_path: Path) -> None:
    policy = adapted(model)
    options = HttpOptions(urls=(url(server),))
    made = HttpEngine(policy, options, longest=40, sampling=SamplingParams())
    try:
        assert any("the adapter" in line for line in made.describe())
        made.transfer_in(tmp_path / "weights")
        made.load(ExportedWeights(policy), 0)  # the probe holds it to the adapted policy
        assert [each.name for each in sorted((tmp_path / "weights").iterdir())] == [
            "adapter-000000.json",
            "adapter-000000.safetensors",
        ]
        with made.open(Request(sampling=SamplingParams(), key=StreamKey(0, "test", 0))) as sampling:
            sampling.put([Continuation(prefix=(3, 4), draw=0, sample=0, limit=5)])
            assert len(sampling.take(30)) == 1
    finally:
        made.close()
