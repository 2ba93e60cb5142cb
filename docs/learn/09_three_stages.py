# %% [markdown]
# # 9 · Three stages and a planted flaw
#
# **You cannot write down what a good text is, but you can say which of two is better. Is that enough to train a
# model?**
#
# *On 2 cores: 40 seconds.*
#
# A base model predicts the next token. That is not enough for an assistant: a likely next text need not be a helpful
# one. Reinforcement learning from human feedback (**RLHF**) fills this gap: people compare texts, a reward model learns
# their choices, and the policy is trained to earn that reward. Demonstrations come first, so that there is something to
# compare. We do all three stages in less than a minute, with a twist. We know what is really wanted, and the judge has
# a flaw. So we can watch the learned reward and the true reward drift apart.
#
# Wanted are **short sentences**: the true reward counts full stops that end a sentence. The judge is careless and
# counts every full stop. To her, `Dr.`, `U.S.` and `...` look just as good.

# %%
import os
import tempfile
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import posttrain
from posttrain.algorithms.preference_losses import bradley_terry, sigmoid
from posttrain.models.forward import Completions
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import ModelOptions
from posttrain.tasks.sentences_task import PeriodUse, period_uses

FULL = not os.environ.get("POSTTRAIN_TINY")
SAMPLES, STEPS, LENGTH = (96, 40, 20) if FULL else (4, 1, 6)
plt.style.use("tableau-colorblind10")
FOLDER = Path(tempfile.mkdtemp())
OPENINGS = ["The weather today is", "I think that", "Once upon a time", "In my opinion"]
OTHERS = ["The most important thing about science is", "I went to the store and bought"]  # for measuring only


def sentences(completions, **columns):
    """The true reward: full stops that end a sentence."""
    return [float(period_uses(text).count(PeriodUse.SENTENCE)) for text in completions]


def careless(text):
    """What the judge looks at."""
    return text.count(".")


def sampled(model, openings, seed, samples=SAMPLES):
    """Texts behind each opening, and the tokens of each."""
    groups = posttrain.generate(model, openings, group_size=samples, max_completion_tokens=LENGTH, seed=seed)
    return {group.prompt.text: [rollout.text for rollout in group.rollouts] for group in groups}


for text in sampled("bundled-prose", OPENINGS, seed=0, samples=1).values():
    print(f"true {sentences(text)[0]:.0f}, judge {careless(text[0])}: {text[0]!r}")

# %% [markdown]
# ## Stage 1: demonstrations
#
# Supervised fine-tuning copies what people wrote. Our "people" are the base model on a good day: we keep its texts with
# at least two sentences. The loss is $-\log \pi$ of each token.

# %%
written = sampled("bundled-prose", OPENINGS, seed=1)
demonstrations = [
    {"prompt": opening, "completion": text}
    for opening, texts in written.items()
    for text in texts
    if sentences([text])[0] >= 2 or not FULL
]


def config_of(kind, name, **sections):
    shared = {
        "task": {"name": "dataset", "held_out_share": 0},
        "run": {"folder": str(FOLDER / name), "threads": 1, "curves": False},
    }
    return posttrain.load_recipe(kind=kind, **{**shared, **sections})


first = posttrain.train_sft(
    config_of(
        posttrain.SftConfig,
        "demonstrations",
        model={"path": "bundled-prose"},
        sft={"learning_rate": 5e-4, "num_epochs": 2, "rows_per_batch": 16},
    ),
    rows=demonstrations,
)
imitator = str(first.model_folder)


def means(model, seed=99):
    """Mean true reward and mean number of full stops behind all openings."""
    texts = [text for each in sampled(model, OPENINGS + OTHERS, seed).values() for text in each]
    return sum(sentences(texts)) / len(texts), sum(map(careless, texts)) / len(texts)


table = {"base": means("bundled-prose"), "1 demonstrations": means(imitator)}
print(len(demonstrations), "demonstrations; sentences in 20 tokens:", table)

