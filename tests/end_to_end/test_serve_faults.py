"""A fault in the engine of `posttrain serve`: it ends the requests in progress and no others."""

import threading
from collections.abc import Iterator

import pytest

from posttrain.server.model_server import ModelServer
from tests.support.served import QUESTION, TEXT, asked, served, until

BODY = {"prompt": QUESTION, "max_tokens": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with served() as made:
        yield made


def fault(*_: object) -> None:
    raise KeyError("a bug")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the terminal has it
def test_a_fault_is_an_answer(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.engine, "open", fault)
    code, answer = asked(server, TEXT, BODY)
    assert code == 500
    assert "Internal error" in answer["error"]["message"]
    monkeypatch.undo()
    assert asked(server, TEXT, BODY)[0] == 200


def test_requests_that_come_amid_a_fault_are_answered(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sampler, codes = server.service.engine, server.service.sampler, list[int]()
    asking = threading.Thread(target=lambda: codes.append(asked(server, TEXT, BODY)[0]))

    def fault_while_asked(*_: object) -> None:
        monkeypatch.setattr(engine, "open", opened)
        asking.start()
        until(lambda: sampler.waiting)
        fault()

    def report(of: threading.ExceptHookArgs) -> None:
        assert of.exc_type is KeyError
        codes.append(asked(server, TEXT, BODY)[0])

    opened = engine.open
    monkeypatch.setattr(threading, "excepthook", report)
    monkeypatch.setattr(engine, "open", fault_while_asked)
    assert asked(server, TEXT, BODY)[0] == 500
    asking.join()
    until(lambda: len(codes) == 2)
    assert codes == [200, 200]
