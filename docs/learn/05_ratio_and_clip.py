# %% [markdown]
# # 5 · Ratio, clip and sign
#
# **Samples are expensive, so we want to learn from each batch more than once. When is a sample too old?**
#
# *On 2 cores: 20 seconds.*
#
# After one update the policy is a new one, and the batch was drawn by the old one. PPO and GRPO correct for this with a
# ratio, and they stop the correction with a clip. The clip has a sign in it that many texts get wrong.

# %%
import os
from contextlib import redirect_stdout
from io import StringIO

import matplotlib.pyplot as plt
import torch

import posttrain
from posttrain.algorithms.losses import ClipRange, clipped_surrogate, clipped_tokens

FULL = not os.environ.get("POSTTRAIN_TINY")
NUM_STEPS, PROMPTS, GROUP_SIZE = (8, 16, 8) if FULL else (1, 2, 4)
EPOCHS = (1, 2, 4) if FULL else (2,)
plt.style.use("tableau-colorblind10")

# %% [markdown]
# ## The formula in ten lines
#
# Call the policy that drew the samples $\mu$ and the one that is trained $\pi$. A mean over samples of $\mu$ can stand
# for a mean over samples of $\pi$ if each sample is weighted:
#
# $$\mathbb{E}_{a \sim \pi}[A(a)] = \sum_a \mu(a) \frac{\pi(a)}{\mu(a)} A(a) = \mathbb{E}_{a \sim \mu}[\rho\, A(a)].$$
#
# The weight is the **ratio** $\rho = \pi(a) / \mu(a)$.
#
# At the first update $\pi = \mu$, so $\rho = 1$. Its gradient is $\rho\,\nabla \log \pi = \nabla \log \pi$: exactly the
# log-trick. Later $\rho$ moves away from 1. The advantage was measured for $\mu$, so far away it means little. PPO
# (Schulman et al. 2017) removes the reason to go there:
#
# $$L = -\min\big(\rho A,\ \text{clip}(\rho, 1 - \varepsilon, 1 + \varepsilon)\, A\big).$$
#
# (One homework text writes $r$ for the reward and for this ratio in the same formula. Here the ratio is always $\rho$.)
#
# ## By hand: four cases
#
# There are two signs of $A$ and two sides of 1. We take $\varepsilon = .2$ and compute the loss and its slope in $\log
# \pi$.

# %%


def surrogate(log_ratio, advantage, low=0.2, high=0.2):
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
ratios = torch.tensor([1.8, 0.4, 1.8, 0.4], dtype=torch.float64)
log_ratio = ratios.log().requires_grad_()
losses = surrogate(log_ratio, advantages)
(slopes,) = torch.autograd.grad(losses.sum(), log_ratio)
meaning = [
    "was good and is likelier now: enough, stop",
    "was good but is rarer now: push it up again",
    "was bad but is likelier now: push it down, hard",
    "was bad and is rarer now: enough, stop",
]
print("  A    ρ     loss   slope")
for row in zip(advantages, ratios, losses, slopes, meaning, strict=True):
    print("{:+.0f}  {:.1f}   {:+.2f}   {:+.2f}   {}".format(*row))
assert slopes.tolist() == [0, -0.4, 1.8, 0]

# %% [markdown]
# The clip does not keep $\rho$ between .8 and 1.2. It only takes the gradient away where the change that $A$ asked for
# has been made. In the other two cases the gradient stays. One text says that a ratio of .4 "is clipped to .8". That is
# so only if $A < 0$. If $A > 0$, $\min(.4 A, .8 A)$ is $.4 A$, and its gradient is what brings the token back.

# %%
line = torch.linspace(0.01, 2.5, 400, dtype=torch.float64)
figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharex=True)
for panel, advantage in zip(panels, (1.0, -1.0), strict=True):
    panel.plot(line, -line * advantage, ":", color="grey", label="without the clip")
    panel.plot(line, surrogate(line.log(), torch.tensor(advantage)), linewidth=2, label="PPO's loss")
    panel.axvspan(0.8, 1.2, alpha=0.15)
    panel.set_title(f"A = {advantage:+.0f}")
    panel.set_xlabel("ρ")
    panel.legend()
