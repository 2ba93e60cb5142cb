# %% [markdown]
# # 7 · The whole loop
#
# **A reward, an update, a better model: does it all fit in 25 lines? And when the score rises, what has the model
# learned?**
#
# *On 2 cores: 2 minutes.*
#
# The parts are on the table: samples (lesson 1), the log-trick (2), a baseline (3), groups (4). This page puts them
# together, first by hand and then with the library. Then it trains Countdown and asks what the better score is made of.

# %%
import os
from contextlib import redirect_stdout
from io import StringIO
from random import Random

import matplotlib.pyplot as plt
import torch

import posttrain
from posttrain.generation.engine import sample_groups
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import ModelOptions
from posttrain.rewards.countdown import Outcome, countdown, countdown_outcome, puzzle
from posttrain.training.session import open_session

FULL = not os.environ.get("POSTTRAIN_TINY")
NUM_STEPS, PROMPTS, GROUP_SIZE, MAX_TOKENS = (20, 16, 8, 160) if FULL else (1, 4, 8, 24)
SHORT_STEPS, SHORT_TOKENS = (3, 60) if FULL else (1, 60)
HELD_OUT, SAMPLES = (128, 4) if FULL else (2, 1)
plt.style.use("tableau-colorblind10")


def recipe(num_steps, max_tokens, warmup, **sections):
    update = {"learning_rate": 4e-4, "warmup_steps": warmup, "schedule": "constant"}
    return posttrain.load_recipe(
        "countdown-tiny",
        task={"name": "countdown", "held_out_size": HELD_OUT},
        rollout={"prompts_per_step": PROMPTS, "group_size": GROUP_SIZE, "max_completion_tokens": max_tokens},
        update=update,
        checkpoint={"every_steps": 0},
        run={
            "folder": "runs/loop",
            "overwrite": True,
            "curves": False,
            "num_steps": num_steps,
            "time_limit_minutes": None,
        },
        **sections,
    )


# %% [markdown]
# ## The formula in ten lines
#
# For each step: take some prompts. Sample $G$ completions of each. Give each completion a reward $r_i$. Compute
#
# $$A_i = \frac{r_i - \bar r}{s}, \qquad L = -\frac{1}{N} \sum_i A_i \sum_t \log \pi(y_{i,t}),$$
#
# where $N$ is the number of all sampled tokens of the step. Go down the gradient of $L$. That is all. With one update
# per step the ratio of lesson 5 is 1, and the clip does nothing, so both may be left out.
#
# ## By hand: 25 lines
#
# The draws must be the same in both versions, so both use the library's sampler. Its random numbers are a function of
# seed, step, prompt and position. The rest is torch.

# %%
short = recipe(
    SHORT_STEPS,
    SHORT_TOKENS,
    0,
    algorithm={"name": "grpo", "token_weights": "mean_over_tokens", "kl": None},
    evaluation={"every_steps": 0, "samples": 1, "sampling_probes": False},
)


