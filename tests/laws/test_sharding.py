"""1, 2 and 3 ranks take one step: the gradient of a sharded policy is that of a whole one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from posttrain.algorithms.table import ALGORITHMS
from posttrain.errors import UserError
from posttrain.models.model_outputs import enable_recomputation
from posttrain.models.policy import Policy, as_policy
from posttrain.models.sharding import can_be_sent, own_part, sharded, whole, whole_copy, whole_weights
from posttrain.options.model import AdapterOptions
from posttrain.records import Prompt
from posttrain.runs.progress import Clock
from posttrain.training.collector import CollectedStep
from posttrain.training.learner import Learner
from posttrain.training.optimizer import require_no_own
from tests.support.adapted import adapted_policy
from tests.support.ranks import MeshRanks, gradients, mesh_of, move, require_one_gradient, run_ranks, shared_by, trained
from tests.support.stages import Tokens, even_tokens, stages_with
from tests.support.tiny import some_prompts, through_its_own_forward, tiny_model, tiny_policy, tokenizer

RANKS = (2, 3)
K3 = {"coefficient": 0.1, "estimator": "k3", "place": "loss"}
CRITIC = {"fit_steps": 0}
LORA = AdapterOptions(rank=4, alpha=8)
TEACHER = {"weights": "start", "sees": "sibling", "template": "1{prompt}{shown}", "correct_from": 0.0}


@dataclass(frozen=True)
class Case:
    """A step of training that all numbers of ranks take."""

    algorithm: Mapping[str, object] = field(default_factory=lambda: {"name": "grpo", "kl": K3})
    policy: Callable[[], Policy] = tiny_policy
    tokens_per_microbatch: int = 40
    """Few enough for more micro-batches than ranks."""
    tolerance: float = 1e-12
    task: Callable[[], Tokens] = Tokens
    reward: Callable[..., Any] = even_tokens
    is_sent: bool = True
    """Whether ranks other than 0 begin without weights."""


class UnevenTokens(Tokens):
    """Prompts of very different lengths, so that micro-batches have from one to many rows."""

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        made = some_prompts([(2, 33, 3, 21, 9)[draw % 5] for draw in range(draws.stop)], seed=step)
        return [replace(made[draw], id=f"draw {draw}") for draw in draws]


def unscored(*kept: int) -> Callable[..., Any]:
    """Scores only the completions of these places in the step, so that groups have other numbers of them."""

    def reward(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float | None]:
        scores = even_tokens(completion_ids)
        return [score + 0.1 * place if place in kept else None for place, score in enumerate(scores)]

    return reward


def float64_lora(**options: Any) -> Policy:
    return adapted_policy(options=LORA, dtype=torch.float64, **options)


def with_frozen_parts() -> Policy:
    policy = tiny_policy("llama")
    policy.model.get_input_embeddings().requires_grad_(False)
    policy.model.model.layers[0].requires_grad_(False)
    policy.model.model.layers[1].mlp.up_proj.requires_grad_(False)
    return policy


def recomputing(forward: str) -> Policy:
    model = tiny_model("llama", exact=False)
    enable_recomputation(model)
    return as_policy(model, tokenizer(), forward=forward)


CASES = {
    **{name: Case({"name": name}) for name in ALGORITHMS if name not in ("ppo", "distill")},
    "grpo with KL k3": Case(),
    "grpo with the full KL": Case({"name": "grpo", "kl": {**K3, "estimator": "full"}}),
    "grpo with KL in the reward": Case({"name": "grpo", "kl": {**K3, "place": "reward"}}),
    "ppo": Case({"name": "ppo", "critic": CRITIC, "kl": {**K3, "estimator": "k1", "place": "reward"}}),
    "ppo, linear head, trunk apart from values": Case(
        {"name": "ppo", "critic": {**CRITIC, "head": "linear", "through_trunk": False}}
    ),
    "ppo with a trunk of the critic": Case({"name": "ppo", "critic": {**CRITIC, "trunk": "own"}, "kl": K3}),
    "distill": Case({"name": "distill", "teacher": TEACHER}),
    "distill whole distributions": Case({"name": "distill", "teacher": TEACHER, "signal": "full"}),
    "uneven lengths": Case(task=UnevenTokens),
    "uneven groups": Case({"name": "grpo"}, reward=unscored(0, 1, 2, 3, 5, 6, 9, 10, 11, 17)),
    "an empty rank": Case({"name": "grpo"}, reward=unscored(5, 6)),
    "an untied head": Case(policy=lambda: tiny_policy("llama")),
    "gemma2": Case(policy=lambda: tiny_policy("gemma2")),
    "transposed layers": Case(policy=lambda: tiny_policy("gpt2")),
    "the plain pass": Case(policy=lambda: through_its_own_forward(tiny_policy("llama"))),
    "the plain pass, for a model that has no other": Case(policy=lambda: tiny_policy("gpt2_plain")),
    "frozen parts": Case(policy=with_frozen_parts),
    "recomputation": Case(policy=lambda: recomputing("auto")),
    "recomputation in the plain pass": Case(policy=lambda: recomputing("plain")),
    "LoRA": Case(policy=float64_lora),
    "LoRA from the base": Case(policy=lambda: float64_lora(filled=False)),
    "LoRA in 4 bits": Case(policy=lambda: adapted_policy(options=LORA, nf4=True), tolerance=1e-5, is_sent=False),
    "LoRA and a trunk of the critic": Case({"name": "ppo", "critic": {**CRITIC, "trunk": "own"}}, float64_lora),
    "float32": Case(policy=lambda: tiny_policy(dtype=torch.float32), tolerance=1e-5),
    "bfloat16 products": Case(policy=lambda: tiny_policy("llama", torch.float32, compute="bfloat16"), tolerance=0.1),
    "a budget above the batch": Case(tokens_per_microbatch=10_000),
}


def modules_of(learner: Learner) -> Mapping[str, nn.Module]:
    return {"policy": learner.policy.model, **({} if learner.critic is None else dict(learner.critic.modules))}


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(own_part(each.detach()).nbytes for each in tensors)


def taken(learner: Learner, collected: CollectedStep) -> dict[str, Any]:
    """A step's credit, first gradient, and policy after all updates, by one rank or by this one of several."""
    modules = modules_of(learner)
    move(modules)
    credited = learner.credit(collected, Clock())
    batches = learner.batches(credited, Clock())
    found: dict[str, Any] = {"credit": {"advantages": batches[0].columns.advantages, **batches[0].columns.known}}

    def keep_gradients(*_: object) -> None:
        found.setdefault("gradients", gradients(modules))  # of the first update
        grads = [parameter.grad for parameter in trained(modules).values()]
        found["gradient bytes"] = bytes_of(grad for grad in grads if grad is not None)

    learner.optimizer.register_step_pre_hook(keep_gradients)
    report = learner.learn(batches, 1, Clock())[0]
    found["micro-batches"] = report.num_micro_batches
    found["numbers"] = {"loss": report.loss, "num_tokens": report.num_tokens, **report.grad_norms, **report.sums}
    moments = (each for state in learner.optimizer.state.values() for each in state.values() if each.ndim)
    found["bytes"] = {
        "gradients": found.pop("gradient bytes"),
        "parameters": bytes_of(learner.policy.model.parameters()),
        "moments": bytes_of(moments),
    }
    found["weights"] = {name: whole(each.detach()).clone() for name, each in trained(modules).items()}
    with torch.no_grad():
        found["sharded"] = learner.policy.completion_logprobs(batches[0])
        with whole_weights(learner.policy) as policy:
            found["gathered"] = policy.completion_logprobs(batches[0])
        copied = whole_copy(learner.policy)
        if copied is not None:
            found["copied"] = copied.completion_logprobs(batches[0])
    return found