panels[0].set_ylabel("loss")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## With the library
#
# The same function is `clipped_surrogate` in [losses](../../src/posttrain/algorithms/losses.py). It takes log-probs of
# both policies. `clipped_tokens` says which tokens have lost their gradient.

# %%
behaviour = torch.full_like(ratios, -1.0)
logprobs = (behaviour + ratios.log()).requires_grad_()
clip, each = ClipRange(low=0.2, high=0.2), torch.arange(4)
library = clipped_surrogate(logprobs, behaviour, advantages, each, clip=clip)
(library_slopes,) = torch.autograd.grad(library.sum(), logprobs)
assert torch.allclose(library, losses, rtol=0, atol=1e-12)
assert torch.allclose(library_slopes, slopes, rtol=0, atol=1e-12)
print("clipped:", clipped_tokens(ratios.log(), advantages, clip=clip).tolist())
assert clipped_tokens(ratios.log(), advantages, clip=clip).tolist() == [True, False, False, True]

# %% [markdown]
# ## The first update never clips
#
# With one update per batch $\rho = 1$ for all tokens. The clip does nothing, and the *value* of the loss is the
# negative mean advantage. It is 0 for a centred group if every completion has the same weight. With a mean over tokens
# (DAPO) long completions weigh more, and the value is $-\sum_i A_i T_i / N$. The gradient is not 0 in either case. A
# loss of 0 in the log is therefore not a sign of an error.

# %%
group = torch.tensor([0.875, -0.625, 0.875, -1.125], dtype=torch.float64)
logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
first = clipped_surrogate(logprobs, logprobs.detach(), group, each, clip=clip).mean()
(first_slopes,) = torch.autograd.grad(first, logprobs)
print(f"loss {first.item():+.3f}, slopes {first_slopes.tolist()}")
assert first.item() == 0
assert torch.allclose(first_slopes, -group / 4)

# %% [markdown]
# ## Experiment: one, two and four passes over each batch
#
# We train the bundled model to begin with a plus, as in lesson 3, by GRPO. Each step draws 128 completions. The runs
# differ in how often they go over them. We watch the share of clipped tokens, and how far the policy has gone from the
# one that sampled, KL(μ‖π).

# %%


def plus_first(completions):
    first = [next((character for character in text if character in "+-*/"), "") for text in completions]
    return [float(operator == "+") for operator in first]


def trained(epochs):
    config = posttrain.load_recipe(
        "countdown-tiny",
        task={"name": "countdown", "held_out_size": 1},
        algorithm={"name": "grpo", "kl": None},
        rollout={"prompts_per_step": PROMPTS, "group_size": GROUP_SIZE, "max_completion_tokens": 16},
        update={"learning_rate": 3e-4, "warmup_steps": 0, "schedule": "constant", "epochs_per_step": epochs},
        evaluation={"every_steps": 0, "samples": 1, "sampling_probes": False},
        checkpoint={"every_steps": 0},
        run={
            "folder": "runs/epochs",
            "overwrite": True,
            "curves": False,
            "num_steps": NUM_STEPS,
            "time_limit_minutes": None,
        },
    )
    with redirect_stdout(StringIO()), posttrain.steps(config, rewards=[plus_first]) as steps:
        return [step.metrics for step in steps]


def passes(epochs):
    return f"{epochs} pass{'es' if epochs > 1 else ''}"


runs = {epochs: trained(epochs) for epochs in EPOCHS}
for epochs, metrics in runs.items():
    clipped = [step.get("clip_ratio/region_mean", 0.0) for step in metrics]
    apart = [step.get("kl_behaviour", 0.0) for step in metrics]
    rewards = [step["reward"] for step in metrics]
    print(
        f"{passes(epochs)}: reward {rewards[0]:.2f} → {rewards[-1]:.2f}, {sum(rewards) / len(rewards):.2f} on average"
    )
    print(f"   clipped: at most {max(clipped):.1%} of the tokens; KL(μ‖π): at most {max(apart):.4f} nats per token")

