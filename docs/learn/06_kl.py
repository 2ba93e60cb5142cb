# %% [markdown]
# # 6 · KL
#
# **A reward never says everything that we want. What keeps a model from giving up all the rest for it?**
#
# *On 2 cores: 1 minute.*
#
# The usual answer is a penalty on the distance from the model that we began with. The distance is the Kullback-Leibler
# divergence, KL. It is estimated from samples, in several ways, and they are less alike than their names.

# %%
import os
from contextlib import redirect_stdout
from io import StringIO

import matplotlib.pyplot as plt
import torch

import posttrain
from posttrain.algorithms import kl
from posttrain.course import calc_kl_penalty

FULL = not os.environ.get("POSTTRAIN_TINY")
NUM_STEPS, PROMPTS, GROUP_SIZE = (15, 16, 8) if FULL else (1, 2, 4)
BETAS = (0.0, 0.01, 0.1, 1.0) if FULL else (1.0,)
plt.style.use("tableau-colorblind10")

# %% [markdown]
# ## The formula in ten lines
#
# How much more likely is the policy's own text under the policy than under the reference? On average, in nats:
#
# $$\text{KL}(\pi \| \text{ref}) = \sum_a \pi(a) \log \frac{\pi(a)}{\text{ref}(a)} = \mathbb{E}_{a \sim \pi}[x],$$
#
# where $x = \log \pi(a) - \log \text{ref}(a)$.
#
# It is 0 if the two are equal, and positive otherwise. The sum over the vocabulary is exact: call it *full*. For a
# sampled token only $x$ is known. Three estimates are in use (Schulman 2020):
#
# $$k_1 = x, \qquad k_2 = x^2 / 2, \qquad k_3 = e^{-x} - 1 + x.$$
#
# $k_1$ is the definition. $k_3$ adds $e^{-x} - 1$, whose mean is 0 because $\sum_a \pi(a) \frac{\text{ref}(a)}{\pi(a)}
# = 1$. It is never negative, since $e^{-x} \ge 1 - x$. GRPO uses $k_3$.
#
# ## By hand: value and spread, by enumeration
#
# Two softmaxes over twenty tokens. We can compute the mean and the spread of each estimate without drawing anything.

# %%
generator = torch.Generator().manual_seed(0)
reference = torch.randn(20, dtype=torch.float64, generator=generator).log_softmax(0)
drift = torch.randn(20, dtype=torch.float64, generator=generator)


def estimates(x):
    return {"k1": x, "k2": x.square() / 2, "k3": (-x).exp() - 1 + x}


def measured(distance):
    """Exact KL, and mean and standard deviation of each estimate, at a policy that has gone this far."""
    logprobs = (reference + distance * drift).log_softmax(0)
    p, x = logprobs.exp(), logprobs - reference
    moments = {}
    for name, values in estimates(x).items():
        mean = (p * values).sum()
        moments[name] = mean.item(), (p * (values - mean).square()).sum().sqrt().item()
    return (p * x).sum().item(), moments


for distance in (0.1, 0.5, 1.5):
    exact, moments = measured(distance)
    told = ", ".join(f"{name} {mean:.4f} ± {spread:.4f}" for name, (mean, spread) in moments.items())
    print(f"KL = {exact:.4f}:  {told}")
    assert abs(moments["k1"][0] - exact) < 1e-12
    assert abs(moments["k3"][0] - exact) < 1e-12
    assert abs(moments["k2"][0] - exact) > 1e-6

distances = torch.linspace(0.05, 3, 60).tolist()
figure, axes = plt.subplots(figsize=(6, 3.4))
for name, line in (("k1", "-"), ("k2", "--"), ("k3", ":")):
    points = [measured(distance) for distance in distances]
    spreads = [moments[name][1] / exact for exact, moments in points]
    axes.loglog([exact for exact, _ in points], spreads, line, linewidth=2, label=name)
axes.set_xlabel("exact KL, nats")
axes.set_ylabel("spread of one sample / KL")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# Near the reference, $k_1$ is useless as a number: its spread is many times the KL, and it may be negative. $k_3$ has
# the same mean and a far smaller spread. Far away that turns around.
#
# ## With the library

