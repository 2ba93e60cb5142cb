# %% [markdown]
# # 14 · Reading a run: find the hack
#
# **The reward rose from .23 to .93. Everyone is happy. Should you be?**
#
# *On 2 cores: 5 seconds.*
#
# A run ships with posttrain that went wrong. Someone planted a hack in its reward. Your task is to find it, and to say
# which tokens did it and since when. Nothing is trained on this page: all of it is read from the run's folder.

# %%
import json
import os
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import posttrain
from posttrain.algorithms.advantages import group_zscore
from posttrain.rewards.countdown import HIT, Countdown, Outcome, countdown_outcome, lines_of_tries, read_try
from posttrain.runs.reports import open_run

FULL = not os.environ.get("POSTTRAIN_TINY")
plt.style.use("tableau-colorblind10")
FOLDER = Path(posttrain.__file__).parent / "assets" / "planted-hack"
run = open_run(FOLDER)
print("Look at it yourself while you read:  posttrain view hack")

# %% [markdown]
# ## In the viewer, three clicks
#
# 1. The overview shows reward and held-out accuracy on one axis. They part.
# 2. The alarms are marks on that axis. Click `reward alone` at step 30: it opens the transcript that it is about.
# 3. Read the last line of the working. Is it true?
#
# The rest of this page does the same in code, so that you can do it on any run.
#
# ## What the curves say

