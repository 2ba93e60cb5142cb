# %% [markdown]
# # 8 · Value head and GAE
#
# **A completion of twenty tokens earns one number, at its end. Which of the twenty tokens deserves the credit?**
#
# *On 2 cores: 1 minute.*
#
# GRPO does not answer: all tokens get the same advantage. PPO trains a second output, the **value head**. Before each
# token it predicts what the completion will earn. A token that raises the prediction was good, one that lowers it was
# bad. This page trains a value head, turns its predictions into advantages by hand, and measures how wrong they are.
#
# The reward is the number of full stops. The model is `bundled-prose`, which writes short English sentences.

# %%
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import posttrain
from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.ppo import GaeOptions, ValuedTokens, generalised_advantages, ppo
from posttrain.algorithms.table import grpo
from posttrain.generation.generate import completions
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.algorithm import CriticOptions
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import SamplingOptions
from posttrain.records import Prompt
from posttrain.training.critic import Critic

FULL = not os.environ.get("POSTTRAIN_TINY")
LENGTH = 20 if FULL else 4  # tokens of a completion
EARLY, UPDATES = (20, 400) if FULL else (1, 2)  # of the value head
ROLLOUTS = 256 if FULL else 4  # from each prefix
TEXTS = 4 if FULL else 1
plt.style.use("tableau-colorblind10")
OPENINGS = ["The weather today is", "I think that", "Once upon a time", "In my opinion"]

torch.manual_seed(0)
policy = load_policy(ModelOptions(path="bundled-prose"))
engine = InProcessEngine(policy, max_rows=256)


def sample(prefix, count, length, seed=0):
    """A group of completions of a prompt, given as token ids."""
    prompt = Prompt(id="prefix", text=policy.tokenizer.decode(prefix), tokens=tuple(prefix))
    options = SamplingOptions(max_completion_tokens=length)
    (group,) = completions(engine, [prompt], options, group_size=count, seed=seed)
    return group


def full_stops(tokens):
    return policy.tokenizer.decode(tokens).count(".")


openings = [policy.tokenizer.encode(text) for text in OPENINGS]
story = openings[2]
for rollout in sample(story, 3, LENGTH).rollouts:
    print(full_stops(rollout.tokens), OPENINGS[2] + rollout.text)

# %% [markdown]
# ## The formula in ten lines
#
# The state $s_t$ is the text before token $t$. Its value is the reward that is expected from there:
#
# $$V(s_t) = \mathbb{E}[R \mid s_t]$$
#
# The **surprise** of token $t$ is how much it changed the expectation. At the last token the reward takes the place of
# the next value:
#
# $$\delta_t = V(s_{t+1}) - V(s_t), \qquad \delta_T = R - V(s_T)$$
#
# One surprise trusts the head completely. The sum of all later surprises does not: the values cancel, and what is left
# is $R - V(s_t)$. Generalised advantage estimation (GAE) lies between them. A surprise $k$ tokens later counts
# $\lambda^k$:
#
# $$A_t = \sum_k \lambda^k \delta_{t+k} = \delta_t + \lambda A_{t+1}$$
#
# $\lambda = 0$ is one surprise. $\lambda = 1$ is the reward minus the value. There is no discount here ($\gamma = 1$).

# %% [markdown]
# ## By hand: a value head in plain torch
#
# The head is a small network on the model's last hidden state: $d \to 4d \to 1$. The hidden state at position $t-1$
# predicts token $t$, so it is also where $V(s_t)$ is read. This is the same off-by-one as in lesson 1.
#
# The loss is the squared error to the reward that the completion earned. Here the policy stays frozen, so every value
# has one true answer to compare with.


# %%
def hidden_states(group):
    """States [rollout, token, d] before each token, read from the frozen model."""
    before = len(group.prompt.tokens)
    rows = torch.tensor([[*group.prompt.tokens, *each.tokens] for each in group.rollouts])
    with torch.no_grad():
        states = policy.model.base_model(rows, attention_mask=torch.ones_like(rows)).last_hidden_state
    return states[:, before - 1 : -1]


width = policy.hidden_width
head = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 1))
nn.init.zeros_(head[2].weight)
optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)


def values_by_hand(group):
    return head(hidden_states(group))[..., 0]


def whole(group):
    """The group without completions that stopped early, so that all rows are equally long."""
    return replace(group, rollouts=tuple(each for each in group.rollouts if len(each.tokens) == LENGTH))