def train_by_hand(session):
    model, rewards_by_step = session.policy.model, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.0, fused=True)
    for step in range(1, SHORT_STEPS + 1):
        session.load_weights()
        prompts = session.task.prompts(step, range(PROMPTS))
        groups = sample_groups(session.engine, prompts, session.collector.request(step, first_draw=0))
        num_tokens = sum(len(rollout.tokens) for group in groups for rollout in group.rollouts)
        rewards = torch.tensor([[right(group.prompt, rollout.text) for rollout in group.rollouts] for group in groups])
        deviation = rewards.std(dim=1, keepdim=True, correction=0)
        advantages = torch.where(deviation > 0, (rewards - rewards.mean(dim=1, keepdim=True)) / deviation, 0.0)
        for group, row in zip(groups, advantages.tolist(), strict=True):
            for rollout, advantage in zip(group.rollouts, row, strict=True):
                if advantage:  # a silent group has nothing to say
                    ids = torch.tensor([[*group.prompt.tokens, *rollout.tokens]])
                    first = len(group.prompt.tokens)
                    table = model(ids).logits[0, first - 1 : -1].log_softmax(-1)
                    logprobs = table.gather(1, ids[0, first:, None])
                    (-advantage * logprobs.sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rewards_by_step.append(rewards.mean().item())
    return rewards_by_step, torch.cat([weight.detach().flatten() for weight in model.parameters()])


def right(prompt, text):
    problem = puzzle(prompt.columns["numbers"], prompt.columns["target"], "all")
    return float(countdown_outcome(problem, text) is Outcome.CORRECT)


with open_session(short) as session:
    before = torch.cat([weight.detach().flatten() for weight in session.policy.model.parameters()])
    rewards_by_hand, by_hand = train_by_hand(session)
print("by hand:", [round(reward, 4) for reward in rewards_by_hand])

# %% [markdown]
# ## With the library

# %%
with redirect_stdout(StringIO()), posttrain.steps(short) as steps:
    rewards_of_library = [step.metrics["reward"] for step in steps]
policy = load_policy(ModelOptions(path="runs/loop/model"))
of_library = torch.cat([weight.detach().flatten() for weight in policy.model.parameters()])

moved, apart = (by_hand - before).norm().item(), (by_hand - of_library).norm().item()
print("library:", [round(reward, 4) for reward in rewards_of_library])
print(f"the weights moved by {moved:.4f} (norm); the two versions differ by {apart:.6f}")
assert torch.allclose(torch.tensor(rewards_by_hand), torch.tensor(rewards_of_library))
assert moved > 0
assert apart < 0.1 * moved

# %% [markdown]
# The same rewards in every step, so the same texts were drawn. The weights agree up to rounding. They are not equal to
# the bit: the library adds in another order, and Adam makes a full step even of a gradient that is nearly zero. What
# does the library add? It computes each prompt once for its whole group, works in batches, and skips nothing that has a
# gradient. It also keeps a run that you can stop, resume and look at. [One step](../guides/one_step.md) reads its loop
# line by line.
#
# ## Experiment: what does Countdown teach?
#
# Now twenty steps, on answers of up to 160 tokens, with a small KL term. A right answer earns 1, anything else 0.
# Next to it runs a **control**: the same training, with the rewards of each step shuffled among its
# completions. It gets as many rewards, and none where it was earned. If the control improved too, the gain would not
# come from the reward.

# %%


def permuted(completions, **columns):
    scores = [graded.score for graded in countdown(completions=completions, **columns)]
    Random(repr(completions)).shuffle(scores)
    return scores


def trained(rewards, probes):
    config = recipe(
        NUM_STEPS,
        MAX_TOKENS,
        2,
        algorithm={"name": "grpo", "token_weights": "mean_over_tokens", "kl": {"coefficient": 0.03}},
        evaluation={"every_steps": 0, "samples": SAMPLES, "sampling_probes": probes},
    )
    with redirect_stdout(StringIO()), posttrain.steps(config, rewards=rewards) as steps:
        curve = [step.metrics["reward"] for step in steps]
    return curve, steps.run.summary["before"], steps.run.summary["after"]


learned, before, after = trained([], probes=True)
control, _, control_after = trained([permuted], probes=False)


def told(results):
    low, high = results["accuracy_sampled_interval"]
    return f"{results['accuracy_sampled']:.3f} [{low:.3f}, {high:.3f}]"


print(f"{HELD_OUT} problems that were never trained on, {SAMPLES} answers each")
print(f"right answers before:             {told(before)}")
print(f"right answers after:              {told(after)}")
print(f"after training, shuffled rewards: {told(control_after)}")

figure, axes = plt.subplots(figsize=(6, 3.3))
axes.plot(range(1, NUM_STEPS + 1), learned, "-", linewidth=2, label="paid for right answers")
axes.plot(range(1, NUM_STEPS + 1), control, "--", linewidth=2, label="control: the same rewards, shuffled")
axes.set_xlabel("step")
axes.set_ylabel("mean reward of the step")
axes.legend()
figure.tight_layout()
plt.show()

if FULL:
    assert after["accuracy_sampled_interval"][0] > before["accuracy_sampled_interval"][1]
    assert control_after["accuracy_sampled_interval"][1] < before["accuracy_sampled_interval"][0]

# %% [markdown]
# The intervals of before and after do not touch. In this run the control got worse. (One seed.)
#
# ## Habit or skill?
#
# A right answer can come from better guesses, or from more of them. The task counts both.

# %%
names = {
    "mean_length": "tokens per completion",
    "tries_per_completion": "tries per completion",
    "success_of_first_try": "first tries that succeed",
    "success_per_try": "all tries that succeed",
    "accuracy_never_giving_up": "right if it may never give up",
    "format_rate": "completions that keep the format",
}
for key, name in names.items():
    print(f"{name:<34} {before[key]:>8.3f} → {after[key]:.3f}")
if FULL:
    assert abs(after["success_of_first_try"] - before["success_of_first_try"]) < 0.05
    assert after["tries_per_completion"] > 2.5 * before["tries_per_completion"]
    assert before["accuracy_never_giving_up"] > after["accuracy_sampled"]
    assert after["format_rate"] < before["format_rate"]

# %% [markdown]
# The first try is as good as it was. There are about three times as many tries. And the model *before* training, if it
# is not allowed to stop searching, already finds more right answers than the trained one gives. So training taught a
# **habit**, to search on, and not a **skill**, to calculate better. The reward paid for right answers only, and this
# was the cheapest way to more of them.
#
# There is a price, too. Some searches now run into the limit of tokens, so fewer completions keep the format. The
# reward did not pay for finishing. [What emerges](../experiments/emergent_behaviours.md) follows this over 60 steps,
# and [what a reward teaches](../experiments/what_a_reward_teaches.md) tries other rewards and other problems.
#
# This is the general lesson of the page: **a higher score says that something changed, not what.** Decide beforehand
# what you would count as skill, and measure it beside the score.
#
# ## Questions
#
# **1.** Which lines of the 25 need a gradient, and which must not have one?
#
# <details><summary>Answer</summary>
#
# Only the forward pass over the finished completions needs one. Sampling, rewards and advantages are numbers. An
# advantage with a gradient would be a second, wrong, path to the weights.
#
# </details>
#
# **2.** Why is the sum divided by the tokens of the whole step, and not of each completion?
#
# <details><summary>Answer</summary>
#
# Lesson 4: with a mean per completion, a token of a long search weighs less than one of a lucky guess. A long wrong
# answer then costs no more than a short one.
#
# </details>
#
# **3.** Training "discovers" verification and going back. Were these behaviours created by the reward?
#
# <details><summary>Answer</summary>
#
# Not here. The bundled model had seen searches with several tries before. Training changed how often it makes them. To
# claim more you must measure the model before training, too, as the table does.
#
# </details>
#
# **4.** Rewards of 0 and 1 are called sparse. Is there nothing to learn from a near miss?
#
# <details><summary>Answer</summary>
#
# Within a group, no: a near miss and nonsense both earn 0. Between completions, a group with one right answer still
# says which one. If a task is so hard that all groups are silent, a reward for near misses helps. It also teaches near
# misses (lesson 10).
#
# </details>
#
# **5.** Would the habit help with other tasks?
#
# <details><summary>Answer</summary>
#
# That is an empirical question, and this page did not ask it. [What a reward
# teaches](../experiments/what_a_reward_teaches.md) did: it carries over to slightly larger numbers, and not to larger
# targets or other tasks.
#
# </details>
