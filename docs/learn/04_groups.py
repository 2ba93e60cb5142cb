# %% [markdown]
# # 4 · Groups
#
# **GRPO asks the model the same question several times. How many times, and what is done with the answers?**
#
# *On 2 cores: 20 seconds.*
#
# The group is GRPO's baseline: no second network, only the mean of the siblings. This page measures what the size of
# the group changes, and three small decisions that papers make differently: the deviation, the length, and the factor
# $1 - 1/G$.

# %%
import os
from itertools import product

import matplotlib.pyplot as plt
import torch

import posttrain
from posttrain.algorithms.advantages import group_centred, group_zscore, informative, leave_one_out
from posttrain.algorithms.losses import constant_length, mean_over_sequences, mean_over_tokens
from posttrain.course import compute_grpo_advantages
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import ModelOptions
from posttrain.rewards.countdown import Outcome, countdown_outcome, puzzle

FULL = not os.environ.get("POSTTRAIN_TINY")
NUM_PROBLEMS, NUM_SAMPLES, MAX_TOKENS = (128, 32, 120) if FULL else (4, 8, 40)
SIZES = (2, 4, 8, 16, 32) if FULL else (2, 4, 8)
plt.style.use("tableau-colorblind10")

# %% [markdown]
# ## The formula in ten lines
#
# One prompt, $G$ completions, rewards $r_1 \dots r_G$. Lesson 3 says: subtract a baseline. The group's mean estimates
# the expected reward *of this prompt*, so an easy problem is compared with itself and not with a hard one:
#
# $$A_i = r_i - \bar r, \qquad \bar r = \frac{1}{G} \sum_j r_j.$$
#
# GRPO (Shao et al. 2024) also divides by the group's standard deviation $s$, so that every group has the same scale:
#
# $$A_i = \frac{r_i - \bar r}{s}.$$
#
# Every token of completion $i$ gets the same $A_i$. A positive advantage makes its tokens likelier, a negative one
# makes them less likely. If all rewards are equal, all advantages are 0: the group is **silent**, it teaches nothing.
#
# ## By hand, and with the library

