"""What an engine returns is looked at before it is graded and trained on: each fault is named, none is passed over."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from posttrain.errors import RunError
from posttrain.generation.engine import require_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Request
from posttrain.generation.streams import StreamKey
from posttrain.options.sampling import Sampling
from posttrain.records import Finish, Group, Prompt, Rollout, TokenSequence
from posttrain.rewards.grading.grade import reward_function
from posttrain.runs.clock import Clock
from posttrain.tasks.base import Probe, Reading
from posttrain.training.collector import no_journal
from posttrain.training.evaluation import Questions, full_evaluation
from tests.support.sequences import resampled
from tests.support.stages import LIMIT, even_tokens, stages_with
from tests.support.tiny import some_prompts, tiny_policy

PROMPTS = some_prompts([3, 5, 2])
REQUEST = Request(group_size=2, max_completion_tokens=4, sampling=Sampling(), key=StreamKey(0, "test", 1, first_draw=7))

Groups = list[Group]


class Changed(InProcessEngine):
    """Ours, with something done to what it returns."""

    def __init__(self, change: Callable[[Groups], Any], *, only_suppressed: bool = False) -> None:
        super().__init__(tiny_policy())
        self.change, self.only_suppressed = change, only_suppressed

    def rollout(self, prompts: Sequence[Prompt], request: Request, **how: Any) -> list[Group]:
        groups = super().rollout(prompts, request, **how)
        return groups if self.only_suppressed and not request.suppressed else self.change(groups)


def of_rollout(change: Callable[[Rollout], Any]) -> Callable[[Groups], Groups]:
    """The change of one completion: sample 1 of the second prompt."""

    def changed(groups: Groups) -> Groups:
        first, second = groups[1].rollouts[0], groups[1].rollouts[1]
        return [groups[0], replace(groups[1], rollouts=(first, change(second), *groups[1].rollouts[2:])), *groups[2:]]

    return changed


FAULTS: dict[str, tuple[Callable[[Groups], Any], str]] = {
    "a group too few": (lambda groups: groups[:-1], r": 2 groups for 3 prompts\.  `rollout` returns a group for each"),
    "other groups": (lambda groups: groups[::-1], r", prompt p0: its group is of prompt p2"),
    "no group": (lambda groups: [*groups[:2], {}], r", prompt p2: a dict is no posttrain\.records\.Group"),
    "another draw": (
        lambda groups: [replace(group, draw=index) for index, group in enumerate(groups)],
        r", prompt p0: draw = 0, where it is request\.key\.first_draw \+ 0 = 7",
    ),
    "a completion too few": (
        lambda groups: [*groups[:2], replace(groups[2], rollouts=groups[2].rollouts[:1])],
        r", prompt p2: 1 completions, where request\.group_size = 2 were asked for",
    ),
    "a number twice": (of_rollout(lambda rollout: replace(rollout, sample=0)), r", prompt p1: sample = 0 stands where"),
    "an empty completion": (
        of_rollout(lambda rollout: resampled(rollout, tokens=(), logprobs=())),
        r", prompt p1, sample 1: 0 tokens, where a completion has 1, the stop token, to max_completion_tokens = 4\.",
    ),
    "a completion too long": (
        of_rollout(lambda rollout: resampled(rollout, tokens=(1,) * 5, logprobs=(-1.0,) * 5)),
        r", prompt p1, sample 1: 5 tokens, where",
    ),
    "a log-prob too few": (
        of_rollout(lambda rollout: resampled(rollout, tokens=(1, 2, 3), logprobs=(-1.0, -1.0))),
        r", prompt p1, sample 1: 3 tokens and 2 logprobs\.  There is one for each token, the stop token too\.",
    ),
    "a log-prob too many of the cut": (
        of_rollout(lambda rollout: resampled(rollout, tokens=(1,), logprobs=(-1.0,), cut_logprobs=(-1.0, -1.0))),
        r", prompt p1, sample 1: 1 tokens and 2 cut_logprobs",
    ),
    "a log-prob of NaN": (
        of_rollout(lambda rollout: resampled(rollout, tokens=(1, 2), logprobs=(-1.0, nan))),
        r", prompt p1, sample 1: logprobs\[1\] = nan, where log μ of a sampled token is finite and at most 0\.",
    ),
    "an infinite log-prob": (
        of_rollout(lambda rollout: resampled(rollout, tokens=(1, 2), logprobs=(-inf, -1.0))),
        r", prompt p1, sample 1: logprobs\[0\] = -inf",
    ),
    "a probability for a log-prob": (
        of_rollout(lambda rollout: resampled(rollout, tokens=(1, 2), logprobs=(-1.0, 0.25))),
        r", prompt p1, sample 1: logprobs\[1\] = 0\.25",
    ),
    "older weights": (
        of_rollout(lambda rollout: resampled(rollout, versions=((0, 3),))),
        r", prompt p1, sample 1: sampled by version 3 of the weights, where version 4 was loaded last",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_engine_prompt_and_sample(fault: str) -> None:
    change, says = FAULTS[fault]
    engine = InProcessEngine(tiny_policy())
    engine.load({}, 4)
    groups = engine.rollout(PROMPTS, REQUEST)
    require_groups(groups, PROMPTS, REQUEST, engine)
    with pytest.raises(RunError, match=f"^engine InProcessEngine{says}"):
        require_groups(change(groups), PROMPTS, REQUEST, engine)


@pytest.mark.parametrize("logprob", [0.0, 1e-4], ids=["certain", "rounded"])
def test_a_certain_token_and_a_rounded_one_pass(logprob: float) -> None:
    engine = InProcessEngine(tiny_policy())
    certain = of_rollout(lambda rollout: resampled(rollout, tokens=(1,), logprobs=(logprob,), finish=Finish.LENGTH))
    require_groups(certain(engine.rollout(PROMPTS, REQUEST)), PROMPTS, REQUEST, engine)


def short(rollout: Rollout) -> Rollout:
    return resampled(rollout, logprobs=rollout.logprobs[:-1])


def test_what_a_step_and_its_refills_train_on_is_looked_at() -> None:
    algorithm = {"name": "dapo", "resample": {"max_rounds": 1}}
    made = stages_with(algorithm, even_tokens)
    made.collector.engine = Changed(of_rollout(short))
    with pytest.raises(RunError, match=r"^engine Changed, prompt draw 1, sample 1: .* logprobs"):
        made.collected()

    def equal(completions: Sequence[str], **columns: object) -> list[float]:
        return [1.0] * len(completions)

    refilled = stages_with(algorithm, equal)
    refilled.collector.engine = Changed(lambda groups: of_rollout(short)(groups) if groups[0].draw else groups)
    with pytest.raises(RunError, match=r"^engine Changed, prompt draw 6, sample 1: .* logprobs"):
        refilled.collector.collect(1, no_journal, Clock())


def test_what_an_evaluation_and_its_probes_measure_is_looked_at() -> None:
    endless = Probe(
        readings={"number": Reading("number")}, measure=lambda groups: {"number": float(len(groups))}, endless=True
    )
    probes: Mapping[str, Probe] = {"endless": endless}
    questions = Questions(
        prompts=PROMPTS, judge=reward_function(even_tokens), max_completion_tokens=LIMIT, seed=0, probes=probes
    )
    assert full_evaluation(Changed(lambda groups: groups), questions, samples=2)[0]["number"] == 3
    with pytest.raises(RunError, match=r"^engine Changed, prompt p1, sample 1: .* logprobs"):
        full_evaluation(Changed(of_rollout(short)), questions, samples=2)
    of_probe = Changed(lambda groups: groups[1:], only_suppressed=True)
    with pytest.raises(RunError, match=r"^engine Changed: 2 groups for 3 prompts"):
        full_evaluation(of_probe, questions, samples=2)


def test_looking_costs_less_than_a_microsecond_for_each_token() -> None:
    """A step of a small model spends hundreds on each; the bound is ten times what it takes on a slow machine."""
    rollouts = tuple(
        Rollout(
            sample=i, sequence=TokenSequence.one_turn((3,) * 500, logprobs=(-1.0,) * 500, finish=Finish.LENGTH), text=""
        )
        for i in range(200)
    )
    request = replace(REQUEST, group_size=200, max_completion_tokens=500)
    engine = InProcessEngine(tiny_policy())
    groups = [Group(prompt=PROMPTS[0], draw=7, rollouts=rollouts)]
    began = time.process_time()
    require_groups(groups, PROMPTS[:1], request, engine)
    assert time.process_time() - began < 1e-6 * 200 * 500
