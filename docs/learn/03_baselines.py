# %% [markdown]
# # 3 · Baselines
#
# **Add 10 to every reward. The best answer is still the best. Why does training get worse?**
#
# *On 2 cores: 1 minute.*
#
# Lesson 2 ended with a noisy estimate of the gradient. This page removes a part of the noise for free: it subtracts a
# number from each reward. That changes nothing on average, and a lot in practice.

# %%
import os
from contextlib import redirect_stdout
from io import StringIO

import matplotlib.pyplot as plt
import torch

import posttrain
from posttrain.algorithms.advantages import batch_centred, group_centred, leave_one_out, raw

FULL = not os.environ.get("POSTTRAIN_TINY")
REPEATS = 4000 if FULL else 200
NUM_STEPS, PROMPTS, GROUP_SIZE = (10, 16, 8) if FULL else (1, 2, 2)
SHIFTS = (0.0, 1.0, 10.0, -10.0) if FULL else (0.0,)
plt.style.use("tableau-colorblind10")

# %% [markdown]
# ## The formula in ten lines
#
# The estimate of lesson 2 is the mean of $r(a)\,\nabla \log \pi(a)$ over samples. Take away a number $b$ that does not
# depend on the action:
#
# $$\mathbb{E}[(r(a) - b)\,\nabla \log \pi(a)] = \nabla J - b\, \mathbb{E}[\nabla \log \pi(a)].$$
#
# The last expectation is zero, because probabilities add up to one whatever the weights are:
#
# $$\mathbb{E}[\nabla \log \pi(a)] = \sum_a \pi(a) \frac{\nabla \pi(a)}{\pi(a)} = \nabla \sum_a \pi(a) = \nabla 1 = 0.$$
#
# So any $b$ gives the same gradient on average. But the spread differs. With all rewards near 10, each sample pushes
# its own token up with a force of 10, and only the sum of many pushes shows which token was better. The difference $A =
# r - b$ is called the **advantage**: how much better than expected.
#
# ## By hand: three tokens, exactly
#
# We take the three-token model again. Here signal and noise can be computed without sampling.

# %%
logits = torch.tensor([1.0, 0.5, -0.5], dtype=torch.float64)
probabilities = logits.softmax(0)
rewards = torch.tensor([0.0, 1.0, 0.2], dtype=torch.float64)
scores = torch.eye(3, dtype=torch.float64) - probabilities  # ∇ log π(a), one row per token


def signal_and_noise(advantages):
    """Length of the expected gradient, and the standard deviation of one sample around it."""
    mean = (probabilities[:, None] * advantages[:, None] * scores).sum(0)
    apart = advantages[:, None] * scores - mean
    return mean.norm(), (probabilities[:, None] * apart.square()).sum().sqrt()


print("      c    signal   noise without a baseline   noise with one")
for shift in SHIFTS:
    paid = rewards + shift
    signal, noise = signal_and_noise(paid)
    centred_signal, centred_noise = signal_and_noise(paid - (probabilities * paid).sum())
    print(f"{shift:>+7.0f}   {signal:>7.3f}   {noise:>24.3f}   {centred_noise:>14.3f}")
    assert torch.allclose(signal, centred_signal)
    if shift == 10:
        factor = (noise / centred_noise).square()
        print(f"          without a baseline, the same quality needs {factor:.0f} times as many samples")

# %% [markdown]
# The signal is the same in every row. Without a baseline the noise follows the size of the rewards. With one, the shift
# does not matter at all.
#
# ## Where does the baseline come from?
#
# Nobody knows the expected reward. There are three usual ways to estimate it:
#
# - the mean of all rewards of the step (REINFORCE with a batch mean);
# - the mean of the *group*, the completions of the same prompt (GRPO, lesson 4);
# - a network that predicts it (PPO's critic, lesson 8).
#
# A mean that contains the completion itself is not independent of the action. **Leave-one-out** uses the mean of the
# others (RLOO, Ahmadian et al. 2024): $A_i = r_i - \frac{1}{G-1}\sum_{j \ne i} r_j$.

