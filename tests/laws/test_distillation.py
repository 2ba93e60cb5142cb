"""The gradient of distillation is that of a divergence to the teacher: over all completions, and through a model."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from posttrain.algorithms.advantages import group_zscore
from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.distillation import to_go
from posttrain.algorithms.table import build_algorithm
from posttrain.batch import Batch, CreditedGroups, collate, sampled_columns
from posttrain.models.policy import Policy
from posttrain.needs import Need
from posttrain.runs.progress import Clock
from posttrain.training.reference import FrozenCopy, Teacher, UncopiedPolicy
from posttrain.training.update import Objective, group_logprobs
from tests.support import tiny
from tests.support.enumerated import COMPLETIONS, Tree
from tests.support.sequences import evidence_of, known, resampled, view_of
from tests.support.stages import stages_with
from tests.support.tiny import tiny_policy

SAMPLED = {"name": "distill", "signal": "sampled", "token_weights": "sum_over_sequence"}
GROUPS = [
    tiny.written_group((3, 7, 2), [(4, 9, 1, 5), (8, 5), (2, 2, 11)], name="a"),
    tiny.written_group((6,), [(1, 5), (12, 13, 5), (7, 7, 7, 5)], name="b", draw=1),
]
SEEN = [[(9, 3, 7, 2), (9, 3, 7, 2), (3, 7, 2)], [(6,), (4, 4, 6), (4, 4, 6)]]
"""What a teacher sees: more than the student, but for the last of the first group and the first of the last."""


def expected_gradient(
    config: dict[str, object], student: Tree, teacher: Tree, *, sampler: Tree | None = None
) -> Tensor:
    """Of single completions, over all that the student, or another, can sample; each in a step of its own."""
    algorithm = build_algorithm(config)
    mine, theirs = student.token_logprobs(), [tokens.detach() for tokens in teacher.token_logprobs()]
    drawn = [tokens.detach() for tokens in (sampler or student).token_logprobs()]
    chance = torch.stack([tokens.sum() for tokens in drawn]).exp()
    now, lengths = torch.cat(mine), torch.tensor([[len(tokens) for tokens in COMPLETIONS]])
    rollout = torch.arange(len(COMPLETIONS)).repeat_interleave(lengths[0])
    columns = known(teacher_logprobs=torch.cat(theirs), behaviour_logprobs=now.detach(), proximal_logprobs=now.detach())
    evidence = evidence_of(torch.zeros(lengths.shape), lengths, known=columns)
    advantages = algorithm.credit(evidence).advantages
    losses = tiny.token_loss(algorithm, now, torch.cat(drawn), advantages, rollout, proximal=now.detach())
    return torch.autograd.grad((chance[rollout] * losses).sum(), student.logits)[0]


def divergence_of_completions(student: Tree, teacher: Tree) -> Tensor:
    mine = torch.stack([tokens.sum() for tokens in student.token_logprobs()])
    theirs = torch.stack([tokens.sum() for tokens in teacher.token_logprobs()]).detach()
    return (mine.exp() * (mine - theirs)).sum()


def divergence_where_it_goes(student: Tree, teacher: Tree) -> Tensor:
    """Σ over prefixes of the chance to come there, held still, times the KL of the next token."""
    visits = torch.zeros(len(student.logits), dtype=torch.float64)
    for tokens, logprobs in zip(COMPLETIONS, student.token_logprobs(), strict=True):
        for t in range(len(tokens)):
            visits[student.row[tokens[:t]]] += logprobs.sum().exp().detach()
    mine, theirs = student.logits.log_softmax(1), teacher.logits.detach().log_softmax(1)
    return (visits * (mine.exp() * (mine - theirs)).sum(dim=1)).sum()


@pytest.mark.parametrize(
    ("options", "divergence"),
    [({"horizon": "completion"}, divergence_of_completions), ({"horizon": "token"}, divergence_where_it_goes)],
    ids=["completion", "token"],
)
def test_the_sampled_signal_has_the_gradient_of_a_divergence_in_expectation(options, divergence) -> None:
    student, teacher = Tree(seed=1), Tree(seed=2)
    actual = expected_gradient({**SAMPLED, **options, "coefficient": 0.7}, student, teacher)
    (true,) = torch.autograd.grad(0.7 * divergence(student, teacher), student.logits)
    torch.testing.assert_close(actual, true, rtol=1e-12, atol=1e-14)


def test_corrected_samples_of_another_policy_have_the_same_expected_gradient() -> None:
    """Weighed by π_prox/μ, and with the teacher's gap to π_prox: that to μ would push away from μ beside it."""
    student, teacher, sampler = (Tree(seed=seed) for seed in (1, 2, 3))
    correction = {"level": "sequence_product", "truncate": None}
    options = {**SAMPLED, "horizon": "completion", "correction": correction}
    actual = expected_gradient(options, student, teacher, sampler=sampler)
    (true,) = torch.autograd.grad(divergence_of_completions(student, teacher), student.logits)
    torch.testing.assert_close(actual, true, rtol=1e-12, atol=1e-14)


