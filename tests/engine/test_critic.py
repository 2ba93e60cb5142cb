"""The critic: values are those of the head on the model's own hidden states, its gradient is right, and it lasts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from posttrain.algorithms.table import build_algorithm
from posttrain.errors import RunError
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.classifiers.heads import ValueHead
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.policy import Policy
from posttrain.options.algorithm import CriticOptions
from posttrain.options.model import ModelOptions
from posttrain.options.training import UpdateOptions
from posttrain.records import Finish, Group
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.progress import Clock
from posttrain.training.critic import Critic, save_critic
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.observations import Observations
from posttrain.training.optimizer import OwnOptimizer
from posttrain.training.session import trained_by_reward
from posttrain.training.update import micro_loss
from tests.support.adapted import adapted_policy
from tests.support.model_folders import small_folder
from tests.support.refusals import refused
from tests.support.stages import LIMIT, Stages, stages_with
from tests.support.tiny import relative_distance, through_its_own_forward, tiny_policy, weights

SHAPES = True
PPO = {"name": "ppo", "critic": {"fit_steps": 0, "rate_scale": 1.0}}
ONE_PASS = {"epochs_per_step": 1, "minibatches_per_epoch": 1}
each_trunk = pytest.mark.parametrize("trunk", ["shared", "own"])


def ppo(trunk: str = "shared", *, critic: Mapping[str, object] | None = None, **options: object) -> dict[str, object]:
    return {**PPO, **options, "critic": {**PPO["critic"], "trunk": trunk, **(critic or {})}}


def filled(head: ValueHead, seed: int = 5) -> None:
    """Give every parameter of a head numbers, so that values differ from state to state."""
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=drawn, dtype=torch.float64) - 0.5)


def with_filled_head(stages: Stages) -> Stages:
    filled(stages.learner.critic.head)
    stages.learner.actor_critic_state = replace(stages.learner.actor_critic_state, begun=True)
    return stages


@torch.no_grad()
def values_one_by_one(policy: Policy, head: ValueHead, groups: Sequence[Group]) -> tuple[list[float], list[float]]:
    """V before each token, and after each completion, by plain calls of the Hugging Face model's trunk."""
    before, after = [], []
    for group in groups:
        for rollout in group.rollouts:
            row = torch.tensor([[*group.prompt.tokens, *rollout.tokens]])
            hidden = policy.model.base_model(input_ids=row, use_cache=False).last_hidden_state[0]
            values = head(hidden)[len(group.prompt.tokens) - 1 :].tolist()
            before += values[:-1]
            after.append(values[-1])
    return before, after


