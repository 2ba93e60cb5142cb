"""Types of weights and of arithmetic, and parts that are not trained: what they change, and what they must not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.algorithms.table import build_algorithm
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import gap_limit, largest_gap
from posttrain.models.forward import Completions
from posttrain.models.loading.description import model_lines
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.saving import save_policy
from posttrain.models.policy import Policy, as_policy, chosen_dtype
from posttrain.options.model import ModelOptions
from posttrain.options.training import UpdateOptions
from posttrain.runs.tensor_state import module_tensors, optimizer_tensors, restore_module, restore_optimizer
from posttrain.training.optimizer import new_optimizer, standing_still
from posttrain.training.update import Objective, update
from tests.support.model_folders import family_folder, small_folder
from tests.support.refusals import refused
from tests.support.tiny import batch_of, request, some_prompts, tiny_model, tokenizer

BF16 = torch.bfloat16


def loaded(folder: Path, **options: object) -> Policy:
    return load_policy(ModelOptions(path=str(folder), **options))  # type: ignore[arg-type]


def step(policy: Policy, optimizer: torch.optim.Optimizer, number: int, rate: float = 1e-2) -> None:
    """Sample with the policy and take one update on what it sampled."""
    algorithm = build_algorithm({"name": "reinforce"})
    groups = sample_groups(InProcessEngine(policy), some_prompts([3, 6], seed=number), request(3, 8))
    batch = batch_of(groups, [[1.0, -0.5, 0.25]] * 2, algorithm)
    update(policy, optimizer, batch, Objective(algorithm=algorithm, temperature=1.0), UpdateOptions(), rate)


@pytest.mark.parametrize(
    ("name", "weights", "device", "expected"),
    [
        ("auto", torch.float32, "cpu", torch.float32),
        ("auto", torch.float32, "cuda", BF16),
        ("auto", BF16, "cpu", BF16),
        ("auto", torch.float64, "cuda", torch.float64),
        ("bfloat16", torch.float32, "cpu", BF16),
        ("float32", torch.float32, "cuda", torch.float32),
        ("float32", torch.float64, "cpu", torch.float64),
    ],
)
def test_the_type_of_products_follows_device_and_weights(
    name: str, weights: torch.dtype, device: str, expected: torch.dtype
) -> None:
    assert chosen_dtype(name, weights, torch.device(device)) == expected


def test_float32_is_refused_where_the_weights_are_narrower(tmp_path: Path) -> None:
    with refused("dtype = float32", "weights are bfloat16"):
        as_policy(tiny_model("qwen3", BF16, exact=False), tokenizer(), dtype="float32")
    with refused("weights = bfloat16 with dtype = float32"):
        ModelOptions(weights="bfloat16", dtype="float32")
    with refused("dtype = half", "bfloat16"):
        chosen_dtype("half", torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
def test_weights_in_bfloat16_take_half_the_memory_and_train_as_they_sample(family: str, tmp_path: Path) -> None:
    folder = family_folder(tmp_path / "model", family, dtype=BF16)
    narrow, wide = loaded(folder, weights="bfloat16"), loaded(folder, dtype="bfloat16")
    assert {each.dtype for each in narrow.model.parameters()} == {BF16} == {narrow.compute_dtype}
    assert {each.dtype for each in wide.model.parameters()} == {torch.float32}
    assert narrow.model.get_memory_footprint() < 0.6 * wide.model.get_memory_footprint()
    assert largest_gap(InProcessEngine(narrow), 40) < gap_limit(narrow)
    before = module_tensors(narrow.copy().model)
    step(narrow, new_optimizer(narrow.model.parameters(), UpdateOptions()), 1)
    assert any(not torch.equal(before[name], value) for name, value in module_tensors(narrow.model).items())
    save_policy(narrow, tmp_path / "saved")
    again = loaded(tmp_path / "saved", weights="bfloat16")
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), narrow.model.parameters(), strict=True))


def test_a_run_with_bfloat16_weights_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    folder = family_folder(tmp_path / "model", "qwen3", dtype=BF16)
    whole = loaded(folder, weights="bfloat16")
    optimizer = new_optimizer(whole.model.parameters(), UpdateOptions())
    step(whole, optimizer, 1)
    weights = {name: value.clone() for name, value in module_tensors(whole.model).items()}
    tensors, state = optimizer_tensors(optimizer)
    tensors = {name: value.clone() for name, value in tensors.items()}
    step(whole, optimizer, 2)

    resumed = loaded(folder, weights="bfloat16")
    restored = new_optimizer(resumed.model.parameters(), UpdateOptions())
    restore_module(resumed.model, weights)
    restore_optimizer(restored, tensors, state)
    step(resumed, restored, 2)
    expected, found = module_tensors(whole.model), module_tensors(resumed.model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    expected, found = optimizer_tensors(optimizer)[0], optimizer_tensors(restored)[0]
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in expected.items())


def test_the_share_of_weights_that_a_step_leaves_standing_is_counted() -> None:
    # Between 1 and 2 numbers of bfloat16 are 2^-7 apart, below 1 half that: a step moves w = 1.5 from 2^-8 = .0039 on,
    # w = .75 from 2^-9 = .00195, w = .375 from 2^-10 = .00098.
    parameter = torch.nn.Parameter(torch.tensor([1.5, 0.75, -0.375, 0.0], dtype=BF16))
    for rate, share in ((0.005, 0.0), (0.003, 0.25), (0.0015, 0.5), (0.0005, 0.75)):
        assert standing_still([parameter], rate) == share
        moved = (parameter.detach() - torch.full_like(parameter, rate).copysign(-parameter.detach())) != parameter
        assert 1 - moved.double().mean().item() == share  # what rounding does to a step away from 0
    assert standing_still([torch.nn.Parameter(torch.ones(3))], 1e-6) == 0
    assert standing_still([parameter, torch.nn.Parameter(torch.ones(4))], 0.0005) == 0.375
    frozen = torch.nn.Parameter(torch.ones(3, dtype=BF16), requires_grad=False)
    assert standing_still([frozen], 1e-6) == 0


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
def test_frozen_parameters_stay_and_the_others_move(family: str, tmp_path: Path) -> None:
    frozen = {"qwen3": ("*.embed_tokens.*", "*.layers.0.*"), "gpt2_plain": ("*.wte.*", "*.h.0.*")}[family]
    policy = loaded(family_folder(tmp_path / "model", family), frozen=frozen)
    before = {name: each.detach().clone() for name, each in policy.model.named_parameters()}
    step(policy, new_optimizer(policy.model.parameters(), UpdateOptions()), 1)
    for name, parameter in policy.model.named_parameters():
        stays = "embed_tokens" in name or "wte" in name or ".layers.0." in name or ".h.0." in name
        assert parameter.requires_grad != stays
        assert torch.equal(parameter, before[name]) == stays
    total = sum(each.numel() for each in policy.model.parameters())
    trained = sum(each.numel() for each in policy.model.parameters() if each.requires_grad)
    assert f"{total / 1e6:.2f} M parameters ({trained / 1e6:.2f} M trained)" in model_lines(policy, "it")[0]


def test_a_tied_parameter_is_frozen_by_either_name(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    by_head, by_embedding = loaded(folder, frozen=("lm_head.*",)), loaded(folder, frozen=("*embed_tokens*",))
    for policy in (by_head, by_embedding):
        assert not policy.model.get_input_embeddings().weight.requires_grad


def test_patterns_that_freeze_nothing_or_everything_are_refused(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "model")
    with refused("model.frozen: no parameter is named *.h.0.*", "embed"):
        loaded(folder, frozen=("*.h.0.*",))
    with refused("model.frozen = * leaves no parameter to train"):
        loaded(folder, frozen=("*",))
    policy = loaded(folder)
    policy.model.requires_grad_(False)
    with refused("every parameter is frozen"):
        new_optimizer(policy.model.parameters(), UpdateOptions())


@pytest.mark.parametrize("family", ["qwen3", "gpt2_plain"])
def test_frozen_matrices_that_are_stored_in_bfloat16_are_held_in_it_and_no_number_changes(
    family: str, tmp_path: Path
) -> None:
    folder = family_folder(tmp_path / "model", family, dtype=BF16)
    pattern = {"qwen3": "*.layers.1.*", "gpt2_plain": "*.h.1.*"}[family]
    held = loaded(folder, dtype="bfloat16", frozen=(pattern,))
    wide = loaded(folder, dtype="bfloat16")
    for name, parameter in held.model.named_parameters():
        narrow = not parameter.requires_grad and parameter.ndim == 2
        assert parameter.dtype == (BF16 if narrow else torch.float32), name
    prompts, asked = some_prompts([4, 9]), request(3, 10)
    assert sample_groups(InProcessEngine(held), prompts, asked) == sample_groups(InProcessEngine(wide), prompts, asked)
    tokens = ([3, 4, 5], [7, 8])
    hidden = [each.forward.completion_hidden(Completions([[1, 2]], tokens, [0, 0])) for each in (held, wide)]
    assert torch.equal(*hidden)
    save_policy(held, tmp_path / "saved")
    assert {each.dtype for each in loaded(tmp_path / "saved", weights="bfloat16").model.parameters()} == {BF16}


def test_frozen_matrices_keep_bits_that_only_float32_has(tmp_path: Path) -> None:
    policy = loaded(family_folder(tmp_path / "model", "qwen3"), dtype="bfloat16", frozen=("*.layers.1.*",))
    assert {each.dtype for each in policy.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("stored", [BF16, torch.float32])
def test_the_stored_type_is_read_off_the_weights_where_the_config_does_not_say(
    stored: torch.dtype, tmp_path: Path
) -> None:
    from tests.support.model_folders import changed

    folder = family_folder(tmp_path / "model", "qwen3", dtype=stored)
    changed(folder / "config.json", dtype=None, torch_dtype=None)
    assert loaded(folder).stored_dtype == stored


def test_a_context_that_is_asked_for_bounds_prompt_and_completion(tmp_path: Path) -> None:
    folder = family_folder(tmp_path / "model", "qwen3")
    policy = loaded(folder, context=10)
    assert (policy.max_positions, loaded(folder).max_positions) == (10, 64)
    policy = replace(policy, stop_ids=(10_000,))  # so that nothing but the context ends a completion
    groups = sample_groups(InProcessEngine(policy), some_prompts([4]), request(2, 50))
    assert {len(rollout.tokens) for rollout in groups[0].rollouts} == {6}
    with refused("context = 1: must be greater than 1"):
        ModelOptions(context=1)
