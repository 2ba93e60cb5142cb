"""A run's memory: the plan beside peaks of whole processes, and what gradient checkpointing saves and leaves alike."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from posttrain.algorithms.table import build_algorithm
from posttrain.config import SftConfig
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.forward import Completions
from posttrain.models.loading.description import model_lines
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.memory.memory_parts import MemorySetup
from posttrain.models.memory.memory_plan import IMPORTED_BYTES, MemoryPlan
from posttrain.models.memory.model_shape import config_shape
from posttrain.models.model_outputs import enable_recomputation, is_recomputing, recomputing_layers
from posttrain.models.policy import Policy, as_policy
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.options.training import SftOptions
from posttrain.runs.planned_memory import sft_setup
from tests.support.every_family import small_config, small_model
from tests.support.memory_probe import PROMPT_TOKENS, __name__ as probe
from tests.support.model_folders import family_folder, small_folder
from tests.support.refusals import refused
from tests.support.tiny import request, some_prompts, tokenizer

MODEL = {"vocab_size": 400, "tie_word_embeddings": True, "max_position_embeddings": 512, "eos_token_id": 0}
GRPO = {"name": "grpo"}
WITH_REFERENCE = {"name": "grpo", "kl": {"coefficient": 0.1}}


def shape(
    hidden: int, mlp: int, layers: int, heads: tuple[int, int, int], rollout: tuple[int, int, int], tokens: int, **other
) -> dict:
    """Heads of queries, of keys and their width; prompts a step, completions of each and their length."""
    model = {**MODEL, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    model |= dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True))
    sampled = dict(zip(("prompts_per_step", "group_size", "max_completion_tokens"), rollout, strict=True))
    vocab, algorithm = other.get("vocab", 400), other.get("algorithm", GRPO)
    return {
        "model": {**model, "vocab_size": vocab},
        "rollout": sampled,
        "tokens_per_microbatch": tokens,
        "algorithm": algorithm,
    }


SHAPES = {
    "weights": shape(768, 2048, 3, (12, 4, 64), (2, 4, 8), 80, algorithm=WITH_REFERENCE),
    "activations": shape(256, 768, 4, (8, 4, 32), (2, 8, 64), 1024),
    "cache": shape(128, 256, 3, (32, 32, 64), (4, 8, 45), 130),
    "many heads": shape(64, 128, 4, (32, 32, 64), (2, 8, 30), 1024),
    "many heads of queries": shape(128, 256, 4, (32, 8, 64), (4, 8, 32), 512),
    "logits": shape(64, 128, 2, (4, 4, 16), (16, 16, 4), 2048, vocab=60_000),
}

OWN_TRUNK = {"name": "ppo", "critic": {"trunk": "own", "fit_steps": 0}}
SHARED_TRUNK = {"name": "ppo", "critic": {"trunk": "shared", "fit_steps": 0}, "kl": {"coefficient": 0.1}}
SHAPES["critic"] = shape(384, 1024, 3, (8, 4, 48), (8, 1, 12), 256, algorithm=OWN_TRUNK)
SHAPES["value head"] = shape(768, 1024, 2, (12, 4, 64), (4, 4, 16), 256, algorithm=SHARED_TRUNK)
SHAPES["adapter"] = {**shape(512, 1536, 3, (8, 4, 64), (2, 8, 24), 1024, algorithm=WITH_REFERENCE), "adapter_rank": 16}
SFT = {"max_length": 128, "tokens_per_batch": 1024, "tokens_per_microbatch": 512, "learning_rate": 1e-3}
SHAPES["rows"] = {"model": SHAPES["adapter"]["model"], "sft": SFT}
SHAPES["rows and an adapter"] = {**SHAPES["rows"], "adapter_rank": 16}


def planned_rows(given: dict) -> MemoryPlan:
    """By the function that plans recipes."""
    adapter = AdapterOptions(rank=given["adapter_rank"]) if "adapter_rank" in given else None
    policy = ModelOptions(path="m", adapter=adapter, device="cpu")
    config = SftConfig(model=policy, task=DatasetOptions(path="rows.jsonl"), sft=SftOptions(**given["sft"]))
    model = config_shape(Qwen3Config(**given["model"]))
    return MemoryPlan(model, sft_setup(config, model))


def planned(name: str) -> MemoryPlan:
    given = SHAPES[name]
    if "sft" in given:
        return planned_rows(given)
    rollout, algorithm = given["rollout"], build_algorithm(given["algorithm"])
    critic, model = algorithm.critic, config_shape(Qwen3Config(**given["model"]))
    setup = MemorySetup(
        reference=algorithm.uses_reference,
        critic=critic is not None and critic.has_own_trunk(model.parameters),
        value_head="none" if critic is None else critic.head,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=rollout["max_completion_tokens"],
        prompts_per_step=rollout["prompts_per_step"],
        group_size=rollout["group_size"],
        tokens_per_microbatch=given["tokens_per_microbatch"],
    )
    if "adapter_rank" in given:
        setup = setup.with_adapter(given["adapter_rank"])
    return MemoryPlan(model, setup)


def peaks(shapes: dict[str, dict]) -> dict[str, int]:
    ran = subprocess.run(
        [sys.executable, "-m", probe, json.dumps(shapes)], capture_output=True, text=True, timeout=250, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the process's memory is read from /proc")
def test_the_plan_is_within_a_fifth_of_the_measured_peak() -> None:
    """Of GRPO and SFT, in full and with an adapter, and of PPO; what was imported is taken off both.

    The plan is for an allocator whose free memory lies in pieces.  By chance it does not: 342 to 456 MB were measured
    of "many heads", and 354 to 428 of "cache".  What is further off is measured twice more: below the plan the most
    counts, above it the median.
    """
    plans = {name: planned(name).peak - IMPORTED_BYTES for name in SHAPES}
    measured = peaks(SHAPES)
    off = {name: SHAPES[name] for name, plan in plans.items() if abs(measured[name] - plan) > 0.2 * measured[name]}
    again = [peaks(off), peaks(off)] if off else []
    for name in off:
        found = sorted([measured[name], *(each[name] for each in again)])
        measured[name] = found[-1] if measured[name] < plans[name] else found[1]
    assert plans == {name: pytest.approx(peak, rel=0.2) for name, peak in measured.items()}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("weights", "optimizer"),
        ("activations", "activations"),
        ("cache", "key_value_cache"),
        ("logits", "logits"),
        ("critic", "critic"),
    ],
)
def test_each_shape_is_mostly_what_it_is_called(name: str, part: str) -> None:
    """Else the comparison would be of four times the same."""
    plan = planned(name)
    parts = {
        **plan.parts["always"],
        **plan.parts["updating" if plan.phases["updating"] == max(plan.phases.values()) else "sampling"],
    }
    assert max(parts, key=lambda each: parts[each]) == part


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system's own count is used")
def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    """getrusage counts both: a run started by a program of 400 MB would report at least that."""
    held = bytearray(400_000_000)
    held[::4096] = b"x" * len(held[::4096])
    program = "from posttrain.runs.progress import peak_memory_bytes; print(peak_memory_bytes())"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert int(ran.stdout) < 300_000_000


PROMPTS, COMPLETIONS, PROMPT_OF = [[1, 2, 3, 4], [5, 6]], [[3, 4, 5, 6, 7], [7, 8], [9, 10, 11]], [0, 0, 1]


LAYERS = {
    "gpt2": {"n_layer": 3},
    "mistral": {"num_hidden_layers": 3, "sliding_window": None},
    "opt": {"num_hidden_layers": 3, "dropout": 0.5},  # its layers themselves ask for training mode, and drop out by it
    "qwen3_moe": {"num_hidden_layers": 3},
}
each_family = pytest.mark.parametrize("family", LAYERS)


def policy_of(family: str, *, recompute: bool, dtype: str = "auto") -> Policy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small_config(family, **LAYERS[family]))
    if recompute:
        enable_recomputation(model)
    return as_policy(model, tokenizer(), forward="plain", dtype=dtype)  # type: ignore[arg-type]


def gradients(policy: Policy) -> tuple[dict[str, Tensor], int]:
    """The gradient of a sum over hidden states, and the numbers that the forward pass kept for it."""
    parameters = {id(parameter) for parameter in policy.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = policy.forward.completion_hidden(Completions(PROMPTS, COMPLETIONS, PROMPT_OF))
        loss = hidden.float().square().sum()
    loss.backward()
    found = {name: each.grad for name, each in policy.model.named_parameters() if each.grad is not None}
    return found, sum(kept.values())


@each_family
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_gradients_are_the_same_bits_and_less_is_kept(family: str, dtype: str) -> None:
    (expected, much), (found, little) = (
        gradients(policy_of(family, recompute=recompute, dtype=dtype)) for recompute in (False, True)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert little < 0.5 * much


@each_family
def test_the_model_stays_in_eval_mode_and_samples_as_before(family: str) -> None:
    plain, policy = policy_of(family, recompute=False), policy_of(family, recompute=True)
    prompts, asked = some_prompts([3, 7]), request(2, 6)
    expected = sample_groups(InProcessEngine(plain), prompts, asked)
    assert sample_groups(InProcessEngine(policy), prompts, asked) == expected
    gradients(policy)
    policy.require_as_made()
    assert not any(module.training for module in policy.model.modules())
    assert not any("forward" in vars(module) for module in policy.model.modules())
    assert sample_groups(InProcessEngine(policy), prompts, asked) == expected


def test_a_layer_that_fails_leaves_the_model_as_it_was() -> None:
    policy = policy_of("mistral", recompute=True)
    with pytest.raises(IndexError), recomputing_layers(policy.model):
        policy.model(input_ids=torch.tensor([[1000]]))
    policy.require_as_made()
    assert not any("forward" in vars(module) for module in policy.model.modules())


def test_without_gradients_nothing_is_wrapped() -> None:
    policy = policy_of("mistral", recompute=True)
    with torch.no_grad(), recomputing_layers(policy.model):
        assert not any("forward" in vars(module) for module in policy.model.modules())


def test_the_option_and_the_models_own_switch_are_the_same(tmp_path: Path) -> None:
    folder = str(family_folder(tmp_path / "model", "gpt2"))
    on, off = (
        load_policy(ModelOptions(path=folder, gradient_checkpointing=True)),
        load_policy(ModelOptions(path=folder)),
    )
    assert (is_recomputing(on.model), is_recomputing(off.model)) == (True, False)
    assert "layers computed again for gradients" in model_lines(on, "it")[0]
    with pytest.warns(FutureWarning):
        off.model.gradient_checkpointing_enable()
    again = as_policy(off.model, off.tokenizer)
    assert gradients(again)[1] == gradients(on)[1]


def test_the_quicker_pass_is_kept_with_layers_that_are_computed_again(tmp_path: Path) -> None:
    folder = str(small_folder(tmp_path / "model"))
    on, off = (load_policy(ModelOptions(path=folder, gradient_checkpointing=each)) for each in (True, False))
    assert (on.forward_reason, off.forward_reason) == (None, None)
    with pytest.warns(FutureWarning):
        off.model.gradient_checkpointing_enable()
    assert as_policy(off.model, off.tokenizer).forward_reason is None


def test_a_model_whose_layers_cannot_be_computed_again_is_refused() -> None:
    model = small_model("mistral")
    model.model.layers = torch.nn.ModuleList()
    with refused("the layers of a MistralForCausalLM cannot be computed again"):
        enable_recomputation(model)
