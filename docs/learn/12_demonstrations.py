# %% [markdown]
# # 12 · From demonstrations to rewards
#
# **You watch someone walk. Which reward would explain the walk?**
#
# *On 2 cores: 20 seconds.*
#
# So far a reward made the behaviour. This page goes the other way: it is inverse reinforcement learning. We watch an
# expert, and look for a reward under which the expert's behaviour makes sense. A reward model of lesson 9 does the same
# with other evidence: someone compares two answers. At the end both turn out to be one likelihood.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np
import torch

from posttrain.algorithms.preference_losses import bradley_terry
from posttrain.irl import (
    Demonstrations,
    IcyGridWorld,
    LinearReward,
    MaxCausalEntIRL,
    MaxEntIRL,
    expected_value_difference,
    fit_jointly,
    fit_preferences,
    occupancy,
    sample_demonstrations,
)
from posttrain.irl.counting import visit_totals
from posttrain.irl.course import local_action_probabilities, recover_reward

FULL = not os.environ.get("POSTTRAIN_TINY")
SIZES = (10, 30, 100, 300, 1000) if FULL else (10,)
SEEDS = 20 if FULL else 1
plt.style.use("tableau-colorblind10")

# %% [markdown]
# ## A world of our own
#
# A 4 × 4 grid. The walk starts in the top left corner and ends in the bottom right one. Most cells are grass. Some are
# mud, and two are traps. On ice, a step goes in a random direction with probability .3.
#
# The true reward has three numbers, one for each kind of cell. We keep it secret from the learner.

# %%
MAP = """
s.mm
.tm.
.t..
...g
"""
cells = "".join(MAP.split())
KINDS = {"grass": "s.", "mud": "m", "trap": "t"}  # the goal ends the walk and pays nothing
features = np.array([[cell in kind for kind in KINDS.values()] for cell in cells], dtype=float)
true_weights = np.array([-2.0, -3.0, -6.0])

icy, dry = IcyGridWorld(4, slip=0.3), IcyGridWorld(4, slip=0.0)

# %% [markdown]
# ## The formula in ten lines
#
# Give the expert some freedom: a better path is likelier, but no path is impossible. Among all policies that collect
# the demonstrated features on average, take the one with the most entropy. It has a soft version of the Bellman
# equation (Ziebart 2010):
#
# $$Q(s,a) = r(s) + \sum_{s'} P(s'|s,a) V(s'), \qquad V(s) = \log \sum_a e^{Q(s,a)}, \qquad \pi(a|s) = e^{Q - V}$$
#
# The reward is linear in features: $r_\theta(s) = \theta \cdot \phi(s)$. The best $\theta$ minimises a convex function.
# Its gradient says what the learner does wrong:
#
# $$g(\theta) = V_\theta(s_0) - \theta \cdot \mu_E, \qquad \nabla g = \mu_\theta - \mu_E$$
#
# $\mu_E$ are the features that the expert collects in a walk, $\mu_\theta$ those of the learner. Too many traps? The
# gradient lowers the reward of traps.
#
# ## By hand
#
# Torch differentiates through all sweeps of the Bellman equation. We check that its gradient is the difference of
# features.

# %%
PENALTY = 1e-4  # (PENALTY / 2) |θ|², so that no weight runs away


def soft_plan(world, weights, sweeps=200):
    """V and π under the reward θ·φ."""
    transitions = torch.tensor(world.transitions.toarray()).view(16, 4, 16)
    reward, ends = torch.tensor(features) @ weights, torch.tensor(world.terminal)
    values = torch.zeros(16, dtype=torch.float64)
    for _ in range(sweeps):
        q = reward[:, None] + transitions @ values
        values = torch.where(ends, reward, q.logsumexp(dim=1))
    return values, (q - values[:, None]).exp()


def dual(world, weights, demonstrated):
    return soft_plan(world, weights)[0][0] - weights @ demonstrated + PENALTY / 2 * weights.square().sum()


