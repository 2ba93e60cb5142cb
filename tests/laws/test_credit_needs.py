"""A credit rule sees the columns that it declares, one provider each; so no statistic depends on micro-batches."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain import Algorithm, ClipRange, Credit, Need, policy_term
from posttrain.algorithms.advantages import group_zscore
from posttrain.algorithms.credit import Evidence, per_rollout
from posttrain.algorithms.losses import clipped_surrogate, mean_over_tokens
from posttrain.algorithms.table import build_algorithm
from posttrain.errors import RunError
from posttrain.needs import CREDIT_NEEDS, NEED_OF
from posttrain.options.algorithm import CriticOptions
from posttrain.runs.progress import Clock
from posttrain.training.credited_step import PROVIDERS
from posttrain.training.reference import FrozenCopy, Teacher
from tests.support.refusals import refused
from tests.support.stages import Stages, stages_with
from tests.support.tiny import gradient_of_update, plain_logprobs, rows_of, tiny_policy, vocab_logprobs

BY_REWARD = per_rollout(group_zscore)
TERM = policy_term(clipped_surrogate, clip=ClipRange(low=0.2, high=0.2))


def algorithm_with(rule: Callable[[Evidence], object], *needs: Need, **more: object) -> Algorithm:
    more |= {"terms": (TERM,), "token_weights": mean_over_tokens}
    return Algorithm(name="mine", credit=rule, credit_needs=frozenset(needs), **more)


def stages_of(algorithm: Algorithm, **update: int) -> Stages:
    stages = stages_with(algorithm, **update)
    if stages.learner.reference is not None:
        stages.learner.reference = FrozenCopy(tiny_policy(seed=1))
    return stages


def logits_of(stages: Stages) -> Tensor:
    """log π of the whole vocabulary at every sampled token, by single rows through the library's model."""
    return torch.cat([vocab_logprobs(stages.policy.model, *row) for row in rows_of(stages.collected().groups)])


def picked(stages: Stages, seed: int | None = None) -> Tensor:
    model = stages.policy.model if seed is None else tiny_policy(seed=seed).model
    return torch.cat([plain_logprobs(model, *row) for row in rows_of(stages.collected().groups)])


def test_every_need_of_credit_has_one_provider_and_every_need_a_column() -> None:
    assert {*PROVIDERS} == CREDIT_NEEDS
    assert {*NEED_OF.values()} == {*Need}


EXPECTED = {
    Need.ENTROPY: lambda stages: {"entropies": -(logits_of(stages).exp() * logits_of(stages)).sum(-1)},
    Need.PROXIMAL_LOGPROBS: lambda stages: {"proximal_logprobs": picked(stages)},
    Need.REFERENCE_LOGPROBS: lambda stages: {"reference_logprobs": picked(stages, 1)},
}


@pytest.mark.parametrize("need", EXPECTED, ids=str)
def test_a_rule_sees_what_it_declares_and_nothing_else(need: Need) -> None:
    seen: list[Evidence] = []

    def rule(evidence: Evidence) -> Credit:
        seen.append(evidence)
        return BY_REWARD(evidence)

    stages = stages_of(algorithm_with(rule, need), tokens_per_microbatch=40)
    expected = EXPECTED[need](stages)
    stages.credited()
    found = dict(seen[0].known)
    assert torch.equal(found.pop("behaviour_logprobs"), seen[0].behaviour_logprobs)
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        torch.testing.assert_close(found[name], column.detach(), rtol=0, atol=1e-12)


def test_values_come_with_what_is_expected_after_a_completion_that_was_cut_off() -> None:
    def rule(evidence: Evidence) -> Credit:
        assert evidence.final_values.shape == evidence.rewards.shape
        return Credit(evidence.values)

    stages = stages_of(algorithm_with(rule, Need.VALUES, critic=CriticOptions()))
    columns = stages.credited().groups.columns
    assert torch.equal(columns.advantages, columns.values)


def test_a_teacher_is_read_behind_the_prompts_that_it_sees() -> None:
    teacher = build_algorithm({"name": "distill"}).teacher
    made = algorithm_with(lambda evidence: Credit(evidence.teacher_logprobs), Need.TEACHER_LOGPROBS, teacher=teacher)
    stages = stages_of(made)
    stages.learner.teacher = Teacher(FrozenCopy(tiny_policy(seed=2)), None)
    found = stages.credited().groups.columns.advantages
    torch.testing.assert_close(found, picked(stages, 2).detach(), rtol=0, atol=1e-12)


WRONG = {
    "undeclared": (lambda evidence: Credit(evidence.entropies), "<lambda>…`entropies`…Need.ENTROPY…`credit_needs`"),
    "computed for a term alone": (lambda seen: Credit(seen.reference_logprobs), "`reference_logprobs`…Need.REFERENCE_"),
    "an error of its own": (lambda evidence: {}["missing"], "<lambda>…KeyError: 'missing'…test_credit_needs.py, line "),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_rule_that_fails_is_a_message_that_names_it(case: str) -> None:
    rule, words = WRONG[case]
    kl = build_algorithm({"name": "grpo", "kl": {"coefficient": 0.1}}).terms[1]
    made = replace(algorithm_with(rule), terms=(TERM, kl))
    with refused("algorithm mine", words, error=RunError):
        stages_of(made).credited()


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ({Need.FULL_KL}, ("credit_needs", "entropy, proximal_logprobs, ")),
        ({Need.VALUES}, ("critic = None", "CriticOptions")),
        ({Need.TEACHER_LOGPROBS}, ("teacher = None", "TeacherOptions")),
    ],
    ids=str,
)
def test_needs_that_cannot_be_met_are_refused(needs: set[Need], words: tuple[str, ...]) -> None:
    with refused("algorithm mine", *words):
        algorithm_with(BY_REWARD, *needs)


def forking(evidence: Evidence) -> Credit:
    """GRPO's advantages on the fifth of the step's tokens whose entropy is highest."""
    threshold = evidence.entropies.quantile(0.8)
    return Credit(torch.where(evidence.entropies >= threshold, BY_REWARD(evidence).advantages, 0.0))


def test_a_quantile_in_the_credit_rule_does_not_depend_on_micro_batches() -> None:
    gradients = []
    for budget in (30, 10_000):
        stages = stages_of(algorithm_with(forking, Need.ENTROPY), tokens_per_microbatch=budget)
        credited = stages.credited()
        share = (credited.groups.columns.advantages != 0).double().mean()
        (batch,) = stages.learner.batches(credited, Clock())
        found = gradient_of_update(stages.policy, batch, stages.learner.objective(), tokens_per_microbatch=budget)
        gradients.append(found[0])
        assert 0.05 < share <= 0.21
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
