"""Slow float64 twins of the maths, written from the papers' equations: one scalar at a time, numpy, no torch.

They share no code and no trick with posttrain: the surrogate is a `min` of two products, the deviation is numpy's,
a sequence ratio is a quotient of products of probabilities.
"""

import math

import numpy as np


def scored(group: np.ndarray) -> np.ndarray:
    return group[~np.isnan(group)]


def advantage(name: str, rewards: np.ndarray) -> np.ndarray:
    """`rewards` is [prompt, group], NaN where unscored."""
    result = np.zeros_like(rewards)
    for i, j in zip(*np.where(~np.isnan(rewards)), strict=True):
        group, own = scored(rewards[i]), rewards[i, j]
        if name == "raw":
            result[i, j] = own
        elif name == "batch_centred":
            result[i, j] = own - np.mean(scored(rewards.ravel()))
        elif len(group) < 2 or len(set(group.tolist())) == 1:
            result[i, j] = 0.0
        elif name == "group_centred":
            result[i, j] = own - np.mean(group)
        elif name == "leave_one_out":
            result[i, j] = own - (np.sum(group) - own) / (len(group) - 1)
        elif name == "over_mean":
            result[i, j] = (own - np.mean(group)) / np.mean(group)
        else:
            result[i, j] = (own - np.mean(group)) / np.std(group, ddof={"population": 0, "sample": 1}[name])
    return result


def ratios(logprobs: np.ndarray, denominators: np.ndarray, rollout: np.ndarray, level: str) -> np.ndarray:
    result = np.exp(logprobs) / np.exp(denominators)
    if level == "token":
        return result
    whole = np.array([np.prod(result[rollout == mine]) for mine in rollout])
    if level == "sequence_product":
        return whole
    return whole ** np.array([1 / np.sum(rollout == mine) for mine in rollout])


def clipped_surrogate(ratio: np.ndarray, advantages: np.ndarray, low: float, high: float) -> np.ndarray:
    losses = []
    for rho, gain in zip(ratio, advantages, strict=True):
        clipped = min(max(rho, 1 - low), 1 + high)
        losses.append(-min(rho * gain, clipped * gain))
    return np.array(losses)


def weighted_policy_gradient(
    logprobs: np.ndarray, ratio: np.ndarray, advantages: np.ndarray, low: float, high: float
) -> np.ndarray:
    weights = [min(max(rho, 1 - low), 1 + high) for rho in ratio]
    return np.array([-w * a * x for w, a, x in zip(weights, advantages, logprobs, strict=True)])


def kl(estimator: str, logprobs: np.ndarray, reference: np.ndarray) -> np.ndarray:
    ratio = np.exp(reference) / np.exp(logprobs)
    return {"k1": -np.log(ratio), "k2": np.log(ratio) ** 2 / 2, "k3": ratio - 1 - np.log(ratio)}[estimator]


def completion_kl(estimator: str, logprobs: np.ndarray, reference: np.ndarray, rollout: np.ndarray) -> np.ndarray:
    wholes = []
    for own in rollout:
        policy = math.prod(math.exp(x) for x, i in zip(logprobs, rollout, strict=True) if i == own)
        other = math.prod(math.exp(x) for x, i in zip(reference, rollout, strict=True) if i == own)
        wholes.append(kl(estimator, np.array(math.log(policy)), np.array(math.log(other))))
    return np.array(wholes)


def full_kl(logits: np.ndarray, reference: np.ndarray) -> np.ndarray:
    totals = []
    for row, other in zip(logits, reference, strict=True):
        p = [math.exp(x) / sum(math.exp(y) for y in row) for x in row]
        q = [math.exp(x) / sum(math.exp(y) for y in other) for x in other]
        totals.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    return np.array(totals)


def token_weight(rule: str, lengths: list[int], is_scored: list[bool], i: int, limit: int) -> float:
    if not is_scored[i]:
        return 0.0
    kept = [length for length, keep in zip(lengths, is_scored, strict=True) if keep]
    return {
        "mean_over_tokens": 1 / sum(kept),
        "mean_over_sequences": 1 / len(kept) / lengths[i],
        "sum_over_sequence": 1 / len(kept),
        "constant_length": 1 / len(kept) / limit,
    }[rule]


def overlong(length: int, limit: int, buffer: float, penalty: float) -> float:
    """What DAPO's equation takes off the reward; its L_max is our limit, its L_cache our buffer · limit."""
    cache = buffer * limit
    if length <= limit - cache:
        return 0.0
    return penalty * (length - (limit - cache)) / cache