# %%
rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0], [2.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
rewards = rewards.double()


def centred(group):
    return group - group.mean(dim=1, keepdim=True)


def zscore(group, correction):
    return centred(group) / group.std(dim=1, keepdim=True, correction=correction)


print("population (divide by G):  ", [round(value, 4) for value in zscore(rewards, 0)[0].tolist()])
print("sample (divide by G - 1):  ", [round(value, 4) for value in zscore(rewards, 1)[0].tolist()])
assert torch.allclose(group_centred(rewards), centred(rewards), rtol=0, atol=1e-12)
assert torch.allclose(group_zscore(rewards), zscore(rewards, 0), rtol=0, atol=1e-12)
assert torch.allclose(group_zscore(rewards, deviation="sample"), zscore(rewards, 1), rtol=0, atol=1e-12)

# %% [markdown]
# Four right answers of eight: one course document prints ±1 for this group, another ±.94. Both are right. The first
# divides by $G$ in the deviation, the second by $G - 1$. In posttrain it is an option, `algorithm.deviation`.
#
# ## Silence must be exactly zero
#
# Three rewards of .9 are equal. In floating point their mean is not quite .9, and the deviation is not quite 0:

# %%
equal = torch.full((1, 3), 0.9)
with_epsilon = centred(equal) / (equal.std(dim=1, keepdim=True, correction=0) + 1e-8)
print("by hand, with the usual 1e-8:", with_epsilon[0].tolist())
print("library:                     ", group_zscore(equal)[0].tolist())
assert with_epsilon.abs().max() > 0.5
assert group_zscore(equal).abs().max() == 0
assert compute_grpo_advantages(equal[0]).abs().max() == 0

# %% [markdown]
# Rounding noise became an advantage as large as any real one. In the library, equal rewards give exactly 0.
#
# ## The bias $1 - 1/G$, by enumeration
#
# The mean contains $r_i$ itself. A completion that does well raises its own baseline. We take a prompt that is solved
# with probability $p$, go through all $2^G$ patterns of right and wrong, and add up the expected gradient. For a
# Bernoulli with logit $\theta$ the score is $y - p$, and the true gradient of $p$ is $p (1 - p)$.

# %%


def expected_gradient(rule, size, p):
    """E[mean_i A_i (y_i - p)], over all 2^G outcomes."""
    outcomes = torch.tensor([*product([0.0, 1.0], repeat=size)], dtype=torch.float64)
    chance = (outcomes * p + (1 - outcomes) * (1 - p)).prod(dim=1)
    return (chance * (rule(outcomes) * (outcomes - p)).mean(dim=1)).sum().item()


for size in (2, 4, 8):
    shares = [expected_gradient(group_centred, size, p) / (p * (1 - p)) for p in (0.1, 0.5, 0.9)]
    print(f"G = {size}: centred rewards find {shares[0]:.4f} of the gradient; 1 - 1/G = {1 - 1 / size:.4f}")
    assert max(abs(share - (1 - 1 / size)) for share in shares) < 1e-12

# %% [markdown]
# The share is the same for every $p$, so it is a matter of the learning rate only. It is not a reason for large groups.
#
# ## What the deviation does
#
# Dividing by the deviation is not the same for every $p$. We compute the same expected gradient for the z-score:

# %%
chances = torch.linspace(0.02, 0.98, 49).tolist()
figure, axes = plt.subplots(figsize=(6, 3.3))
for size, line in ((2, ":"), (8, "--")):
    slopes = [expected_gradient(group_zscore, size, p) for p in chances]
    axes.plot(chances, slopes, line, linewidth=2, label=f"z-score, G = {size}")
axes.plot(chances, [p * (1 - p) for p in chances], "-", linewidth=2, label="true gradient of p")
axes.set_xlabel("chance p that the prompt is solved")
axes.set_ylabel("expected gradient")
axes.legend()
figure.tight_layout()
plt.show()

hard, even = (expected_gradient(group_zscore, 8, p) / expected_gradient(group_centred, 8, p) for p in (0.1, 0.5))
print(f"G = 8: the z-score weighs a prompt of p = .1 by {hard:.2f}, one of p = .5 by {even:.2f}")
assert hard > even

# %% [markdown]
# The z-score gives more weight to prompts that are nearly always or nearly never solved: it divides by $\sqrt{p(1-p)}$,
# which is small there. One rare success counts more. (A group of two has only one z-score, ±1, so its line lies on the
# true one.) Dr. GRPO (Liu et al. 2025) leaves the division out for this reason.
#
# ## What the length does
#
# GRPO first averages over the tokens of a completion, then over completions. So a token of a long completion weighs
# less. Here are a right and a wrong answer of 10 tokens, and a wrong answer of 40. All have the same advantage in size:

# %%
lengths, scored = torch.tensor([10, 10, 40]), torch.ones(3, dtype=torch.bool)
print("weight of one token of:  right, 10    wrong, 10    wrong, 40")
for rule in (mean_over_sequences, mean_over_tokens, constant_length):
    weights = rule(lengths, scored, max_completion_tokens=40)
    print(f"{rule.__name__:>22}:  " + "    ".join(f"{weight:>9.4f}" for weight in weights))
by_hand = 1 / (3 * lengths.double())
assert torch.allclose(mean_over_sequences(lengths, scored, max_completion_tokens=40), by_hand, rtol=0, atol=1e-15)

# %% [markdown]
# Under the mean over sequences, a long wrong answer is punished four times less per token than a short wrong one. So
# being wrong at length is cheap. The mean over tokens (DAPO) and the constant length (Dr. GRPO) do not have this bias.
#
# ## Experiment: silent groups of a real model
#
# The bundled model answers each problem many times. From the same answers we form groups of each size and count silent
# ones.

# %%
policy = load_policy(ModelOptions(path="bundled"))
generator = torch.Generator().manual_seed(0)
problems = []
while len(problems) < NUM_PROBLEMS:
    a, b, c = torch.randint(1, 31, (3,), generator=generator).tolist()
    target = [a + b + c, a * b - c, a + b - c, (a - b) * c][len(problems) % 4]
    if 1 <= target <= 99:
        problems.append(([a, b, c], target))
prompts = [f"Use all of {a}, {b}, {c} to make {target}.\n" for (a, b, c), target in problems]
groups = posttrain.generate(policy, prompts, group_size=NUM_SAMPLES, max_completion_tokens=MAX_TOKENS)


def solved(problem, rollout):
    return float(countdown_outcome(puzzle(*problem, "all"), rollout.text) is Outcome.CORRECT)


earned = torch.tensor(
    [[solved(problem, rollout) for rollout in group.rollouts] for problem, group in zip(problems, groups, strict=True)]
)
print(f"{NUM_PROBLEMS} problems, {NUM_SAMPLES} answers each: {earned.mean():.3f} right")

silent = {}
for size in SIZES:
    silent[size] = 1 - informative(earned.reshape(-1, size)).double().mean().item()
    print(f"G = {size:>2}: {silent[size]:.0%} of the groups are silent")

figure, axes = plt.subplots(figsize=(6, 3.3))
axes.plot(SIZES, [silent[size] for size in SIZES], "o-", linewidth=2)
axes.set_xscale("log", base=2)
axes.set_xticks(SIZES, SIZES)
axes.set_xlabel("group size G")
axes.set_ylabel("silent groups, share")
axes.set_ylim(0, 1)
figure.tight_layout()
plt.show()
assert [silent[size] for size in SIZES] == sorted(silent.values(), reverse=True)
assert not FULL or abs(silent[2] - 0.75) < 0.03

# %% [markdown]
# In groups of two, three completions of four are thrown away. Larger groups find a contrast more often. They also have
# a better baseline. With a perfect one, the mean squared advantage of a prompt is $p(1-p)$. The mean of $G - 1$
# siblings is noisy, and makes it $\frac{G}{G-1}$ times as large:

# %%
perfect = earned.var(dim=1).mean()  # p(1 - p), averaged over the problems
for size in SIZES:
    square = leave_one_out(earned.reshape(-1, size)).square().mean() / perfect
    print(f"G = {size:>2}: mean squared advantage {square:.2f} times the perfect one; theory {size / (size - 1):.2f}")
    assert not FULL or abs(square / (size / (size - 1)) - 1) < 0.15

# %% [markdown]
# From 2 to 8 this noise falls from 2 to 1.14. From 8 to 32 it falls to 1.03. But a step has a budget of completions:
# 256 of them are 128 prompts in groups of 2, or 8 prompts in groups of 32. Fewer prompts are noise, too. [How large a
# group](../experiments/group_size.md) trains with each size at an equal budget of completions.
#
# ## The simulation in the course
#
# One of the course notebooks simulates this with rewards from {1, −.5, −1} and prints "true expected reward = 0.3". We
# repeat it:

# %%
generator = torch.Generator().manual_seed(42)
values = torch.tensor([1.0, -0.5, -1.0], dtype=torch.float64)
for size in (2, 4, 8, 16, 32):
    baselines = values[torch.randint(3, (1000, size), generator=generator)].mean(dim=1)
    theory = values.std(correction=0).item() / size**0.5
    print(f"G = {size:>2}: mean baseline {baselines.mean():+.3f}, deviation {baselines.std():.3f}, theory {theory:.3f}")
    assert abs(baselines.mean() + 1 / 6) < 5 * theory / 1000**0.5

# %% [markdown]
# The true expected reward is $-1/6$, not .3. The deviation is $.85/\sqrt{G}$: four times the completions halve it.
# Nothing special happens at $G = 4$.
#
# ## Questions
#
# **1.** Why does GRPO draw more than one completion per prompt, and what centres the rewards?
#
# <details><summary>Answer</summary>
#
# The mean reward of the other completions of the same prompt says how hard the prompt is. It is the control variate, or
# baseline. With one completion the mean is its own reward, and the advantage is always 0.
#
# </details>
#
# **2.** A prompt yields the rewards (2, 1, −1). What are the centred advantages?
#
# <details><summary>Answer</summary>
#
# The mean is 2/3, so they are 4/3, 1/3 and −5/3. They add up to 0.
#
# </details>
#
# **3.** When does dividing by the deviation help, and when does it hurt?
#
# <details><summary>Answer</summary>
#
# It helps if prompts are paid on different scales: each then counts alike. It hurts with rewards of 0 and 1: prompts
# that are nearly always solved get a large weight for their last failures. It is also dangerous for rewards that differ
# only by noise, since the noise is blown up to ±1.
#
# </details>
#
# **4.** Where do larger groups have diminishing returns?
#
# <details><summary>Answer</summary>
#
# For the baseline, early: its noise makes the squared advantage $G/(G-1)$ times as large, which is 1.14 at $G = 8$.
# Silent groups matter longer: if $p$ is .05, a group of 8 is silent in 66% of the cases, and one of 32 in 19%.
#
# </details>
#
# **5.** All responses of a group are right. What does the step learn from it? Is that a problem?
#
# <details><summary>Answer</summary>
#
# Nothing. The prompt is too easy for now. It costs completions, so some recipes draw another prompt instead (DAPO's
# dynamic sampling; `algorithm.resample` here).
#
# </details>

# %%
# The numbers in the answers, checked.
three = torch.tensor([[2.0, 1.0, -1.0]], dtype=torch.float64)
assert torch.allclose(group_centred(three)[0], torch.tensor([4 / 3, 1 / 3, -5 / 3], dtype=torch.float64))
assert group_centred(three[:, :1]).item() == 0
assert [f"{0.95**size + 0.05**size:.2f}" for size in (8, 32)] == ["0.66", "0.19"]
