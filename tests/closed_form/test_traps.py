"""Mistakes of notebooks that teach this, each beside what we do: theirs fails the test that ours passes.

The numbers are those of the list of traps in the design.  10 and 11, about Countdown's rule, are in
test_countdown_rewards.py; 12, the choice of a deviation and a denominator, is in test_advantages.py and
test_algorithms.py.
"""

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from posttrain.algorithms.table import build_algorithm
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.forward import Completions
from posttrain.models.logprobs import token_logprobs
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.rollout import RolloutOptions, SamplingParams
from posttrain.options.training import UpdateOptions
from posttrain.records import Group
from posttrain.training.reference import FrozenCopy
from posttrain.training.update import Objective, group_logprobs, update
from tests.support.refusals import refused
from tests.support.sequences import resampled
from tests.support.tiny import (
    STOP_IDS,
    batch_of,
    gradient_of_update,
    next_logprobs,
    request,
    some_prompts,
    tiny_policy,
    tokenizer,
    twin,
    weights,
    written_group,
)

PROMPT, COMPLETION = (3, 9, 4), (7, 12, 8, 5)
PAD = 1
ON_POLICY = build_algorithm({"name": "reinforce", "token_weights": "mean_over_tokens"})
OBJECTIVE = Objective(algorithm=ON_POLICY, temperature=1.0)


@pytest.fixture
def policy() -> Policy:
    return tiny_policy("gpt2_plain")  # absolute positions: a token in the wrong place shows


def true_logprobs(policy: Policy) -> torch.Tensor:
    """log π of each completion token, from its own prefix alone."""
    prefixes = [(*PROMPT, *COMPLETION[:t]) for t in range(len(COMPLETION))]
    return torch.stack([next_logprobs(policy.model, p)[token] for p, token in zip(prefixes, COMPLETION, strict=True)])


def our_logprobs(policy: Policy) -> torch.Tensor:
    hidden = policy.forward.completion_hidden(Completions([PROMPT], [COMPLETION], [0]))
    return token_logprobs(hidden, policy.output_layer, torch.tensor(COMPLETION))


def sampled_group(policy: Policy) -> Group:
    """The completion as if the policy had just sampled it: every ratio is 1."""
    group = written_group(PROMPT, [COMPLETION])
    (rollout,) = group.rollouts
    return replace(group, rollouts=(resampled(rollout, logprobs=tuple(true_logprobs(policy).tolist())),))


def assert_right(actual: torch.Tensor, policy: Policy) -> None:
    torch.testing.assert_close(actual, true_logprobs(policy), rtol=0, atol=1e-12)


def assert_wrong(actual: torch.Tensor, policy: Policy) -> None:
    assert (actual - true_logprobs(policy)).abs().max() > 0.01


def row_logits(policy: Policy, row: list[int]) -> torch.Tensor:
    return policy.model(input_ids=torch.tensor([row])).logits[0]


def test_1_log_probs_under_no_grad_have_no_gradient(policy: Policy) -> None:
    @torch.no_grad()
    def helper() -> torch.Tensor:
        logprobs = torch.log_softmax(row_logits(policy, [*PROMPT, *COMPLETION]), -1)
        return logprobs[len(PROMPT) - 1 : -1].gather(1, torch.tensor(COMPLETION)[:, None])[:, 0]

    assert_right(helper(), policy)  # the values are right, which is why nobody noticed
    with pytest.raises(RuntimeError, match="does not require grad"):
        (-helper().mean()).backward()

    direction = torch.autograd.grad(our_logprobs(policy).sum(), policy.output_layer.matrix)[0]
    step, before = 1e-5, our_logprobs(policy).sum().item()
    with torch.no_grad():
        policy.output_layer.matrix.add_(step * direction)
    # To first order the value rises by step · |gradient|².  (The head is tied to the embedding: both are in `grad`.)
    assert our_logprobs(policy).sum().item() - before == pytest.approx(step * direction.square().sum().item(), rel=1e-2)