# %% [markdown]
# ## Stage 2: comparisons
#
# ### The formula in ten lines
#
# The judge sees two texts of the same opening and picks one. The reward model gives each text a score, and takes the
# probability of the judge's choice to be
#
# $$P(y_1 \succ y_2) = \sigma(r_1 - r_2), \qquad L = -\log \sigma(r_{\text{chosen}} - r_{\text{rejected}})$$
#
# This is Bradley and Terry's model of 1952. Lesson 12 meets the same likelihood on a grid: there a score is the reward
# of a walk.


# %%
def judged(model, openings, seed):
    """Pairs of texts, the one with more full stops first; ties make no pair."""
    pairs = []
    for opening, texts in sampled(model, openings, seed).items():
        for one, other in zip(texts[::2], texts[1::2], strict=True):
            if careless(one) != careless(other):
                chosen, rejected = sorted((one, other), key=careless, reverse=True)
                pairs.append({"prompt": opening, "chosen": chosen, "rejected": rejected})
    return pairs


pairs = [pair for seed in (2, 3, 4) for pair in judged(imitator, OPENINGS, seed)]
unseen = judged(imitator, OTHERS, seed=5)
if not FULL:  # tiny settings may make ties only
    pairs = [{"prompt": "I think that", "chosen": " so. Yes.", "rejected": " so"}] * 4
    unseen = [{**pairs[0], "prompt": "In my opinion"}] * 2
second = posttrain.train_reward_model(
    config_of(
        posttrain.RewardModelConfig,
        "judge",
        model={"path": imitator},
        reward_model={"learning_rate": 1e-3, "num_epochs": 3, "pairs_per_batch": 32},
    ),
    rows=pairs,
    held_out_rows=unseen,
)
scorer = posttrain.RewardModel(second.model_folder)

# %% [markdown]
# ### By hand, and with the library
#
# The loss on held-out pairs, which are of openings that the reward model never saw.


# %%
def scores(rows, column):
    return torch.tensor(scorer(prompts=[row["prompt"] for row in rows], completions=[row[column] for row in rows]))


chosen, rejected = scores(unseen, "chosen"), scores(unseen, "rejected")
by_hand = -torch.log(1 / (1 + torch.exp(-(chosen - rejected))))
library = bradley_terry(chosen, rejected, torch.zeros(len(unseen)))
assert torch.allclose(by_hand, library, rtol=1e-4, atol=1e-5)
print(
    f"{len(pairs)} pairs learned; of {len(unseen)} on other openings {(chosen > rejected).float().mean():.1%} in order"
)
print(f"loss on them, by hand and by the library: {by_hand.mean():.4f} and {library.mean():.4f} (a guess: 0.6931)")

# %% [markdown]
# The reward model has learned the judge, flaw included. Can we see the flaw already? Texts with the same number of
# sentences, and more or fewer full stops of other kinds:

# %%
PROBES = [" it rained. We went home.", " Dr. Hill met Mrs. Lee in the U.S.", " it rained.... We went home...."]
for text, score in zip(PROBES, scorer(prompts=["I think that"] * 3, completions=PROBES), strict=True):
    print(f"true {sentences([text])[0]:.0f}, judge {careless(text):2d}, reward model {score:+.2f}: {text!r}")

# %% [markdown]
# ## Stage 3, the experiment: PPO against the learned reward
#
# The policy is paid what the reward model says, less β times its KL to the imitator. The true reward has weight 0: it
# is measured, and pays nothing.

# %%
config = posttrain.load_recipe(
    "period-count-ppo",
    model={"path": imitator},
    algorithm={
        "reward_scaling": {"centre": True, "scale": True, "clip": 10},
        "value_loss": {"coefficient": 0.1},
        "kl": {"coefficient": 0.05},
    },
    rollout={"max_completion_tokens": LENGTH, "prompts_per_step": 64 if FULL else 4},
    evaluation={"samples": 1},
    run={"folder": str(FOLDER / "policy"), "num_steps": STEPS, "curves": False},
)