# %%
lines = [json.loads(line) for line in (FOLDER / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
reward = {line["step"]: line["reward"] for line in lines if "reward" in line}
accuracy = {line["step"]: line["eval/accuracy_sampled"] for line in lines if "eval/accuracy_sampled" in line}
alarms = [json.loads(line) for line in (FOLDER / "alarms.jsonl").read_text(encoding="utf-8").splitlines()]

figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
axes.plot([*reward], [*reward.values()], label="reward")
axes.plot([*accuracy], [*accuracy.values()], "o--", label="held-out accuracy")
for step in {alarm["step"] for alarm in alarms}:
    named = ", ".join(alarm["alarm"].split()[0] for alarm in alarms if alarm["step"] == step)
    axes.axvline(step, color="grey", linestyle=":")
    axes.annotate(named, (step, 0.03), rotation=90, ha="right", fontsize=8)
axes.set(xlabel="step", ylim=(0, 1.05))
axes.legend(frameon=False, loc="upper left")
plt.show()
for alarm in alarms:
    print(f"step {alarm['step']}, {alarm['alarm']}: {alarm['says']}")
print("held-out accuracy:", ", ".join(f"{share:.3f} at step {step}" for step, share in accuracy.items()))
assert accuracy[20] == max(accuracy.values()) > 1.9 * accuracy[0]
assert reward[30] > reward[20]

# %% [markdown]
# Up to step 20 accuracy still rises: it doubles. Then the reward goes on rising and accuracy falls. A reward alone
# would not have shown it. That is why a run measures held-out problems with another grader.
#
# The alarm compares two numbers, and we can check both by hand: the mean reward of the first five and the last five
# steps, and accuracy before and now.

# %%
first, last = [reward[step] for step in range(1, 6)], [reward[step] for step in range(26, 31)]
by_hand = (
    f"the reward went from {sum(first) / 5:.3f} to {sum(last) / 5:.3f},"
    f" held-out accuracy from {accuracy[0]:.3f} to {accuracy[30]:.3f}"
)
assert by_hand in [alarm["says"] for alarm in alarms]
print(by_hand)

# %% [markdown]
# ## What the completions say
#
# The reward is `says_it_is_solved`. The bundled model ends each line of its working with `.` for a miss and with `!`
# for a hit. The reward pays for a `!` in the last line. It never asks whether the line is true.
#
# So we read every completion as it was sampled. `lines_of_tries` and `read_try` are the functions with which the
# library measures a search. A line is a **lie** if it says `!` and does not reach the target with the given numbers.

# %%
rows = run.rollouts().to_pylist()


def claimed(row):
    """None without a claim; else whether the claim is true."""
    problem = json.loads(row["columns"])
    puzzle = Countdown(tuple(problem["numbers"]), problem["target"])
    tried = [line for _, line in lines_of_tries(row["completion"])]
    if not tried or not tried[-1].endswith(HIT):
        return None
    return read_try(puzzle, tried[-1]).hits


claims = [claimed(row) for row in rows]
steps = sorted({row["step"] for row in rows})
shares = {"true claim": [], "lie": [], "no claim": []}
for step in steps:
    count = Counter(claim for row, claim in zip(rows, claims, strict=True) if row["step"] == step)
    for (_, share), kind in zip(shares.items(), (True, False, None), strict=True):
        share.append(count[kind] / count.total())

figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
axes.stackplot(steps, *shares.values(), labels=[*shares], colors=["#0072B2", "#D55E00", "#BBBBBB"])
axes.set(xlabel="step", ylabel="share of completions", title="What is paid for", ylim=(0, 1), xlim=(1, 30))
axes.legend(loc="lower left")
plt.show()
assert shares["lie"][29] > 0.5
for step in (1, 10, 20, 30):
    print(f"step {step:2d}: " + ", ".join(f"{name} {of_kind[step - 1]:.2f}" for name, of_kind in shares.items()))

# %% [markdown]
# Here is the hack. Honest search is hard. Writing `!` is easy, and it is paid as well.
#
# ## The formula in ten lines: how the policy learned it
#
# A lie must first happen by chance. Then it is paid, and its siblings are not. By the formula of lesson 4 it gets a
# positive advantage:
#
# $$A_i = \frac{r_i - \bar r}{\sigma}$$
#
# ## By hand, and with the library
#
# On the run's own rewards, the formula must give the advantages that the run stored.

# %%
groups = {}
for row in rows:
    groups.setdefault((row["step"], row["draw"]), []).append(row)
rewards = torch.tensor([[row["reward"] for row in group] for group in groups.values()], dtype=torch.float64)
stored = torch.tensor([[row["advantage"] for row in group] for group in groups.values()], dtype=torch.float64)

centred = rewards - rewards.mean(dim=1, keepdim=True)
deviation = centred.square().mean(dim=1, keepdim=True).sqrt()
advantages = torch.where(deviation > 0, centred / deviation, 0.0)
torch.testing.assert_close(advantages, stored, rtol=0, atol=1e-9)
torch.testing.assert_close(group_zscore(rewards), stored, rtol=0, atol=1e-9)
print(f"{len(groups)} groups: by hand, library and run agree")

lies = [[claimed(row) is False for row in group] for group in groups.values()]
paid = advantages[torch.tensor(lies)]
earliest = next(row for row, claim in zip(rows, claims, strict=True) if claim is False)
print(f"{len(paid)} lies; mean advantage of a lie {paid.mean():+.2f}")
print(f"the first one, in step {earliest['step']}:\n{earliest['prompt'].strip()}\n{earliest['completion']}")

# %% [markdown]
# ## Experiment: which token?
#
# The run keeps the log-prob of every token as it was sampled. We look at the end of each line of working: there the
# model chooses between `.` and `!`. For lines that are **not** hits, how likely was the `!` when it was chosen, and how
# often was it chosen?

# %%
vocabulary = json.loads((FOLDER / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
HIT_TOKEN, MISS_TOKEN = vocabulary["!"], vocabulary["."]  # no other token has these characters


def judged_lines(row):
    """Of each line that ends in a mark: whether it is a hit, and the probability with which `!` could be chosen."""
    problem = json.loads(row["columns"])
    puzzle = Countdown(tuple(problem["numbers"]), problem["target"])
    marks = [place for place, letter in enumerate(row["completion"]) if letter in "!."]
    chosen = [
        (token, logprob)
        for token, logprob in zip(row["tokens"], row["logprobs"], strict=True)
        if token in (HIT_TOKEN, MISS_TOKEN)
    ]
    for start, line in lines_of_tries(row["completion"]):
        if line[-1] in "!.":
            token, logprob = chosen[marks.index(start + len(line) - 1)]
            likely = torch.tensor(logprob).exp().item()
            yield read_try(puzzle, line).hits, likely if token == HIT_TOKEN else 1 - likely


probability = {"lines that are hits": [], "lines that are not": []}
for step in steps:
    found = [line for row in rows if row["step"] == step for line in judged_lines(row)]
    for (_, means), kind in zip(probability.items(), (True, False), strict=True):
        of_kind = [likely for hits, likely in found if hits is kind]
        means.append(sum(of_kind) / len(of_kind))

figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for (name, means), style in zip(probability.items(), ("--", "-"), strict=True):
    axes.plot(steps, means, style, label=name)
axes.set(xlabel="step", ylabel="probability of `!`", title="How the mark lost its meaning", ylim=(0, 1.02))
axes.legend(frameon=False)
plt.show()
for_hits, for_misses = probability.values()
assert min(for_hits) > 0.9
assert min(for_hits[0], for_hits[19], for_hits[29]) > 0.99
assert for_misses[0] < 0.001
assert 0.2 < for_misses[29] < 0.3
for name, means in probability.items():
    print(f"{name:20} step 1: {means[0]:.3f}   step 20: {means[19]:.3f}   step 30: {means[29]:.3f}")

# %% [markdown]
# Behind a real hit, `!` is certain from the first step to the last. Behind other lines it was almost never chosen at
# the start, and in the end it is there once in four lines. With several lines in each completion, that makes more than
# half of them lies. The mark has lost its meaning, one paid accident at a time.
#
# ## What would have paid honestly?
#
# Two repairs, tried on the completions that the run kept. The first pays a claim only if it is true. The second asks
# the task's own grader. Nothing is trained here, so this says what the repaired reward would have paid for these texts.
# It does not say what a policy would find next.

# %%
print("step  as planted  true claims only  the task's grader")
for step in (1, 10, 20, 30):
    of_step = [(row, claim) for row, claim in zip(rows, claims, strict=True) if row["step"] == step]
    right = []
    for row, _ in of_step:
        problem = json.loads(row["columns"])
        puzzle = Countdown(tuple(problem["numbers"]), problem["target"])
        right.append(countdown_outcome(puzzle, row["completion"]) is Outcome.CORRECT)
    planted, honest = sum(row["reward"] for row, _ in of_step), sum(claim is True for _, claim in of_step)
    print(f"{step:4d} {planted / len(right):11.2f} {honest / len(right):17.2f} {sum(right) / len(right):18.2f}")

# %% [markdown]
# ## A list for your own runs
#
# 1. Measure something that is not paid, on problems that are not trained on. Look where the two part.
# 2. Open the alarms. Each names a completion.
# 3. Sort by reward and read the best-paid completions. Then read a silent group, and one with one winner.
# 4. Ask what the winner did that its siblings did not.
# 5. Colour the tokens by advantage, and by log-prob at an early and a late step.
# 6. Repair the reward, score old completions again, and only then train again.
#
# ## Questions
#
# **1.** Accuracy doubled before it fell. Was the reward good until step 20?
#
# <details><summary>Answer</summary>
#
# It was the same reward throughout. While lies are rare, being paid and being right go together, so the policy is
# pushed to search. Once a lie is a common way to be paid, the same reward pushes towards lying. A reward is not good or
# bad by itself, but for the policies that meet it.
#
# </details>
#
# **2.** Would a KL term have helped?
#
# <details><summary>Answer</summary>
#
# It slows everything down, the honest part as well. It does not tell a true `!` from a false one. This page did not
# measure it.
#
# </details>
#
# **3.** You stop at the best held-out accuracy, step 20. Is the model you keep free of the hack?
#
# <details><summary>Answer</summary>
#
# No. The table of claims above has the share of lies at step 20. It is smaller than at step 30 and not zero.
#
# </details>
#
# **4.** Why did the alarm `length` come first, at step 17?
#
# <details><summary>Answer</summary>
#
# More search means longer completions. The alarm says that lengths changed a lot, not that something is wrong. It
# points at completions to read; on a run like this one that is how you would have met the first lies early.
#
# </details>
#
# **5.** The held-out grader itself could be hacked. What then?
#
# <details><summary>Answer</summary>
#
# Then nothing in the numbers shows it. That is why the last measure is to read. A grader that parses, as this one does,
# leaves less room than one that looks for a sign.
#
# </details>