def steps_of(rank: int) -> Mapping[Any, Any]:
    meshes = {size: mesh_of(size) for size in RANKS}
    found: dict[Any, Any] = {}
    for name, case in CASES.items():
        update = {"tokens_per_microbatch": case.tokens_per_microbatch, "max_grad_norm": 1e9}
        stages = stages_with(case.algorithm, case.reward, policy=case.policy(), task=case.task(), **update)
        collected, whole_learner = stages.collected(), stages.learner
        for size, mesh in meshes.items():
            if mesh is not None:
                policy = shared_by(mesh, case.policy(), is_sent=case.is_sent)
                learner = Learner(policy, whole_learner.algorithm, whole_learner.settings)
                found[name, size] = taken(learner, collected)
        if rank == 0:
            found[name, 1] = taken(whole_learner, collected)
    return found


@pytest.fixture(scope="module")
def steps() -> Mapping[Any, Any]:
    return run_ranks(max(RANKS), steps_of)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_take_one_step(steps: Mapping[Any, Any], name: str, size: int) -> None:
    one, several, tolerance = steps[name, 1], steps[name, size], CASES[name].tolerance
    require_one_gradient(one["gradients"], several["gradients"], tolerance)
    assert several["credit"].keys() == one["credit"].keys()
    for column, numbers in one["credit"].items():
        assert (several["credit"][column] - numbers).abs().max() <= 10 * tolerance, column
    assert several["numbers"] == pytest.approx(one["numbers"], rel=10 * tolerance, abs=10 * tolerance)
    for parameter, numbers in one["weights"].items():
        assert (several["weights"][parameter] - numbers).abs().max() <= max(1e-7, tolerance), parameter
    for weights in ("gathered", "sharded", "copied"):
        assert (several[weights] - one["copied"]).abs().max() <= max(1e-6, tolerance), weights


