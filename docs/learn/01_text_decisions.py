# %% [markdown]
# # 1 · Text as a decision process
#
# **A model writes text, one token after another. Where in this is a state, an action, and a reward?**
#
# *On 2 cores: 15 seconds.*
#
# Reinforcement learning speaks of states, actions and episodes. This page finds each of them in a language model. Then
# it computes the one number that all later lessons need: the log-probability of a token that the model wrote.

# %%
import os
import re

import matplotlib.pyplot as plt
import torch

import posttrain
from posttrain.models.forward import Completions
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.model import ModelOptions

FULL = not os.environ.get("POSTTRAIN_TINY")
NUM_PROMPTS, GROUP_SIZE = (32, 16) if FULL else (3, 4)
plt.style.use("tableau-colorblind10")

policy = load_policy(ModelOptions(path="bundled"))
model, tokenizer = policy.model, policy.tokenizer
print(f"{model.num_parameters():,} parameters, {model.config.vocab_size} tokens")

# %% [markdown]
# ## State, action, transition, episode
#
# The model comes with the package. It is tiny and plays one game, Countdown: combine three numbers into a target.
#
# | in reinforcement learning | in a language model |
# |---|---|
# | state $s_t$ | the prompt and all tokens written so far |
# | action $a_t$ | the next token; the vocabulary is the set of actions |
# | transition | append the token: $s_{t+1} = [s_t, a_t]$. Nothing here is random |
# | policy $\pi(a \mid s)$ | the softmax over the next token |
# | episode | from the prompt to the stop token, or to a limit |
# | reward | one number, at the end, for the whole text |
#
# Here is an episode, one action at a time. It is greedy: it always takes the most probable token.

# %%
prompt = TokenizerRenderer(tokenizer).render("Use all of 11, 25, 11 to make 25.\n", id="example")
state = list(prompt.tokens)
with torch.no_grad():
    for step in range(8):
        logits = model(torch.tensor([state])).logits[0, -1]
        action = logits.argmax().item()
        probability = logits.softmax(0)[action]
        written = repr(tokenizer.decode([action]))
        print(f"step {step}: state of {len(state):>2} tokens, action {written:>9} ({probability:.2f})")
        state.append(action)
print(repr(tokenizer.decode(state)))

# %% [markdown]
# Every step has 384 possible actions. After 40 steps there are $384^{40}$ possible texts. Nobody can try them all, so
# everything that follows works with samples.
#
# ## The formula in ten lines: the log-probability of a text
#
# The probability of a text is the product over its tokens. Products of hundreds of numbers below 1 underflow, so we add
# logarithms:
#
# $$\log \pi(y \mid x) = \sum_{t=1}^{T} \log \pi(y_t \mid x, y_{<t}).$$
#
# One forward pass gives all terms at once. There is one trap. The logits at position $i$ are the model's opinion about
# the token at position $i + 1$. For a prompt of length $n$:
#
# ```text
# position    0   1   2  |  3   4   5
# token       x0  x1  x2 |  y0  y1  y2       prompt of n = 3, completion of 3
# logits at   0   1   2     3   4   5
# predict     x1  x2  y0    y1  y2  (next)
#                     ^^    ^^  ^^           these three: from n - 1 up to the last but one
# ```
#
# ## By hand

# %%


