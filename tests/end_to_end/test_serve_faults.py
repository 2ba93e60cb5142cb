"""A fault in the engine of `posttrain serve`: it ends the requests in progress and no others."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from posttrain.errors import UserError
from posttrain.generation.in_process import InProcessEngine, InProcessSampling
from posttrain.generation.request import Continuation, Request, StreamKey
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import SamplingParams
from posttrain.server.model_server import ModelServer
from posttrain.server.sampler import Sampler
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_one_of_several_requests_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three are refused together; alone, the first has a fault and the others are sampled."""
    put, faults = InProcessSampling.put, list[str]()

    def put_alone(sampling: InProcessSampling, continuations: Sequence[Continuation]) -> None:
        if len(continuations) > 1:
            raise UserError("not together")
        if not faults:
            faults.append("a bug")
            raise KeyError("a bug")
        put(sampling, continuations)

    monkeypatch.setattr(InProcessSampling, "put", put_alone)
    sampler = Sampler(InProcessEngine(load_policy(ModelOptions())))
    request = Request(sampling=SamplingParams(), key=StreamKey(0, "test", 0))
    prompts = [[Continuation(prefix=(1, 2, 3), draw=draw, sample=0, limit=2)] for draw in range(3)]
    try:
        with sampler.hands_off():
            jobs = [sampler.submit(request, each) for each in prompts]
        with pytest.raises(KeyError):
            jobs[0].result.result(30)
        assert [len(job.result.result(30)[0].tokens) for job in jobs[1:]] == [2, 2]
    finally:
        sampler.stop()
