"""Checkpoints: bit-exact, whole or absent whenever the process dies, and damage is told with the way out."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from posttrain.errors import RunError
from posttrain.runs import checkpoint as checkpoints
from posttrain.runs.checkpoint import claim_threads, forget_after, load_latest, prune, restore_threads, save
from posttrain.runs.files import TEMPORARY, saved_steps
from posttrain.runs.tensor_state import module_tensors, optimizer_tensors, restore_module, restore_optimizer
from tests.support.accidents import flip_bit
from tests.support.refusals import refused

SHAPES = True


class Tied(torch.nn.Module):
    """An embedding whose matrix is also the output head, as in many small models."""

    def __init__(self, seed: int, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(5, width)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)))


def adam(model: torch.nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))


def train(model: torch.nn.Module, optimizer: torch.optim.AdamW, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        tokens = torch.randint(5, (16,), generator=torch.Generator().manual_seed(step))
        torch.nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()


def assert_same_bits(left: torch.nn.Module, right: torch.nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def save_training(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.AdamW) -> Path:
    tensors, options = optimizer_tensors(optimizer)
    return save(folder, step, {"policy": module_tensors(model), "optimizer": tensors}, {"optimizer": options})


def resumed(folder: Path) -> tuple[Tied, torch.optim.AdamW]:
    saved = load_latest(folder)
    model = Tied(seed=99).to(saved.tensors["policy"]["embed.weight"].dtype)
    optimizer = adam(model)
    restore_module(model, saved.tensors["policy"])
    options = saved.state["optimizer"]
    assert isinstance(options, dict)
    restore_optimizer(optimizer, saved.tensors["optimizer"], options)
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_from_a_checkpoint_gives_the_bits_of_never_having_stopped(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = Tied(seed=1).to(dtype)
    train(whole, adam(whole), range(10))
    first = Tied(seed=1).to(dtype)
    optimizer = adam(first)
    train(first, optimizer, range(4))
    save_training(tmp_path, 4, first, optimizer)
    second, optimizer = resumed(tmp_path)
    assert_same_bits(first, second)
    assert second.head.weight is second.embed.weight
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    train(second, optimizer, range(4, 10))
    assert_same_bits(whole, second)


def test_an_optimizer_that_has_taken_no_step_can_be_saved(tmp_path: Path) -> None:
    model = Tied(seed=1)
    save_training(tmp_path, 0, model, adam(model))
    second, optimizer = resumed(tmp_path)
    train(second, optimizer, range(3))
    train(model, adam(model), range(3))
    assert_same_bits(model, second)


def test_training_on_leaves_the_loaded_checkpoint_as_it_was(tmp_path: Path) -> None:
    model = Tied(seed=1)
    optimizer = adam(model)
    train(model, optimizer, range(2))
    save_training(tmp_path, 2, model, optimizer)
    saved = load_latest(tmp_path)
    before = {name: tensor.clone() for name, tensor in saved.tensors["optimizer"].items()}
    options = saved.state["optimizer"]
    assert isinstance(options, dict)
    restore_optimizer(optimizer, saved.tensors["optimizer"], options)
    train(model, optimizer, range(2, 4))
    assert all(torch.equal(before[name], tensor) for name, tensor in saved.tensors["optimizer"].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_and_floats_keep_their_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([0.1, -0.0, 1e-30, 3.0], dtype=torch.float64).to(dtype)
    strided = torch.arange(6.0).reshape(2, 3).to(dtype).T
    state = {"seconds": 0.1 + 0.2, "step": 2**60, "best": None, "names": ["é", "\ud800"]}
    save(tmp_path, 1, {"any": {"values": values, "strided": strided}}, state)
    saved = load_latest(tmp_path)
    assert saved.tensors["any"]["values"].view(torch.uint8).tolist() == values.view(torch.uint8).tolist()
    assert torch.equal(saved.tensors["any"]["strided"], strided)
    assert saved.state == state


def test_a_model_of_another_shape_is_refused_before_anything_is_copied() -> None:
    model = Tied(seed=1)
    untouched = {name: tensor.clone() for name, tensor in module_tensors(model).items()}
    with refused("`embed.weight` has shape [5, 3] here and [5, 4] in the checkpoint", error=RunError):
        restore_module(model, module_tensors(Tied(seed=2, width=4)))
    missing = module_tensors(Tied(seed=2))
    del missing["norm.bias"]
    with refused("`norm.bias` has shape", "none in the checkpoint", error=RunError):
        restore_module(model, missing)
    with refused("the model: `extra` has shape none here", error=RunError):
        restore_module(model, {**module_tensors(Tied(seed=2)), "extra": torch.zeros(1)})
    assert all(torch.equal(untouched[name], tensor) for name, tensor in module_tensors(model).items())


def test_an_optimizer_of_another_recipe_is_refused() -> None:
    wide, narrow = Tied(seed=1, width=4), Tied(seed=1)
    optimizer = adam(wide)
    train(wide, optimizer, range(1))
    tensors, options = optimizer_tensors(optimizer)
    with refused("`0.exp_avg` has shape [5, 3] here and [5, 4]", error=RunError):
        restore_optimizer(adam(narrow), tensors, options)
    more = {f"{index}.exp_avg": torch.zeros(1) for index in (6, 5, 4, 3)}  # of three parameters
    with refused("the optimiser: `3.exp_avg` has shape none here", error=RunError):
        restore_optimizer(optimizer, {**tensors, **more}, options)
    with refused("parameter groups", error=RunError):
        restore_optimizer(torch.optim.AdamW(wide.parameters()), tensors, options)


def fill(folder: Path, *steps: int) -> None:
    for step in steps:
        save(folder, step, {"policy": {"w": torch.full((64,), float(step))}}, {"step": step})


def test_the_newest_finished_checkpoint_is_loaded_and_unfinished_ones_are_passed_over(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "absent") is load_latest(tmp_path) is None
    fill(tmp_path, 5, 10)
    (tmp_path / ".tmp-step-000015").mkdir()
    (tmp_path / ".tmp-step-000015" / "policy.safetensors").write_bytes(b"half")
    saved = load_latest(tmp_path)
    assert (saved.step, saved.path, saved.state) == (10, tmp_path / "step-000010", {"step": 10})
    fill(tmp_path, 15)
    assert not (tmp_path / ".tmp-step-000015").exists()


@pytest.mark.parametrize(
    ("file", "harm", "told"),
    [
        ("policy.safetensors", flip_bit, "SHA-256"),
        ("policy.safetensors", lambda file: os.truncate(file, 100), "100 bytes, but manifest.json says"),
        ("policy.safetensors", Path.unlink, "missing, but manifest.json lists it"),
        ("state.json", flip_bit, "SHA-256"),
        ("manifest.json", Path.unlink, "missing or not readable"),
        ("manifest.json", lambda file: os.truncate(file, 30), "damaged: not readable"),
    ],
)
def test_a_damaged_checkpoint_is_named_together_with_the_last_good_one(tmp_path: Path, file, harm, told) -> None:
    fill(tmp_path, 5, 10, 15, 20)
    flip_bit(tmp_path / "step-000015" / "policy.safetensors")
    harm(tmp_path / "step-000020" / file)
    with refused(f"step-000020/{file}:", f"{told}", "good checkpoint is", "step-000010.", error=RunError) as error:
        load_latest(tmp_path)
    assert f"\n    posttrain rl --resume {tmp_path.parent} --from-step 10\n" in str(error.value)
    with refused(f"posttrain sft --resume {tmp_path.parent} --from-step 10", error=RunError):
        load_latest(tmp_path, command="sft")


def test_a_damaged_only_checkpoint_says_that_there_is_no_other(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    flip_bit(tmp_path / "step-000005" / "policy.safetensors")
    with refused("There is no earlier", "--run.overwrite", error=RunError):
        load_latest(tmp_path)


def test_saving_a_step_again_replaces_a_damaged_checkpoint_and_leaves_a_good_one(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    written = (tmp_path / "step-000005" / "manifest.json").stat().st_mtime_ns
    fill(tmp_path, 5)
    assert (tmp_path / "step-000005" / "manifest.json").stat().st_mtime_ns == written
    flip_bit(tmp_path / "step-000005" / "policy.safetensors")
    fill(tmp_path, 5)
    assert load_latest(tmp_path).tensors["policy"]["w"][0] == 5.0


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step, score in enumerate([0.3, 0.9, 0.5, None, 0.9, 0.1]):
        save(tmp_path, step, {}, {}, score=score)
    (tmp_path / ".tmp-step-000009").mkdir()
    prune(tmp_path, keep_last=2, keep_best=2)
    assert list(saved_steps(tmp_path)) == [1, 4, 5]  # 4 is among the newest two and the best two
    prune(tmp_path, keep_last=1, keep_best=1)
    assert list(saved_steps(tmp_path)) == [4, 5]  # of equals the later
    prune(tmp_path, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_the_newest_is_that_of_the_largest_step_however_names_are_sorted(tmp_path: Path) -> None:
    fill(tmp_path, 999_998, 999_999, 1_000_000)  # by name the last one comes first
    assert load_latest(tmp_path).step == 1_000_000
    prune(tmp_path, keep_last=2)
    assert sorted(saved_steps(tmp_path)) == [999_999, 1_000_000]


def test_a_checkpoint_that_is_being_removed_is_no_longer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 5, 10)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, keep_last=1)
    monkeypatch.undo()
    assert list(saved_steps(tmp_path)) == [10]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith("step-000005")], "what is left has its name"
    fill(tmp_path, 15)
    prune(tmp_path, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000015"]


def test_a_checkpoint_can_be_removed_again_where_a_kill_left_half_of_it(tmp_path: Path) -> None:
    fill(tmp_path, 5, 10)
    shutil.copytree(tmp_path / "step-000010", tmp_path / f"{TEMPORARY}step-000010")
    assert forget_after(tmp_path, 5) == [10]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_the_thread_count_is_restored_and_another_one_is_refused(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        fill(tmp_path, 1)
        torch.set_num_threads(1)
        saved = load_latest(tmp_path)
        with claim_threads(0) as no_wish:
            assert restore_threads(saved, no_wish) == []
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
        with claim_threads(2) as the_same:
            assert restore_threads(saved, the_same) == []
        with claim_threads(1) as another, refused("run.threads = 1, but", "step-000001 was made with 2") as error:
            restore_threads(saved, another)
        assert error.value.exit_code == 2
    finally:
        torch.set_num_threads(before)


def test_a_thread_count_that_cannot_be_had_stops_the_resumed_run(tmp_path: Path, monkeypatch) -> None:
    fill(tmp_path, 1)
    saved = load_latest(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with claim_threads(0) as threads, refused("only uses 3", error=RunError):
        restore_threads(saved, threads)


def test_another_version_of_torch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 1)
    saved = load_latest(tmp_path)
    monkeypatch.setattr(checkpoints, "arithmetic", lambda: {**saved.made_with, "torch": "9.9"})
    with claim_threads(0) as threads:
        (note,) = restore_threads(saved, threads)
    assert "torch is 9.9 here" in note


def test_an_empty_folder_with_the_name_of_a_checkpoint_is_passed_over_until_it_is_filled(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "step-000009").mkdir()
    assert load_latest(tmp_path).step == 1
    fill(tmp_path, 9)
    assert load_latest(tmp_path).step == 9


def test_the_manifest_says_its_format_and_lists_files_in_order_which_sha256sum_can_check(tmp_path: Path) -> None:
    stems = ["zeta", "policy", "alpha", "optimizer", "beta"]
    folder = save(tmp_path, 3, {stem: {"w": torch.ones(1)} for stem in stems}, {}, score=0.25)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["score"]) == (2, 3, 0.25)
    assert list(manifest["files"]) == sorted([*(f"{stem}.safetensors" for stem in stems), "state.json"])
    lines = "".join(f"{entry['sha256']}  {name}\n" for name, entry in manifest["files"].items())
    subprocess.run(["sha256sum", "--check", "--strict"], cwd=folder, input=lines, text=True, check=True)


def test_a_state_that_json_cannot_hold_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(tmp_path, 3, {}, {"best": float("nan")})
    assert list(tmp_path.iterdir()) == []
