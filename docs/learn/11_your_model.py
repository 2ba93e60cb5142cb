# %% [markdown]
# # 11 · Your model, your data, your reward
#
# **You have a model, a list of questions and a rule for good answers. How do you train the model on them?**
#
# *On 2 cores: 1 minute.*
#
# This is a course's homework from end to end. A small instruct model gets a sum and is asked to answer in a form: its
# thoughts in tags, then its answer in tags, each on lines of their own. It knows sums. It prefers prose. The reward
# pays for the form only, and we train a LoRA adapter with GRPO.

# %%
import os
import random
import re
import tempfile
from contextlib import redirect_stdout
from io import StringIO

import matplotlib.pyplot as plt
import torch

import posttrain
from posttrain.algorithms.advantages import group_zscore
from posttrain.course import grpo_sequence_loss
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.rewards.shaping import line_format

FULL = not os.environ.get("POSTTRAIN_TINY")
STEPS, QUESTIONS = (25, 32) if FULL else (1, 2)
LENGTH = 128 if FULL else 24
SEEDS = (0, 1, 2) if FULL else (0,)  # of the control
plt.style.use("tableau-colorblind10")

# %% [markdown]
# ## Your data
#
# Rows are dictionaries with a `prompt` and any other columns. A list of messages goes through the model's chat
# template. The homework draws 64 questions with seed 42. It measures on the questions that it trains on. We also hold
# out others.

# %%
SYSTEM = (
    "You are a helpful assistant. Think first, then answer. Reply in this form alone:\n"
    "<think>\n...\n</think>\n<answer>\n...\n</answer>"
)


def row(a, b):
    asked = f"If you add {a} and {b}, what is the result?"
    return {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}], "answer": str(a + b)}


rng = random.Random(42)
drawn = [(rng.randint(10, 99), rng.randint(1, 9)) for _ in range(64)]
others = [(a, b) for a in range(10, 100) for b in range(1, 10) if (a, b) not in drawn]
rows = [row(*pair) for pair in drawn]
held_out = [row(*pair) for pair in random.Random(0).sample(others, QUESTIONS)]
print(len(rows), "questions; the first:", rows[0]["prompt"][-1]["content"], "→", rows[0]["answer"])

# %% [markdown]
# ## Your model
#
# Any folder or name that transformers can load. Here it is `bundled-instruct`, which has 0.37 million parameters. Look
# at what it does before you train anything.

# %%
before = posttrain.generate(
    "bundled-instruct", [each["prompt"] for each in held_out[:2]], group_size=2, max_completion_tokens=LENGTH
)
for group in before:
    for rollout in group.rollouts:
        print(repr(rollout.text))

# %% [markdown]
# ## Your reward
#
# A function that gets lists, and returns a number for each completion. Ours reads the form line by line. The homework's
# pattern is `^<think>\n.*?</think>\n<answer>\n.*?\n</answer>$` with the flags DOTALL and MULTILINE. With MULTILINE a
# `$` matches at the end of **any** line, so text behind `</answer>` is paid. That is trap 13. `fullmatch` has no such
# hole.


# %%
def in_form(completions, **columns):
    """1 where the whole answer has the form, else 0."""
    paid = []
    for messages in completions:  # conversations reach a reward as messages
        text = messages[-1]["content"].strip()
        parts = re.fullmatch(r"<think>\n(.+)\n</think>\n<answer>\n(.+)\n</answer>", text, re.DOTALL)
        paid.append(float(parts is not None and not re.search(r"</?(think|answer)>", parts[1] + parts[2])))
    return paid


def right_sum(completions, answer, **columns):
    """1 where the last number is the sum. It is measured and not paid."""
    numbers = [re.findall(r"\d+", messages[-1]["content"]) for messages in completions]
    return [float(bool(found) and found[-1] == right) for found, right in zip(numbers, answer, strict=True)]


