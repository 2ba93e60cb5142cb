"""The first half of a step: sample groups, grade them, refill uninformative ones, make advantages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from posttrain.algorithms import kl
from posttrain.algorithms.advantages import informative
from posttrain.batch import Judged
from posttrain.records import Grades, Group
from posttrain.rewards.grading.grade import grade
from posttrain.runs.clock import Clock
from posttrain.training.session import Session
from posttrain.training.update import group_logprobs

Journal = Callable[[Sequence[Group], Grades], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """Where in the run a collection happens, and who takes note of it."""

    step: int
    weights_version: int
    clock: Clock
    journal: Journal
    """Is given every score before it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The groups that a step trains on, and what is known of them."""

    judged: Judged
    grades: Grades
    replaced: "list[tuple[list[Group], Grades]]"
    """Groups that dynamic sampling set aside, round by round; logged, not weighted."""

    def everything(self) -> tuple[list[Group], Grades, Float64[Tensor, "prompt group"]]:
        """What the rollout file shows: the groups trained on, then those set aside, whose advantages are NaN."""
        groups, grades, advantages = list(self.judged.groups), self.grades, self.judged.advantages
        for more_groups, more_grades in self.replaced:
            groups += more_groups
            grades = joined(grades, more_grades)
            advantages = torch.cat([advantages, torch.full_like(more_grades.rewards, torch.nan)])
        return groups, grades, advantages


def collect(session: Session, moment: StepContext) -> Collected:
    """Sample and grade the step's groups; every score goes to the journal before it is used."""
    options, algorithm = session.config.rollout, session.algorithm
    groups, grades = sampled(session, moment, range(options.prompts_per_step))
    replaced: list[tuple[list[Group], Grades]] = []
    if algorithm.resample is not None:
        groups, grades, replaced = refilled(session, moment, groups, grades)
    reference = None
    if session.reference is not None and algorithm.uses_reference_logprobs:
        with moment.clock("reference"):
            reference = group_logprobs(
                session.reference,
                groups,
                temperature=options.temperature,
                max_tokens=session.config.update.tokens_per_microbatch,
            )
    judged = Judged(
        groups=groups,
        advantages=algorithm.advantage(shaped(session, groups, grades, reference)),
        scored=~grades.rewards.isnan(),
        reference_logprobs=reference,
    )
    return Collected(judged=judged, grades=grades, replaced=replaced)


def sampled(session: Session, moment: StepContext, draws: range) -> tuple[list[Group], Grades]:
    """The groups of some draws of a step, and their grades."""
    with moment.clock("rollout"):
        session.engine.load(session.policy.model.state_dict(), moment.weights_version)
        request = session.request(moment.step, first_draw=draws.start)
        groups = session.engine.rollout(session.task.prompts(moment.step, draws), request)
    with moment.clock("grade"):
        grades = grade(
            groups,
            session.rewards,
            on_error=session.config.rollout.on_reward_error,
            journal=moment.journal,
            step=moment.step,
            grading=session.config.grading,
            resources=session.resources,
        )
        return groups, grades


def refilled(
    session: Session, moment: StepContext, groups: list[Group], grades: Grades
) -> tuple[list[Group], Grades, list[tuple[list[Group], Grades]]]:
    """Put other prompts' groups in place of those whose rewards are all equal, for a stated number of rounds.

    What is uninformative after the last round stays, so that a step always has its full number of groups.
    """
    assert session.algorithm.resample is not None
    replaced: list[tuple[list[Group], Grades]] = []
    drawn = len(groups)
    for _ in range(session.algorithm.resample.max_rounds):
        keep = informative(grades.rewards)
        missing = int((~keep).sum())
        if missing == 0:
            break
        new_groups, new_grades = sampled(session, moment, range(drawn, drawn + missing))
        drawn += missing
        out, kept = (~keep).nonzero().flatten().tolist(), keep.nonzero().flatten().tolist()
        replaced.append(([groups[i] for i in out], choose(grades, out)))
        groups = [groups[i] for i in kept] + new_groups
        grades = joined(choose(grades, kept), new_grades)
    return groups, grades, replaced


def shaped(
    session: Session, groups: list[Group], grades: Grades, reference: Float64[Tensor, " token"] | None
) -> Float64[Tensor, "prompt group"]:
    """The rewards that advantages are made of: length shaping and a KL in the reward taken into account."""
    algorithm, rewards = session.algorithm, grades.rewards
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts])
    if algorithm.shape_reward is not None:
        limit = session.config.rollout.max_completion_tokens
        rewards = algorithm.shape_reward(rewards, lengths.view_as(rewards), max_completion_tokens=limit)
    term = algorithm.kl
    if term is not None and term.place == "reward":
        assert reference is not None
        behaviour = torch.tensor([lp for rollout in rollouts for lp in rollout.logprobs], dtype=torch.float64)
        owner = torch.arange(len(rollouts)).repeat_interleave(lengths)
        per_token = kl.ESTIMATORS[term.estimator](behaviour, reference)
        total = kl.sequence_total(per_token, owner, num_rollouts=len(rollouts))
        rewards = rewards - term.coefficient * total.view_as(rewards)
    return rewards


def choose(grades: Grades, rows: list[int]) -> Grades:
    """The grades of some groups."""
    return Grades(
        names=grades.names,
        scores=grades.scores[:, rows],
        rewards=grades.rewards[rows],
        outcomes={name: tuple(outcomes[i] for i in rows) for name, outcomes in grades.outcomes.items()},
        details={name: tuple(details[i] for i in rows) for name, details in grades.details.items()},
        num_failures=grades.num_failures,
        num_cached=grades.num_cached,
    )


def joined(first: Grades, second: Grades) -> Grades:
    """The grades of two lists of groups, one after the other."""
    return Grades(
        names=first.names,
        scores=torch.cat([first.scores, second.scores], dim=1),
        rewards=torch.cat([first.rewards, second.rewards]),
        outcomes=appended([(first, first.outcomes), (second, second.outcomes)], blank=""),
        details=appended([(first, first.details), (second, second.details)], blank=None),
        num_failures=first.num_failures + second.num_failures,
        num_cached=first.num_cached + second.num_cached,
    )


def appended(parts: Sequence[tuple[Grades, Mapping[str, Any]]], *, blank: object) -> dict[str, Any]:
    """What functions told of some groups and then of others; a function may have told nothing of some of them."""
    told = [name for name in parts[0][0].names if any(name in of_part for _, of_part in parts)]
    nothing = [((blank,) * grades.rewards.shape[1],) * grades.rewards.shape[0] for grades, _ in parts]
    return {
        name: tuple(row for (_, of_part), none in zip(parts, nothing, strict=True) for row in of_part.get(name, none))
        for name in told
    }
