# %% [markdown]
# # 2 · The log-trick
#
# **You cannot differentiate a random draw. So how can a reward change the weights?**
#
# *On 2 cores: 3 seconds.*
#
# A model writes a token by drawing it at random. The reward looks at the token that was drawn. But a draw cannot be
# differentiated. Change a weight a little, and the same token comes out, until suddenly another one does. This page
# shows the way around it that all of policy-gradient training uses.

# %%
import os

import matplotlib.pyplot as plt
import torch

from posttrain.algorithms.advantages import raw
from posttrain.algorithms.losses import weighted_policy_gradient

FULL = not os.environ.get("POSTTRAIN_TINY")
REPEATS = 2000 if FULL else 100
plt.style.use("tableau-colorblind10")

# %% [markdown]
# ## A model with three tokens
#
# Our model is as small as it gets: three numbers, one for each token. The softmax turns them into probabilities. Each
# token earns a reward.

# %%
logits = torch.tensor([1.0, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
rewards = torch.tensor([0.0, 1.0, 0.2], dtype=torch.float64)

probabilities = logits.softmax(0)
expected = (probabilities * rewards).sum()
for token in range(3):
    print(f"token {token}: probability {probabilities[token]:.3f}, reward {rewards[token]:.1f}")
print(f"expected reward J = {expected:.4f}")

# %% [markdown]
# We want to raise the expected reward
#
# $$J(\theta) = \sum_a \pi_\theta(a)\, r(a).$$
#
# With three tokens we can add up all cases, so torch can differentiate $J$ directly. Keep this gradient: it is the
# truth that everything below is compared with.

# %%
(exact,) = torch.autograd.grad(expected, logits)
print("exact gradient of J:", [f"{value:+.4f}" for value in exact])

# %% [markdown]
# Going up this gradient makes token 1 likelier and token 0 less likely, as it should.
#
# ## The formula in ten lines
#
# A real model has thousands of tokens and writes hundreds of them in a row. Nobody can add up all texts. We need a way
# to *estimate* the gradient from a few samples. An average over samples estimates a sum of the form $\sum_a \pi(a)
# \cdot \text{something}(a)$. The gradient does not have this form yet:
#
# $$\nabla J = \sum_a \nabla \pi(a)\, r(a).$$
#
# The derivative of a logarithm is $\nabla \log \pi = \nabla \pi / \pi$. Therefore $\nabla \pi = \pi\, \nabla \log \pi$,
# and
#
# $$\nabla J = \sum_a \pi(a)\, r(a)\, \nabla \log \pi(a) = \mathbb{E}_{a \sim \pi} [ r(a)\, \nabla \log \pi(a) ].$$
#
# Now $\pi(a)$ is back in front, and an average over samples will do. The draw itself is never differentiated. Only the
# log-probability of what was drawn is. This is REINFORCE (Williams 1992). Torch minimises, so we give it the loss
#
# $$L = -\frac{1}{N} \sum_{i=1}^{N} r(a_i)\, \log \pi(a_i).$$
#
# ## By hand

# %%


def estimate(num_samples, seed):
    """The gradient of J, from samples only."""
    chosen = torch.multinomial(probabilities.detach(), num_samples, replacement=True, generator=seeded(seed))
    loss = -(rewards[chosen] * logits.log_softmax(0)[chosen]).mean()
    (gradient,) = torch.autograd.grad(loss, logits)
    return chosen, -gradient  # the loss goes down where J goes up


def seeded(seed):
    return torch.Generator().manual_seed(seed)


for num_samples in (10, 100, 1000):
    _, gradient = estimate(num_samples, seed=0)
    print(f"{num_samples:>5} samples:", [f"{value:+.4f}" for value in gradient])
print("      exact  :", [f"{value:+.4f}" for value in exact])

# %% [markdown]
# If we weight each token by its probability instead of drawing, the formula must give the exact gradient. It does:

# %%
weighted = (probabilities.detach() * rewards * logits.log_softmax(0)).sum()
(enumerated,) = torch.autograd.grad(weighted, logits)
assert torch.allclose(enumerated, exact, rtol=0, atol=1e-15)

# %% [markdown]
# ## With the library
#
# In posttrain the same loss is [`weighted_policy_gradient`](../../src/posttrain/algorithms/losses.py). `raw` says that
# the reward itself is the advantage. The second argument holds the log-probs at the time of sampling. They equal the
# current ones here; lesson 5 is about what happens when they do not.

# %%
chosen, by_hand = estimate(100, seed=0)
logprobs = logits.log_softmax(0)[chosen]
advantages = raw(rewards[chosen][None])[0]
each = torch.arange(len(chosen))  # every token is a completion
loss = weighted_policy_gradient(logprobs, logprobs.detach(), advantages, each).mean()
(gradient,) = torch.autograd.grad(-loss, logits)
print("by hand:", by_hand.tolist())
print("library:", gradient.tolist())
assert torch.allclose(gradient, by_hand, rtol=0, atol=1e-15)

# %% [markdown]
# ## From a token to a text
#
# A text is drawn token by token, so its probability is a product, and its log-probability is a sum: $\log \pi(y) =
# \sum_t \log \pi(y_t \mid y_{<t})$. The trick does not care. Here is a model of texts with two tokens: nine texts, and
# a reward for each. The second token depends on the first.

# %%
first = torch.randn(3, dtype=torch.float64, generator=seeded(1)).requires_grad_()
second = torch.randn(3, 3, dtype=torch.float64, generator=seeded(2)).requires_grad_()
text_rewards = torch.rand(3, 3, dtype=torch.float64, generator=seeded(3))

text_logprobs = first.log_softmax(0)[:, None] + second.log_softmax(1)  # [first token, second token]
exact_loss = (text_logprobs.exp() * text_rewards).sum()
trick_loss = (text_logprobs.exp().detach() * text_rewards * text_logprobs).sum()
exact_two = torch.autograd.grad(exact_loss, [first, second], retain_graph=True)
trick_two = torch.autograd.grad(trick_loss, [first, second])
for one, other in zip(exact_two, trick_two, strict=True):
    assert torch.allclose(one, other, rtol=0, atol=1e-15)
print(f"9 texts, total probability {text_logprobs.exp().sum():.6f}: both gradients agree")

# %% [markdown]
# ## Experiment: how many samples are enough?
#
# Each sample is a noisy estimate of the gradient. The mean of $N$ of them has a standard error that falls like
# $1/\sqrt{N}$. We repeat the estimate many times for each $N$ and measure its distance from the exact gradient.

# %%
sizes = [10, 30, 100, 300, 1000]
onehot = torch.eye(3, dtype=torch.float64)
scores = rewards[:, None] * (onehot - probabilities.detach())  # r(a) ∇ log π(a) for each token a
variance = (probabilities.detach()[:, None] * (scores - exact).square()).sum()

errors = []
for size in sizes:
    draws = torch.multinomial(probabilities.detach().expand(REPEATS, 3), size, replacement=True, generator=seeded(size))
    gradients = scores[draws].mean(dim=1)
    errors.append((gradients - exact).square().sum(dim=1).mean().sqrt().item())

print(f"length of the exact gradient: {exact.norm():.3f}")
for size, error in zip(sizes, errors, strict=True):
    print(f"{size:>5} samples: error {error:.4f}, theory {(variance / size).sqrt():.4f}")

figure, axes = plt.subplots(figsize=(6, 3.5))
axes.loglog(sizes, errors, "o", label="measured")
axes.loglog(sizes, [(variance / size).sqrt().item() for size in sizes], "-", label="√(variance / N)")
axes.axhline(exact.norm().item(), linestyle="--", color="grey", label="length of the gradient itself")
axes.set_xlabel("samples N")
axes.set_ylabel("error of the gradient")
axes.legend()
plt.show()

for size, error in zip(sizes, errors, strict=True):
    assert abs(error / (variance / size).sqrt() - 1) < 0.25

# %% [markdown]
# The theory holds: for a tenth of the error we need a hundred times as many samples. With ten samples the error is
# almost half as long as the gradient, and this is a model with three tokens. That is the price of the log-trick, and
# the reason for most of what follows. Lesson 3 lowers the noise without more samples.
#
# ## Questions
#
# **1.** Token 0 was drawn and earned +1. Which logits go up, which go down? And with a reward of −1?
#
# <details><summary>Answer</summary>
#
# The gradient of $\log \pi(0)$ is $1 - \pi(0)$ for logit 0 and $-\pi(k)$ for the others. With the probabilities above
# (.547, .331, .122) logit 0 goes up by .453, and the others go down by .331 and .122, times the learning rate. With −1
# all signs turn around. The three numbers add up to 0: probability is only moved, never made.
#
# </details>
#
# **2.** An advantage of +.5 and a log-prob of −15: what does the sample add to the loss, and where does the optimiser
# go? What about an advantage of −.5?
#
# <details><summary>Answer</summary>
#
# $-(.5)(-15) = +7.5$. The optimiser lowers the loss, so it raises the log-prob towards 0: the text becomes likelier.
# With −.5 the sample adds −7.5, and the loss falls as the log-prob becomes more negative: less likely. The value of the
# loss says nothing about success. Its gradient does the work.
#
# </details>
#
# **3.** Why is the draw put under `no_grad`, and the log-prob is not?
#
# <details><summary>Answer</summary>
#
# Drawing needs no gradient: the formula has none in that place. The log-prob of what was drawn is the only thing that
# is differentiated. A helper that computes it under `no_grad` returns the right number with a gradient of nothing, and
# the model never learns. One of the course notebooks does exactly this.
#
# </details>
#
# **4.** All rewards are the same, say 1. What is the exact gradient? Is the estimate zero, too?
#
# <details><summary>Answer</summary>
#
# $J$ is then 1 for all weights, so the exact gradient is 0. A single estimate is $\nabla \log \pi(a)$, which is not 0.
# Only the mean over draws is. So there is noise where there is nothing to learn, and lesson 3 removes it.
#
# </details>

# %%
# The numbers in the answers, checked.
assert [f"{value:.3f}" for value in probabilities.tolist()] == ["0.547", "0.331", "0.122"]
assert [f"{value:+.3f}" for value in (onehot - probabilities.detach())[0].tolist()] == ["+0.453", "-0.331", "-0.122"]
assert -0.5 * -15 == 7.5
always_paid = onehot - probabilities.detach()
assert (probabilities.detach()[:, None] * always_paid).sum(0).abs().max() < 1e-15
assert 0.4 < errors[0] / exact.norm() < 0.5
