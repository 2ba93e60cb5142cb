"""The course's algorithm in plain loops over states, actions and next states: what the vectorised one must equal."""

import math

import numpy as np
from numpy import ndarray


def backward_loops(transitions: ndarray, terminal: list[int], reward: ndarray) -> ndarray:
    """P(a|s) from the partition function, axes of `transitions` state, action, next."""
    num_states, num_actions, _ = transitions.shape
    table, gains = transitions.tolist(), [math.exp(worth) for worth in reward]
    partition = [0.0] * num_states
    for state in terminal:
        partition[state] = 1.0
    for _ in range(2 * num_states):
        through = [[0.0] * num_actions for _ in range(num_states)]
        for state in range(num_states):
            for action in range(num_actions):
                total = 0.0
                for following in range(num_states):
                    total += table[state][action][following] * partition[following]
                through[state][action] = gains[state] * total
        updated = [sum(row) for row in through]
        change = max(abs(new - old) for new, old in zip(updated, partition, strict=True))
        partition = updated
        if change < 1e-6:
            break
    policy = np.zeros((num_states, num_actions))
    for state in range(num_states):
        for action in range(num_actions):
            if partition[state] > 0:
                policy[state, action] = through[state][action] / partition[state]
    return policy


def forward_loops(transitions: ndarray, terminal: list[int], start: ndarray, policy: ndarray) -> ndarray:
    """Expected visits over 2·S steps."""
    num_states, num_actions, _ = transitions.shape
    table, choices = transitions.tolist(), policy.tolist()
    now, total = start.tolist(), start.tolist()
    for _ in range(2 * num_states - 1):
        then = [0.0] * num_states
        for state in range(num_states):
            if state in terminal:
                continue
            for action in range(num_actions):
                flow = now[state] * choices[state][action]
                for following in range(num_states):
                    then[following] += flow * table[state][action][following]
        now = then
        total = [a + b for a, b in zip(total, now, strict=True)]
    return np.array(total)


def course_loops(
    transitions: ndarray,
    terminal: list[int],
    start: ndarray,
    demonstrated: ndarray,
    *,
    max_iterations: int | None = None,
) -> tuple[ndarray, ndarray, int]:
    """Weights of one feature per state by exponentiated gradient, their visits, and the number of iterations."""
    weights, iteration, moved = np.ones(len(start)), 0, math.inf
    while moved > 1e-4 and iteration != max_iterations:
        policy = backward_loops(transitions, terminal, weights)
        visits = forward_loops(transitions, terminal, start, policy)
        updated = weights.copy()
        for state in range(len(weights)):
            step = 0.2 / (1 + iteration)
            updated[state] = weights[state] * math.exp(step * (demonstrated[state] - visits[state]))
        moved = max(abs(updated - weights))
        weights, iteration = updated, iteration + 1
    visits = forward_loops(transitions, terminal, start, backward_loops(transitions, terminal, weights))
    return weights, visits, iteration
