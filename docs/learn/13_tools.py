# %% [markdown]
# # 13 · Tools and turns: the calculator
#
# **A model calls a calculator in the middle of its answer. Who wrote the result, and who should be paid for it?**
#
# *On 2 cores: 20 seconds.*
#
# The bundled model solves Countdown by trying: `17+5=22,22-3=19.` It makes slips in arithmetic. So we give it a tool.
# Whenever it writes `=`, a calculator writes the result. The model reads it and goes on.

# %%
import os
import random
import re

import matplotlib.pyplot as plt
import torch

import posttrain
from posttrain.models.forward import Completions
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import ModelOptions
from posttrain.options.task import CountdownOptions
from posttrain.rewards.countdown import Outcome, countdown_outcome
from posttrain.tasks.countdown_problems import held_out_problems
from posttrain.tasks.countdown_task import compact, difficulty

FULL = not os.environ.get("POSTTRAIN_TINY")
PROBLEMS, SAMPLES, LENGTH = (64, 4, 300) if FULL else (2, 2, 40)
plt.style.use("tableau-colorblind10")

policy = load_policy(ModelOptions(path="bundled"))
problems = held_out_problems(difficulty(CountdownOptions()), "all", PROBLEMS)
prompts = [compact(each) for each in problems]


def completed(tools=(), tools_at=None, seed=0):
    """A group of answers to each problem, with a tool or without."""
    turns = {"tools": tools, "tools_at": tools_at, "max_turns": 100} if tools else {}
    return posttrain.generate(policy, prompts, group_size=SAMPLES, max_completion_tokens=LENGTH, seed=seed, **turns)


helped = completed(["calculator"], {"calculator": "="})
group, rollout = next((each, one) for each in helped for one in each.rollouts if not all(one.sequence.sampled))
print(group.prompt.text)
print(rollout.text[:200])

# %% [markdown]
# ## One sequence, two writers
#
# The completion is one row of tokens. A mask says who wrote each token: 1 for the policy, 0 for the tool.

# %%
tokens, sampled = rollout.tokens, rollout.sequence.sampled
print(
    "".join(
        policy.tokenizer.decode([t]) if own else f"[{policy.tokenizer.decode([t])}]"
        for t, own in zip(tokens[:80], sampled, strict=False)
    )
)
print(f"{len(tokens)} tokens, {sum(sampled)} by the policy, {len(tokens) - sum(sampled)} by the calculator")

# %% [markdown]
# ## The formula in ten lines
#
# The policy decides its own tokens only. The tool's reply is part of the environment, like ice in lesson 12. Let $c$
# be the context and $m_t$ the mask. The probability of the whole text is a product of both writers:
#
# $$p(y) = \prod_{t: m_t = 1} \pi_\theta(y_t | c, y_{<t}) \prod_{t: m_t = 0} P_{\text{tool}}(y_t | c, y_{<t})$$
#
# The second factor does not depend on $\theta$. So it drops out of the log-trick:
#
# $$\nabla \log p(y) = \sum_t m_t \, \nabla \log \pi_\theta(y_t | c, y_{<t})$$
#
# Given tokens are **read**: they are in $y_{<t}$ of everything that follows. They are never **learned**.
#
# ## By hand
#
# Two things to check. First, the replies: at each `=` that the policy writes, the reply is the value of the expression
# before it. Our calculator is four lines.


# %%
def calculated(expression):
    left, operator, right = re.search(r"(\d+)([-+*/])(\d+)$", expression).groups()
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[operator]


text_so_far, checked = "", 0
for t, (token, own) in enumerate(zip(tokens, sampled, strict=True)):
    if not own and sampled[t - 1]:  # a reply begins
        end = next((i for i in range(t, len(tokens)) if sampled[i]), len(tokens))
        reply = policy.tokenizer.decode(tokens[t:end])
        if re.search(r"(?<![-+*/\d])\d+[-+*/]\d+=$", text_so_far) and "/" not in reply:
            assert float(reply) == calculated(text_so_far[:-1])
            checked += 1
    text_so_far += policy.tokenizer.decode([token])
print(f"{checked} replies are what our own calculator says")

# %% [markdown]
# ## By hand, and with the library
#
# Second, the log-probs. One pass of the model over everything, then pick the positions with mask 1. The library
# recorded the same numbers while it sampled, and computes them again in an update.

# %%
before = len(group.prompt.tokens)
row = torch.tensor([[*group.prompt.tokens, *tokens]])
with torch.no_grad():
    logits = policy.model(row, attention_mask=torch.ones_like(row)).logits[0, before - 1 : -1]
all_logprobs = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
mask = torch.tensor(sampled)
by_hand = all_logprobs[mask]

while_sampling = torch.tensor(rollout.logprobs)
with torch.no_grad():
    in_update = policy.completion_logprobs(Completions([group.prompt.tokens], [tokens], [0], sampled=mask))
torch.testing.assert_close(while_sampling, by_hand, rtol=0, atol=1e-4)
torch.testing.assert_close(in_update, by_hand, rtol=0, atol=1e-4)
print(f"{len(by_hand)} log-probs: by hand, while sampling and in the update, all equal to 1e-4")

# %% [markdown]
# What would happen without the mask? The tool's tokens have log-probs under the policy too. With a positive advantage
# we would teach the model to write results itself; with a negative one, to find them unlikely. Neither is a choice that
# the model made.