@each_trunk
@pytest.mark.parametrize("forward", ["shared prompt", "plain"])
def test_a_value_is_that_of_the_state_before_its_token(trunk: str, forward: str) -> None:
    groups = stages_with().collected().groups
    policy = tiny_policy() if forward == "shared prompt" else through_its_own_forward(tiny_policy())
    critic = Critic(policy, CriticOptions(trunk=trunk), seed=0)
    filled(critic.head)
    found = critic.of_groups(groups, max_tokens=40)
    before, after = values_one_by_one(critic.trunk, critic.head, groups)
    torch.testing.assert_close(found["values"], torch.tensor(before, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    finished = [rollout.finish == Finish.STOP for group in groups for rollout in group.rollouts]
    assert any(finished)
    assert not all(finished)
    expected = [0.0 if stop else end for stop, end in zip(finished, after, strict=True)]
    assert found["final_values"].flatten().tolist() == pytest.approx(expected, rel=1e-9)


def test_a_new_head_expects_the_mean_reward_everywhere() -> None:
    stages = stages_with(ppo(), critic_reward)
    credited = stages.credited()
    rewards = credited.collected.grades.rewards
    values = credited.groups.columns.values.tolist()
    assert values == pytest.approx([rewards.mean().item()] * len(values))
    assert credited.metrics["value/explained_variance"] == pytest.approx(0, abs=1e-9)


def critic_reward(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Half of the tokens are even: a return that the first tokens tell something of."""
    return [sum(token % 2 == 0 for token in tokens) / 4 for tokens in completion_ids]


def test_a_head_is_float32_in_a_bfloat16_model_and_float64_in_one_of_that() -> None:
    hidden = torch.ones(3, 8, dtype=torch.bfloat16)
    for kind in ("mlp", "linear"):
        head = ValueHead(8, kind, seed=0, dtype=torch.bfloat16)
        assert head(hidden).dtype == torch.float32
        assert ValueHead(8, kind, seed=0, dtype=torch.float64).output.weight.dtype == torch.float64
    channels = {kind: ValueHead(8, kind, seed=0).output.weight.shape[1] for kind in ("mlp", "linear")}
    assert channels == {"mlp": 32, "linear": 8}


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_the_gradient_of_the_head_is_that_of_finite_differences(kind: str) -> None:
    """The whole update's loss, through collation and weights: (L(θ + h) - L(θ - h)) / 2h for every parameter."""
    stages = with_filled_head(stages_with(ppo(critic={"head": kind}), critic_reward, **ONE_PASS))
    learner, head = stages.learner, stages.learner.critic.head
    (batch,) = learner.batches(stages.credited(), Clock())

    def loss() -> float:
        with torch.no_grad():
            return micro_loss(stages.policy, batch, learner.objective(), Observations()).item()

    micro_loss(stages.policy, batch, learner.objective(), Observations()).backward()
    step = 1e-6
    for parameter in head.parameters():
        flat, slope = parameter.data.view(-1), parameter.grad.flatten()
        for place in range(0, len(flat), max(1, len(flat) // 5)):
            kept = flat[place].item()
            ends = []
            for moved in (kept + step, kept - step):
                flat[place] = moved
                ends.append(loss())
            flat[place] = kept
            assert slope[place].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-8)


def moved_by_an_update(config: Mapping[str, object], budget: int = 10_000) -> tuple[Tensor, Tensor]:
    """How far one step of gradient descent without clipping moves the policy, and the critic."""
    stages = with_filled_head(stages_with(config, critic_reward, tokens_per_microbatch=budget, **ONE_PASS))
    learner = stages.learner
    groups = [{"params": list(stages.policy.model.parameters()), "module": "policy", "max_grad_norm": 1e9}]
    group = learner.critic.parameter_group
    groups.append({"params": list(group.parameters), "module": group.module, "max_grad_norm": 1e9})
    learner.optimizer = torch.optim.SGD(groups, lr=1.0)
    before = weights(stages.policy), critic_vector(learner.critic)
    learner.remember(credited := stages.credited())
    learner.learn(learner.batches(credited, Clock()), 1, Clock())
    return before[0] - weights(stages.policy), before[1] - critic_vector(learner.critic)


def critic_vector(critic: Critic) -> Tensor:
    return parameters_to_vector([each for _, module in critic.modules for each in module.parameters()]).detach().clone()


@each_trunk
def test_micro_batches_change_no_gradient_with_values_either(trunk: str) -> None:
    whole = moved_by_an_update(ppo(trunk, entropy_bonus=0.01))
    assert all(part.norm() > 1e-4 for part in whole)
    for budget in (60, 25):
        parts = moved_by_an_update(ppo(trunk, entropy_bonus=0.01), budget)
        assert all(relative_distance(a, b) <= 1e-10 for a, b in zip(parts, whole, strict=True))


def test_the_value_loss_reaches_a_shared_trunk_where_it_may_and_no_other() -> None:
    through, critic = moved_by_an_update(ppo())
    apart, same_critic = moved_by_an_update(ppo(critic={"through_trunk": False}))
    own, _ = moved_by_an_update(ppo("own"))
    assert relative_distance(through, apart) > 0.01
    assert relative_distance(own, apart) <= 1e-10
    assert relative_distance(same_critic, critic) <= 1e-10


def test_a_trunk_of_its_own_learns_and_leaves_the_output_layer_alone() -> None:
    stages = with_filled_head(stages_with(ppo("own"), critic_reward))
    critic = stages.learner.critic
    before = {name: tensor.clone() for name, tensor in critic.tensors().items()}
    policy = weights(stages.policy)
    stages.learn(stages.credited())
    after = critic.tensors()
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items() if "bias" not in name)
    assert not any("lm_head" in name for name in after)
    assert relative_distance(weights(stages.policy), policy) > 1e-4


def test_a_trunk_of_its_own_learns_however_the_options_came_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` copies a large policy; what `through_trunk` says is about a trunk that is shared."""
    monkeypatch.setattr("posttrain.options.algorithm.LARGE", 1)
    stages = stages_with(ppo("auto", critic={"fit_steps": 0, "through_trunk": False}), critic_reward)
    critic = stages.learner.critic
    filled(critic.head)
    before = weights(critic.own_trunk)
    stages.learn(stages.credited())
    assert not torch.equal(weights(critic.own_trunk), before)


def test_a_copy_of_an_adapted_policy_shares_what_is_frozen() -> None:
    policy = adapted_policy()
    critic = Critic(policy, CriticOptions(trunk="own"), seed=0)
    ours = dict(policy.model.named_parameters())
    for name, parameter in critic.trunk.model.named_parameters():
        assert (parameter is ours[name]) != parameter.requires_grad, name
    trained = [each for each in critic.parameter_group.parameters if each.ndim == 2]
    assert len(trained) == 2 * len(lora_layers(policy.model)) + 2  # A and B of each layer, two matrices of the head


@each_trunk
def test_an_adapted_policy_is_trained_with_a_critic(trunk: str) -> None:
    policy = adapted_policy()
    settings = LearnerSettings(update=UpdateOptions(learning_rate=1e-2), max_completion_tokens=LIMIT, num_steps=3)
    config = ppo(trunk, largest_epoch_kl=None)  # another policy samples, which is far from this one
    stages = stages_with(config, critic_reward)
    collected, stages = stages.collected(), replace(stages, learner=Learner(policy, build_algorithm(config), settings))
    frozen = {name: each.clone() for name, each in policy.model.named_parameters() if not each.requires_grad}
    adapter = parameters_to_vector([each for each in policy.model.parameters() if each.requires_grad])
    metrics = stages.learn(stages.learner.credit(collected, Clock()))
    assert metrics["num_updates"] == 8
    now = dict(policy.model.named_parameters())
    assert all(torch.equal(now[name], each) for name, each in frozen.items())
    moved = parameters_to_vector([each for each in policy.model.parameters() if each.requires_grad])
    assert not torch.equal(moved, adapter)


def test_the_policy_waits_until_the_critic_explains_returns_that_it_has_not_seen() -> None:
    stages = stages_with(ppo(critic={"fit_steps": 10, "rate_scale": 3.0}), critic_reward)
    before, told = weights(stages.policy), []
    for step in range(1, 7):
        credited = stages.credited(step)
        moved_before = not torch.equal(weights(stages.policy), before)
        metrics = stages.learn(credited)
        explained = credited.metrics["value/explained_variance"]
        told.append((credited.metrics["value/critic_alone"], explained > 1e-6))
        assert (metrics["grad_norm/policy"] > 0) == (told[-1][0] == 0)
        assert moved_before or (not torch.equal(weights(stages.policy), before)) == (told[-1][0] == 0)
    alone = [each for each, _ in told]
    assert alone[0] == 1.0
    assert alone[-1] == 0.0
    assert alone == sorted(alone, reverse=True)
    assert told[alone.index(0.0)][1]  # the first step in which it moved is one that the critic explained


def test_the_critic_is_alone_for_so_many_steps_at_most() -> None:
    """Rewards dealt out by the sampling seed's noise alone: nothing can be explained, and the policy moves anyway."""
    stages = stages_with(ppo(critic={"fit_steps": 2, "rate_scale": 1e-9}), critic_reward)
    alone = []
    for step in (1, 2, 3):
        credited = stages.credited(step)
        stages.learn(credited)
        alone.append(credited.metrics["value/critic_alone"])
    assert alone == [1.0, 1.0, 0.0]


def saved(learner: Learner) -> Checkpoint:
    trained = trained_by_reward(learner)
    trained.run.num_updates = learner.num_updates
    tensors = {stem: {name: each.clone() for name, each in named.items()} for stem, named in trained.tensors().items()}
    return Checkpoint(step=2, path=Path("step-2"), tensors=tensors, state=trained.state(), made_with={})


LASTING = {
    "kl": {"coefficient": 0.05, "estimator": "k1", "place": "reward"},
    "adaptive_kl": {"target": 0.01, "horizon": 50.0},
    "reward_scaling": {},
    "critic": {"fit_steps": 2},
}


@each_trunk
def test_a_restored_learner_takes_the_step_that_the_saved_one_took_bit_for_bit(trunk: str) -> None:
    config = {**LASTING, "name": "ppo", "critic": {**LASTING["critic"], "trunk": trunk}}
    first = stages_with(config, critic_reward)
    for step in (1, 2):
        first.learn(first.credited(step))
    checkpoint = saved(first.learner)
    checkpoint = replace(checkpoint, state=json.loads(json.dumps(checkpoint.state)))
    second = stages_with(config, critic_reward)
    trained_by_reward(second.learner).restore(checkpoint)
    new, *kept = (each.learner.actor_critic_state for each in (stages_with(config, critic_reward), first, second))
    assert new != kept[0] == kept[1]
    for stages in (first, second):
        stages.learn(stages.credited(3))
    theirs, ours = (trained_by_reward(each.learner).tensors() for each in (first, second))
    for stem, named in theirs.items():
        assert all(torch.equal(ours[stem][name], tensor) for name, tensor in named.items()), stem
    assert first.learner.actor_critic_state == second.learner.actor_critic_state


@each_trunk
def test_a_saved_critic_is_a_plain_folder_that_another_run_starts_from(trunk: str, tmp_path: Path) -> None:
    policy = policy_of(small_folder(tmp_path / "model"))
    critic = Critic(policy, CriticOptions(trunk=trunk), seed=0)
    filled(critic.head)
    for _ in range(2):  # the second replaces the first
        save_critic(critic.head, critic.own_trunk, tmp_path / "run" / "critic")
    (tmp_path / "run" / "critic").rename(tmp_path / "critic")
    again = Critic(policy, CriticOptions(trunk=trunk, path=str(tmp_path / "critic")), seed=1)
    assert again.begun
    assert not critic.begun
    assert (tmp_path / "critic" / "config.json").is_file() == (trunk == "own")
    for name, tensor in critic.tensors().items():
        torch.testing.assert_close(again.tensors()[name], tensor, rtol=0, atol=0)
    with refused("critic.head = linear", "algorithm.critic.path"):
        Critic(policy, CriticOptions(trunk=trunk, path=str(tmp_path / "critic"), head="linear"), seed=1)


def test_a_folder_for_a_head_on_the_policys_trunk_holds_such_a_head(tmp_path: Path) -> None:
    """A head that reads another model would be read on states that it has never seen, and no head is none."""
    policy = policy_of(small_folder(tmp_path / "model"))
    for path in (tmp_path / "nowhere", tmp_path / "model"):
        with refused("critic.path", path, "value_head.safetensors", "trunk = own"):
            Critic(policy, CriticOptions(path=str(path)), seed=0)
    apart = Critic(policy, CriticOptions(trunk="own"), seed=0)
    save_critic(apart.head, apart.own_trunk, tmp_path / "critic")
    with refused("critic.path", "the model in this folder", "critic.trunk = own"):
        Critic(policy, CriticOptions(trunk="shared", path=str(tmp_path / "critic")), seed=0)


def test_a_trunk_of_its_own_may_be_any_model_of_the_same_tokens_under_a_new_head(tmp_path: Path) -> None:
    policy = policy_of(small_folder(tmp_path / "model"))
    critic = Critic(policy, CriticOptions(trunk="own", path=str(small_folder(tmp_path / "other", seed=3))), seed=0)
    assert not critic.begun
    assert torch.equal(weights(critic.own_trunk), weights(policy_of(tmp_path / "other")))
    assert not torch.equal(weights(critic.own_trunk), weights(policy))
    assert all(each.requires_grad for each in critic.own_trunk.model.parameters())
    assert critic.head.output.weight.abs().max() == 0


def test_a_critic_of_another_shape_is_not_restored(tmp_path: Path) -> None:
    policy = policy_of(small_folder(tmp_path / "model"))
    linear, mlp = (Critic(policy, CriticOptions(head=kind), seed=0) for kind in ("linear", "mlp"))
    with refused("the critic", error=RunError):
        mlp.restore(linear.tensors())


def test_a_trunk_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    policy = policy_of(small_folder(tmp_path / "model"))
    other = small_folder(tmp_path / "other")
    tokenizer = new_tokenizer()
    tokenizer.add_tokens(["<aside>"])
    tokenizer.save_pretrained(other)
    with refused("algorithm.critic.path", "1 tokens differ", "<aside>"):
        Critic(policy, CriticOptions(trunk="own", path=str(other)), seed=0)


def policy_of(folder: Path) -> Policy:
    return load_policy(ModelOptions(path=str(folder)))


def test_an_optimiser_of_the_callers_knows_no_critic() -> None:
    policy = tiny_policy()
    own = OwnOptimizer(optimizer=torch.optim.SGD(policy.model.parameters(), lr=0.1))
    settings = LearnerSettings(update=UpdateOptions(), max_completion_tokens=8)
    with refused("optimizer", "ppo", "critic"):
        Learner(policy, build_algorithm({"name": "ppo"}), settings, own_optimizer=own)


def test_auto_shares_the_trunk_of_a_small_model_and_copies_a_large_one() -> None:
    assert not CriticOptions().has_own_trunk(99_999_999)
    assert CriticOptions().has_own_trunk(100_000_000)
    assert not CriticOptions(trunk="shared").has_own_trunk(10**10)
