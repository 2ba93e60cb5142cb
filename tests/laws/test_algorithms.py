"""What holds for an update under every algorithm: how it is split, ordered or thinned out changes no gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.table import build_algorithm
from tests.support.tiny import BY_REWARD, advantage, token_loss

each_algorithm = pytest.mark.parametrize("name", BY_REWARD)
LIMIT = 12


class Update:
    """Log-probs and rewards of a random update, [prompt, group] completions of 1 to 12 tokens; some unscored."""

    def __init__(self, seed: int, num_prompts: int, group_size: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, LIMIT + 1, (num_prompts * group_size,), generator=rng)
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
        weights = algorithm.token_weights(self.lengths, scored, max_completion_tokens=LIMIT)
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


def assert_same(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@each_algorithm
@settings(max_examples=25)
@given(update=UPDATES, kl=KL_TERMS, micro=st.integers(1, 6), seed=st.integers(0, 1000))
def test_neither_micro_batches_nor_the_order_of_rollouts_change_the_update(name, update, kl, micro, seed) -> None:
    algorithm = build_algorithm({"name": name, "kl": kl})
    everything = torch.arange(len(update.lengths))
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))
    whole = update.loss_and_gradient(algorithm, [everything])
    assert_same(update.loss_and_gradient(algorithm, list(order.split(micro))), whole)


@each_algorithm
@settings(max_examples=25)
@given(update=UPDATES)
def test_leaving_out_rollouts_without_advantage_changes_no_gradient(name, update) -> None:
    algorithm = build_algorithm({"name": name})
    kept = torch.nonzero(advantage(algorithm, update.rewards).reshape(-1))[:, 0]
    whole = update.loss_and_gradient(algorithm, [torch.arange(len(update.lengths))])
    if len(kept):
        assert_same(update.loss_and_gradient(algorithm, [kept]), whole)
    else:
        assert torch.all(whole[1] == 0)


@each_algorithm
@settings(max_examples=25)
@given(update=UPDATES)
def test_an_unscored_rollout_gets_no_gradient_not_even_from_the_kl_term(name, update) -> None:
    algorithm = build_algorithm({"name": name, "kl": {"coefficient": 0.1}})
    _, gradient = update.loss_and_gradient(algorithm, [torch.arange(len(update.lengths))])
    assert torch.all(gradient[update.rewards.reshape(-1).isnan()[update.rollout]] == 0)
