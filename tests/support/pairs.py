"""Pairs of random tokens for tiny models, sessions that learn them, and their log-probs one unpadded row at a time."""

from collections.abc import Sequence
from unittest.mock import NonCallableMock

import numpy as np
import torch
from torch import Tensor

from posttrain.algorithms.preference_losses import OfPairs
from posttrain.config import DpoConfig, RewardModelConfig
from posttrain.models.classifiers.heads import TextScorer
from posttrain.models.policy import Policy
from posttrain.options.pairs import DpoOptions, RewardTrainingOptions
from posttrain.options.training import RunOptions
from posttrain.records import Preference, Prompt, TokenSequence
from posttrain.tasks.preference_set import PreferenceSet
from posttrain.training.dpo.dpo_objective import DpoObjective
from posttrain.training.dpo.dpo_run import RoundPairs
from posttrain.training.fit_session import FitSession
from posttrain.training.optimizer import OwnOptimizer
from posttrain.training.reference import Reference
from posttrain.training.reward_model.reward_run import RewardModelObjective
from posttrain.training.session import Session
from tests.support.tiny import VOCAB, plain_logprobs

SHAPES = ((3, 4, 2), (5, 1, 6), (1, 3, 3), (5, 2, 7), (2, 5, 1))
"""Tokens of prompt, chosen and rejected answer."""


def some_pairs(
    shapes: Sequence[tuple[int, int, int]] = SHAPES, *, seed: int = 5, weights: Sequence[float] = ()
) -> list[Preference]:
    """Pairs of these lengths; those whose prompts are as long as each other share a prompt."""
    random = np.random.Generator(np.random.Philox(seed))

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.integers(VOCAB, size=count).tolist())

    prompts = {size: tokens(size) for size in sorted({shape[0] for shape in shapes})}
    return [
        Preference(
            prompt=Prompt(id=f"p{number}", text="", tokens=prompts[size]),
            chosen=TokenSequence.one_turn(tokens(chosen)),
            rejected=TokenSequence.one_turn(tokens(rejected)),
            weight=weights[number] if weights else 1.0,
            where=f"pairs:{number + 1}",
        )
        for number, (size, chosen, rejected) in enumerate(shapes)
    ]


def one_row_at_a_time(policy: Policy, pairs: Sequence[Preference]) -> OfPairs:
    """log π of both answers of each pair by the library's own forward pass, with gradients."""

    def of(pair: Preference, answer: TokenSequence) -> Tensor:
        return plain_logprobs(policy.model, pair.prompt.tokens, answer.tokens)[torch.tensor(answer.sampled)].sum()

    return OfPairs(
        torch.stack([of(pair, pair.chosen) for pair in pairs]), torch.stack([of(pair, pair.rejected) for pair in pairs])
    )


def dpo_session(
    policy: Policy,
    options: DpoOptions,
    pairs: PreferenceSet,
    *,
    num_steps: int = 4,
    reference: Reference | None = None,
    optimizer: OwnOptimizer | None = None,
) -> FitSession[Preference]:
    """A run by `train_dpo` on these pairs, before its first step."""
    config = DpoConfig(dpo=options, run=RunOptions(num_steps=num_steps))
    objective = DpoObjective(config, policy, pairs, reference=reference)
    objective.keep_reference()
    return FitSession(config, "tiny", pairs, objective, own_optimizer=optimizer)


def rounds_session(policy: Policy, options: DpoOptions) -> tuple[FitSession[Preference], RoundPairs]:
    """A run by `train_dpo` in rounds, whose pairs are given to `begin_round` and sampled by nobody."""
    config = DpoConfig(dpo=options)
    rounds = RoundPairs(config, NonCallableMock(spec=Session, policy=policy, model_name="tiny"))
    return FitSession(config, "tiny", rounds, rounds), rounds


def reward_session(
    scorer: TextScorer,
    options: RewardTrainingOptions,
    pairs: PreferenceSet,
    *,
    num_steps: int = 4,
    optimizer: OwnOptimizer | None = None,
) -> FitSession[Preference]:
    """A run by `train_reward_model` on these pairs, before its first step."""
    config = RewardModelConfig(reward_model=options, run=RunOptions(num_steps=num_steps))
    objective = RewardModelObjective(config, scorer, pairs)
    return FitSession(config, "tiny", pairs, objective, own_optimizer=optimizer)
