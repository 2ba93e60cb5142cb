"""Conversations over a server are those in process, token for token."""

from functools import partial
from pathlib import Path

import pytest

from posttrain.generation.http import probe
from posttrain.generation.http.http_engine import HttpEngine
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import StreamKey
from posttrain.models.loading.saving import ExportedWeights
from posttrain.options.rollout import HttpOptions, SamplingParams
from tests.support.rl_server import NATS, own_server, save_model
from tests.support.tiny import request, some_prompts
from tests.support.turns import Dice, conversations, environments

PROMPTS, ASKED = some_prompts((3, 7, 5)), request(4, 24, key=StreamKey(3, "test", 2))


def test_conversations_over_a_server_are_those_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of a turn goes on at the position behind the turns before, and stop texts end turns there too."""
    monkeypatch.setattr(probe, "NUM_SEQUENCES", 2)
    letters = tuple("aeiot0123456789")
    made = environments(partial(Dice, ends=0.05), max_turns=5, stop_texts=letters)
    with own_server(save_model(tmp_path / "model"), tmp_path / "weights") as server:
        policy = server.policy
        expected = conversations(InProcessEngine(policy), PROMPTS, ASKED, made)
        assert sum(len(each.turns) for group in expected for each in group.rollouts) > 12
        engine = HttpEngine(policy, HttpOptions(urls=(server.url,)), longest=60, sampling=SamplingParams())
        try:
            engine.load(ExportedWeights(policy), 0)
            found = conversations(engine, PROMPTS, ASKED, made)
        finally:
            engine.close()
    for group, other in zip(found, expected, strict=True):
        for mine, its in zip(group.rollouts, other.rollouts, strict=True):
            assert (mine.tokens, mine.sequence.sampled, mine.finish) == (its.tokens, its.sequence.sampled, its.finish)
            assert mine.logprobs == pytest.approx(its.logprobs, abs=NATS)