# %%
logprobs = (reference + 0.5 * drift).log_softmax(0)
for name, values in estimates(logprobs - reference).items():
    assert torch.allclose(kl.ESTIMATORS[name](logprobs, reference), values, rtol=0, atol=1e-12)
full = calc_kl_penalty(logprobs[None, None], reference[None, None], kl_coef=1.0)
assert torch.allclose(full, torch.tensor(measured(0.5)[0], dtype=torch.float64), rtol=0, atol=1e-12)
print("k1, k2, k3 and the full sum are equal")

# %% [markdown]
# ## The gradient is another matter
#
# A good estimate of the value need not have a good gradient. A loss differentiates the formula at the sampled token.
# The draw is not differentiated, although it depends on the weights, too. We enumerate the expected gradient of each
# estimate and compare it with the gradient of the KL itself.

# %%
start = (reference + 0.5 * drift).clone().requires_grad_()


def gradient(make):
    (found,) = torch.autograd.grad(make(start.log_softmax(0)), start)
    return found


def in_the_loss(name):
    """Expected gradient of the estimate at a sampled token."""
    return gradient(lambda logprobs: (logprobs.exp().detach() * estimates(logprobs - reference)[name]).sum())


def in_the_reward(logprobs):
    """The log-trick with x as a cost."""
    return (logprobs.exp().detach() * (logprobs - reference).detach() * logprobs).sum()


wanted = gradient(lambda logprobs: (logprobs.exp() * (logprobs - reference)).sum())
other_way = gradient(lambda logprobs: (reference.exp() * (reference - logprobs)).sum())
found = {f"{name} in the loss": in_the_loss(name) for name in ("k1", "k2", "k3")}
found["k1 in the reward"] = gradient(in_the_reward)
for name, slope in found.items():
    print(f"{name:>16}: length {slope.norm():.4f}, distance from ∇KL(π‖ref) {(slope - wanted).norm():.4f}")
print(f"      ∇KL(π‖ref): length {wanted.norm():.4f}")
assert found["k1 in the loss"].norm() < 1e-12
assert torch.allclose(found["k2 in the loss"], wanted, rtol=0, atol=1e-12)
assert torch.allclose(found["k1 in the reward"], wanted, rtol=0, atol=1e-12)
assert torch.allclose(found["k3 in the loss"], other_way, rtol=0, atol=1e-12)

# %% [markdown]
# - $k_1$ in the loss does nothing at all, on average. It only adds noise.
# - $k_2$, a biased value, has the right gradient.
# - $k_3$ in the loss follows the *other* divergence, KL(ref‖π). Near the reference they are alike.
# - $k_1$ subtracted from the reward has the right gradient again.
#
# The page on the [KL term](../algorithms/kl.md) has the whole table.
#
# ## Experiment: reward against nats
#
# The bundled model learns to begin with a plus again, with $\beta \cdot k_3$ in the loss. How much reward is bought
# with how many nats?

# %%


def plus_first(completions):
    first = [next((character for character in text if character in "+-*/"), "") for text in completions]
    return [float(operator == "+") for operator in first]


def trained(beta):
    """Reward and KL to the base model, step by step."""
    config = posttrain.load_recipe(
        "countdown-tiny",
        task={"name": "countdown", "held_out_size": 1},
        # A coefficient must be positive: 1e-9 stands for 0, so that the KL is measured.
        algorithm={"name": "grpo", "kl": {"coefficient": max(beta, 1e-9), "estimator": "k3"}},
        rollout={"prompts_per_step": PROMPTS, "group_size": GROUP_SIZE, "max_completion_tokens": 16},
        update={"learning_rate": 3e-4, "warmup_steps": 0, "schedule": "constant"},
        evaluation={"every_steps": 0, "samples": 1, "sampling_probes": False},
        checkpoint={"every_steps": 0},
        run={
            "folder": "runs/kl",
            "overwrite": True,
            "curves": False,
            "num_steps": NUM_STEPS,
            "time_limit_minutes": None,
        },
    )
    with redirect_stdout(StringIO()), posttrain.steps(config, rewards=[plus_first]) as steps:
        return [(step.metrics["reward"], step.metrics.get("kl", 0.0)) for step in steps]