def test_2_a_step_without_a_policy_term_does_not_make_what_was_rewarded_likelier(policy: Policy) -> None:
    def notebook_step(model: Policy) -> None:
        optimizer = torch.optim.SGD(model.model.parameters(), lr=0.1)
        with torch.no_grad():
            kl = our_logprobs(model).mean() - our_logprobs(policy).mean()
            value_loss = torch.tensor(0.25)  # (value - return)², of no weight of ours
        loss = (0.1 * kl + 0.5 * value_loss).requires_grad_()  # so that backward() does not complain
        loss.backward()
        optimizer.step()

    theirs, ours = twin(policy), twin(policy)
    notebook_step(theirs)
    assert torch.equal(weights(theirs), weights(policy))
    batch = batch_of([sampled_group(policy)], [[1.0]], ON_POLICY)
    update(ours, torch.optim.SGD(ours.model.parameters()), batch, OBJECTIVE, UpdateOptions(), 0.1)
    assert our_logprobs(ours).sum() > our_logprobs(policy).sum() + 0.01


def test_3_the_prompts_length_is_no_index_into_a_left_padded_row(policy: Policy) -> None:
    row = [PAD, PAD, *PROMPT, *COMPLETION]
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 1])
    prompt_length = int(mask[: 2 + len(PROMPT)].sum())  # 3, while the completion starts at 5
    logprobs = torch.log_softmax(row_logits(policy, row), -1)
    theirs = logprobs[prompt_length - 1 : prompt_length - 1 + len(COMPLETION)]
    assert_wrong(theirs.gather(1, torch.tensor(COMPLETION)[:, None])[:, 0], policy)

    # Ours knows no padding: beside a longer prompt the numbers stay what they are.
    longer = tuple(range(10))
    hidden = policy.forward.completion_hidden(Completions([longer, PROMPT], [COMPLETION, COMPLETION], [0, 1]))
    both = token_logprobs(hidden, policy.output_layer, torch.tensor(COMPLETION * 2))
    assert_right(both[len(COMPLETION) :], policy)


def test_4_a_reference_that_is_the_policy_has_no_kl() -> None:
    policy = tiny_policy()
    adapter = {"on": True}

    @contextmanager
    def disable_adapter():
        adapter["on"] = False
        yield
        adapter["on"] = True

    disable_adapter()  # not entered: nothing happens
    assert adapter["on"]

    def moved() -> Policy:
        changed = twin(policy)
        with torch.no_grad():
            for parameter in changed.model.parameters():
                parameter.mul_(1.1)
        return changed

    now = moved()
    reference = policy if not adapter["on"] else now
    group = written_group(PROMPT, [COMPLETION])
    theirs = group_logprobs(reference, [group], temperature=1.0, max_tokens=100)
    assert torch.equal(theirs, group_logprobs(now, [group], temperature=1.0, max_tokens=100))  # KL ≡ 0

    # Ours is a copy from before the policy moved.
    algorithm = build_algorithm({"name": "dapo", "kl": {"coefficient": 0.1, "estimator": "k3"}})
    log_ref = group_logprobs(FrozenCopy(policy).policy, [group], temperature=1.0, max_tokens=100)
    batch = batch_of([group], [[1.0]], algorithm, reference_logprobs=log_ref)
    _, metrics = gradient_of_update(now, batch, Objective(algorithm=algorithm, temperature=1.0))
    x = our_logprobs(now) - our_logprobs(policy)
    assert metrics["kl"] == pytest.approx((torch.exp(-x) - 1 + x).mean().item(), rel=1e-10)
    assert metrics["kl"] > 1e-3


def test_5_labels_of_minus_100_are_no_token_ids(policy: Policy) -> None:
    row = [*PROMPT, *COMPLETION]
    labels = torch.tensor([-100] * len(PROMPT) + list(COMPLETION))[1:]
    logprobs = torch.log_softmax(row_logits(policy, row)[:-1], -1)
    with pytest.raises(RuntimeError, match="out of bounds"):
        logprobs.gather(1, labels[:, None])
    mended = logprobs.gather(1, labels.clamp(min=0)[:, None])[:, 0]  # scores token 0 at every position of the prompt
    assert mended.sum().item() != pytest.approx(true_logprobs(policy).sum().item(), abs=0.1)

    # Ours has an entry for completion tokens and for nothing else.
    batch = batch_of([written_group(PROMPT, [COMPLETION])], [[1.0]], ON_POLICY)
    assert tuple(batch.tokens.tolist()) == COMPLETION
    assert_right(our_logprobs(policy), policy)


