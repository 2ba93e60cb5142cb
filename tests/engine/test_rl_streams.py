"""Our server's own part beside vLLM's routes: the run's uniform numbers, adapters, pauses, and who waits for whom."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.generation import rl_protocol as wire
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation, Request, Sampled, StreamKey
from posttrain.models.adapters.adaptable import add_adapter
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import AdapterOptions
from posttrain.options.rollout import SamplingParams
from posttrain.records import Finish
from posttrain.server.sampler import Sampler
from tests.support.rl_server import NATS, RlServer, logprobs, moved, own_server, save_model, weights_of

KEY = StreamKey(3, "rollout", 5)
PROMPTS = [(11, 7, 23, 5, 8), (4, 9), (6, 6, 6), (12, 30, 31, 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RlServer]:
    with own_server(folder, tmp_path_factory.mktemp("weights")) as made:
        yield made


def own(draw: int = 0, sample: int = 0, **more: Any) -> wire.OwnFields:
    return wire.OwnFields(seed=KEY.seed, purpose=KEY.purpose, step=KEY.step, draw=draw, sample=sample, **more)


def in_process(policy: Policy, continuations: list[Continuation], **settings: Any) -> list[Sampled]:
    """The completions, by draw and sample."""
    done: list[Sampled] = []
    with InProcessEngine(policy).open(Request(**{"sampling": SamplingParams(), "key": KEY, **settings})) as sampling:
        sampling.put(continuations)
        while len(done) < len(continuations):
            done += sampling.take(60)
    return sorted(done, key=lambda each: (each.continuation.draw, each.continuation.sample))


def said_of(choice: wire.Choice) -> tuple[float, ...]:
    return tuple(each.logprob for each in choice.logprobs.content)


def test_a_completion_alone_is_the_one_among_63_others_with_its_turn_s_numbers(server: RlServer) -> None:
    first = server.generate(PROMPTS[0], own=own(sample=2), max_tokens=5)[0]
    prefix = (*PROMPTS[0], *first.token_ids, 9, 4)  # and a reply of a tool
    second = lambda: server.generate(prefix, own=own(sample=2, first_position=5), max_tokens=9)[0]
    alone = second()
    with ThreadPoolExecutor(32) as pool:
        others = [
            pool.submit(server.generate, PROMPTS[number % 4], own=own(number, 7), max_tokens=20) for number in range(63)
        ]
        among = pool.submit(second).result()
        assert all(each.result() for each in others)
    assert among.token_ids == alone.token_ids
    assert said_of(among) == said_of(alone)
    again = server.generate(prefix, own=own(sample=2), max_tokens=9)[0]
    assert again.token_ids != alone.token_ids  # the numbers of the first turn give other tokens


def test_requests_in_any_order_have_the_bits_of_one_process(server: RlServer) -> None:
    wanted = [
        Continuation(prefix=prefix, draw=draw, sample=sample, limit=24)
        for draw, prefix in enumerate(PROMPTS)
        for sample in range(6)
    ]
    expected = in_process(server.policy, wanted)
    with ThreadPoolExecutor(4) as pool:
        answers = dict(
            pool.map(
                lambda draw: (draw, server.generate(PROMPTS[draw], own=own(draw), max_tokens=24, n=6)), (3, 1, 2, 0)
            )
        )
    for each in expected:
        choice = answers[each.continuation.draw][each.continuation.sample]
        assert choice.token_ids == each.tokens
        assert said_of(choice) == each.logprobs  # to the bit: JSON keeps doubles


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"logprobs": 3}, {"keep_alternatives": 3}),
        ({"top_k": 5, "min_p": 0.05}, {"sampling": SamplingParams(top_k=5, min_p=0.05)}),
        ({"temperature": 0.7, "top_p": 0.8}, {"sampling": SamplingParams(temperature=0.7, top_p=0.8)}),
        ({"temperature": 0.0}, {"sampling": SamplingParams(greedy=True)}),
        ({"suppressed": (5, 9, 40)}, {"suppressed": (5, 9, 40)}),
        ({"suppressed": (5,), "logprobs": 20}, {"suppressed": (5,), "keep_alternatives": 20}),
    ],
)
def test_what_a_request_asks_comes_back_as_in_one_process(
    server: RlServer, fields: dict[str, Any], settings: dict[str, Any]
) -> None:
    suppressed = {"suppressed": fields.pop("suppressed")} if "suppressed" in fields else {}
    (expected,) = in_process(server.policy, [Continuation(prefix=PROMPTS[0], draw=1, sample=4, limit=16)], **settings)
    (choice,) = server.generate(PROMPTS[0], own=own(1, 4, **suppressed), max_tokens=16, **fields)
    assert (choice.token_ids, said_of(choice)) == (expected.tokens, expected.logprobs)
    assert choice.cut_logprobs == expected.cut_logprobs
    if expected.alternatives is not None:
        count = settings["keep_alternatives"]
        assert tuple(each.likeliest(count) for each in choice.logprobs.content) == expected.alternatives


def test_a_stop_text_ends_a_completion_and_is_named(server: RlServer) -> None:
    whole = server.generate(PROMPTS[0], own=own(), max_tokens=20)[0]
    text = server.policy.tokenizer.decode(list(whole.token_ids[3:5]))
    cut = server.generate(PROMPTS[0], own=own(), max_tokens=20, stop=(text,), detokenize=True)[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", text)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) <= 5


def test_a_kept_completion_is_continued_as_if_it_had_not_been_cut_and_may_be_let_go(server: RlServer) -> None:
    (whole,) = in_process(server.policy, [Continuation(prefix=PROMPTS[0], draw=8, sample=0, limit=30)])
    assert whole.finish is Finish.LENGTH, "take another draw"
    first = server.generate(PROMPTS[0], own=own(8, keep=True), max_tokens=10)[0]
    sampling = next(each.sampling for each in server.server.service.sampler.open.values())
    assert len(sampling.kept) == 1
    rest = server.generate((*PROMPTS[0], *first.token_ids), own=own(8, keep=True, first_position=10), max_tokens=20)[0]
    assert first.token_ids + rest.token_ids == whole.tokens
    assert said_of(first) + said_of(rest) == pytest.approx(whole.logprobs, abs=NATS)
    assert len(sampling.kept) == 1
    stream = wire.Stream(**{name: value for name, value in asdict(own(8)).items() if name in wire.Stream.__slots__})
    assert server.post(wire.RELEASE, wire.ReleaseRequest(streams=(stream,)))[0] == 200
    assert not sampling.kept


def test_a_pause_keeps_waits_or_aborts(server: RlServer) -> None:
    def asked(tokens: int) -> Any:
        body = wire.GenerateRequest(
            token_ids=PROMPTS[1], sampling_params=wire.SamplingFields(max_tokens=tokens, n=16), posttrain=own(9)
        )
        return server.client.post(server.url + wire.GENERATE, content=wire.written(body), headers=JSON_HEADERS)

    sampler = server.server.service.sampler
    with ThreadPoolExecutor(1) as other:
        for mode, status in (("keep", 200), ("wait", 200), ("abort", 503)):
            under_way = other.submit(asked, 60)
            until(lambda: sampler.num_open)
            assert server.post(f"{wire.PAUSE}?mode={mode}") == (200, {"status": "paused"})
            assert server.client.get(server.url + wire.IS_PAUSED).json() == {"is_paused": True}
            count = sampler.num_open
            assert (count > 0) == (mode == "keep")
            time.sleep(0.05)
            assert sampler.num_open == count  # nothing is sampled
            assert server.post(wire.RESUME)[0] == 200
            assert under_way.result().status_code == status
    assert server.post(f"{wire.PAUSE}?mode=nap")[0] == 400


JSON_HEADERS = {"Content-Type": "application/json"}


def until(holds: Any) -> None:
    while not holds():
        time.sleep(0.002)


def test_a_client_that_leaves_takes_nothing_from_another_on_the_same_stream(server: RlServer) -> None:
    sampler, started = server.server.service.sampler, threading.Event()
    expected = server.generate(PROMPTS[0], own=own(4), max_tokens=40)[0]

    def leaves() -> None:
        job = sampler.submit(
            Request(sampling=SamplingParams(), key=KEY),
            [Continuation(prefix=PROMPTS[0], draw=4, sample=sample, limit=300) for sample in range(16)],
        )
        until(lambda: job.began_at is not None)
        started.set()
        time.sleep(0.02)
        sampler.cancel(job)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(leaves)
        started.wait()
        stays = pool.submit(server.generate, PROMPTS[0], own=own(4), max_tokens=40)
        assert stays.result()[0].token_ids == expected.token_ids
    until(lambda: not sampler.num_open)


def adapted(policy: Policy, rank: int = 2, seed: int = 0) -> Policy:
    """A copy with an adapter that changes something."""
    model = policy.copy().model
    add_adapter(model, AdapterOptions(rank=rank), seed=seed)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.lora_B.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))
    return replace(as_policy(model, policy.tokenizer), stop_ids=policy.stop_ids)


def test_an_adapter_s_matrices_alone_are_an_update(folder: Path, tmp_path: Path) -> None:
    with own_server(folder, tmp_path) as server:
        for number, policy in enumerate((adapted(server.policy, seed=1), adapted(server.policy, seed=2)), start=1):
            exported = ExportedWeights(policy).adapter()
            fields = wire.AdapterFields(base_digest=exported.base_digest, settings=dict(exported.settings))
            info = replace(server.write(exported.tensors, f"adapter-{number}"), adapter=fields)
            server.update(info, number)
            (choice,) = server.generate(PROMPTS[0], own=own(number), max_tokens=16)
            said = said_of(choice)
            assert said == pytest.approx(logprobs(policy, PROMPTS[0], choice.token_ids), abs=NATS)
            assert said != pytest.approx(logprobs(server.policy, PROMPTS[0], choice.token_ids), abs=100 * NATS)
        other = ExportedWeights(adapted(server.policy, rank=3)).adapter()
        fields = wire.AdapterFields(base_digest=other.base_digest, settings=dict(other.settings))
        for refused, says in (
            (replace(server.write(other.tensors, "other"), adapter=fields), "has the shape"),
            (replace(info, adapter=replace(info.adapter, base_digest="0" * 64)), "its base has the digest"),
            (replace(info, adapter=replace(info.adapter, settings={**info.adapter.settings, "r": 7})), "r = 7"),
            (server.write(weights_of(server.policy), "all"), "Restart"),
        ):
            server.begin()
            status, said = server.post(wire.UPDATE, wire.UpdateRequest(update_info=refused))
            assert status == 400
            assert says in said["error"]["message"]
        server.post(wire.RESUME)
        assert server.info().weight_version == "2"
        assert server.generate(PROMPTS[0], own=own(2), max_tokens=16)[0] == choice


def test_an_adapter_that_does_not_fit_leaves_the_base_as_it_was(folder: Path, tmp_path: Path) -> None:
    with own_server(folder, tmp_path) as server:
        before = server.generate(PROMPTS[0], own=own(), max_tokens=16)
        exported = ExportedWeights(adapted(server.policy)).adapter()
        last = list(exported.tensors)[-1]
        tensors = {**exported.tensors, last: exported.tensors[last][:-1].clone()}
        fields = wire.AdapterFields(base_digest=exported.base_digest, settings=dict(exported.settings))
        server.begin()
        update = wire.UpdateRequest(update_info=replace(server.write(tensors), adapter=fields))
        status, said = server.post(wire.UPDATE, update)
        assert (status, "adapter" in said["error"]["message"]) == (400, True)
        server.post(wire.RESUME)
        assert server.generate(PROMPTS[0], own=own(), max_tokens=16) == before


def test_weights_by_put_are_those_by_a_file(server: RlServer) -> None:
    policy = moved(server.policy, 6)
    info = server.write(weights_of(policy))
    content = Path(info.path).read_bytes()
    Path(info.path).unlink()
    assert server.put(wire.UPLOAD.format(sha256=info.sha256), content)[0] == 200
    server.update(wire.UpdateInfo(sha256=info.sha256), 60)
    (choice,) = server.generate(PROMPTS[0], own=own(), max_tokens=16)
    ours = logprobs(policy, PROMPTS[0], choice.token_ids)
    assert said_of(choice) == pytest.approx(ours, abs=NATS)


def adapter_update(server: RlServer) -> wire.UpdateRequest:
    exported = ExportedWeights(adapted(server.policy)).adapter()
    fields = wire.AdapterFields(base_digest=exported.base_digest, settings=dict(exported.settings))
    return wire.UpdateRequest(update_info=replace(server.write(exported.tensors, "adapter"), adapter=fields))


def test_a_server_whose_base_was_overwritten_takes_no_adapter(folder: Path, tmp_path: Path) -> None:
    with own_server(folder, tmp_path) as server:
        assert server.info().posttrain.model_digest
        server.update(server.write(weights_of(moved(server.policy, 3))), 1)
        assert server.info().posttrain.model_digest == ""  # so a trainer sends all weights
        server.begin()
        status, said = server.post(wire.UPDATE, adapter_update(server))
        assert status == 400
        assert "its base has the digest" in said["error"]["message"]


def test_a_first_adapter_that_is_refused_while_completions_are_under_way_changes_nothing(
    folder: Path, tmp_path: Path
) -> None:
    with own_server(folder, tmp_path) as server, ThreadPoolExecutor(1) as pool:
        sampler = server.server.service.sampler
        expected = server.generate(PROMPTS[0], own=own(), max_tokens=400)
        stays = pool.submit(server.generate, PROMPTS[0], own=own(), max_tokens=400)
        until(lambda: sampler.num_open > 0)
        server.begin()
        assert sampler.num_open
        assert server.post(wire.UPDATE, adapter_update(server))[0] == 200
        assert server.post(wire.FINISH, wire.FinishRequest(weight_version="1"))[0] == 409
        assert not lora_layers(server.server.service.policy.model)
        server.post(wire.RESUME)
        assert stays.result() == expected


def test_a_request_that_cannot_start_fails_without_those_that_came_with_it(server: RlServer) -> None:
    sampler, plain = Sampler(InProcessEngine(server.policy)), Request(sampling=SamplingParams(), key=KEY)
    try:
        with sampler.hands_off():
            jobs = [
                sampler.submit(plain, [Continuation(prefix=prefix, draw=0, sample=0, limit=4)])
                for prefix in (PROMPTS[0], (), PROMPTS[0])
            ]
        assert "a prefix of 0 tokens" in str(jobs[1].result.exception(30))
        first, last = (each.result.result(30) for each in (jobs[0], jobs[2]))
        assert first[0].tokens == last[0].tokens
    finally:
        sampler.stop()


def test_a_probe_waits_for_no_rows(server: RlServer) -> None:
    sampler = Sampler(InProcessEngine(server.policy, max_rows=4))
    plain, prefix = Request(sampling=SamplingParams(), key=KEY), PROMPTS[0]
    try:
        rows = [
            sampler.submit(plain, [Continuation(prefix=prefix, draw=draw, sample=0, limit=400)]) for draw in range(12)
        ]
        until(lambda: sampler.num_open == 12)
        probe = replace(plain, key=StreamKey(0, "probe", 0))
        done = sampler.submit(probe, [Continuation(prefix=prefix, draw=0, sample=0, limit=4)]).result.result(30)
        assert len(done[0].tokens) <= 4
        assert not any(each.result.done() for each in rows[4:])
    finally:
        sampler.stop()