def test_a_rank_may_have_no_micro_batch(steps: Mapping[Any, Any]) -> None:
    assert steps["an empty rank", 3]["micro-batches"] < 3


@pytest.mark.parametrize("size", RANKS)
def test_a_batch_that_fits_in_one_micro_batch_is_split_for_all_ranks(steps: Mapping[Any, Any], size: int) -> None:
    assert steps["a budget above the batch", 1]["micro-batches"] == 1
    assert steps["a budget above the batch", size]["micro-batches"] >= size


@pytest.mark.parametrize("name", [name for name in CASES if "4 bits" not in name])
def test_two_ranks_hold_half_of_parameters_gradients_and_moments_each(steps: Mapping[Any, Any], name: str) -> None:
    """On rank 0, which has the larger part of an odd number of rows; there is more than one micro-batch."""
    for kind, whole_bytes in steps[name, 1]["bytes"].items():
        assert 0 < steps[name, 2]["bytes"][kind] <= 0.55 * whole_bytes, kind


def test_layers_in_4_bits_stay_whole_and_their_adapters_are_split(steps: Mapping[Any, Any]) -> None:
    one, two = (steps["LoRA in 4 bits", size]["bytes"] for size in (1, 2))
    assert two["moments"] <= 0.55 * one["moments"]
    assert two["gradients"] <= 0.55 * one["gradients"]
    assert two["parameters"] < one["parameters"]


class NoMesh:
    """Is not looked at before a refusal."""

    device_type = "cpu"

    def get_local_rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def refused_to_shard(policy: Policy) -> str:
    with pytest.raises(UserError) as refusal:
        sharded(replace(policy, ranks=MeshRanks(NoMesh())))
    return str(refusal.value)


def test_a_policy_that_cannot_be_split_is_refused() -> None:
    class OwnForward:
        padded = False

        def completion_logprobs(self, batch: object, needs: object) -> None: ...

    own = replace(tiny_policy(), forward=OwnForward())
    assert "its forward pass is a OwnForward, which cannot be sharded.  Use one rank" in refused_to_shard(own)
    mixed = tiny_policy("llama")
    mixed.model.lm_head.float()
    assert "its trained weights have 2 types (float32, float64)" in refused_to_shard(mixed)
    scalar = tiny_policy("llama")
    scalar.model.model.register_parameter("scale", nn.Parameter(torch.ones((), dtype=torch.float64)))
    assert "its weight model.scale is one number" in refused_to_shard(scalar)
    hooked = as_policy(tiny_model("llama", exact=False), tokenizer())
    hooked.model.model.register_forward_hook(lambda *_: None)
    assert "has a hook" in refused_to_shard(hooked)


def test_a_tokenizer_with_code_of_its_own_is_loaded_by_every_rank() -> None:
    class OwnTokenizer(PreTrainedTokenizerFast): ...

    policy = as_policy(tiny_model("llama", exact=False), tokenizer())
    assert can_be_sent(policy)
    assert not can_be_sent(replace(policy, tokenizer=OwnTokenizer(tokenizer_object=tokenizer().backend_tokenizer)))


def test_an_optimiser_over_whole_weights_is_refused_with_several_ranks() -> None:
    with pytest.raises(UserError, match="hold whole weights, but several ranks split"):
        require_no_own(object())
    require_no_own(None)
