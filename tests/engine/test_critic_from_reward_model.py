"""A critic that starts as a reward model: it expects what that model says, learns, and is kept like any other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

from posttrain.models.classifiers.heads import new_scorer
from posttrain.models.classifiers.saved_classifier import TextReading, save_classifier
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.policy import Policy, as_policy
from posttrain.options.algorithm import CriticOptions
from posttrain.options.model import ModelOptions
from posttrain.records import Finish
from posttrain.training.critic import Critic, save_critic
from posttrain.training.learner import Learner
from tests.support.model_folders import small_folder
from tests.support.refusals import refused
from tests.support.reward_models import classifier, reward_tokenizer
from tests.support.sequences import resampled
from tests.support.stages import stages_with

each_head = pytest.mark.parametrize("head", ["mlp", "linear"])


def reward_model(folder: Path, policy: Policy, *, seed: int = 3) -> Path:
    """A reward model over the policy's body, its head drawn at random."""
    save_classifier(new_scorer(policy, seed=seed), folder, TextReading(stop_token_ids=policy.stop_ids))
    return folder


def critic_of(policy: Policy, folder: Path, **options: Any) -> Critic:
    return Critic(policy, CriticOptions(trunk="own", path=str(folder), **options), seed=0)


def policy_in(folder: Path) -> Policy:
    return load_policy(ModelOptions(path=str(small_folder(folder))))


@each_head
def test_the_value_of_a_text_is_the_reward_models_score_of_it(head: str, tmp_path: Path) -> None:
    policy = policy_in(tmp_path / "model")
    folder = reward_model(tmp_path / "rm", policy)
    critic = critic_of(policy, folder, head=head)
    assert critic.begun, "its bias is not to become the mean reward"
    (group, *_) = stages_with().collected().groups
    cut = [resampled(each, finish=Finish.LENGTH) for each in group.rollouts]
    found = critic.of_groups([replace(group, rollouts=tuple(cut))], max_tokens=10_000)
    scorer = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [scorer(input_ids=torch.tensor([[*group.prompt.tokens, *each.tokens]])).logits[0, 0] for each in cut]
    assert torch.stack(expected).std() > 1e-3, "texts of one score would say nothing"
    torch.testing.assert_close(found["final_values"].flatten().float(), torch.stack(expected), rtol=0, atol=1e-5)


def test_a_reward_model_of_another_size_and_family_will_do(tmp_path: Path) -> None:
    policy = policy_in(tmp_path / "model")
    sizes = GPT2Config(vocab_size=len(policy.tokenizer), n_embd=24, n_layer=1, n_head=2, n_positions=64, eos_token_id=0)
    other = as_policy(GPT2LMHeadModel(sizes), policy.tokenizer)
    critic = critic_of(policy, reward_model(tmp_path / "rm", other))
    assert critic.trunk.model.config.model_type == "gpt2"
    assert critic.head.output.weight.shape == (1, 4 * 24)
    assert critic.trunk.tokenizer is policy.tokenizer


@each_head
def test_it_learns_and_is_kept_as_a_plain_folder(head: str, tmp_path: Path) -> None:
    policy = policy_in(tmp_path / "model")
    options = {"fit_steps": 0, "trunk": "own", "path": str(reward_model(tmp_path / "rm", policy)), "head": head}
    stages = stages_with({"name": "ppo", "critic": options}, policy=policy)
    learner: Learner = stages.learner
    assert learner.critic is not None
    before = {name: each.clone() for name, each in learner.critic.tensors().items()}
    stages.learn(stages.credited())
    moved = [name for name, each in learner.critic.tensors().items() if not torch.equal(each, before[name])]
    assert any(name.startswith("trunk.") for name in moved)
    assert "head.output.weight" in moved
    save_critic(learner.critic.head, learner.critic.own_trunk, tmp_path / "critic")
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not told["missing_keys"]
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight, "no matrix of its own"
    assert not hasattr(loaded.config, "reading"), "how a reward model reads is nothing of a language model"
    again = critic_of(policy, tmp_path / "critic", head=head)
    for name, tensor in learner.critic.tensors().items():
        torch.testing.assert_close(again.tensors()[name], tensor, rtol=0, atol=0)


def test_what_is_no_reward_model_of_one_number_over_the_policys_tokens_is_refused(tmp_path: Path) -> None:
    policy = policy_in(tmp_path / "model")
    for kind, labels, said in [
        ("qwen3", ("good", "bad"), "Qwen3ForSequenceClassification has 2 of them"),
        ("bert", ("good",), "BertForSequenceClassification has another head"),
    ]:
        folder = tmp_path / f"{kind}-{len(labels)}"
        classifier(kind, labels=labels).save_pretrained(folder)
        reward_tokenizer().save_pretrained(folder)
        with refused("algorithm.critic.path = ", said):
            critic_of(policy, folder)
    folder = tmp_path / "other-tokens"
    classifier("qwen3").save_pretrained(folder)
    strange = reward_tokenizer()
    strange.add_tokens(["<aside>"])
    strange.save_pretrained(folder)
    with refused("algorithm.critic.path =", "not the policy's:", "such as '<aside>'"):
        critic_of(policy, folder)


def test_a_reward_model_may_pad_with_a_token_of_its_own(tmp_path: Path) -> None:
    policy = policy_in(tmp_path / "model")
    folder = reward_model(tmp_path / "rm", policy)
    tokenizer = new_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    tokenizer.save_pretrained(folder)
    assert critic_of(policy, folder).begun


def test_a_head_on_the_policys_trunk_is_no_reward_models(tmp_path: Path) -> None:
    policy = policy_in(tmp_path / "model")
    folder = reward_model(tmp_path / "rm", policy)
    with refused("trunk = own"):
        Critic(policy, CriticOptions(trunk="shared", path=str(folder)), seed=0)