curves = {beta: trained(beta) for beta in BETAS}
for beta, curve in curves.items():
    reward, nats = curve[-1]
    print(f"β = {beta:<5g} reward {curve[0][0]:.2f} → {reward:.2f}, KL {nats:.3f} nats per token")

figure, axes = plt.subplots(figsize=(6, 3.6))
for (beta, curve), mark in zip(curves.items(), ("o-", "s--", "^:", "D-"), strict=False):
    axes.plot([nats for _, nats in curve], [reward for reward, _ in curve], mark, markersize=4, label=f"β = {beta:g}")
axes.set_xlabel("KL to the base model, nats per token")
axes.set_ylabel("reward")
axes.legend()
figure.tight_layout()
plt.show()

if FULL:
    ends = {beta: curve[-1] for beta, curve in curves.items()}
    assert ends[0.0][1] > ends[0.1][1] > ends[1.0][1]
    assert min(ends[beta][0] for beta in (0.0, 0.01, 0.1)) > 0.98 > 0.9 > ends[1.0][0]
    assert 6 < ends[0.0][1] / ends[0.1][1] < 8

# %% [markdown]
# The runs with $\beta$ of 0, .01 and .1 reach the same reward. They differ in the price: $\beta = .1$ pays a seventh of
# the nats. The rest was drift that no reward had asked for. With $\beta = 1$ the penalty is worth more than the reward,
# and learning nearly stops. (One seed; the good $\beta$ depends on the scale of the advantages.)
#
# A KL penalty does not know what is good. It only keeps the model near its start, for better and worse. If the reward
# has a hole, KL delays the fall: [over-optimisation](../experiments/over_optimisation.md) measures it with learned
# rewards.
#
# ## KL to what?
#
# One course text begins each iteration with `reference = initial_policy`, and then penalises KL(initial_policy ‖
# reference). These are two names of one model:

# %%
same = calc_kl_penalty(logprobs[None, None], logprobs[None, None], kl_coef=0.04)
print(f"KL of a model to itself: {same.item():.1f}, so this penalty has no effect")
assert same.item() == 0

# %% [markdown]
# The KL must be that of the policy *being trained* to a model that stays where it is. A LoRA run makes the same mistake
# more quietly: if the adapter is not switched off for the reference, both are the same model, and the KL in the log is
# 0 for ever. If your KL is exactly 0 after ten updates, look there first.
#
# ## Questions
#
# **1.** Midway through training you double $\beta$. What happens?
#
# <details><summary>Answer</summary>
#
# The pull towards the reference doubles at once, and the reward's push stays. The policy goes back a little, until both
# balance at a smaller KL, and the reward falls a little with it. Later updates are more careful. The experiment shows
# the two ends of it: more $\beta$, fewer nats.
#
# </details>
#
# **2.** Why is a KL penalty important? What happens without it?
#
# <details><summary>Answer</summary>
#
# Without it the policy is free to give up everything that the reward does not measure: grammar, format, variety. In the
# experiment the run without a penalty went the furthest for the same reward. It matters most when the reward is a
# learned model with flaws: the further away, the less the reward model has seen.
#
# </details>
#
# **3.** Your log shows a KL of −.02 by $k_1$. Is that an error?
#
# <details><summary>Answer</summary>
#
# No. $k_1$ of a sample is negative whenever the token is likelier under the reference. Only its mean is not. $k_3$ is
# never negative.
#
# </details>
#
# **4.** A token is $10^{-9}$ times as likely under the policy as under the reference. What do $k_1$ and $k_3$ say?
#
# <details><summary>Answer</summary>
#
# $x = -20.7$, so $k_1 = -20.7$ and $k_3 = 10^9 - 1 - 20.7$. One such token outweighs a whole batch. It is rare, because
# the policy hardly ever samples it, but a batch from an older policy may have it.
#
# </details>
#
# **5.** Doubling the learning rate or halving $\beta$: which one lets the model go further in the end?
#
# <details><summary>Answer</summary>
#
# $\beta$ sets where the two forces balance. The learning rate sets how fast the model gets there.
#
# </details>

# %%
# The numbers in the answers, checked.
rare = torch.tensor(1e-9, dtype=torch.float64).log()
assert round(estimates(rare)["k1"].item(), 1) == -20.7
assert abs(estimates(rare)["k3"].item() / 1e9 - 1) < 1e-6
