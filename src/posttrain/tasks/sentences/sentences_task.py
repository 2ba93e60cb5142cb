"""Texts to go on with: the toy on which a course watches a policy find out what a reward pays.

**What the prompt looks like.**  The beginning of a sentence, such as `The weather today is`, without a template.

**What earns what.**  The reward `period_count` with `most: null`: the number of full stops in the completion.

**Known hack.**  It is one.  What is of interest is which: shorter sentences, abbreviations, decimal numbers, lists, or
nothing but full stops.  posttrain.tasks.sentences.period_strategies tells them apart, and the probe `periods` reports
what it finds in held-out completions.

**Where texts come from.**  posttrain.tasks.sentences.grammar writes those that `posttrain sft` learns; nothing is
downloaded, and a model that was trained on text of its own needs none of them.
"""

from collections.abc import Mapping, Sequence

from posttrain.options.sentences import SentencesOptions
from posttrain.records import Group, Prompt
from posttrain.rewards.grading.function import RewardFunction
from posttrain.rewards.shaping import PeriodCount
from posttrain.tasks.base import DRAWS_PER_STEP, Probe, PromptRenderer, Reading, Task
from posttrain.tasks.sentences.period_strategies import PeriodUse, period_strategies


class SentencesTask(Task):
    """The beginnings of the options, one after the other, again and again; what differs is what is sampled."""

    name = "sentences"

    def __init__(self, options: SentencesOptions, renderer: PromptRenderer) -> None:
        self.options, self.renderer = options, renderer
        self.reward_functions = (
            RewardFunction(name="period_count", call=PeriodCount(most=None), text_only=True, bounded=True),
        )

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        """As many beginnings, each as often as the others or once more."""
        assert draws.stop <= DRAWS_PER_STEP, draws
        openings = self.options.openings
        return [self.prompt(openings[draw % len(openings)], f"train/{draw % len(openings)}") for draw in draws]

    def held_out(self) -> list[Prompt]:
        """The held-out beginnings in turns."""
        openings = self.options.held_out_openings
        numbers = range(self.options.held_out_size)
        return [self.prompt(openings[number % len(openings)], f"held-out/{number}") for number in numbers]

    def prompt(self, opening: str, id: str) -> Prompt:
        """A beginning as the policy sees it."""
        return self.renderer.render(opening, id=id, prefill="", columns={})

    def probes(self) -> Mapping[str, Probe]:
        """What the full stops of held-out completions are for."""
        kinds = {f"periods_{use}": Reading(f"full stops: {use}") for use in PeriodUse}
        readings = {"periods": Reading("full stops"), **kinds, "words_per_sentence": Reading("words per sentence")}
        return {"periods": Probe(readings=readings, measure=period_readings)}


def period_readings(groups: Sequence[Group]) -> dict[str, float]:
    """The strategies of all completions of the groups, under the names of the probe."""
    found = period_strategies([each.text for group in groups for each in group.rollouts])
    kinds = {f"periods_{use}": count for use, count in found.uses.items()}
    return {"periods": found.periods, **kinds, "words_per_sentence": found.words_per_sentence}