GOOD = "<think>\n7 + 8 = 15\n</think>\n<answer>\n15\n</answer>"
TEXTS = [GOOD, GOOD + "\nTrust me.", "The result is 15.", GOOD.replace("\n", " "), GOOD + GOOD, "<think>\n" + GOOD]
HOMEWORK = re.compile(r"^<think>\n.*?</think>\n<answer>\n.*?\n</answer>$", re.DOTALL | re.MULTILINE)
ours = in_form([[{"role": "assistant", "content": text}] for text in TEXTS])
library = line_format(completions=TEXTS, finish_reasons=["stop"] * len(TEXTS))
assert ours == [graded.score for graded in library]
for text, score in zip(TEXTS, ours, strict=True):
    print(f"homework {HOMEWORK.search(text) is not None:d}, ours {score:.0f}: {text!r}")

# %% [markdown]
# ## The formula in ten lines
#
# GRPO takes $G$ answers to each question. The advantage of an answer is its reward above the group's mean, in units of
# the group's deviation:
#
# $$A_i = \frac{r_i - \bar r}{\sigma}$$
#
# An update lowers the clipped loss, with a penalty for leaving the reference:
#
# $$L = -\frac1N \sum_i \min\left(\rho_i A_i, \text{clip}(\rho_i, 1 \pm \epsilon) A_i\right) + \beta\, \text{KL}$$
#
# **LoRA** trains it cheaply. The weight $W$ stays frozen. Next to it go two thin matrices of rank $r$. $B$ starts at 0,
# so the model starts unchanged:
#
# $$W' = W + \frac{\alpha}{r} B A, \qquad A: r \times d_{\text{in}}, \quad B: d_{\text{out}} \times r$$
#
# ## By hand, and with the library
#
# Advantages of the homework's groups of two. The homework writes its loss for whole completions, with the reference in
# the ratio's denominator; this is its own test value.

# %%
rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
centred = rewards - rewards.mean(dim=1, keepdim=True)
deviation = rewards.std(dim=1, correction=0, keepdim=True)
advantages = torch.where(deviation > 0, centred / deviation, 0.0)
assert torch.equal(advantages, group_zscore(rewards))
print("advantages of three groups:", advantages.tolist(), "- the second group is silent")

new, reference = torch.tensor([0.6, 0.4, 0.7, 0.3]).log(), torch.tensor([0.5, 0.5, 0.6, 0.4]).log()
of_four = torch.tensor([1.2, -0.4, 0.5, -1.0])
ratio = (new - reference).exp()
surrogate = torch.minimum(ratio * of_four, ratio.clamp(0.8, 1.2) * of_four)
k3 = (reference - new).exp() - 1 - (reference - new)
loss = (-surrogate + 0.1 * k3).mean()
assert torch.isclose(loss, grpo_sequence_loss(new, reference, of_four, beta=0.1, epsilon=0.2))
print(f"the homework's loss: {loss:.7f}")

# %% [markdown]
# And one layer with an adapter. We put random numbers into B, so that the adapter does something.

# %%
adapter = AdapterOptions(rank=16, alpha=32)
policy = load_policy(ModelOptions(path="bundled-instruct", adapter=adapter))
layers = lora_layers(policy.model)
name, layer = next(iter(layers.items()))
with torch.no_grad():
    layer.lora_B.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, layer.lora_A.shape[1], generator=torch.Generator().manual_seed(1))
    A, B = layer.lora_A, layer.lora_B
    by_hand = layer.base_layer(x) + 32 / 16 * (x @ A.T) @ B.T
    torch.testing.assert_close(layer(x), by_hand, rtol=0, atol=1e-5)
trained = sum(each.numel() for each in policy.model.parameters() if each.requires_grad)
whole = sum(each.numel() for each in policy.model.parameters()) - trained
print(f"{name}: layer(x) = W x + 2 B A x")
print(f"{len(layers)} layers with an adapter: {trained:,} numbers are trained, {whole:,} are frozen")

# %% [markdown]
# In this tiny model an adapter of rank 16 is not thin. In a model of 7 billion parameters it is half a percent: see the
# table at the end of lesson 8.
#
# ## The run
#
# Ten lines: a recipe, the rows, the rewards. A weight of 0 reports a score and pays nothing.