def test_6_the_logits_that_predict_a_completion_begin_one_before_it(policy: Policy) -> None:
    logits = row_logits(policy, [*PROMPT, *COMPLETION])
    theirs = torch.log_softmax(logits[len(PROMPT) :], -1)  # what follows each token, instead of the token
    assert_wrong(theirs.gather(1, torch.tensor(COMPLETION)[:, None])[:, 0], policy)
    assert_right(our_logprobs(policy), policy)


def test_7_text_that_is_tokenised_apart_and_together_gives_other_tokens() -> None:
    ids = tokenizer()
    apart = ids.encode("the tar") + ids.encode("get")
    together = ids.encode("the target")
    assert ids.decode(apart) == ids.decode(together)
    assert apart != together

    # A prefilled answer is tokenised with its prompt, once.
    prompt = TokenizerRenderer(ids).render("the tar", id="p", prefill="get")
    assert list(prompt.tokens) == together

    # And what was sampled is trained on as it was sampled, not as its text would be tokenised.
    policy = tiny_policy("llama")
    groups = sample_groups(InProcessEngine(policy), some_prompts([4] * 4), request(4, 8))
    batch = batch_of(groups, [[1.0] * 4] * 4, ON_POLICY)
    assert batch.completions == tuple(rollout.tokens for group in groups for rollout in group.rollouts)
    assert batch.prompts == tuple(group.prompt.tokens for group in groups)
    again = [ids.encode(rollout.text) for group in groups for rollout in group.rollouts]
    assert any(tuple(tokens) != completion for tokens, completion in zip(again, batch.completions, strict=True))


def test_8_a_mask_by_token_id_hides_a_stop_token_that_is_the_padding_too() -> None:
    stop = STOP_IDS[0]
    row = torch.tensor([*COMPLETION, stop, stop])  # COMPLETION ends with the stop token; then padding
    theirs = row != stop
    assert theirs.tolist() == [True, True, True, False, False, False]

    # Ours: the gradient of the stop token's own log-prob is in the update, with the weight of any other token.
    policy = tiny_policy()
    batch = batch_of([sampled_group(policy)], [[1.0]], ON_POLICY)
    assert batch.tokens[-1] == stop
    assert batch.columns.weights.tolist() == [1 / 4] * 4
    moved = twin(policy)
    update(moved, torch.optim.SGD(moved.model.parameters()), batch, OBJECTIVE, UpdateOptions(), 0.05)
    assert our_logprobs(moved)[-1] > our_logprobs(policy)[-1]


def test_9_samples_of_a_cut_distribution_are_not_on_policy_under_the_full_one() -> None:
    # Σ_v μ(v) ∇ log π(v) is what a constant reward teaches.  It is 0 when μ is π, and not when μ is π cut at top-p.
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0], dtype=torch.float64, requires_grad=True)
    full = torch.softmax(logits.detach(), 0)  # .61, .22, .14, .03
    cut = torch.where(torch.tensor([True, True, True, False]), full, 0.0)

    def taught(sampled: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((sampled * torch.log_softmax(logits, 0)).sum(), logits)[0]

    assert taught(full).abs().max() < 1e-15
    assert taught(cut / cut.sum())[3] == pytest.approx(-full[3].item())  # the unlikely token is made unlikelier yet

    # Ours refuses to train on them unless told, and records both log-probs.
    with refused("top_p = 0.9", "allow_cut_sampling"):
        RolloutOptions(top_p=0.9)
    assert RolloutOptions(top_p=0.9, allow_cut_sampling=True).sampling.cuts
    (group,) = sample_groups(
        InProcessEngine(tiny_policy()), some_prompts([4]), request(6, 8, SamplingParams(top_p=0.9))
    )
    for rollout in group.rollouts:
        assert rollout.cut_logprobs is not None
        gain = [cut - own for own, cut in zip(rollout.logprobs, rollout.cut_logprobs, strict=True)]
        # At least 0.9 of the mass was kept, and of 24 tokens some was always cut.
        assert all(0 < kept <= -math.log(0.9) + 1e-12 for kept in gain)