# %%
group = torch.tensor([[1.0, -0.5, 1.0, -1.0]], dtype=torch.float64)  # the example of the course notebook
n = group.shape[1]
centred_by_hand = group - group.mean()
left_out_by_hand = torch.stack([group[0, i] - (group[0].sum() - group[0, i]) / (n - 1) for i in range(n)])[None]
print("centred       ", centred_by_hand[0].tolist())
print("leave-one-out ", [round(value, 4) for value in left_out_by_hand[0].tolist()])

# %% [markdown]
# ## With the library
#
# The rules are functions in [`posttrain.algorithms.advantages`](../../src/posttrain/algorithms/advantages.py): `raw`
# has no baseline, `batch_centred` and `group_centred` subtract a mean, `leave_one_out` that of the others.

# %%
assert torch.equal(raw(group), group)
assert torch.allclose(group_centred(group), centred_by_hand, rtol=0, atol=1e-15)
assert torch.allclose(batch_centred(group), centred_by_hand, rtol=0, atol=1e-15)
assert torch.allclose(leave_one_out(group), left_out_by_hand, rtol=0, atol=1e-15)
assert torch.allclose(leave_one_out(group), n / (n - 1) * group_centred(group))
print("equal, and leave-one-out is G/(G-1) times the centred rewards")

# %% [markdown]
# ## Groups of four: what is lost?
#
# The mean of four rewards is a poor estimate of the expected reward. Does it matter? We draw many groups of four tokens
# and compare three rules at a shift of 10.

# %%
generator = torch.Generator().manual_seed(0)
draws = torch.multinomial(probabilities.expand(REPEATS, 3), 4, replacement=True, generator=generator)
exact = (probabilities[:, None] * rewards[:, None] * scores).sum(0)
measured = {}
for name, rule in {"raw": raw, "centred": group_centred, "leave one out": leave_one_out}.items():
    advantages = rule((rewards + 10)[draws])
    gradients = (advantages[..., None] * scores[draws]).mean(dim=1)  # one per group
    along = (gradients.mean(0) @ exact / exact.square().sum()).item()
    noise = (gradients - gradients.mean(0)).square().sum(1).mean().sqrt().item()
    measured[name] = along, noise
    print(f"{name:>14}: mean gradient {along:+.2f} of the exact one, noise of one group {noise:.3f}")
if FULL:
    assert abs(measured["centred"][0] - 0.75) < 0.05
    assert abs(measured["leave one out"][0] - 1) < 0.07

# %% [markdown]
# The raw rule is unbiased, too. Its mean here is off by a quarter because of noise: with 4,000 groups and a noise of 4
# per group, the error of the mean is about .06, and the gradient is only .29 long.
#
# The centred rule finds three quarters of the gradient: each reward pulls its own baseline up, so $1 - 1/G$ is left.
# Leave-one-out is unbiased. The direction is the same, so this factor is only a different learning rate. Lesson 4 looks
# closer.
#
# ## Experiment: ten steps of training
#
# Now a real model: the bundled one. The reward is something simple that it does in some of its completions: the first
# operator that it writes is a plus. We add $c$ to every reward and train ten steps, with and without a baseline. All
# else is equal: seed, problems, learning rate.

# %%


def plus_first(shift):
    """A reward for `posttrain.train`: 1 if the first operator is a plus, else 0; and the shift."""

    def reward(completions):
        first = [next((character for character in text if character in "+-*/"), "") for text in completions]
        return [float(operator == "+") + shift for operator in first]

    return reward


def trained(shift, baseline):
    """Share of completions that begin with a plus, step by step."""
    config = posttrain.load_recipe(
        "countdown-tiny",
        task={"name": "countdown", "held_out_size": 1},
        algorithm={"name": "reinforce", "baseline": baseline},
        rollout={"prompts_per_step": PROMPTS, "group_size": GROUP_SIZE, "max_completion_tokens": 16},
        update={"learning_rate": 3e-4, "warmup_steps": 0, "schedule": "constant"},
        evaluation={"every_steps": 0, "samples": 1, "sampling_probes": False},
        checkpoint={"every_steps": 0},
        run={
            "folder": "runs/baselines",
            "overwrite": True,
            "curves": False,
            "num_steps": NUM_STEPS,
            "time_limit_minutes": None,
        },
    )
    with redirect_stdout(StringIO()), posttrain.steps(config, rewards=[plus_first(shift)]) as steps:
        return [step.metrics["reward"] - shift for step in steps]