# %%
with tempfile.TemporaryDirectory() as folder:
    config = posttrain.load_recipe(
        "format-adherence-tiny",
        task={"name": "dataset"},
        rollout={"prompts_per_step": 32 if FULL else 2, "max_completion_tokens": LENGTH},
        evaluation={"every_steps": 0},
        run={"folder": f"{folder}/run", "num_steps": STEPS, "curves": False},
    )
    rewards = [in_form, posttrain.reward_function(right_sum, weight=0.0)]
    history = []
    with posttrain.steps(config, rows=rows, held_out_rows=held_out, rewards=rewards) as run:
        for step in run:
            history.append(step.metrics)
    summary = run.run.summary
    after = posttrain.generate(
        run.run.model_folder, [each["prompt"] for each in held_out[:2]], group_size=1, max_completion_tokens=LENGTH
    )
print(after[0].rollouts[0].text)

# %%
print("held-out, never trained on        before  after")
for name in ("accuracy_greedy", "accuracy_sampled"):
    was, now = (summary[when][name] for when in ("before", "after"))
    print(f"in the form, {name.removeprefix('accuracy_'):18} {was:8.2f} {now:6.2f}")

figure, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
curves = {"in the form (paid)": "rewards/in_form/mean", "right sum (not paid)": "rewards/right_sum/mean"}
for (label, key), style in zip(curves.items(), ("-", "--"), strict=True):
    axes.plot(range(1, STEPS + 1), [each[key] for each in history], style, label=label)
axes.set(xlabel="step", ylabel="share of sampled answers", ylim=(0, 1.05), title="What is paid, and what is not")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# The form is learned, and it carries over to questions that were never asked in training. The dashed line shows the
# right sums of the same answers. Nothing pays for them. (One seed.)
#
# The run's folder has `adapter/`, which loads in PEFT, and `model/`, with the adapter merged, which loads anywhere.
# With a model of your own, `model={"path": "Qwen/Qwen2.5-0.5B-Instruct", "adapter": {"rank": 16}}` is the only change.
# [Format adherence](../guides/format_adherence.md) has three seeds, runs without the KL, and what the homework's own
# loop does differently.
#
# ## Experiment: the control
#
# Would any reward do? In the control the rewards of each step are shuffled among its answers. The answers of a step
# earn as much as before, but the reward says nothing about a single answer. We train the control with three seeds.


# %%
def control(seed):
    """Held-out results of a run whose rewards are shuffled."""
    dealer = random.Random(seed)

    def shuffled(completions, **columns):
        paid = in_form(completions)
        dealer.shuffle(paid)
        return paid

    with tempfile.TemporaryDirectory() as folder:
        config = posttrain.load_recipe(
            "format-adherence-tiny",
            task={"name": "dataset"},
            rollout={"prompts_per_step": 32 if FULL else 2, "max_completion_tokens": LENGTH},
            evaluation={"every_steps": 0},
            run={"folder": f"{folder}/control", "num_steps": STEPS, "seed": seed, "curves": False},
        )
        measured = posttrain.reward_function(in_form, weight=0.0)
        return posttrain.train(config, rows=rows, held_out_rows=held_out, rewards=[measured, shuffled]).summary


def told(results):
    """Accuracy with its 95 % interval."""
    low, high = results["accuracy_sampled_interval"]
    return f"{results['accuracy_sampled']:.2f} [{low:.2f}, {high:.2f}]"


with redirect_stdout(StringIO()):
    controls = {seed: control(seed) for seed in SEEDS}
print("in the form, sampled       before             after")
print(f"paid for the form          {told(summary['before'])}  {told(summary['after'])}")
for seed, results in controls.items():
    print(f"shuffled rewards, seed {seed}   {told(results['before'])}  {told(results['after'])}")
if FULL:
    after_controls = [results["after"]["accuracy_sampled"] for results in controls.values()]
    assert max(after_controls) < 0.6 < summary["after"]["accuracy_sampled_interval"][0]

