"""Several turns beside one: tokens through the model, and sampled tokens per second of CPU.

    python benchmarks/turns.py [--repeats 5]

The bundled model answers the prompts of a step of Countdown (16 × 8 completions), with a calculator at `=` and without,
in turns, on one thread.  Seconds are those of the process's CPU, threads of replies included.  The figures are medians,
and a ratio is that of neighbours.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import posttrain
from posttrain.generation.conversations import sample_conversations
from posttrain.generation.in_process import InProcessEngine, steps_for
from posttrain.generation.steps import Steps
from posttrain.records import Group
from posttrain.tasks.base import training_prompts
from posttrain.training.session import Session, open_session


class CountedSteps:
    """The steps of an engine, which count the tokens that go through the model."""

    def __init__(self, steps: Steps) -> None:
        self.tokens = 0
        self._prefill, self._step = steps.prefill, steps.step
        steps.prefill, steps.step = self.prefill, self.step  # type: ignore[method-assign]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Any:
        self.tokens += sum(map(len, prompts))
        return self._prefill(prompts)

    def step(self, tokens: torch.Tensor, slots: Any) -> torch.Tensor:
        self.tokens += len(tokens)
        return self._step(tokens, slots)


@dataclass(frozen=True)
class Measured:
    """What a step's sampling took."""

    sampled: int
    given: int
    turns: int
    prompts: int
    through_the_model: int
    cpu_seconds: float

    @property
    def per_second(self) -> float:
        return self.sampled / self.cpu_seconds

    @property
    def share_computed(self) -> float:
        """Tokens through the model for each token of a prompt (once), sampled or given."""
        return self.through_the_model / (self.prompts + self.sampled + self.given)


def measured(session: Session, counted: CountedSteps) -> Measured:
    prompts = training_prompts(session.task, 1, range(16))
    counted.tokens, began = 0, time.process_time()
    request, workers = session.collector.request(1), session.environment.workers
    groups: list[Group] = sample_conversations(session.engine, prompts, request, workers)
    seconds = time.process_time() - began
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sampled = sum(rollout.num_sampled for rollout in rollouts)
    return Measured(
        sampled=sampled,
        given=sum(len(rollout.tokens) for rollout in rollouts) - sampled,
        turns=sum(len(rollout.turns) for rollout in rollouts),
        prompts=sum(len(group.prompt.tokens) for group in groups),
        through_the_model=counted.tokens,
        cpu_seconds=seconds,
    )


def opened(**sections: Any) -> tuple[Session, CountedSteps]:
    engine = {"name": "in_process", "native": False}  # the torch path, whose passes are counted
    config = posttrain.load_recipe("countdown-tiny", run={"threads": 1}, engine=engine, **sections)
    session = open_session(config, inference=True)
    session.load_weights()
    assert isinstance(session.engine, InProcessEngine)
    session.engine._steps = steps_for(session.engine.policy)
    return session, CountedSteps(session.engine._steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    rollout = {"prompts_per_step": 16, "group_size": 8}
    calculator = {"tools": ["calculator"], "tools_at": {"calculator": "="}}
    one, several = opened(rollout=rollout), opened(rollout={**rollout, "max_turns": 60}, **calculator)
    with one[0], several[0]:
        pairs = [(measured(*one), measured(*several)) for _ in range(repeats + 1)][1:]  # the first warms up
    last = pairs[-1][1]
    print(
        json.dumps(
            {
                "completions": 128,
                "turns": last.turns,
                "sampled": last.sampled,
                "given": last.given,
                "share_computed": round(last.share_computed, 3),
                "sampled_per_cpu_second": {
                    "one turn": round(statistics.median(each.per_second for each, _ in pairs)),
                    "several": round(statistics.median(each.per_second for _, each in pairs)),
                },
                "ratio": round(statistics.median(b.per_second / a.per_second for a, b in pairs), 2),
                "ratios": [round(b.per_second / a.per_second, 2) for a, b in pairs],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
