"""Conversations over servers are those in process, to the bit."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from posttrain.generation.http import probe
from posttrain.generation.http.http_engine import HttpEngine
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import StreamKey
from posttrain.models.loading.saving import ExportedWeights
from posttrain.options.rollout import HttpOptions, SamplingParams
from tests.support.rl_server import own_server, save_model
from tests.support.tiny import request, some_prompts
from tests.support.turns import Dice, conversations, environments

PROMPTS, ASKED = some_prompts((3, 7, 5)), request(4, 24, key=StreamKey(3, "test", 2))


@pytest.mark.parametrize("count", [1, 2])
def test_conversations_over_servers_are_those_in_process(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of a turn goes on at the position behind the turns before, and stop texts end turns there too."""
    monkeypatch.setattr(probe, "NUM_SEQUENCES", 2)
    letters = tuple("aeiot0123456789")
    made = environments(partial(Dice, ends=0.05), max_turns=5, stop_texts=letters)
    model = save_model(tmp_path / "model")
    with ExitStack() as held:
        servers = [held.enter_context(own_server(model, tmp_path / f"weights-{place}")) for place in range(count)]
        policy, urls = servers[0].policy, tuple(each.url for each in servers)
        expected = conversations(InProcessEngine(policy), PROMPTS, ASKED, made)
        assert sum(len(each.turns) for group in expected for each in group.rollouts) > 12
        engine = HttpEngine(policy, HttpOptions(urls=urls), longest=60, sampling=SamplingParams())
        try:
            engine.load(ExportedWeights(policy), 0)
            found = conversations(engine, PROMPTS, ASKED, made)
        finally:
            engine.close()
    for group, other in zip(found, expected, strict=True):
        for mine, its in zip(group.rollouts, other.rollouts, strict=True):
            assert (mine.tokens, mine.sequence.sampled, mine.finish) == (its.tokens, its.sequence.sampled, its.finish)
            assert mine.logprobs == its.logprobs
