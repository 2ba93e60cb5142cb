"""Where a critic starts (a reward model, earlier rollouts, nothing), what it expects, learns and tells."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

from posttrain.algorithms.table import build_algorithm
from posttrain.models.classifiers.heads import new_scorer
from posttrain.models.classifiers.saved_classifier import TextReading, save_classifier
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.policy import Policy, as_policy
from posttrain.options.algorithm import CriticOptions
from posttrain.options.model import ModelOptions
from posttrain.records import Finish
from posttrain.rewards.grading.answers import ProcessReward
from posttrain.runs.progress import Clock
from posttrain.runs.rollout_file import parquet_bytes, read_rollouts
from posttrain.training.collector import CollectedStep
from posttrain.training.critic import Critic, save_critic
from posttrain.training.learner import Learner, earlier_rollouts, require_known_tokens, warm_start
from tests.support.model_folders import small_folder
from tests.support.refusals import refused
from tests.support.reward_models import classifier, reward_tokenizer
from tests.support.sequences import resampled
from tests.support.stages import Stages, stages_with
from tests.support.tiny import weights

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


RAW = {"name": "ppo", "whitening": "none", "largest_epoch_kl": None}
SCALED = {**RAW, "reward_scaling": {}}


def stages(folder: Path | str, trunk: str = "shared") -> Stages:
    return stages_with({**RAW, "critic": {"trunk": trunk, "warm_start": str(folder), "rate_scale": 1.0}})


def keep(folder: Path, steps: list[CollectedStep]) -> None:
    for number, step in enumerate(steps, 1):
        nothing = torch.zeros_like(step.grades.rewards)
        (folder / f"step-{number:06d}.parquet").write_bytes(parquet_bytes(number, step.groups, step.grades, nothing))


def value_loss(learned: Stages, step: CollectedStep) -> float:
    """Mean squared distance of values from the returns of a step, which are its rewards."""
    columns = learned.learner.credit(step, Clock()).groups.columns
    assert columns.values is not None
    return float((columns.values - columns.returns).square().mean())


@pytest.mark.parametrize("trunk", ["shared", "own"])
def test_the_critic_comes_to_expect_what_was_earned_and_the_policy_stays(trunk: str, tmp_path: Path) -> None:
    earlier = stages_with(RAW)
    steps = [earlier.collected(step) for step in (1, 2)]
    keep(tmp_path, steps)
    new = stages(tmp_path, trunk)
    before, untaught = weights(new.policy), value_loss(stages("", trunk), steps[1])
    (told,) = warm_start(new.learner, Clock())
    assert "learned from 40 earlier rollouts; explained variance on the last step, before learning it: " in told
    assert "unknown" not in told
    assert torch.equal(weights(new.policy), before)
    assert new.learner.critic.head.output.weight.abs().max() > 0
    state = new.learner.actor_critic_state
    assert (state.begun, state.fitted) == (True, False)
    assert value_loss(new, steps[1]) < untaught


def test_what_is_told_is_how_the_last_step_looked_before_it_was_learned_from(tmp_path: Path) -> None:
    """A new head expects one number everywhere, which explains nothing; rewards that are all alike ask for nothing."""
    step = stages_with(RAW).collected()
    keep(tmp_path, [step])
    assert warm_start(stages(tmp_path).learner, Clock())[0].endswith("before learning it: 0.00.")
    alike = replace(step, grades=replace(step.grades, rewards=torch.ones_like(step.grades.rewards)))
    keep(tmp_path, [step, alike])
    assert warm_start(stages(tmp_path).learner, Clock())[0].endswith("before learning it: unknown.")


def both_ways(completion_ids: list[list[int]], **columns: object) -> list[ProcessReward]:
    """Ten times what the tokens are worth, at each token, and 1 in the end."""
    return [ProcessReward(1.0, token_rewards=[10.0 * (token % 2) for token in tokens]) for tokens in completion_ids]


def test_what_tokens_earned_is_part_of_the_returns_as_in_the_step_that_wrote_it(tmp_path: Path) -> None:
    step = stages_with(RAW, both_ways).collected()
    learner = stages("").learner
    credited = learner.credit(step, Clock())
    nothing = torch.zeros_like(step.grades.rewards)
    assert credited.process_rewards is not None
    columns = {"process_rewards": credited.process_rewards}
    file = tmp_path / "step-000001.parquet"
    file.write_bytes(parquet_bytes(1, step.groups, step.grades, nothing, token_columns=columns))
    groups, grades = read_rollouts(file)
    again = learner.credit(replace(step, groups=groups, grades=grades), Clock())
    assert credited.groups.columns.returns.max() > 10
    torch.testing.assert_close(again.groups.columns.returns, credited.groups.columns.returns, rtol=0, atol=0)
    file.write_bytes(parquet_bytes(1, step.groups, step.grades, nothing))
    with refused("has marks but no column `process_rewards`"):
        read_rollouts(file)


def test_rewards_that_were_seen_are_part_of_what_rewards_are_divided_by(tmp_path: Path) -> None:
    keep(tmp_path, [stages_with(SCALED).collected(step) for step in (1, 2)])
    new = stages_with({**SCALED, "critic": {"warm_start": str(tmp_path)}})
    warm_start(new.learner, Clock())
    assert new.learner.actor_critic_state.rewards.count == 40


def test_without_a_folder_nothing_is_done() -> None:
    new = stages("")
    before = new.learner.actor_critic_state
    assert warm_start(new.learner, Clock()) == []
    assert warm_start(stages_with({"name": "grpo"}).learner, Clock()) == []
    assert new.learner.actor_critic_state == before
    for config in ({"name": "grpo"}, {"name": "ppo"}):
        assert earlier_rollouts(build_algorithm(config)) == []


def test_a_folder_without_rollouts_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    with refused("algorithm.critic.warm_start =", ": does not contain step-N.parquet"):
        earlier_rollouts(build_algorithm({"name": "ppo", "critic": {"warm_start": str(tmp_path)}}))


def test_rollouts_of_a_larger_vocabulary_are_refused(tmp_path: Path) -> None:
    new = stages("")
    (group, *_) = new.collected().groups
    size = new.policy.num_logits
    for beyond in (False, True):
        prompt = replace(group.prompt, tokens=(size - 1 + beyond, *group.prompt.tokens[1:]))
        ours, theirs = [group, replace(group, prompt=prompt)], Path("step-000001.parquet")
        if beyond:
            with refused(f"step-000001.parquet contains token {size}, but the policy has {size}"):
                require_known_tokens(ours, new.policy, theirs)
        else:
            require_known_tokens(ours, new.policy, theirs)


def ppo(**critic: object) -> dict[str, object]:
    return {"name": "ppo", "critic": {"fit_steps": 0, "rate_scale": 1.0, **critic}}


def test_the_critic_is_clipped_by_its_own_norm() -> None:
    """With a limit near 0 the critic stands still under plain gradient descent, and the policy moves as without."""

    def moved(**critic: float) -> tuple[float, float]:
        made = stages_with(ppo(**critic), epochs_per_step=1, minibatches_per_epoch=1)
        made.learner.actor_critic_state = replace(made.learner.actor_critic_state, begun=True)  # no first value
        head, policy = weights_of(made), parameters_to_vector(made.policy.model.parameters()).detach().clone()
        made.learner.optimizer = torch.optim.SGD(made.learner.optimizer.param_groups, lr=1e-2)
        made.learn(made.credited())
        now = parameters_to_vector(made.policy.model.parameters()).detach()
        return (weights_of(made) - head).norm().item(), (now - policy).norm().item()

    (free, policy), (held, same) = moved(), moved(max_grad_norm=1e-9)
    assert free > 1e-4
    assert held < 1e-9
    assert same == pytest.approx(policy, rel=1e-6)


def weights_of(made: Stages) -> Tensor:
    return parameters_to_vector(made.learner.critic.head.parameters()).detach().clone()


def test_a_new_head_expects_the_mean_of_what_was_scored() -> None:
    made = stages_with(ppo())
    assert made.learner.critic is not None
    step = made.collected()
    rewards = torch.tensor([[2.0, float("nan"), 4.0, float("nan")]], dtype=torch.float64)
    grades = replace(step.grades.select([0]), rewards=rewards, scores=rewards[None])
    found = made.learner.credit(replace(step, groups=step.groups[:1], grades=grades), Clock()).groups.columns.values
    torch.testing.assert_close(found, torch.full_like(found, 3.0), rtol=0, atol=1e-5)