def test_the_two_horizons_differ_by_how_earlier_tokens_change_what_follows() -> None:
    student, teacher = Tree(seed=1), Tree(seed=2)
    short, long = (expected_gradient({**SAMPLED, "horizon": h}, student, teacher) for h in ("token", "completion"))
    assert (short - long)[0].norm() > 0.01  # of the empty prefix
    last = [student.row[prefix] for prefix in [(1, 1), (1, 2), (2, 1), (2, 2)]]
    torch.testing.assert_close(short[last], long[last], rtol=1e-12, atol=1e-14)


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(1, 4), min_size=2, max_size=2), min_size=1, max_size=3), st.integers(0, 99))
def test_what_is_to_go_is_summed_within_each_completion(lengths: list[list[int]], seed: int) -> None:
    counts = torch.tensor(lengths)
    numbers = torch.randn(int(counts.sum()), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rollout = torch.arange(counts.numel()).repeat_interleave(counts.flatten())
    later = (rollout[:, None] == rollout) & (torch.arange(len(rollout)) >= torch.arange(len(rollout))[:, None])
    torch.testing.assert_close(to_go(numbers, counts), later.double() @ numbers, rtol=1e-12, atol=1e-12)


def test_rewards_stand_beside_the_teacher_as_often_as_they_are_told_to() -> None:
    gaps = torch.tensor([0.5, -1, 2, 0, 0.25, 1, -3], dtype=torch.float64)
    columns = known(teacher_logprobs=gaps, behaviour_logprobs=torch.zeros_like(gaps))
    evidence = evidence_of([[1.0, 0, 0, 1]], [[1, 2, 1, 3]], known=columns)
    by_reward = group_zscore(evidence.rewards)[0].repeat_interleave(evidence.lengths[0])
    both = build_algorithm({**SAMPLED, "coefficient": 0.1, "reward_weight": 2.0}).credit(evidence).advantages
    torch.testing.assert_close(both, 0.1 * gaps + 2 * by_reward, rtol=1e-12, atol=1e-12)
    full = build_algorithm({"name": "distill", "reward_weight": 2.0})
    torch.testing.assert_close(full.credit(evidence).advantages, 2 * by_reward, rtol=1e-12, atol=1e-12)
    assert [term.name for term in full.terms] == ["distill", "policy"]
    assert (build_algorithm({"name": "distill"}).credit(evidence).advantages == 0).all()


@pytest.mark.parametrize("correction", [None, {"truncate": 2.0}], ids=["own samples", "corrected"])
def test_the_sampled_term_tells_how_far_the_student_is_from_its_teacher(correction: dict[str, float] | None) -> None:
    algorithm = build_algorithm({**SAMPLED, **({} if correction is None else {"correction": correction})})
    (term,) = algorithm.terms
    logprobs, theirs = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.5, -0.5]).double()
    columns = {"behaviour_logprobs": logprobs, "proximal_logprobs": logprobs, "teacher_logprobs": theirs}
    told = term.measures(view_of(logprobs, **columns))
    assert told["kl_teacher"].tolist() == [0.5, -1.5]
    assert ("correction/weight" in told) == (correction is not None)
    assert (Need.PROXIMAL_LOGPROBS in term.needs) == (correction is not None)
    assert Need.TEACHER_LOGPROBS in term.needs
    assert (term.vanishes_without_advantage, term.reported) == (True, False)


@pytest.mark.parametrize("options", [{"signal": "sampled"}, {"reward_weight": 1.0}], ids=str)
def test_a_signal_and_what_clips_it_may_be_together(options: dict[str, object]) -> None:
    algorithm = build_algorithm({"name": "distill", "clip_low": 0.1, "correction": {}, **options})
    assert [term.reported for term in algorithm.terms if term.name == "distill"] in ([], [False])


def taught_batch(algorithm: Algorithm, seen: Sequence[Sequence[tuple[int, ...]]] | None) -> Batch:
    scored, columns = torch.ones(2, 3, dtype=torch.bool), sampled_columns(GROUPS)
    groups = CreditedGroups(groups=GROUPS, scored=scored, columns=columns, teacher_prompts=seen)
    keep = algorithm.keeps_zero_advantages
    return collate(groups, algorithm.weighted, max_completion_tokens=16, keep_zero_advantages=keep)


