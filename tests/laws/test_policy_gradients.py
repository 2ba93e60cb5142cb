"""The gradient of each algorithm, in expectation over every group that could have been sampled, by enumeration.

The policy is a softmax over all completions that a vocabulary of three tokens (0 stops) has within three positions,
or over single tokens.  "True" means the gradient of the expected reward with respect to the logits.  And what holds
for an update under every algorithm: how it is split, ordered or thinned out changes no gradient.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.kl import k1
from posttrain.algorithms.table import build_algorithm
from tests.support.enumerated import COMPLETIONS, LIMIT, Tree
from tests.support.tiny import BY_REWARD, advantage, token_loss

POLICY = torch.tensor([0.4, -0.3, 0.9], dtype=torch.float64)
BEHAVIOUR = torch.tensor([0.1, 0.5, -0.2], dtype=torch.float64)
REWARDS = torch.tensor([1.5, -0.5, 0.25], dtype=torch.float64)
RIGHT_OR_WRONG = torch.tensor([1, 0, 0], dtype=torch.float64)
GROUP_SIZE = 3


def true_gradient(rewards: torch.Tensor) -> torch.Tensor:
    logits = POLICY.clone().requires_grad_()
    (logits.softmax(0) @ rewards).backward()
    return -logits.grad  # of the loss, which is the negative reward


def expected_gradient(algorithm: Algorithm, rewards: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """Of one group of one-token completions, over the 27 groups that `behaviour` can sample."""
    logits = POLICY.clone().requires_grad_()
    log_pi, log_mu = logits.log_softmax(0), behaviour.log_softmax(0)
    rollout, scored = torch.arange(GROUP_SIZE), torch.ones(GROUP_SIZE, dtype=torch.bool)
    weights = algorithm.token_weights(torch.ones_like(rollout), scored, max_completion_tokens=1)
    expected = torch.zeros((), dtype=torch.float64)
    for sampled in itertools.product(range(3), repeat=GROUP_SIZE):
        tokens = torch.tensor(sampled)
        advantages = advantage(algorithm, rewards[tokens][None])[0]
        loss = token_loss(algorithm, log_pi[tokens], log_mu[tokens], advantages, rollout)
        expected = expected + log_mu[tokens].sum().exp() * (weights * loss).sum()
    expected.backward()
    return logits.grad


def assert_same(actual: object, expected: object, atol: float = 1e-14) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=atol)


OWN_REWARD_IN_BASELINE = 1 - 1 / GROUP_SIZE
UNSCALED = [
    ({"name": "reinforce"}, 1),
    ({"name": "reinforce", "baseline": "batch_mean"}, OWN_REWARD_IN_BASELINE),
    ({"name": "rloo"}, 1),
    ({"name": "dr_grpo"}, OWN_REWARD_IN_BASELINE),
    ({"name": "grpo", "deviation": "none"}, OWN_REWARD_IN_BASELINE),
]


@pytest.mark.parametrize(("config", "factor"), UNSCALED, ids=str)
def test_on_policy_an_unscaled_advantage_gives_the_true_gradient_up_to_a_constant(config, factor) -> None:
    actual = expected_gradient(build_algorithm(config), REWARDS, behaviour=POLICY)
    assert_same(actual, factor * true_gradient(REWARDS))


@pytest.mark.parametrize(("config", "factor"), UNSCALED[:3], ids=str)
def test_off_policy_the_unbounded_ratio_still_gives_the_true_gradient(config, factor) -> None:
    # Exact for completions of one token, where the token's ratio is the completion's.
    actual = expected_gradient(build_algorithm(config), REWARDS, behaviour=BEHAVIOUR)
    assert_same(actual, factor * true_gradient(REWARDS))


@pytest.mark.parametrize(
    ("config", "shrink"),
    [
        ({"name": "grpo"}, 1.0),
        ({"name": "grpo", "deviation": "sample"}, math.sqrt((GROUP_SIZE - 1) / GROUP_SIZE)),
        ({"name": "dapo"}, 1.0),
        ({"name": "gspo"}, 1.0),
        ({"name": "gspo", "sequence_ratio": "product"}, 1.0),
        ({"name": "cispo"}, 1.0),
    ],
    ids=str,
)
def test_on_policy_a_zscore_gives_the_true_direction_when_rewards_are_right_or_wrong(config, shrink) -> None:
    # With c of G right and q = c/G, the z-scores are √((1-q)/q) and -√(q/(1-q)), so the right ones add up to
    # c √((1-q)/q) = G √(q(1-q)), the wrong ones to minus that.  Given c, every right completion is a draw from the
    # right ones: the gradient is -E[√(q(1-q))] (E[∇log π | right] - E[∇log π | wrong]); and the true one is
    # -p(1-p) times the same bracket, as E[∇log π] = 0.
    p = POLICY.softmax(0)[0].item()
    spread = 0.0
    for c in range(GROUP_SIZE + 1):
        q = c / GROUP_SIZE
        spread += math.comb(GROUP_SIZE, c) * p**c * (1 - p) ** (GROUP_SIZE - c) * math.sqrt(q * (1 - q))
    actual = expected_gradient(build_algorithm(config), RIGHT_OR_WRONG, behaviour=POLICY)
    assert_same(actual, shrink * spread / (p * (1 - p)) * true_gradient(RIGHT_OR_WRONG))


def test_over_the_mean_the_gradient_is_that_of_the_first_terms_of_the_log_of_the_chance_of_success() -> None:
    # Of G completions c ~ Bin(G, p) are right.  With c > 0 the right ones weigh (1 - c/G) / (c/G) each and the wrong
    # ones -1, over G: (1/c) Σ_right ∇log π - (1/G) Σ_all ∇log π.  Its mean is ∇p Σ_{k ≤ G} (1-p)^{k-1}, of the first
    # sum, less (1-p)^{G-1} ∇p, since the second is left out where c = 0: Σ_{k < G} (1-p)^{k-1} ∇p is left, which is
    # the gradient of -Σ_{k < G} (1-p)^k / k.
    p = POLICY.softmax(0)[0].item()
    factor = sum((1 - p) ** (k - 1) for k in range(1, GROUP_SIZE))
    actual = expected_gradient(build_algorithm({"name": "maxrl"}), RIGHT_OR_WRONG, behaviour=POLICY)
    assert_same(actual, factor * true_gradient(RIGHT_OR_WRONG))
    assert factor < 1 / p  # which it comes to with G: the gradient of log p


def gradient_over_pairs(algorithm: Algorithm, tree: Tree, rewards: torch.Tensor) -> torch.Tensor:
    """Expected gradient of a group of two completions, over all 225 pairs."""
    logprobs = tree.token_logprobs()
    chance = torch.stack([tokens.sum() for tokens in logprobs]).exp().detach()
    both_scored = torch.ones(2, dtype=torch.bool)
    expected = torch.zeros((), dtype=torch.float64)
    for i, j in itertools.product(range(len(COMPLETIONS)), repeat=2):
        lengths = torch.tensor([len(COMPLETIONS[i]), len(COMPLETIONS[j])])
        rollout = torch.arange(2).repeat_interleave(lengths)
        weights = algorithm.token_weights(lengths, both_scored, max_completion_tokens=LIMIT)
        advantages = advantage(algorithm, rewards[[i, j]][None])[0]
        tokens = torch.cat([logprobs[i], logprobs[j]])
        loss = token_loss(algorithm, tokens, tokens.detach(), advantages[rollout], rollout)
        expected = expected + chance[i] * chance[j] * (weights[rollout] * loss).sum()
    return torch.autograd.grad(expected, tree.logits)[0]


@pytest.mark.parametrize(
    ("config", "factor"),
    [({"name": "reinforce"}, 1), ({"name": "rloo"}, 1), ({"name": "dr_grpo"}, (1 - 1 / 2) / LIMIT)],
    ids=str,
)
def test_completions_of_several_lengths_get_the_true_gradient(config, factor) -> None:
    tree = Tree(seed=1)
    chance = torch.stack([tokens.sum() for tokens in tree.token_logprobs()]).exp()
    true = torch.autograd.grad(-(chance @ tree.rewards), tree.logits)[0]
    assert_same(gradient_over_pairs(build_algorithm(config), tree, tree.rewards), factor * true)


def test_k1_in_the_reward_gives_the_gradient_of_the_divergence_between_whole_completions() -> None:
    tree, reference = Tree(seed=1), Tree(seed=2)
    mine, theirs = tree.token_logprobs(), reference.token_logprobs()
    rollout = torch.arange(len(COMPLETIONS)).repeat_interleave(torch.tensor([len(tokens) for tokens in COMPLETIONS]))
    estimate = k1(torch.cat(mine).detach(), torch.cat(theirs).detach())
    penalties = torch.zeros(len(COMPLETIONS), dtype=estimate.dtype).index_add(0, rollout, estimate)
    log_chance = torch.stack([tokens.sum() for tokens in mine])
    log_reference = torch.stack([tokens.sum() for tokens in theirs])
    objective = log_chance.exp() @ (tree.rewards - 0.3 * (log_chance - log_reference))
    true = torch.autograd.grad(-objective, tree.logits)[0]
    actual = gradient_over_pairs(build_algorithm({"name": "rloo"}), tree, tree.rewards - 0.3 * penalties)
    assert_same(actual, true)


each_algorithm = pytest.mark.parametrize("name", BY_REWARD)
LONGEST = 12


class Update:
    """Log-probs and rewards of a random update, [prompt, group] completions of 1 to 12 tokens; some unscored."""

    def __init__(self, seed: int, num_prompts: int, group_size: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, LONGEST + 1, (num_prompts * group_size,), generator=rng)
        self.rollout = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        count = len(self.rollout)
        self.behaviour = -torch.rand(count, generator=rng, dtype=torch.float64) * 3 - 0.1
        self.logprobs = self.behaviour + 0.4 * torch.randn(count, generator=rng, dtype=torch.float64)
        self.reference = self.behaviour + 0.4 * torch.randn(count, generator=rng, dtype=torch.float64)
        rewards = torch.randint(0, 3, (num_prompts, group_size), generator=rng).double()
        self.rewards = torch.where(torch.rand(rewards.shape, generator=rng) < 0.15, torch.nan, rewards)

    def loss_and_gradient(self, algorithm: Algorithm, batches: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The update's loss, summed over micro-batches of rollouts, and its gradient with respect to log π."""
        scored = ~self.rewards.reshape(-1).isnan()
        weights = algorithm.token_weights(self.lengths, scored, max_completion_tokens=LONGEST)
        advantages = advantage(algorithm, self.rewards).reshape(-1)
        logprobs = self.logprobs.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for rollouts in batches:
            tokens = torch.cat([torch.nonzero(self.rollout == rollout)[:, 0] for rollout in rollouts])
            mine = self.rollout[tokens]
            given = (logprobs[tokens], self.behaviour[tokens], advantages[mine], mine)
            loss = token_loss(algorithm, *given, reference=self.reference[tokens])
            total = total + (weights[mine] * loss).sum()
        total.backward()
        return total.detach(), logprobs.grad