curves = {(rule, shift): trained(shift, rule) for rule in ("none", "batch_mean") for shift in SHIFTS}
for rule in ("none", "batch_mean"):
    print(f"baseline: {rule}")
    for shift in SHIFTS:
        curve = curves[rule, shift]
        print(f"  reward {shift:+3.0f}: {curve[0]:.2f} in the first step, {curve[-1]:.2f} in the last")

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
for panel, rule in zip(panels, ("none", "batch_mean"), strict=True):
    for shift, line in zip(SHIFTS, ("-", "--", "-.", ":"), strict=False):
        panel.plot(range(1, NUM_STEPS + 1), curves[rule, shift], line, linewidth=2, label=f"c = {shift:+.0f}")
    panel.set_title("without a baseline" if rule == "none" else "minus the mean of the step")
    panel.set_xlabel("step")
panels[0].set_ylabel("a plus first, share")
panels[0].set_ylim(0, 1.03)
panels[0].legend()
figure.tight_layout()
plt.show()

final = {key: curve[-1] for key, curve in curves.items()}
spread = [
    abs(a - b) for shift in SHIFTS for a, b in zip(curves["batch_mean", shift], curves["batch_mean", 0.0], strict=True)
]
assert max(spread) < 1e-6
if FULL:
    assert final["none", 0.0] > 0.9 > final["none", 10.0] > final["none", -10.0]
    assert final["batch_mean", 10.0] > 0.9

# %% [markdown]
# With a baseline the four runs are the same run, number for number. The picture on the right shows one line, because
# there is only one. Without it, $c = 10$ learns slowly and $c = -10$ not at all. (One seed: expect other numbers with
# another one.)
#
# Look at $c = -10$ again. Every completion is punished, good or bad. On average the pushes of a constant cancel, as the
# derivation above says. What is left is noise, and it moves the model in a random direction.
#
# ## Questions
#
# **1.** Four responses earn .8, .3, .9 and .2. Which are encouraged without a baseline, and which with the mean as
# baseline?
#
# <details><summary>Answer</summary>
#
# Without: all four, also the worst. With the mean of .55: the first (+.25) and the third (+.35). The others get −.25
# and −.35.
#
# </details>
#
# **2.** The rewards (1, −.5, 1, −1) have the log-probs (−15.2, −18.7, −12.3, −22.1). What is the loss with the mean as
# baseline?
#
# <details><summary>Answer</summary>
#
# The mean is .125 and the advantages are .875, −.625, .875 and −1.125. The loss is $-\frac{1}{4} \sum_i A_i \log \pi_i
# = -3.1219$. It is negative, and that means nothing: only its gradient counts.
#
# </details>
#
# **3.** May the baseline depend on the prompt? On the first half of the answer? On the token that is being credited?
#
# <details><summary>Answer</summary>
#
# On the prompt, yes. On everything that came before the token, yes: that is a value function, lesson 8. On the token
# itself, no: then the expectation above is no longer zero, and the gradient is biased.
#
# </details>
#
# **4.** Adam divides the gradient by its own size. Does that not remove the problem of $c = 10$?
#
# <details><summary>Answer</summary>
#
# It removes the scale, and not the noise. All runs on this page use Adam. The signal is a small part of a gradient that
# is mostly noise, and dividing by the size of the noise makes the useful part of the step small.
#
# </details>

# %%
# The numbers in the answers, checked.
four = torch.tensor([0.8, 0.3, 0.9, 0.2])
assert torch.allclose(four - four.mean(), torch.tensor([0.25, -0.25, 0.35, -0.35]))
text_logprobs = torch.tensor([-15.2, -18.7, -12.3, -22.1], dtype=torch.float64)
assert round(-(group_centred(group)[0] * text_logprobs).mean().item(), 6) == -3.121875