def gradient_by_hand(policy: Policy, teacher: Policy, seen: Sequence[Sequence[tuple[int, ...]]], heat: float) -> Tensor:
    """∇ of the mean over tokens of Σ_v π(v) (log π(v) - log π_T(v)), the teacher without gradient."""
    kls = []
    for group, prompts in zip(GROUPS, seen, strict=True):
        for rollout, prompt in zip(group.rollouts, prompts, strict=True):
            mine = tiny.vocab_logprobs(policy.model, group.prompt.tokens, rollout.tokens, heat)
            theirs = tiny.vocab_logprobs(teacher.model, prompt, rollout.tokens, heat).detach()
            kls.append((mine.exp() * (mine - theirs)).sum(dim=-1))
    return tiny.gradient_of(policy, torch.cat(kls).mean())


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
@pytest.mark.parametrize("budget", [10_000, 12])
def test_the_full_signal_has_the_gradient_of_the_kl_to_a_teacher_that_sees_more(family: str, budget: int) -> None:
    policy, other = tiny_policy(family), tiny_policy(family, seed=1)
    algorithm = build_algorithm({"name": "distill", "coefficient": 0.5})
    for teacher, seen in ((other, SEEN), (other, None), (policy, SEEN)):
        by_hand = gradient_by_hand(policy, teacher, seen or [[g.prompt.tokens] * 3 for g in GROUPS], heat=0.8)
        objective = Objective(algorithm=algorithm, temperature=0.8, teacher=Teacher(UncopiedPolicy(teacher), None))
        batch = taught_batch(algorithm, seen)
        gradient, metrics = tiny.gradient_of_update(policy, batch, objective, tokens_per_microbatch=budget)
        assert tiny.relative_distance(gradient, 0.5 * by_hand) < 1e-9
        assert metrics["loss"] == pytest.approx(0.5 * metrics["kl_teacher"], rel=1e-9)
        assert (metrics["num_micro_batches"] > 1) == (budget == 12)


def test_a_student_that_sees_what_its_teacher_sees_and_is_it_learns_nothing() -> None:
    policy, algorithm = tiny_policy(), build_algorithm({"name": "distill"})
    objective = Objective(algorithm=algorithm, temperature=1.0, teacher=Teacher(UncopiedPolicy(policy), None))
    gradient, metrics = tiny.gradient_of_update(policy, taught_batch(algorithm, None), objective)
    assert gradient.norm() < 1e-12
    assert abs(metrics["kl_teacher"]) < 1e-12


def test_a_teacher_that_is_the_student_itself_is_not_moved_by_the_gradient() -> None:
    # The same numbers as from a frozen copy: nothing flows through the teacher's side, nor through a shared head.
    policy, algorithm = tiny_policy(), build_algorithm({"name": "distill"})
    batch = taught_batch(algorithm, SEEN)
    teachers = [Teacher(each, None) for each in (UncopiedPolicy(policy), FrozenCopy(tiny.twin(policy)))]
    objectives = [Objective(algorithm=algorithm, temperature=1.0, teacher=each) for each in teachers]
    found = [tiny.gradient_of_update(policy, batch, each)[0] for each in objectives]
    assert tiny.relative_distance(*found) < 1e-12
    assert found[0].norm() > 0.01


def test_the_sampled_signal_is_the_full_one_on_average_over_the_vocabulary() -> None:
    policy, teacher = tiny_policy(), tiny_policy(seed=1)
    prompt = GROUPS[0].prompt.tokens
    mine = torch.cat([tiny.plain_logprobs(policy.model, prompt, (token,)) for token in range(24)])
    (first, *_) = GROUPS[0].rollouts
    of_one = [resampled(first, tokens=(token,), logprobs=(0.0,)) for token in range(24)]
    groups = [replace(GROUPS[0], rollouts=(rollout,)) for rollout in of_one]
    theirs = group_logprobs(teacher, groups, temperature=1.0, max_tokens=99, teacher_prompts=[[(9, *prompt)]] * 24)
    sampled = (mine.detach().exp() * -(theirs - mine.detach()) * mine).sum()
    full = (mine.exp() * (mine - theirs)).sum()
    parameters = list(policy.model.parameters())
    by_sample, by_all = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (sampled, full))
    torch.testing.assert_close(by_sample, by_all, rtol=1e-9, atol=1e-12)


def test_the_gap_to_a_teacher_is_that_of_the_policy_of_now_where_samples_are_older() -> None:
    """The teacher is the policy itself and sees the same prompt: nothing is to be learned, whoever sampled."""
    config = {"name": "distill", "signal": "sampled", "correction": {}}
    stages = stages_with(config, lambda completions, **columns: [0.0] * len(completions))  # no sibling is right
    collected = stages.collected()
    with torch.no_grad():
        for parameter in stages.policy.model.parameters():
            parameter.mul_(1.05)
    columns = stages.learner.credit(collected, Clock()).groups.columns
    assert (columns.proximal_logprobs - columns.behaviour_logprobs).abs().max() > 0.01
    assert columns.advantages.abs().max() < 1e-6