UPDATES = st.builds(Update, seed=st.integers(0, 2**31), num_prompts=st.integers(1, 3), group_size=st.integers(2, 5))
KL_TERMS = st.sampled_from([None, {"coefficient": 0.1}, {"coefficient": 0.3, "estimator": "k2"}])


@each_algorithm
@settings(max_examples=25)
@given(update=UPDATES, kl=KL_TERMS, micro=st.integers(1, 6), seed=st.integers(0, 1000))
def test_neither_micro_batches_nor_the_order_of_rollouts_change_the_update(name, update, kl, micro, seed) -> None:
    algorithm = build_algorithm({"name": name, "kl": kl})
    everything = torch.arange(len(update.lengths))
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))
    whole = update.loss_and_gradient(algorithm, [everything])
    assert_same(update.loss_and_gradient(algorithm, list(order.split(micro))), whole, atol=1e-12)


@each_algorithm
@settings(max_examples=25)
@given(update=UPDATES)
def test_leaving_out_rollouts_without_advantage_changes_no_gradient(name, update) -> None:
    algorithm = build_algorithm({"name": name})
    kept = torch.nonzero(advantage(algorithm, update.rewards).reshape(-1))[:, 0]
    whole = update.loss_and_gradient(algorithm, [torch.arange(len(update.lengths))])
    if len(kept):
        assert_same(update.loss_and_gradient(algorithm, [kept]), whole, atol=1e-12)
    else:
        assert torch.all(whole[1] == 0)


@each_algorithm
@settings(max_examples=25)
@given(update=UPDATES)
def test_an_unscored_rollout_gets_no_gradient_not_even_from_the_kl_term(name, update) -> None:
    algorithm = build_algorithm({"name": name, "kl": {"coefficient": 0.1}})
    _, gradient = update.loss_and_gradient(algorithm, [torch.arange(len(update.lengths))])
    assert torch.all(gradient[update.rewards.reshape(-1).isnan()[update.rollout]] == 0)
