"""`posttrain serve`: a real server over the bundled model, asked as OpenAI's clients ask."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from posttrain.cli import main
from posttrain.commands.serving import Server, serving
from posttrain.models.loading import load_policy
from posttrain.models.options import ModelOptions

QUESTION = "Use all of 11, 25, 11 to make 25."


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(load_policy(ModelOptions()), name="bundled") as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield made
        made.shutdown()


def asked(server: Server, path: str, body: Any = None, *, raw: bytes | None = None) -> tuple[int, Any]:
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}{path}", data)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_models_and_health(server: Server) -> None:
    assert asked(server, "/v1/models")[1]["data"][0]["id"] == "bundled"
    assert asked(server, "/health") == (200, {"status": "ok"})


def test_completions_are_counted_seeded_and_cut_at_stop_texts(server: Server) -> None:
    body = {"prompt": QUESTION, "max_tokens": 60, "n": 3, "seed": 5}
    code, first = asked(server, "/v1/completions", body)
    assert code == 200
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in first["choices"]}) > 1
    usage = first["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    again = asked(server, "/v1/completions", body)[1]
    assert [choice["text"] for choice in again["choices"]] == [choice["text"] for choice in first["choices"]]
    cut = asked(server, "/v1/completions", {**body, "stop": "="})[1]["choices"]
    assert all("=" not in choice["text"] for choice in cut)
    assert {choice["finish_reason"] for choice in cut} == {"stop"}
    short = asked(server, "/v1/completions", {"prompt": [QUESTION, QUESTION], "max_tokens": 2})[1]["choices"]
    assert [choice["finish_reason"] for choice in short] == ["length", "length"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": QUESTION, "max_tokens": "many"}, "max_tokens = 'many'"),
        ("/v1/completions", {"prompt": QUESTION, "temperature": -1}, "temperature = -1"),
        ("/v1/completions", {"prompt": QUESTION, "n": 1000}, "n = 1000"),
        ("/v1/completions", {"prompt": QUESTION, "stream": True}, "stream"),
        ("/v1/completions", {"prompt": "x" * 5000}, "leave no room"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, "chat template"),
        ("/v1/completions", [1], "JSON object"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(server: Server, path: str, body: Any, says: str) -> None:
    code, answer = asked(server, path, body)
    assert code == 400
    assert says in answer["error"]["message"]


def test_what_is_no_request_is_refused_and_the_server_goes_on(server: Server) -> None:
    assert asked(server, "/v1/completions", raw=b"{nonsense")[0] == 400
    assert asked(server, "/v1/nothing", {})[0] == 404
    assert asked(server, "/nothing")[0] == 404
    assert asked(server, "/health")[0] == 200


def test_the_command_refuses_to_listen_for_others_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "bundled", "--host", "0.0.0.0"]) == 2
    assert "--public" in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_message(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "bundled", "--port", str(server.server_port)]) == 2
    assert "choose another port" in capsys.readouterr().err