def minimised(objective):
    weights = torch.full((3,), -3.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=100, tolerance_grad=1e-10, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = objective(weights)
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


def expert(world):
    return soft_plan(world, torch.tensor(true_weights))[1].numpy()


def walks(world, policy, number, seed):
    return sample_demonstrations(world, policy, num_episodes=number, rng=np.random.default_rng(seed))


def collected(shown):
    """Features that each walk collects, [walk, feature]."""
    return np.array([features[np.asarray(episode.states)].sum(axis=0) for episode in shown])


shown = walks(icy, expert(icy), 200, seed=1)
demonstrated = torch.tensor(collected(shown).mean(axis=0))
by_hand = minimised(lambda weights: dual(icy, weights, demonstrated))

weights = by_hand.clone().requires_grad_()
(slope,) = torch.autograd.grad(dual(icy, weights, demonstrated) - PENALTY / 2 * weights.square().sum(), weights)
visits = occupancy(icy, soft_plan(icy, by_hand)[1].numpy(), discount=1.0)
assert np.allclose(slope, visits @ features - demonstrated.numpy(), atol=1e-8)  # the gradient is what the text says


def shown_weights(name, weights):
    print(f"{name:13}", ", ".join(f"{kind} {weight:.4f}" for kind, weight in zip(KINDS, weights, strict=True)))


shown_weights("true weights", true_weights)
shown_weights("by hand", by_hand)

# %% [markdown]
# 200 walks are enough to find out what hurts. Nobody told the learner about traps.
#
# ## With the library
#
# `MaxCausalEntIRL` minimises the same function with Newton's method.

# %%
reward = LinearReward(features=features)
fit = MaxCausalEntIRL(l2=PENALTY).fit(icy, reward, shown)
shown_weights("library", fit.weights)
assert np.allclose(fit.weights, by_hand.numpy(), atol=1e-5)


def draw(axes, numbers, title):
    image = axes.imshow(numbers.reshape(4, 4), cmap="cividis")
    for state, (cell, number) in enumerate(zip(cells, numbers, strict=True)):
        dark = number < (numbers.min() + numbers.max()) / 2
        text = f"{cell}\n{number:.1f}"
        axes.text(state % 4, state // 4, text, ha="center", va="center", color="white" if dark else "black")
    axes.set(title=title, xticks=[], yticks=[])
    plt.colorbar(image, ax=axes, shrink=0.7)


figure, panels = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
draw(panels[0], features @ true_weights, "true reward")
draw(panels[1], features @ fit.weights, "found in 200 walks")
draw(panels[2], occupancy(icy, fit.policy, discount=1.0), "visits of the fitted policy")
plt.show()

# %% [markdown]
# ## 2008, and why it fails on ice
#
# The course teaches the earlier version of 2008. There a *path* has probability $\propto e^{\theta \cdot \phi(\tau)}$,
# slips included. So the model believes that it chooses its luck. On dry ground the two models are the same.
#
# We fit three methods to demonstrations of the same expert, carry out each policy, and compare its visits with the
# demonstrated ones. The last column is the true reward that each policy loses, compared with the best policy.


# %%
def measured(world, walked, policy):
    gap = np.abs(occupancy(world, policy, discount=1.0) - visit_totals(walked, 16)).max()
    return gap, expected_value_difference(world, features @ true_weights, policy, discount=1.0)


losses = {}
print("world  method          gap of visits  reward lost")
for name, world in (("icy", icy), ("dry", dry)):
    walked = walks(world, expert(world), 1000 if FULL else 50, seed=2)
    endless = IcyGridWorld(4, slip=world.slip, terminal=())
    taught = recover_reward(endless, np.eye(16), np.array([15]), walked)
    fits = {
        "the course's": local_action_probabilities(endless, np.array([15]), taught.weights),
        "2008, exact": MaxEntIRL(l2=PENALTY).fit(world, reward, walked).policy,
        "causal": MaxCausalEntIRL(l2=PENALTY).fit(world, reward, walked).policy,
        "the expert": expert(world),
    }
    for method, policy in fits.items():
        gap, lost = measured(world, walked, policy)
        print(f"{name:6} {method:15} {gap:13.3f}  {lost:11.3f}")
        losses[name, method] = lost

if FULL:
    assert all(losses[name, "causal"] < losses[name, "the expert"] + 0.2 for name in ("icy", "dry"))
    assert losses["dry", "2008, exact"] < losses["dry", "the expert"] + 0.2
    assert losses["icy", "2008, exact"] > 4 * losses["icy", "the expert"]

# %% [markdown]
# The causal method is almost as good as the expert's own policy, on both grounds. The exact 2008 method is as good on
# dry ground only. The course's version has a further handicap: it multiplies its weights, so they stay positive, and a
# positive reward cannot say that a trap hurts. [Inverse RL](../irl.md) takes it apart step by step.
#
# ## Two walks, compared
#
# Now the bridge to lesson 9. On dry ground, the model of 2008 gives a path the probability $e^{\theta \cdot
# \phi(\tau)} / Z$. Compare two paths with the same start. $Z$ cancels:
#
# $$\log p(\tau_1) - \log p(\tau_2) = \theta \cdot (\phi(\tau_1) - \phi(\tau_2)) = R(\tau_1) - R(\tau_2)$$
#
# So if we are shown two paths and told that one of them is the expert's, it is the first one with probability
# $\sigma(R_1 - R_2)$. That is the Bradley-Terry model of preferences. A reward model maximises the same likelihood;
# its paths are answers, and its $R$ is a network.

# %%
seen = walks(dry, expert(dry), 200, seed=3)
learned = MaxCausalEntIRL(l2=PENALTY).fit(dry, reward, seen)
first, second, *_ = seen


def path_logprob(episode):
    states, actions = np.asarray(episode.states), np.asarray(episode.actions)
    return np.log(learned.policy[states[:-1], actions]).sum()


def total(episode):
    return features[np.asarray(episode.states)].sum(axis=0) @ learned.weights


assert np.isclose(path_logprob(first) - path_logprob(second), total(first) - total(second))
print(f"log-odds of two walks: {path_logprob(first) - path_logprob(second):+.4f}")
print(f"difference of rewards: {total(first) - total(second):+.4f}")

# %% [markdown]
# Now forget the demonstrations. Someone watches pairs of careless walks and says which one is better. We fit the
# weights to these answers: by hand, with the library's inverse RL, and we compute the loss with the function that
# trains reward models of text.


# %%
careless = soft_plan(dry, 0.75 * torch.tensor(true_weights))[1].numpy()


def compared(number, seed):
    """Pairs of careless walks, the preferred one of each first."""
    pair = [walks(dry, careless, number, seed=[seed, side]) for side in (0, 1)]
    better = [collected(each) @ true_weights for each in pair]
    draws = np.random.default_rng([seed, 2]).random(number)
    right_way = draws < 1 / (1 + np.exp(np.clip(better[1] - better[0], -500, 500)))
    sides = [[*pair[0]], [*pair[1]]]
    preferred = [sides[0][i] if right else sides[1][i] for i, right in enumerate(right_way)]
    others = [sides[1][i] if right else sides[0][i] for i, right in enumerate(right_way)]
    return Demonstrations.from_episodes(preferred), Demonstrations.from_episodes(others)


preferred, others = compared(300, seed=4)
chosen, rejected = (torch.tensor(collected(each)) for each in (preferred, others))


def pair_loss(weights):
    """-log σ(R₁ - R₂), as a reward model's."""
    return -torch.nn.functional.logsigmoid((chosen - rejected) @ weights).mean()


by_hand = minimised(lambda weights: pair_loss(weights) + PENALTY / 2 * weights.square().sum())
of_pairs = fit_preferences(MaxCausalEntIRL(l2=PENALTY), dry, reward, (preferred, others))
of_text = bradley_terry(chosen @ by_hand, rejected @ by_hand, torch.zeros(300)).mean()
shown_weights("by hand", by_hand)
shown_weights("library", of_pairs.weights)
print(f"loss {pair_loss(by_hand):.6f}; of the reward model's function {of_text:.6f}")
assert np.allclose(of_pairs.weights, by_hand.numpy(), atol=1e-5)
assert torch.isclose(of_text, pair_loss(by_hand))

# %% [markdown]
# ## Experiment: which evidence says more?
#
# The same number of walks from the expert, of comparisons of careless walks, or of both. How far are the found weights
# from the true ones? We repeat each with new draws.

# %%
irl = MaxCausalEntIRL(l2=PENALTY)
errors = {"demonstrations": [], "comparisons": [], "both": []}
for size in SIZES:
    found = {name: [] for name in errors}
    for seed in range(SEEDS):
        shown, pairs = walks(dry, expert(dry), size, seed=[size, seed]), compared(size, seed=1000 * size + seed)
        fits = irl.fit(dry, reward, shown), fit_preferences(irl, dry, reward, pairs)
        fits = (*fits, fit_jointly(irl, dry, reward, shown, pairs))
        for name, fitted in zip(errors, fits, strict=True):
            found[name].append(np.linalg.norm(fitted.weights - true_weights))
    for name, of_size in found.items():
        errors[name].append(float(np.median(of_size)))

if FULL:
    assert all(of_name == sorted(of_name, reverse=True) for of_name in errors.values())
    assert all(one < other for one, other in zip(errors["demonstrations"], errors["comparisons"], strict=True))
print("evidence       ", *(f"{size:>7}" for size in SIZES))
for name, of_name in errors.items():
    print(f"{name:15}", *(f"{error:7.2f}" for error in of_name))

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for (name, of_name), marker in zip(errors.items(), "osv", strict=True):
    axes.loglog(SIZES, of_name, marker + "-", label=name)
axes.set(xlabel="walks or comparisons", ylabel="distance from the true weights", title=f"median of {SEEDS} draws")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# All three get closer with more evidence. Here a demonstration says more than a comparison: it is a whole walk of good
# choices, and a comparison is one bit about two careless walks. The weights of both add up without a knob, since both
# are likelihoods of the same model.
#
# ## Questions
#
# **1.** Two demonstrations collect features $F_1$ and $F_2$. What are their log-odds under the maximum-entropy model,
# and when are they zero?
#
# <details><summary>Answer</summary>
#
# $\omega \cdot (F_1 - F_2)$. They are zero when both paths earn the same reward. This does not need $F_1 = F_2$: it is
# enough that the difference is orthogonal to $\omega$. In a world with chance, $\sum_t \log P(s_{t+1}|s_t, a_t)$ of
# each path comes on top.
#
# </details>
#
# **2.** What goes wrong if you compute expected visits before the backward pass has converged?
#
# <details><summary>Answer</summary>
#
# The backward pass makes the policy. Early sweeps know only paths of a few steps, so states far from the goal have no
# path yet, and their action probabilities are undefined or wrong. The visits then belong to another policy, and the
# gradient $\mu_E - \mu_\omega$ is of another reward.
#
# </details>
#
# **3.** Write the forward recursion of expected visits. How do you keep terminal states from sending probability on?
#
# <details><summary>Answer</summary>
#
# $d_{t+1}(s') = \sum_{s \notin T} \sum_a d_t(s)\, \pi(a|s)\, P(s'|s,a)$, with $d_0$ the start. The sum leaves out
# terminal states $T$: they receive probability and never pass it on. Setting their rows of $P$ to zero does the same.
#
# </details>
#
# **4.** Name one technique for numerical stability here.
#
# <details><summary>Answer</summary>
#
# Work with logarithms: keep $V = \log Z$ and add up with log-sum-exp, which subtracts the maximum first. $Z$ itself is
# a sum of $e^{\text{reward of a path}}$. It underflows to 0 when every path is long and costs something, and overflows
# when paths are paid. `logsumexp` in `soft_plan` above is this trick.
#
# </details>
#
# **5.** The course's weights are $\omega \leftarrow \omega \cdot e^{\alpha_t \nabla}$. Which rewards can they not
# express?
#
# <details><summary>Answer</summary>
#
# Negative ones. All weights start at 1 and are only multiplied by positive numbers. A trap can at most be worth little.
#
# </details>
#
# **6.** Everyone in our world ends in the goal. What can demonstrations say about the goal's reward?
#
# <details><summary>Answer</summary>
#
# Nothing, without a discount. Every walk collects it exactly once, so it changes no choice. Add a feature for the goal
# and `identifiability(fit)` lists it. Comparisons between walks that reach the goal and walks that do not can settle
# it.
#
# </details>
