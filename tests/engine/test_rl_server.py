"""The laws of a server that samples for training, over HTTP.

They hold for any server of vLLM's routes: ours in this process, or the one that `POSTTRAIN_RL_SERVER` names, with its
model's folder (`POSTTRAIN_RL_MODEL`) and a folder that it reads weights from (`POSTTRAIN_RL_TRANSFER`).
"""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from posttrain.generation import rl_protocol as wire
from posttrain.models.policy import Policy
from tests.support.rl_server import NATS, RlServer, any_server, asks, logprobs, moved, weights_of

PROMPT = (11, 7, 23, 5, 8)
VERSIONS = count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RlServer]:
    with any_server(tmp_path_factory.mktemp("rl")) as made:
        made.update(made.write(weights_of(made.policy)), next(VERSIONS))  # it may hold anything
        yield made


def gap(server: RlServer, choice: wire.Choice, policy: Policy | None = None) -> float:
    """How far the log-probs of a completion are from the trainer's."""
    said = [each.logprob for each in choice.logprobs.content]
    ours = logprobs(policy or server.policy, PROMPT, choice.token_ids)
    return max(abs(a - b) for a, b in zip(said, ours, strict=True))


def test_it_is_healthy(server: RlServer) -> None:
    assert server.client.get(server.url + wire.HEALTH).status_code == 200


def test_ids_go_in_and_ids_come_out_with_the_trainer_s_log_probs(server: RlServer) -> None:
    choices = server.generate(PROMPT, n=4, max_tokens=20)
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    for choice in choices:
        assert 1 <= len(choice.token_ids) <= 20
        stopped = choice.token_ids[-1] in server.policy.stop_ids
        assert choice.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(choice.token_ids) == 20
        assert [each.token_id for each in choice.logprobs.content] == [*choice.token_ids]
        assert gap(server, choice) < NATS
    assert len({choice.token_ids for choice in choices}) > 1


def test_temperature_0_takes_the_likeliest_token_and_alternatives_are_the_likeliest(server: RlServer) -> None:
    (choice,) = server.generate(PROMPT, temperature=0.0, max_tokens=6, logprobs=3)
    prefix = PROMPT
    for token, said in zip(choice.token_ids, choice.logprobs.content, strict=True):
        likeliest = said.likeliest(3)
        assert likeliest[0][0] == token
        assert [value for _, value in likeliest] == sorted((value for _, value in likeliest), reverse=True)
        for other, value in likeliest:
            assert abs(value - logprobs(server.policy, prefix, (other,))[0]) < NATS
        prefix += (token,)


def test_each_update_is_what_is_sampled_from_then_on_and_its_version_is_told(server: RlServer) -> None:
    for seed in (1, 2):
        policy, version = moved(server.policy, seed), next(VERSIONS)
        server.update(server.write(weights_of(policy)), version)
        assert server.info().weight_version == str(version)
        for choice in server.generate(PROMPT, n=4, max_tokens=20):
            assert gap(server, choice, policy) < NATS
            assert gap(server, choice) > 100 * NATS  # so that the line above says something
            spans = [(span.version, span.start, span.end) for span in choice.weight_versions]
            assert spans == [(str(version), 0, len(choice.token_ids))]


def test_an_update_reaches_completions_under_way_between_two_tokens(server: RlServer) -> None:
    old, new = moved(server.policy, 3), moved(server.policy, 4)
    before, after = next(VERSIONS), next(VERSIONS)
    server.update(server.write(weights_of(old), "old"), before)
    info = server.write(weights_of(new), "new")
    with ThreadPoolExecutor(1) as other:
        under_way = other.submit(server.generate, PROMPT, n=16, max_tokens=240)
        time.sleep(0.1)
        server.update(info, after)
        choices = under_way.result()
    spanning = [choice for choice in choices if len(choice.weight_versions) == 2]
    assert spanning, [len(choice.token_ids) for choice in choices]
    for choice in choices:
        ends = {span.version: (span.start, span.end) for span in choice.weight_versions}
        assert ends.keys() <= {str(before), str(after)}
        said = [each.logprob for each in choice.logprobs.content]
        by = {str(before): logprobs(old, PROMPT, choice.token_ids), str(after): logprobs(new, PROMPT, choice.token_ids)}
        for version, (start, end) in ends.items():
            assert max(abs(a - b) for a, b in zip(said[start:end], by[version][start:end], strict=True)) < NATS
        assert sum(end - start for start, end in ends.values()) == len(choice.token_ids)


