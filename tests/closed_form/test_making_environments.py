"""Environments of a recipe: a user's class or factory, an OpenEnv server, and mistakes in either."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.environments.making import Own, TurnSettings, environments_of
from posttrain.environments.openenv import OpenEnvFailure
from posttrain.environments.protocol import Environment, Environments, Reply
from posttrain.environments.run_environment import RepliesOfRun, ReplySettings
from posttrain.environments.tools import Toolbox, toolbox_of
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.environment import EnvironmentOptions
from posttrain.options.model import ModelOptions
from tests.support.conversations import chat_tokenizer
from tests.support.openenv_server import EchoServer, echo_server
from tests.support.refusals import refused

TOKENIZER = chat_tokenizer()
GUESS = """
from posttrain.environments.protocol import Reply

class Guess:
    stop_texts = ("!",)
    reproducible = False

    def __init__(self, *, most: int = 9):
        self.most = most

    def reset(self, row, seed):
        return f"Guess up to {self.most}."

    def reply(self, said):
        return Reply("Higher.", reward=0.5, done=said == "9")

class Deaf:
    def reset(self, row, seed): ...

ONE = Guess()

def same():
    return ONE

def made(most: int):
    return Guess(most=most)

number = 3
"""


def environments(own: Own = None, **options: Any) -> Environments | None:
    settings = TurnSettings(max_turns=4, options=EnvironmentOptions(**options))
    stop = int(TOKENIZER.eos_token_id)
    return environments_of(settings, Toolbox(), TokenizerRenderer(TOKENIZER), (stop,), own)


@pytest.fixture
def guess(tmp_path: Path) -> str:
    path = tmp_path / "guess.py"
    path.write_text(GUESS)
    return str(path)


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with echo_server() as running:
        yield running


def test_without_a_section_nothing_replies() -> None:
    assert environments() is None


@pytest.mark.parametrize("name", ["Guess", "made"])
def test_a_class_or_a_factory_of_a_file_makes_an_object_for_each_completion(guess: str, name: str) -> None:
    found = environments(path=f"{guess}:{name}", options={"most": 7})
    assert found is not None
    assert (found.stop_texts, found.reproducible, found.only_at_stop_texts) == (("!",), False, False)
    first, second = found.make(), found.make()
    assert first is not second
    assert first.reset({}, 0) == "Guess up to 7."


def test_mistakes_of_a_users_environment_are_named_before_the_first_step(guess: str) -> None:
    with refused("Deaf", "`reply`"):
        environments(path=f"{guess}:Deaf")
    with refused("environment.options.mots", "`most`"):
        environments(path=f"{guess}:Guess", options={"mots": 7})
    with refused("same", "twice", "new one"):
        environments(path=f"{guess}:same")
    with refused("number is a int"):
        environments(path=f"{guess}:number")
    with refused("environment.path and environment.url"):
        environments(path=f"{guess}:Guess", url="ws://127.0.0.1:1/ws")
    with refused("environment.options", "path"):
        environments(options={"most": 7})
    with refused("number is a int", "function"):
        toolbox_of([f"{guess}:number"])


def test_an_object_with_both_methods_is_taken_as_it_is() -> None:
    class Mine:
        def reset(self, row: Mapping[str, object], seed: int) -> None: ...

        def reply(self, said: str) -> None: ...

    found = environments(Mine)
    assert found is not None
    assert isinstance(found.make(), Mine)
    assert environments(found) is found


def talk(environment: Environment, said: str) -> Reply:
    reply = environment.reply(said)
    assert isinstance(reply, Reply)
    return reply


def test_an_openenv_server_replies_until_it_is_done_and_its_session_ends(server: EchoServer) -> None:
    found = environments(url=server.url, options={"reset": {"level": 2}, "columns": ["word"]})
    assert found is not None
    assert not found.reproducible
    environment = found.make()
    assert environment.reset({"word": "x", "other": 1}, 7) == "Say something."
    assert server.asked[0] == {"type": "reset", "data": {"seed": 7, "word": "x", "level": 2}}
    replies = [talk(environment, said) for said in ("a", "b", "c")]
    # One text among the observation's fields: it is what the policy reads.
    assert replies[0] == Reply("You said 'a'.", reward=0.1)
    assert [reply.done for reply in replies] == [False, False, True]
    assert server.asked[1] == {"type": "step", "data": {"message": "a"}}
    environment.close()  # type: ignore[attr-defined]
    environment.close()  # type: ignore[attr-defined]
    assert server.closed.wait(5)


def test_fields_of_actions_and_observations_can_be_named(server: EchoServer) -> None:
    found = environments(url=server.url, options={"action": "", "observation": "steps"})
    assert found is not None
    environment = found.make()
    environment.reset({}, 0)
    assert talk(environment, '{"message": "a"}').content == "1"
    assert talk(environment, "no JSON").content == "2"  # an empty action: the server says what it makes of it


FAILURES = {"break": "EXECUTION_ERROR", "garbage": "JSON", "close": "Closed", "hang": "Timeout"}


@pytest.mark.parametrize("said", FAILURES)
def test_a_server_that_fails_dies_or_hangs_raises_what_ends_the_completion(server: EchoServer, said: str) -> None:
    found = environments(url=server.url, seconds=0.5)
    assert found is not None
    environment = found.make()
    environment.reset({}, 0)
    with refused(FAILURES[said], server.url, error=OpenEnvFailure):
        environment.reply(said)
    server.closed.set()


def test_a_refused_connection_is_an_error_before_the_first_step() -> None:
    with echo_server() as server:
        url = server.url
    with refused("environment.url", url, "Start the server"):
        environments(url=url)


def test_the_objects_that_are_only_looked_at_are_closed() -> None:
    open_ones: list[object] = []

    class Mine:
        def __init__(self) -> None:
            open_ones.append(self)

        def reset(self, row: Mapping[str, object], seed: int) -> None: ...

        def reply(self, said: str) -> None: ...

        async def close(self) -> None:
            open_ones.remove(self)

    environments(lambda: Mine())
    assert open_ones == []

    def only_one() -> Mine:
        if open_ones:
            raise OSError("one board, and it is taken")
        return Mine()

    with refused("only_one failed when it was made", "one board, and it is taken"):
        environments(only_one)
    assert open_ones == []


def test_a_mistake_of_the_class_is_one_message_before_the_first_step() -> None:
    class Broken(Plain):
        def __init__(self) -> None:
            raise OSError("no board")

    class CannotClose(Plain):
        def close(self) -> None:
            raise OSError("lost")

    with refused("Plain", "is a Plain", "Give a class or a factory"):
        environments(Plain())
    with refused("Broken failed when it was made and closed once", "OSError: no board"):
        environments(Broken)
    with refused("CannotClose failed when it was made and closed once", "OSError: lost"):
        environments(CannotClose)


def test_a_class_that_hangs_is_an_error_at_its_deadline_that_says_where() -> None:
    class Hangs(Plain):
        def __init__(self) -> None:
            waits_for_a_board()

    class HangsAtTheEnd(Plain):
        async def close(self) -> None:
            waits_for_a_board()

    def waits_for_a_board() -> None:
        time.sleep(20)

    for each in (Hangs, HangsAtTheEnd):
        with refused(f"{each.__name__} failed when it was made and closed once", "longer than 0.2 s", "waits_for"):
            environments(each, seconds=0.2)


def test_environments_of_python_are_refused_beside_tools() -> None:
    found = environments(Plain)
    assert found is not None
    settings, stop = TurnSettings(max_turns=4), int(TOKENIZER.eos_token_id)
    with refused("tools and environment", "only one"):
        environments_of(settings, toolbox_of(["calculator"]), TokenizerRenderer(TOKENIZER), (stop,), found)


class Plain:
    def reset(self, row: Mapping[str, object], seed: int) -> None: ...

    def reply(self, said: str) -> None: ...


def test_what_environments_share_is_closed_once() -> None:
    closed: list[str] = []
    found = environments(Plain)
    assert found is not None
    own = replace(found, close=lambda: closed.append("once"))
    policy = load_policy(ModelOptions(path="bundled"), inference=True)
    with ExitStack() as opened:
        assert RepliesOfRun(policy, ReplySettings(own=own), {}, opened).open(list).workers is not None
    assert closed == ["once"]