figure, panels = plt.subplots(1, 3, figsize=(10, 3))
names = {
    "reward": "reward",
    "clip_ratio/region_mean": "clipped tokens, share",
    "kl_behaviour": "KL(μ‖π), nats per token",
}
for panel, (key, name) in zip(panels, names.items(), strict=True):
    for (epochs, metrics), line in zip(runs.items(), ("-", "--", ":"), strict=False):
        panel.plot([step.get(key, 0.0) for step in metrics], line, linewidth=2, label=passes(epochs))
    panel.set_title(name)
    panel.set_xlabel("step")
panels[0].legend()
figure.tight_layout()
plt.show()

if FULL:
    most_clipped = {epochs: max(step.get("clip_ratio/region_mean", 0.0) for step in runs[epochs]) for epochs in EPOCHS}
    furthest = {epochs: max(step.get("kl_behaviour", 0.0) for step in runs[epochs]) for epochs in EPOCHS}
    assert most_clipped[1] == 0 < most_clipped[2] < most_clipped[4]
    assert furthest[1] < 1e-6 < furthest[2] < furthest[4]
    average = {epochs: sum(step["reward"] for step in runs[epochs]) / NUM_STEPS for epochs in EPOCHS}
    assert average[1] < average[2] < average[4]

# %% [markdown]
# One pass never clips, as the formula says. With more passes each batch teaches more, and the policy ends further from
# the one that sampled it. Four passes are better here on average, with a reward that is easy and true. (One seed.)
#
# GRPO with one pass needs neither the ratio nor the clip. It is then REINFORCE with a group baseline.
#
# ## Questions
#
# **1.** Write the clipped surrogate and say how the clip depends on the sign of the advantage.
#
# <details><summary>Answer</summary>
#
# $\min(\rho A, \text{clip}(\rho, 1 \pm \varepsilon) A)$. If $A > 0$ the gradient ends above $1 + \varepsilon$: the
# token has become likelier by enough. If $A < 0$ it ends below $1 - \varepsilon$. On the other side nothing is clipped,
# so mistakes can be taken back.
#
# </details>
#
# **2.** The old policy gave a response .5, the new one .9, and $\varepsilon = .2$. What is the objective for $A = 1$?
# For $A = -1$?
#
# <details><summary>Answer</summary>
#
# $\rho = 1.8$. For $A = 1$: $\min(1.8, 1.2) = 1.2$, without a gradient. For $A = -1$: $\min(-1.8, -1.2) = -1.8$, with
# one. Punishment is not limited from above; some recipes add a third bound there (`dual_clip`).
#
# </details>
#
# **3.** What happens if the reference model is put into the denominator in place of $\mu$?
#
# <details><summary>Answer</summary>
#
# The ratio then measures the distance from the reference, which grows over the whole training and not only within a
# step. Once it is outside of the clip, tokens that should become likelier have no gradient any more. The homework
# writes it so, with the ratio of a whole completion. For $A > 0$ learning then soon stops; for $A < 0$ nothing bounds
# the ratio, and the gradient can explode ([mistake 12](mistakes/12.md) shows it).
#
# </details>
#
# **4.** Why does DAPO use a larger upper bound than lower bound, such as .28 and .2?
#
# <details><summary>Answer</summary>
#
# A token with a probability of .01 may only rise to .012 under a bound of 1.2. A token of .9 is hardly bounded at all.
# The rare tokens are where exploration is, so the upper bound is raised.
#
# </details>
#
# **5.** The loss printed at step 1 is 0.000. Is training broken?
#
# <details><summary>Answer</summary>
#
# No. With centred advantages, $\rho = 1$ and equal weights of the completions, the value is $-\frac{1}{G}\sum A = 0$.
# Look at the gradient norm and at the reward.
#
# </details>

# %%
# The numbers in the answers, checked.
answer = surrogate(torch.tensor([1.8, 1.8]).log(), torch.tensor([1.0, -1.0]))
assert torch.allclose(answer, torch.tensor([-1.2, 1.8]))
assert abs(0.01 * 1.2 - 0.012) < 1e-12
