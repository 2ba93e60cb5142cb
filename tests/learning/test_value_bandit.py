"""PPO on a bandit whose values are known: the head comes to say what the policy earns, and the policy what pays best.

Six contexts, four arms that pay 0 or 1 with known chances, completions of two tokens of which the first is the arm and
the second a coin that pays nothing.  The "hidden state" is which context it is, and from the second token on which arm.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.table import build_algorithm
from posttrain.algorithms.terms import TokenView
from posttrain.batch import TokenColumns
from posttrain.models.classifiers.heads import ValueHead
from posttrain.training.actor_critic_state import explained_variance
from tests.support.sequences import known

CONTEXTS, ARMS, PULLS, STEPS, EPOCHS = 6, 4, 1024, 60, 2
CHANCES = torch.tensor(
    [
        [0.9, 0.1, 0.1, 0.1],
        [0.1, 0.2, 0.1, 0.1],
        [0.5, 0.5, 0.9, 0.5],
        [0, 0, 0, 1],
        [0.3, 0.8, 0.3, 0.3],
        [0.6, 0, 0, 0],
    ]
).double()
STATES = CONTEXTS + CONTEXTS * ARMS
"""Before the arm each context; before the coin each pair of context and arm."""
WEIGHT = torch.full((2 * PULLS,), 1 / (2 * PULLS), dtype=torch.float64)


def evidence_of(rewards: Tensor, values: Tensor) -> Evidence:
    return Evidence(
        rewards=rewards[:, None],
        scores=rewards[None, :, None],
        weights=torch.ones(1, dtype=torch.float64),
        lengths=torch.full((PULLS, 1), 2),
        max_completion_tokens=2,
        known=known(values=values, final_values=torch.zeros(PULLS, 1).double()),
    )


def trained(*, shuffled: bool = False) -> tuple[Tensor, ValueHead, float]:
    """The policy's logits for each context, the head, and what it explained of the last step's returns."""
    algorithm: Algorithm = build_algorithm({"name": "ppo"})
    drawn = torch.Generator().manual_seed(0)
    logits = torch.zeros(CONTEXTS, ARMS, dtype=torch.float64, requires_grad=True)
    head = ValueHead(STATES, "linear", seed=0, dtype=torch.float64)
    optimizer = torch.optim.Adam([{"params": [logits], "lr": 0.03}, {"params": head.parameters(), "lr": 0.06}])
    explained = 0.0
    for _ in range(STEPS):
        context = torch.randint(CONTEXTS, (PULLS,), generator=drawn)
        arm = logits.detach().softmax(-1)[context].multinomial(1, generator=drawn)[:, 0]
        rewards = (torch.rand(PULLS, generator=drawn, dtype=torch.float64) < CHANCES[context, arm]).double()
        if shuffled:
            rewards = rewards[torch.randperm(PULLS, generator=drawn)]
        state = torch.stack([context, CONTEXTS + context * ARMS + arm], dim=1).flatten()
        hidden = one_hot(state, STATES).double()
        before = head(hidden).detach()
        credit = algorithm.credit(evidence_of(rewards, before))
        assert credit.returns is not None
        explained = explained_variance(credit.returns, before) or 0.0
        mu = logits.detach().log_softmax(-1)[context, arm]
        columns = TokenColumns(
            advantages=credit.advantages,
            weights=WEIGHT,
            behaviour_logprobs=torch.stack([mu, torch.zeros_like(mu)], dim=1).flatten(),
            known=known(values=before, returns=credit.returns),
        )
        for _ in range(EPOCHS):
            own = logits.log_softmax(-1)[context, arm]
            logprobs = torch.stack([own, torch.zeros_like(own)], dim=1).flatten()
            rollout = torch.arange(PULLS).repeat_interleave(2)
            view = TokenView(logprobs=logprobs, rollout=rollout, columns=columns, known=known(values=head(hidden)))
            optimizer.zero_grad()
            (WEIGHT * algorithm.loss(view)).sum().backward()
            optimizer.step()
    return logits.detach(), head, explained


def test_values_become_what_the_policy_earns_and_the_policy_takes_what_pays_best() -> None:
    logits, head, explained = trained()
    policy = logits.softmax(-1)
    with torch.no_grad():
        values = head(torch.eye(STATES, dtype=torch.float64))
    earned = (policy * CHANCES).sum(-1)
    assert (values[:CONTEXTS] - earned).abs().max() < 0.1
    best = CHANCES.argmax(-1)
    after_best = values[CONTEXTS:].view(CONTEXTS, ARMS)[torch.arange(CONTEXTS), best]
    assert (after_best - CHANCES.amax(-1)).abs().max() < 0.1
    assert (earned / CHANCES.amax(-1)).mean() > 0.9
    assert explained > 0.15  # chances leave most of the variance to luck


def test_rewards_dealt_out_at_random_have_one_value_and_teach_no_arm() -> None:
    logits, head, explained = trained(shuffled=True)
    earned = (logits.softmax(-1) * CHANCES).sum(-1)
    assert (earned / CHANCES.amax(-1)).mean() < 0.6
    with torch.no_grad():
        values = head(torch.eye(STATES, dtype=torch.float64))[:CONTEXTS]
    assert values.max() - values.min() < 0.2
    assert explained < 0.1
