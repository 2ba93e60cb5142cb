"""Training of a critic on rollouts of an earlier run, before its own run starts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.algorithms.algorithm import Algorithm
from posttrain.errors import UserError
from posttrain.models.policy import Policy
from posttrain.records import Group
from posttrain.runs.progress import Clock
from posttrain.runs.rollout_file import read_rollouts, stored_steps
from posttrain.training.actor_critic_state import EXPLAINED
from posttrain.training.collector import CollectedStep
from posttrain.training.learner import Learner
from posttrain.training.update import update

OPTION = "algorithm.critic.warm_start"


def require_earlier_rollouts(algorithm: Algorithm) -> None:
    if algorithm.critic is not None and algorithm.critic.warm_start:
        stored_steps(algorithm.critic.warm_start, OPTION)


def warm_start(learner: Learner, clock: Clock) -> list[str]:
    """Train the critic once on each step of the folder in its options, if there is one; returns notes.

    The explained variance of a step is measured before the critic learns from it.
    """
    options = learner.algorithm.critic
    if options is None or not options.warm_start:
        return []
    explained: list[float | None] = []
    count = 0
    for number, file in enumerate(stored_steps(options.warm_start, OPTION)):
        groups, grades = read_rollouts(file)
        require_known_tokens(groups, learner.policy, file)
        metrics = fit_critic(learner, CollectedStep(step=-number, groups=groups, grades=grades), clock)
        explained.append(metrics.get(EXPLAINED))
        count += sum(len(group.rollouts) for group in groups)
    last = "unknown" if explained[-1] is None else f"{explained[-1]:.2f}"
    return [
        f"The critic learned from {count} earlier rollouts; explained variance of the last step's before it: {last}."
    ]


def fit_critic(learner: Learner, collected: CollectedStep, clock: Clock) -> Mapping[str, float]:
    """Train only the critic on rollouts; returns their metrics before that."""
    before, options = learner.actor_critic_state, learner.settings.update
    credited = learner.credit(collected, clock)
    learner.actor_critic_state = replace(before, rewards=credited.next_state.rewards, begun=True, fitted=False)
    for batch in learner.batches(credited, clock):
        if batch.completions:
            with clock("update"):
                update(learner.policy, learner.optimizer, batch, learner.objective(), options, options.largest_rate)
    learner.actor_critic_state = replace(learner.actor_critic_state, fitted=before.fitted)
    return credited.metrics


def require_known_tokens(groups: Sequence[Group], policy: Policy, file: Path) -> None:
    largest = max(max(*rollout.tokens, *group.prompt.tokens) for group in groups for rollout in group.rollouts)
    if largest >= policy.num_logits:
        where = f"{OPTION}: {file} has token {largest}, and the policy knows {policy.num_logits} of them"
        raise UserError(f"{where}.  Give rollouts of a policy with the same tokenizer.")