def test_a_server_samples_for_one_run_until_it_gives_it_back_or_is_silent(server: RlServer) -> None:
    assert server.take("ann: /runs/1", 60)[0] == 200
    status, said = server.take("bob: /runs/1", 60)
    assert status >= 400
    assert "this server samples for ann: /runs/1" in said
    assert server.take("ann: /runs/1", 0)[0] == 200
    assert server.take("ann: /runs/1", 60, renews=True)[0] >= 400  # other weights may be there by now
    assert server.take("bob: /runs/1", 0.2)[0] == 200
    time.sleep(0.3)
    for seconds in (60, 0):
        assert server.take("ann: /runs/1", seconds, renews=True)[0] >= 400
    assert server.take("bob: /runs/1", 0.2, renews=True)[0] == 200
    time.sleep(0.3)
    assert server.take("ann: /runs/1", 60)[0] == 200
    assert server.take("ann: /runs/1", 0)[0] == 200


def damaged(server: RlServer, how: str) -> wire.UpdateInfo:
    """An update that cannot be loaded."""
    weights = weights_of(moved(server.policy, 9))
    name = "model.norm.weight"
    if how == "another shape":
        weights[name] = weights[name][:-1].clone()
    elif how == "a missing tensor":
        del weights[name]
    info = server.write(weights, how.replace(" ", "-"))
    path = server.transfer / f"{how.replace(' ', '-')}.safetensors"
    if how == "another digest":
        return wire.UpdateInfo(path=info.path, sha256="0" * 64)
    if how == "a truncated file":
        path.write_bytes(path.read_bytes()[:-100])
    if how == "no file":
        path.unlink()
    return info


@pytest.mark.parametrize("how", ["another digest", "a truncated file", "no file", "another shape", "a missing tensor"])
def test_a_failed_update_loads_nothing_and_says_why(server: RlServer, how: str) -> None:
    if server.server is None and how in ("another shape", "a missing tensor"):
        pytest.skip("vLLM has then loaded a part of it, and is given the last good weights again")
    policy, version = moved(server.policy, 5), next(VERSIONS)
    server.update(server.write(weights_of(policy)), version)
    server.begin()
    status, said = server.post(wire.UPDATE, wire.UpdateRequest(update_info=damaged(server, how)))
    assert status >= 400
    assert said["error"]["message"] if isinstance(said["error"], dict) else said["error"]
    finish = wire.FinishRequest(weight_version=str(next(VERSIONS)))
    if server.server is not None:  # the update has ended
        assert server.post(wire.FINISH, finish)[0] == 409
        assert server.post(wire.UPDATE, wire.UpdateRequest(update_info=server.write(weights_of(policy))))[0] == 409
    if server.server is None:
        server.update(server.write(weights_of(policy)), version)
    assert server.post(wire.RESUME)[0] == 200
    assert server.info().weight_version == str(version)
    (choice,) = server.generate(PROMPT)
    assert gap(server, choice, policy) < NATS


def test_an_update_that_was_not_started_is_refused(server: RlServer) -> None:
    info = server.write(weights_of(server.policy))
    assert server.post(wire.UPDATE, wire.UpdateRequest(update_info=info))[0] >= 400
    assert server.post(wire.FINISH, wire.FinishRequest(weight_version="77"))[0] >= 400
    assert server.info().weight_version != "77"


def test_a_client_that_dies_leaves_the_others_their_answers(server: RlServer) -> None:
    body = wire.written(asks(PROMPT, n=16, max_tokens=400))
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {wire.GENERATE} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as made:
        made.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.1)
    assert server.generate(PROMPT, n=2)