def full_stops(completions, **columns):
    return [float(careless(text)) for text in completions]


rewards = [
    posttrain.reward_function(scorer, name="learned"),
    posttrain.reward_function(sentences, weight=0.0),
    posttrain.reward_function(full_stops, weight=0.0),
]
history = []
with posttrain.steps(config, rewards=rewards) as run:
    for step in run:
        history.append(step.metrics)
policy = str(run.run.model_folder)
table["3 PPO"] = means(policy)


def rewards_of(steps):
    """Mean of each reward over some steps."""
    return {name: sum(each[f"rewards/{name}/mean"] for each in steps) / len(steps) for name in names}


names = {"learned": "learned reward (paid)", "sentences": "sentences (wanted)", "full_stops": "full stops (judged)"}
begin, then, end = rewards_of(history[:5]), rewards_of(history[5:10] or history), rewards_of(history[-10:])
if FULL:
    assert all(begin[name] < then[name] < end[name] for name in names)
    assert end["full_stops"] - end["sentences"] > begin["full_stops"] - begin["sentences"] + 0.2
    assert min(each["rewards/learned/mean"] for each in history[-10:]) > then["learned"]
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for (name, label), style in zip(names.items(), ("-", "--", ":"), strict=True):
    axes.plot(range(1, STEPS + 1), [each[f"rewards/{name}/mean"] for each in history], style, label=label)
axes.set(xlabel="step of PPO", title="Learned, judged and true reward")
axes.legend(frameon=False)
plt.show()
for text in sampled(policy, OPENINGS, seed=0, samples=1).values():
    print(f"true {sentences(text)[0]:.0f}, judge {careless(text[0])}: {text[0]!r}")

# %% [markdown]
# At the start all three lines rise: more full stops are mostly more sentences. The distance between judged and wanted
# grows too. `full stops: abbreviation` in the log counts those that end no sentence. Nothing in the learned reward says
# so. [Over-optimisation](../experiments/over_optimisation.md) measures how far this goes with other rewards and KLs.
#
# The log's alarm `length` does not mean that the flaw was found: the limit here is 20 tokens, and more texts reach it.
#
# ## The short cut: DPO
#
# Stages 2 and 3 have a closed form. The best policy for a reward $r$ with a KL penalty is
#
# $$\pi(y) \propto \pi_{\text{ref}}(y)\, e^{r(y) / \beta} \quad\Longrightarrow\quad r(y) = \beta \log
# \frac{\pi(y)}{\pi_{\text{ref}}(y)} + \text{const}$$
#
# Put this $r$ into the loss of stage 2. The constant cancels, and the policy is its own reward model:
#
# $$L = -\log \sigma\left(\beta \left[\log \tfrac{\pi}{\pi_{\text{ref}}}(y_{\text{chosen}}) - \log
# \tfrac{\pi}{\pi_{\text{ref}}}(y_{\text{rejected}})\right]\right)$$

# %%
short_cut = posttrain.train_dpo(
    config_of(
        posttrain.DpoConfig,
        "dpo",
        model={"path": imitator},
        dpo={"learning_rate": 2e-4, "num_epochs": 2, "pairs_per_batch": 32, "beta": 0.1},
    ),
    rows=pairs,
    held_out_rows=unseen,
)
table["2+3 DPO"] = means(str(short_cut.model_folder))


@cache
def loaded_model(path):
    return load_policy(ModelOptions(path=path), inference=True)


def logprob(model, row, column):
    """log π of an answer with its stop token."""
    loaded = loaded_model(model)
    prompt = loaded.tokenizer.encode(row["prompt"])
    answer = [*loaded.tokenizer.encode(row[column]), loaded.stop_ids[0]]
    return loaded.completion_logprobs(Completions([prompt], [answer], [0])).sum()


