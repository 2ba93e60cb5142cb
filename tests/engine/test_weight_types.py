"""Types of weights and of arithmetic, frozen parts, devices, new models: what they change, and what they must not."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel, Qwen3ForCausalLM

from posttrain.algorithms.table import build_algorithm
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import gap_limit, largest_gap
from posttrain.models.forward import Completions
from posttrain.models.loading.description import model_lines
from posttrain.models.loading.devices import idle_gpu_lines, require_device_of
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.loading.saving import save_policy
from posttrain.models.memory.model_shape import recipe_shape
from posttrain.models.policy import Policy, as_policy, chosen_dtype
from posttrain.options.model import ModelOptions, NewModelOptions
from posttrain.options.training import UpdateOptions
from posttrain.runs.tensor_state import module_tensors
from posttrain.training.optimizer import new_optimizer, standing_still
from posttrain.training.update import Objective, update
from tests.support.model_folders import family_folder, small_folder
from tests.support.refusals import refused
from tests.support.tiny import batch_of, request, some_prompts, tiny_model, tokenizer

SHAPES = True
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
    with refused("weights = bfloat16 stores fewer digits than dtype = float32"):
        ModelOptions(weights="bfloat16", dtype="float32")
    with refused("context = 1: must be greater than 1"):
        ModelOptions(context=1)
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


CPU, FIRST, SECOND = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))


@pytest.mark.parametrize(("there", "asked"), [(CPU, "auto"), (CPU, "cpu"), (SECOND, "auto"), (SECOND, "cuda")])
def test_a_model_object_stays_where_it_is(there: torch.device, asked: str) -> None:
    require_device_of(there, asked)


@pytest.mark.parametrize(("there", "asked"), [(CPU, "cuda"), (FIRST, "cpu")])
def test_a_recipe_that_names_another_device_than_the_object_s_is_refused(there: torch.device, asked: str) -> None:
    with refused(f"model.device = {asked}", str(there), "auto"):
        require_device_of(there, asked)


def test_a_policy_on_the_cpu_beside_a_gpu_is_said_in_the_plan() -> None:
    [line] = idle_gpu_lines(CPU, gpu=True)
    assert "on the CPU, though torch sees a GPU" in line
    assert idle_gpu_lines(CPU, gpu=False) == idle_gpu_lines(FIRST, gpu=True) == []


SMALL = {"hidden_size": 16, "mlp_size": 24, "num_layers": 2, "num_heads": 2, "max_positions": 64}
GPT2 = NewModelOptions(family="gpt2", **SMALL)


def made(options: NewModelOptions, seed: int = 0) -> Policy:
    tokenizer = new_tokenizer()
    return as_policy(new_model(options, tokenizer, seed=seed), tokenizer)


def test_the_family_decides_the_architecture() -> None:
    assert isinstance(made(NewModelOptions(**SMALL)).model, Qwen3ForCausalLM)
    model = made(GPT2).model
    assert isinstance(model, GPT2LMHeadModel)
    assert model.transformer.wpe.weight.shape == (64, 16)
    assert model.transformer.h[1].mlp.c_fc.weight.shape == (16, 24)
    assert isinstance(model.transformer.ln_f, torch.nn.LayerNorm)
    assert {each.p for each in model.modules() if isinstance(each, torch.nn.Dropout)} == {0.0}
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_new_gpt2_goes_through_the_shared_prompt_pass_and_sampler_and_trainer_agree() -> None:
    policy = made(GPT2)
    assert not policy.forward.padded
    assert largest_gap(InProcessEngine(policy), longest=40) < 1e-4


def test_weights_are_a_function_of_the_seed_and_survive_a_folder(tmp_path: Path) -> None:
    one, again, other = (made(GPT2, seed).model.state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["transformer.wte.weight"], other["transformer.wte.weight"])
    policy = made(GPT2, 3)
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    loaded = load_policy(ModelOptions(path=str(tmp_path))).model.state_dict()
    assert all(torch.equal(one[name], loaded[name]) for name in one)


def test_the_memory_plan_counts_its_parameters() -> None:
    count = sum(each.numel() for each in made(GPT2).model.parameters())
    assert recipe_shape(GPT2).parameters == count


def test_key_heads_of_their_own_are_refused_for_gpt2() -> None:
    NewModelOptions(family="gpt2", num_heads=4, num_kv_heads=4)
    with refused("num_kv_heads = 1 is only for family = qwen3", "Leave it out"):
        NewModelOptions(family="gpt2", num_heads=4, num_kv_heads=1)


def test_a_tokenizer_for_text_has_plain_words_as_tokens_and_loses_nothing() -> None:
    tokenizer = new_tokenizer("text")
    assert [len(tokenizer.encode(text)) for text in ("The weather today is", "I think that")] == [4, 3]
    # Full stops and digits stay single: their number is that of their tokens.
    said = "It rained... Dr. Lee paid 12.5 £."
    assert tokenizer.decode(tokenizer.encode(said)) == said
    dots = tokenizer.encode("................")
    assert len(dots) == 16
    assert len(set(dots)) == 1