# %%
given = all_logprobs[~mask]
if len(given):
    print(f"the policy's own tokens: {by_hand.mean():.2f} nats on average")
    print(f"the tool's tokens:       {given.mean():.2f} nats on average")
    print(f"the policy gives the tool's tokens a probability of {given.exp().mean():.2f} on average")

# %% [markdown]
# ## Experiment: does the tool help, and why?
#
# A new text in the prompt could help for any reason. So there is a control: a calculator that answers with a random
# number. Same model, no training, held-out problems.


# %%
def random_calculator(expression: str) -> str | None:
    """Answers at random.

    Args:
        expression: arithmetic
    """
    return str(random.Random(expression).randint(1, 60)) if re.search(r"\d[-+*/]\d+$", expression) else None


def solved(groups):
    """For each problem, the share of right answers."""
    shares = []
    for problem, each in zip(problems, groups, strict=True):
        right = [countdown_outcome(problem, one.text) is Outcome.CORRECT for one in each.rollouts]
        shares.append(sum(right) / len(right))
    return torch.tensor(shares)


def steps_right(groups):
    """The share of equations a op b = c that hold."""
    found = [
        float(c) == calculated(f"{a}{op}{b}")
        for each in groups
        for one in each.rollouts
        for a, op, b, c in re.findall(r"(?<![-+*/\d])(\d+)([-+*/])(\d+)=(-?\d+)(?![\d/])", one.text)
        if not (op == "/" and b == "0")
    ]
    return sum(found) / max(len(found), 1)


settings = {
    "no tool": completed(),
    "calculator": helped,
    "random calculator": completed([random_calculator], {"random_calculator": "="}),
}
rates = {name: solved(groups) for name, groups in settings.items()}
print(f"{'':18} solved  ± standard error  right equations")
for name, shares in rates.items():
    error = shares.std() / len(shares) ** 0.5
    print(f"{name:18} {shares.mean():6.3f}  {error:16.3f}  {steps_right(settings[name]):15.3f}")

means = {name: shares.mean().item() for name, shares in rates.items()}
errors = {name: (shares.std() / len(shares) ** 0.5).item() for name, shares in rates.items()}
if FULL:
    assert 0.95 < steps_right(settings["no tool"]) < steps_right(settings["calculator"])
    assert means["calculator"] < means["no tool"] + errors["no tool"]
    random_at_most = means["random calculator"] + errors["random calculator"]
    assert all(random_at_most < means[name] - errors[name] for name in ("no tool", "calculator"))
figure, axes = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
axes.bar([*means], [*means.values()], yerr=[1.96 * error for error in errors.values()], capsize=4)
axes.set(ylabel="solved", title=f"{PROBLEMS} held-out problems, {SAMPLES} answers each (95 % intervals)")
plt.show()

# %% [markdown]
# The bundled model already computes well. The calculator removes slips, and yet the model solves no more: what it lacks
# is a better search, not better arithmetic. The control shows that it does read the replies. With random results it
# solves less.
#
# So before you add a tool, measure what is missing. Without the control we could not have said whether the model reads
# its tool at all.
#
# ## Turns in chat
#
# `tools_at` serves a base model, which has no format for calls. A chat model writes its calls as messages. There, a
# tool is a function with type hints and a docstring, and the chat template describes it in the prompt:
#
# ```yaml
# tools: [calculator, mine.py:population]
# rollout: {max_turns: 4}
# ```
#
# The mask is the same. `recipes/calculator-calls.yaml` trains a small model to call the calculator for products, which
# it cannot do, and not for additions, which it can: a call costs .2. [Tools and environments](../guides/tools.md) has
# the rest.
#
# ## Questions
#
# **1.** Should a completion's length count the tool's tokens?
#
# <details><summary>Answer</summary>
#
# No. Length penalties, token weights and limits are about what the policy chose to write. A tool that returns a long
# page would otherwise be a penalty on asking. Here all lengths count sampled tokens, and the context limit counts all.
#
# </details>
#
# **2.** Why not decode the conversation, and tokenise it again for the update?
#
# <details><summary>Answer</summary>
#
# Text does not say where it was cut into tokens. `22,` may be one token or two. The log-probs of the new cut belong to
# a sequence that nobody sampled, and the ratio to μ is wrong. This is trap 7: carry token ids, and never make them
# anew.
#
# </details>
#
# **3.** A reply contains `<|im_end|>`. What could it do?
#
# <details><summary>Answer</summary>
#
# End the turn and forge the next one: an injection. Replies are tokenised as plain text, so the control token cannot
# come from them.
#
# </details>
#
# **4.** A tool fails: the server is down. What is the completion's reward?
#
# <details><summary>Answer</summary>
#
# None, and never 0. A policy must not learn from an outage. The completion is counted as failed and takes no part in
# the update. A wrong *call* is another matter: the reply says what is wrong, and the policy can learn from it.
#
# </details>
#
# **5.** In a conversation of three turns the last one is right. Which turns get the credit?
#
# <details><summary>Answer</summary>
#
# With GRPO all sampled tokens of all turns. With rewards per turn and `credit: reward_to_go`, each token gets what was
# earned from its turn on. A value head (lesson 8) can tell the turns apart even with one reward at the end.
#
# </details>