def logprobs_by_hand(prompt_tokens, completion_tokens, shift=1):
    """log π of every token of the completion, and the entropy of the distribution that it was drawn from, in nats."""
    ids = torch.tensor([[*prompt_tokens, *completion_tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0]
    first = len(prompt_tokens) - shift
    table = logits[first : first + len(completion_tokens)].log_softmax(-1)  # [token, vocabulary]
    chosen = table.gather(1, ids[0, len(prompt_tokens) :, None])[:, 0]
    entropy = -(table.exp() * table).sum(-1)
    return chosen, entropy


(group,) = posttrain.generate(policy, prompt.text, group_size=2, max_completion_tokens=100, seed=3)
rollout = group.rollouts[0]
chosen, entropy = logprobs_by_hand(group.prompt.tokens, rollout.tokens)
print(rollout.text)
print(f"{len(chosen)} tokens, log π(text) = {chosen.sum():.3f}, so π(text) = {chosen.sum().exp():.2e}")

# %% [markdown]
# The last token is the stop token. It is an action like any other: the model must learn *when* to stop.
#
# ## With the library
#
# The sampler of posttrain writes down the log-prob of each token as it draws it. The trainer computes it again later,
# with a gradient. All three must agree, or the training is wrong.

# %%
sampled = torch.tensor(rollout.logprobs)
trained = policy.completion_logprobs(Completions([group.prompt.tokens], [rollout.tokens], [0]))
print(f"sampler against hand: {(sampled - chosen).abs().max():.1e} nats")
print(f"trainer against hand: {(trained - chosen).abs().max():.1e} nats, gradient: {trained.requires_grad}")
assert torch.allclose(sampled, chosen, atol=1e-4)
assert torch.allclose(trained, chosen, atol=1e-4)

# %% [markdown]
# ## What if we are off by one?
#
# Take the logits one position too late, and every token is scored by an opinion about its successor. The code runs, and
# it returns numbers of a plausible kind.

# %%
shifted, _ = logprobs_by_hand(group.prompt.tokens, rollout.tokens[:-1], shift=0)
right_mean, wrong_mean = chosen[:-1].mean().item(), shifted.mean().item()
uniform = torch.tensor(1 / model.config.vocab_size).log().item()
print(f"mean log π, right: {right_mean:.2f};  one too late: {wrong_mean:.2f};  a uniform guess: {uniform:.2f}")
assert wrong_mean < uniform < right_mean

# %% [markdown]
# The shifted numbers are worse than those of a model that knows nothing. That is a good test for your own code: **the
# mean log-prob of what a model wrote itself must be far above $-\log V$.** One course notebook makes this mistake in
# its KL term.
#
# ## Token by token
#
# The log-prob says how surprising the token was. The entropy says how open the choice was before it was made.

# %%
texts = [tokenizer.decode([token]).replace("\n", "⏎") for token in rollout.tokens]
shown = min(len(texts), 45)
figure, axes = plt.subplots(figsize=(10, 3.2))
axes.bar(range(shown), -chosen[:shown], label="−log π of the token", width=0.8)
axes.plot(range(shown), entropy[:shown], "k.-", linewidth=0.8, label="entropy of the choice")
axes.set_xticks(range(shown), texts[:shown], rotation=90, fontsize=8)
axes.set_ylabel("nats")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# Most tokens are certain: the result of a sum, the `=`, the rest of a tag. The decisions are few: which number comes
# first, which operator, and whether to stop the search after a failed try.
#
# ## Experiment: how many tokens are decisions?
#
# We sample completions of many problems and sort their tokens by entropy.

# %%
generator = torch.Generator().manual_seed(0)
numbers = torch.randint(1, 31, (NUM_PROMPTS, 4), generator=generator).tolist()
problems = [f"Use all of {a}, {b}, {c} to make {d}.\n" for a, b, c, d in numbers]
groups = posttrain.generate(policy, problems, group_size=GROUP_SIZE, max_completion_tokens=100)

entropies, surprises, tokens = [], [], []
for each in groups:
    for rollout in each.rollouts:
        surprise, entropy = logprobs_by_hand(each.prompt.tokens, rollout.tokens)
        entropies.append(entropy)
        surprises.append(-surprise)
        tokens += [tokenizer.decode([token]) for token in rollout.tokens]
entropies, surprises = torch.cat(entropies), torch.cat(surprises)
sorted_entropies = entropies.sort(descending=True).values
share = (sorted_entropies.cumsum(0) / sorted_entropies.sum())[len(entropies) // 5]

print(f"{len(entropies)} tokens; mean entropy {entropies.mean():.3f}, mean surprise {surprises.mean():.3f} nats")
print(f"{(entropies < 0.05).float().mean():.0%} of the tokens have an entropy below .05 nats")
print(f"the fifth with the most entropy holds {share:.0%} of it")
mean_entropy = {}
for kind, pattern in {"digit": r"\d", "operator": r"[-+*/]", "=": r"=", "</think>": r"</think>"}.items():
    mine = torch.tensor([bool(re.fullmatch(pattern, token)) for token in tokens])
    mean_entropy[kind] = entropies[mine].mean()
    print(f"  mean entropy where {kind:<8} was drawn: {mean_entropy[kind]:.3f}")
if FULL:
    assert abs(entropies.mean() - surprises.mean()) < 0.02
    assert share > 0.8
    assert mean_entropy["="] < 0.05 < 0.3 < mean_entropy["operator"] < mean_entropy["</think>"]

# %% [markdown]
# The `=` is not a decision. Operators are, and so is `</think>`: it ends the search. Two more things to take along.
# First, the mean entropy and the mean surprise are nearly the same number. They must be: the entropy is the *expected*
# surprise, $H = -\sum_a \pi(a) \log \pi(a)$. Second, a few tokens carry nearly all the choice. One reward for the whole
# text will still be given to all tokens alike, until lesson 8.
#
# ## Questions
#
# **1.** Why is there usually no discount ($\gamma = 1$) when the reward comes at the end of a text?
#
# <details><summary>Answer</summary>
#
# A discount below 1 says that a later reward is worth less. Here the reward always comes with the last token, so it
# would only pay for short texts. If you want short texts, say so in the reward.
#
# </details>
#
# **2.** A prompt has 3 tokens and the completion 3. Which slice of the logits do you need? Which one is wrong although
# it has the right length?
#
# <details><summary>Answer</summary>
#
# `logits[2:5]`, or `logits[n - 1 : -1]`. The slice `logits[3:6]`, or `logits[n:]`, also has three rows. But row 3 is
# about the token after $y_0$, and the last row is about a token that is not there.
#
# </details>
#
# **3.** `gather` picks one number per row. The labels of a batch are padded with −100. What happens?
#
# <details><summary>Answer</summary>
#
# −100 is not an index, so `gather` raises an error (on a GPU, a device-side assertion). Mask first and pick afterwards,
# or pick at a valid index and mask the result. One course notebook looks up first and masks later,
# so its own example ends in the error.
#
# </details>
#
# **4.** Why should the sampled token ids be kept, rather than the text that they make?
#
# <details><summary>Answer</summary>
#
# Several token sequences can make the same text, and text does not show where it was cut. If you tokenise again you may
# score a sequence that the model never drew. The stop token is lost, too. posttrain carries ids from the sampler to the
# loss.
#
# </details>
#
# **5.** What makes the environment of a text unusual among the environments of reinforcement learning?
#
# <details><summary>Answer</summary>
#
# The transition is known and certain: append the token. So the whole episode can be scored in one forward pass, and you
# can start again from any state for free. Lesson 8 uses this to measure the true value of a prefix.
#
# </details>

# %%
# The numbers in the answers, checked.
n, completion = 3, 3
assert [*range(6)][2:5] == [*range(6)][n - 1 : -1]
assert len([*range(6)][n:]) == completion
raised = False
try:
    torch.zeros(1, 5).gather(1, torch.tensor([[-100]]))
except (RuntimeError, IndexError):
    raised = True
assert raised