text = whole(sample(story, 8, LENGTH, seed=5))
text = replace(text, rollouts=(max(text.rollouts, key=lambda each: full_stops(each.tokens)),))
snapshots, drawn = {}, (0, EARLY, UPDATES)
for update in range(UPDATES + 1):
    if update in drawn:
        snapshots[update] = {name: each.clone() for name, each in head.state_dict().items()}
    group = whole(sample(openings[update % 4], 32, LENGTH, seed=100 + update))
    rewards = torch.tensor([float(full_stops(each.tokens)) for each in group.rollouts])
    loss = (values_by_hand(group) - rewards[:, None]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update in drawn:
        print(f"update {update:3d}: squared error {loss.item():.3f}, variance of R {rewards.var().item():.3f}")

# %% [markdown]
# ## With the library
#
# The library has the same network as `Critic`. Give it the weights of ours, and both predict the same values.

# %%
critic = Critic(policy, CriticOptions(trunk="shared", head="mlp"), seed=0)
names = {"widening.weight": "0.weight", "widening.bias": "0.bias", "output.weight": "2.weight", "output.bias": "2.bias"}


def critic_at(update):
    """The library's critic with the weights that our head had after so many updates."""
    critic.head.load_state_dict({ours: snapshots[update][hand] for ours, hand in names.items()})
    head.load_state_dict(snapshots[update])
    return critic


def values(group):
    return critic.of_groups([group], max_tokens=8192)["values"]


critic_at(UPDATES)
same_values = values(text), values_by_hand(text)[0].double().detach()
torch.testing.assert_close(*same_values, rtol=0, atol=1e-4)
print(f"largest difference between our head and the library's: {(same_values[0] - same_values[1]).abs().max():.1e}")

# %% [markdown]
# ## By hand: GAE
#
# One loop from the back. The library computes all tokens at once. The numbers are equal.


# %%
def gae_by_hand(values, reward, lam):
    advantages, following = [], 0.0
    for t in reversed(range(len(values))):
        after = reward if t == len(values) - 1 else values[t + 1]
        following = (after - values[t]) + lam * following
        advantages.insert(0, following)
    return torch.stack(advantages)


def gae(values, reward, lam):
    """The library's."""
    rewards = torch.zeros_like(values)
    rewards[-1] = reward
    of_one = torch.zeros(len(values), dtype=torch.int64)
    tokens = ValuedTokens(rewards=rewards, values=values, rollout=of_one, final_values=torch.zeros(1).double())
    return generalised_advantages(tokens, lam=lam)


reward = float(full_stops(text.rollouts[0].tokens))
for lam in (0.0, 0.5, 0.95, 1.0):
    torch.testing.assert_close(gae_by_hand(values(text), reward, lam), gae(values(text), reward, lam))
torch.testing.assert_close(gae(values(text), reward, 1.0), reward - values(text))
print("GAE by hand and by the library: equal for λ = 0, .5, .95, 1")

# %% [markdown]
# ## V drawn on a text
#
# What does the head know? We know a way to find the true value: sample 256 completions from every prefix of the text
# and take the mean of their rewards. No training run could afford that. A page can.

# %%
prompt, tokens = text.prompt.tokens, text.rollouts[0].tokens


def futures(prompt, tokens):
    """Of every prefix of a text: a group of continuations, and the full stops of each whole text."""
    found = []
    for t in range(LENGTH):
        group = sample((*prompt, *tokens[:t]), ROLLOUTS, LENGTH - t, seed=1000 + t)
        rewards = [float(full_stops([*tokens[:t], *each.tokens])) for each in group.rollouts]
        found.append((group, torch.tensor(rewards).double()))
    return found


truth = [rewards.mean().item() for _, rewards in futures(prompt, tokens)]
shown = [policy.tokenizer.decode([token]) for token in tokens]
figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
distances = {}
for (update, _), style in zip(snapshots.items(), (":", "--", "-"), strict=True):
    critic_at(update)
    axes.plot(values(text).tolist(), style, color="#0072B2", label=f"value head after {update} updates")
    distances[update] = (values(text) - torch.tensor(truth)).abs().mean().item()
axes.plot(truth, "o", color="#D55E00", label=f"true value, {ROLLOUTS} rollouts from each prefix")
axes.set_xticks(range(LENGTH), shown, rotation=60)
axes.set(ylabel="expected full stops", title=f"V before each token; this text earned {reward:.0f}")
axes.legend(frameon=False)
plt.show()
print("mean distance from the dots:", ", ".join(f"{apart:.2f} after {each}" for each, apart in distances.items()))
if FULL:
    assert distances[0] > distances[EARLY] > distances[UPDATES]

# %% [markdown]
# The new head starts at 0 everywhere. The more it is trained, the better it follows the dots. Where line and
# dots differ, a wrong value gives a wrong advantage.

# %% [markdown]
# ## Experiment: bias and variance of each λ
#
# For token $t$ of a text we know the true advantage: $V(s_{t+1}) - V(s_t)$, both from rollouts. We also have 256
# different futures after that token. Each gives an estimate $\hat A_t$. So we can measure:
#
# - the **noise** of one estimate: its standard deviation over the 256 futures;
# - its **offset**: by how much the mean estimate at this state is wrong, whichever token is taken;
# - its **bias**: by how much it is wrong for this token, beyond the offset.
#
# An offset does not depend on the action. It acts like a baseline, and lesson 3 shows that a baseline does not change
# the expected gradient. A bias does.


# %%
def first_advantages(group, rewards, values, lam):
    """The estimate Â of the first token of each continuation."""
    lengths = torch.tensor([len(each.tokens) for each in group.rollouts])
    earned = torch.zeros_like(values)
    earned[lengths.cumsum(0) - 1] = rewards
    rollout = torch.arange(len(lengths)).repeat_interleave(lengths)
    tokens = ValuedTokens(rewards=earned, values=values, rollout=rollout, final_values=torch.zeros_like(rewards))
    return generalised_advantages(tokens, lam=lam)[lengths.cumsum(0) - lengths]


LAMBDAS = (0.0, 0.5, 0.95, 1.0)
texts = [whole(sample(opening, 8, LENGTH, seed=7)) for opening in openings[:TEXTS]]
known = [futures(each.prompt.tokens, each.rollouts[0].tokens) for each in texts]
results = {}
for update in (EARLY, UPDATES):
    critic_at(update)
    valued = [[(group, rewards, values(group)) for group, rewards in of_text] for of_text in known]
    for lam in LAMBDAS:
        squares = []
        for of_text in valued:
            for (here, from_here, v_here), (there, from_there, v_there) in pairwise(of_text):
                offset = first_advantages(here, from_here, v_here, lam).mean()  # true: 0 on average over tokens
                after = torch.stack([of_one[0] for of_one in v_there.split([len(r.tokens) for r in there.rollouts])])
                estimates = after - v_here[0] + lam * first_advantages(there, from_there, v_there, lam)
                true = from_there.mean() - from_here.mean()
                squares.append([(estimates.mean() - true - offset) ** 2, offset**2, estimates.var()])
        results[update, lam] = torch.tensor(squares).mean(dim=0).sqrt().tolist()

print("updates    λ    bias  offset  noise   (full stops, root mean square)")
for (update, lam), (bias, offset, noise) in results.items():
    print(f"{update:7d} {lam:4.2f}  {bias:6.3f}  {offset:6.3f}  {noise:5.3f}")
assert all(bias < 1e-6 for (_, lam), (bias, *_) in results.items() if lam == 1.0)
assert all(noise < 1e-3 for (_, lam), (*_, noise) in results.items() if lam == 0.0)
if FULL:
    for update in (EARLY, UPDATES):
        assert max(LAMBDAS, key=lambda lam: results[update, lam][2]) == 1.0
    for lam in LAMBDAS[:-1]:
        assert results[UPDATES, lam][0] < results[EARLY, lam][0]

# %%
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for update, colour, marker in zip((EARLY, UPDATES), ("#E69F00", "#0072B2"), ("s", "o"), strict=True):
    points = [results[update, lam] for lam in LAMBDAS]
    axes.plot([p[2] for p in points], [p[0] for p in points], marker + "-", color=colour, label=f"{update} updates")
    for lam, point in zip(LAMBDAS, points, strict=True):
        axes.annotate(f"λ = {lam:g}", (point[2], point[0]), xytext=(5, 5), textcoords="offset points")
axes.set(xlabel="noise of one estimate (full stops)", ylabel="bias (full stops)", title="λ trades bias for noise")
axes.legend(title="value head after", frameon=False)
plt.show()

# %% [markdown]
# λ = 1 has no bias by construction: the values cancel, and estimate and truth use the same futures. It has the most
# noise. λ = 0 has no noise here: once the token is chosen, both values are fixed numbers. In return it has all of the
# head's errors. Training the head lowers the bias of every λ below 1: a better head makes a small λ cheaper.

# %% [markdown]
# ## PPO and GRPO on one answer
#
# The same sixteen completions, credited by both. GRPO compares the reward with the group's mean and gives every token
# the same number. PPO compares each state with the one before.

# %%
critic_at(UPDATES)
group = whole(sample(story, 16, LENGTH, seed=5))
rewards = torch.tensor([[float(full_stops(each.tokens)) for each in group.rollouts]]).double()
evidence = Evidence(
    rewards=rewards,
    scores=rewards[None],
    weights=torch.ones(1).double(),
    lengths=torch.full(rewards.shape, LENGTH),
    max_completion_tokens=LENGTH,
    truncated=torch.ones(rewards.shape, dtype=torch.bool),
    known=critic.of_groups([group], max_tokens=8192),
)
credits = {
    "GRPO": grpo().credit(evidence).advantages,
    "PPO, λ = .95": ppo(gae=GaeOptions(lambda_policy=0.95)).credit(evidence).advantages,
}
best = int(rewards.argmax())
shown = [policy.tokenizer.decode([token]) for token in group.rollouts[best].tokens]
figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
for (name, advantages), colour, shift in zip(credits.items(), ("#999999", "#0072B2"), (-0.2, 0.2), strict=True):
    places = [place + shift for place in range(LENGTH)]
    axes.bar(places, advantages.view(-1, LENGTH)[best].tolist(), width=0.4, color=colour, label=name)
axes.axhline(0, color="black", linewidth=0.8)
axes.set_xticks(range(LENGTH), shown, rotation=60)
axes.set(ylabel="advantage (deviations)", title=f"The answer with most full stops: {rewards.max():.0f}")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# Both say that the answer was good. Only PPO says where. The price is a critic that has to be learned, and its errors.

# %% [markdown]
# ## PPO in the library
#
# In a real run the policy moves, and the critic has to follow. `value/explained_variance` says how much of the returns
# it explains: 1 is all, 0 is no more than a constant.

# %%
with tempfile.TemporaryDirectory() as folder:
    steps = 20 if FULL else 2
    config = posttrain.load_recipe(
        "period-count-ppo",
        run={"folder": f"{folder}/ppo", "num_steps": steps, "curves": False, "threads": torch.get_num_threads()},
        rollout={"prompts_per_step": 64 if FULL else 4, "max_completion_tokens": LENGTH},
    )
    with posttrain.steps(config) as run:
        for step in run:
            if step.step in (1, steps // 2, steps):
                explained = step.metrics.get("value/explained_variance", 0.0)
                print(
                    f"step {step.step:2d}: {step.metrics['reward']:.2f} full stops, explained variance {explained:.2f}"
                )

# %% [markdown]
# ## What a critic costs at 7 billion parameters
#
# `posttrain plan` adds up memory from a model's `config.json`; nothing is loaded. We print its table. The recipe is
# GRPO, so the first column repeats the third. PPO has a critic with its own copy of the model. Both train all weights
# in float32.

# %%
SEVEN_B = """{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584,
"intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
"vocab_size": 152064, "max_position_embeddings": 32768, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}"""
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "config.json").write_text(SEVEN_B, encoding="utf-8")
    command = [sys.executable, "-m", "posttrain", "plan", "--model.path", folder, "--gpu-gb", "80"]
    planned = subprocess.run([*command, "--model.gradient-checkpointing"], capture_output=True, text=True, check=True)
table, _, _ = planned.stdout.partition(" fits ")
print(table)
assert re.search(r"while updating +182 +304 ", table)

# %% [markdown]
# An update needs 182 GB with GRPO and 304 GB with PPO. The difference is the critic: its weights, its gradients and its
# optimiser. A LoRA adapter of GRPO trains 40 million numbers in place of 7.6 billion.

# %% [markdown]
# ## Questions
#
# **1.** Why is there no discount?
#
# <details><summary>Answer</summary>
#
# The reward comes once, at the end, and the episode is short. With γ < 1 a long right answer would be worth less than a
# short one. That is a length penalty, and a hidden one.
#
# </details>
#
# **2.** A course computes `A = V(s_{t+1}) - V(s_t)`, and `r - V(s_t)` for the last token. Which λ is that?
#
# <details><summary>Answer</summary>
#
# λ = 0. `posttrain.course.compute_advantages` does it. In the table above it has the least noise and the most bias.
#
# </details>
#
# **3.** Which target should the value head learn?
#
# <details><summary>Answer</summary>
#
# The reward that was earned: its λ is 1 whatever the policy's λ is. A target made of the head's own predictions repeats
# the head's errors. `gae.lambda_value` is 1 by default.
#
# </details>
#
# **4.** A course computes the value loss from advantages under `no_grad`. What does the head learn?
#
# <details><summary>Answer</summary>
#
# Nothing: the value loss has no gradient. In the course's notebook no other part of the loss has one, so `backward()`
# raises an error. [What the courses get wrong](../course.md) has the row (`compute_advantages`).
#
# </details>
#
# **5.** Why does GRPO need no critic?
#
# <details><summary>Answer</summary>
#
# The mean of a group's rewards estimates V of the prompt. It says nothing about the states inside a completion, so GRPO
# cannot tell tokens apart.
#
# </details>
#
# **6.** Must the critic share the policy's trunk?
#
# <details><summary>Answer</summary>
#
# No. Shared, it costs almost no memory, and the value loss also moves the policy's weights. A copy leaves the policy
# alone and costs what the table above says. `algorithm.critic.trunk` is `shared`, `own`, or `auto`, which shares below
# 100 million parameters.
#
# </details>
