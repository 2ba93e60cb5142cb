"""A student moves towards its teacher, on its own completions, and one who is taught by another does not."""

from collections.abc import Sequence

import pytest
import torch

from posttrain.algorithms.correction import Correction
from posttrain.algorithms.distillation import distill
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import StreamKey
from posttrain.models.policy import Policy
from posttrain.options.algorithm import TeacherOptions
from posttrain.options.training import UpdateOptions
from posttrain.records import Grades, Group
from posttrain.runs.progress import Clock
from posttrain.training.collector import CollectedStep
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.metrics import update_metrics
from posttrain.training.reference import Teacher, UncopiedPolicy
from posttrain.training.update import group_logprobs
from tests.support.tiny import request, some_prompts, tiny_policy

NUM_STEPS = 20
NAMED = TeacherOptions(sees="answer")  # another takes its place below


def distance(student: Policy, teacher: Policy) -> float:
    """Mean KL of the student to a teacher, in nats per token, on completions of prompts that are not trained on."""
    learner = learner_of(student, teacher, "full")
    return step_of(learner, 1000, first_seed=1000)["kl_teacher"]


def learner_of(student: Policy, teacher: Policy, signal: str) -> Learner:
    settings = LearnerSettings(update=UpdateOptions(learning_rate=1e-2), max_completion_tokens=10, num_steps=NUM_STEPS)
    learner = Learner(student, distill(teacher=NAMED, signal=signal), settings)  # type: ignore[arg-type]
    learner.teacher = Teacher(UncopiedPolicy(teacher), None)
    return learner


def ungraded(step: int, groups: Sequence[Group]) -> CollectedStep:
    nothing = torch.zeros(len(groups), len(groups[0].rollouts), dtype=torch.float64)
    grades = Grades(names=("none",), scores=nothing[None], weights=torch.ones(1).double(), rewards=nothing)
    return CollectedStep(step=step, groups=groups, grades=grades)


def step_of(learner: Learner, step: int, *, first_seed: int = 0) -> dict[str, float]:
    """One step of distillation; what it was like before its update."""
    prompts = some_prompts([3, 6, 1, 4], seed=first_seed + step)
    groups = sample_groups(InProcessEngine(learner.policy), prompts, request(8, 10, key=StreamKey(0, "distill", step)))
    credited = learner.credit(ungraded(step, groups), Clock())
    return update_metrics(learner.learn(learner.batches(credited, Clock()), step, Clock()))


@pytest.mark.parametrize("updates", [1, 2])
def test_corrected_advantages_are_those_of_the_policy_that_the_step_starts_from(updates: int) -> None:
    """log π_T - log π_prox, whatever sampled; without a correction log π_T - log μ."""
    student, teacher = tiny_policy(seed=0), tiny_policy(seed=1)
    options = UpdateOptions(learning_rate=1e-2, minibatches_per_epoch=updates)
    settings = LearnerSettings(update=options, max_completion_tokens=10, num_steps=NUM_STEPS)
    asked = request(4, 10, key=StreamKey(0, "distill", 1))
    groups = sample_groups(InProcessEngine(tiny_policy(seed=2)), some_prompts([3, 6], seed=5), asked)
    started, taught = (group_logprobs(each, groups, temperature=1.0, max_tokens=999) for each in (student, teacher))
    sampled = torch.tensor([x for group in groups for each in group.rollouts for x in each.logprobs]).double()
    for correction, base in ((Correction(), started), (None, sampled)):
        learner = Learner(student, distill(teacher=NAMED, signal="sampled", correction=correction), settings)
        learner.teacher = Teacher(UncopiedPolicy(teacher), None)
        credited = learner.credit(ungraded(1, groups), Clock())
        torch.testing.assert_close(credited.groups.columns.advantages, taught - base, rtol=1e-5, atol=1e-5)
    assert (started - sampled).abs().max() > 0.1


@pytest.mark.parametrize("signal", ["full", "sampled"])
def test_a_student_moves_towards_its_teacher_and_the_control_taught_by_another_does_not(signal: str) -> None:
    student, teacher, other = (tiny_policy(dtype=torch.float32, seed=seed) for seed in (0, 1, 2))
    before = distance(student.copy(), teacher)
    after = {}
    for name, taught_by in (("teacher", teacher), ("other", other)):
        learner = learner_of(student.copy(), taught_by, signal)
        for step in range(1, NUM_STEPS + 1):
            step_of(learner, step)
        after[name] = distance(learner.policy, teacher)
    assert after["teacher"] < 0.55 * before
    # Not all of the way that it came: random models have in common that none is sure of much.
    assert after["other"] > 1.15 * after["teacher"]