# %% [markdown]
# Shuffled rewards move the policy too, up or down by luck: one of these controls rises, two fall. None comes near the
# run that is paid for the form. So it is the reward that teaches, and not the training as such.
#
# ## Questions
#
# The homework has nine questions. Four are about inverse RL and are answered in lesson 12. Here are the five about
# GRPO, and three more about its code.
#
# **1.** Why does GRPO draw more than one completion for each prompt, and what centres the rewards?
#
# <details><summary>Answer</summary>
#
# Prompts differ in difficulty. A reward of .5 is good on a hard prompt and bad on an easy one. The mean reward of the
# group is the control variate: it estimates what this prompt earns. Only what differs between siblings is left. With
# one completion the group's mean is the reward itself, and nothing is left.
#
# </details>
#
# **2.** A prompt yields rewards (2, 1, −1). What are the centred advantages?
#
# <details><summary>Answer</summary>
#
# The mean is 2/3, so they are 4/3, 1/3 and −5/3. They add up to 0. In units of the deviation (population, 1.247) they
# are 1.07, .27 and −1.34.
#
# </details>
#
# **3.** Midway through training you double β. What happens to the updates?
#
# <details><summary>Answer</summary>
#
# The pull to the reference doubles. Where the reward's gradient and the KL's were in balance, the KL now wins, and the
# policy moves back. The distance to the reference shrinks, and so does part of the reward. A policy that is still
# improving improves more slowly. If the rewards no longer differ within groups, only the KL is left to act.
#
# </details>
#
# **4.** Write the clipped surrogate. How does the clip depend on the sign of the advantage?
#
# <details><summary>Answer</summary>
#
# $\min(\rho A, \text{clip}(\rho, 1 - \epsilon, 1 + \epsilon) A)$. For $A > 0$ it is flat once $\rho > 1 +
# \epsilon$: the answer is likely enough. For $A < 0$ it is flat once $\rho < 1 - \epsilon$: unlikely enough. On the
# other side the clip never acts, so a wrong move can always be undone. The homework calls both the reward and the ratio
# $r$; they are different numbers.
#
# </details>
#
# **5.** Format rewards come often, right answers rarely. Propose a shaping that keeps correctness worth learning.
#
# <details><summary>Answer</summary>
#
# Gate: pay correctness only where the form holds, and pay it much more than the form, for example .1 + 1. The form is
# learned first, since it varies within groups. Once all siblings have it, it adds the same to all, drops out of the
# advantage, and only correctness is left. Lesson 10 measures this.
#
# </details>
#
# **6.** The homework asks `hasattr(model, "enable_adapter")`, calls `disable_adapter()`, and computes the reference.
# What is its reference?
#
# <details><summary>Answer</summary>
#
# The policy itself. `disable_adapter` returns a context manager, and nobody enters it. The ratio is 1 and the KL is 0
# at every step. This is trap 4.
#
# </details>
#
# **7.** It takes the sum of the attention mask as the prompt's length, in rows that are padded on the left. When is
# that wrong?
#
# <details><summary>Answer</summary>
#
# Whenever prompts in a batch have different lengths. The sum counts real tokens, but on the left there is padding, so
# the index points into the prompt. This is trap 3.
#
# </details>
#
# **8.** It measures on the first 32 training questions. What does that leave open?
#
# <details><summary>Answer</summary>
#
# Whether the model learned the form, or these answers. We measured on questions that it never saw.
#
# </details>
#
# **9.** Another course's script sets `load_in_4bit` and `torch_dtype` in a `ModelConfig`, and gives the trainer only
# the model's name. Is its base in 4 bits?
#
# <details><summary>Answer</summary>
#
# No. The trainer loads the model by its name and never sees these settings. The run only needs more memory than
# planned, so nobody notices. (The script also lists a `math_reward_func` that it never defines: that is an error at
# once.) Here `model: {quantization: nf4}` puts a frozen base in 4 bits: see [LoRA](../guides/lora.md).
#
# </details>