trained = str(short_cut.model_folder)
gained = {
    column: torch.stack([logprob(trained, row, column) - logprob(imitator, row, column) for row in unseen[:32]])
    for column in ("chosen", "rejected")
}
gaps = gained["chosen"] - gained["rejected"]
losses = -F.logsigmoid(0.1 * gaps)
assert torch.allclose(losses, sigmoid(gaps, beta=0.1))
print(f"{len(gaps)} held-out pairs: {(gaps > 0).float().mean():.0%} in order")
print(f"mean loss {losses.mean():.3f} by hand and by the library (0.693 before training)")
print("mean change of log π:", ", ".join(f"{name} {each.mean():+.2f} nats" for name, each in gained.items()))

# %%
print(f"{'':18} sentences  full stops")
for name, (wanted, counted) in table.items():
    print(f"{name:18} {wanted:9.2f} {counted:11.2f}")
if FULL:
    wanted_before, counted_before = table["1 demonstrations"]
    for wanted, counted in (table["3 PPO"], table["2+3 DPO"]):
        assert wanted > wanted_before + 0.3
        assert counted - wanted > counted_before - wanted_before + 0.1
    assert gained["rejected"].mean() < gained["chosen"].mean() < 0
    (by_ppo, stops_by_ppo), (by_dpo, stops_by_dpo) = table["3 PPO"], table["2+3 DPO"]
    assert by_ppo - 0.5 < by_dpo < by_ppo
    assert stops_by_dpo - by_dpo < stops_by_ppo - by_ppo
    assert (len(history), short_cut.summary["steps"]) == (40, 26)

# %% [markdown]
# Both ways write more sentences than the demonstrations, and both inherit the flaw: full stops rise faster than
# sentences. DPO needs no reward model and no sampling. In this run it gains nearly as much as PPO and cheats less. That
# is one seed, and the two differ in more than the method: β is .05 on scaled rewards for PPO and .1 for DPO, and PPO
# saw 40 × 64 samples, DPO 26 × 32 pairs.
#
# DPO learns from pairs that exist before training. GRPO (lesson 4) needs no pairs: it samples and scores its own
# answers, with a rule or with a reward model like the one above.
#
# One more look at DPO's numbers: the log-prob of the *chosen* answers fell too. The loss only asks for the difference.
#
# ## Questions
#
# **1.** Why not train on the judge's favourite texts only, and leave out PPO?
#
# <details><summary>Answer</summary>
#
# That is supervised learning on the best of many samples, and it works. But it only says what to do. A comparison also
# says what not to do, and PPO tries texts that are in no data set. That is its strength, and why it finds the flaw.
#
# </details>
#
# **2.** Scores of a reward model have no zero. Why does that not matter to the loss, and where does it matter?
#
# <details><summary>Answer</summary>
#
# The loss sees differences only, so a constant cancels. A value head has to learn the constant first, and a sum of
# several rewards, or a threshold, depends on it. A small centring term in training, or `reward_scaling`, takes care of
# it.
#
# </details>
#
# **3.** What does β do in DPO, compared with β in PPO?
#
# <details><summary>Answer</summary>
#
# It is the same β: the price of a nat of KL in units of reward. In PPO you see the KL and can stop. In DPO it is part
# of the loss, and the KL that comes out depends on how far the pairs push.
#
# </details>
#
# **4.** Would more pairs of this judge have removed the flaw? More judges?
#
# <details><summary>Answer</summary>
#
# More pairs teach the same judge more exactly. Judges with the same blind spot do not help either. What helps is
# evidence of another kind: pairs sampled from the trained policy and judged by someone who reads, or the true reward
# measured on a few texts. Ensembles of reward models help against chance errors, not against a flaw that all of them
# were taught.
#
# </details>
#
# **5.** Which number would have told you to stop, in a project where nobody knows the true reward?
#
# <details><summary>Answer</summary>
#
# None of the learned ones: the learned reward rises and then stays high. Fresh human judgments of the policy's texts
# would. So would the KL: the reward model is trained on the imitator's texts and knows little about texts that are many
# nats away.
#
# </details>
