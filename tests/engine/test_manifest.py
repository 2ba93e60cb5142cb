"""What a checkpoint holds of a run, and what was done to it since: damage is told, strays are passed over."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from posttrain.errors import RunError
from posttrain.options.training import CheckpointOptions, RunOptions, UpdateOptions
from posttrain.runs import checkpoint
from posttrain.runs.checkpoint import forget_after, load_latest, load_step, prune, save
from posttrain.runs.files import DamageError, manifest_from, read_manifest, saved_steps
from posttrain.runs.harness import Harness, HarnessOptions
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.tensor_state import like
from posttrain.training.learner import Learner, LearnerSettings
from posttrain.training.optimizer import OwnOptimizer
from posttrain.training.reference import FrozenCopy
from posttrain.training.session import trained_by_reward
from posttrain.training.sft.sft_run import SftState
from posttrain.training.trained import RunState, Trained
from tests.support.accidents import flip_bit
from tests.support.refusals import refused
from tests.support.stages import Stages, stages_with
from tests.support.tiny import tiny_policy, weights


def fill(folder: Path, *steps: int) -> None:
    for step in steps:
        save(folder, step, {"policy": {"w": torch.full((64,), float(step))}}, {"step": step})


WHOLE = {"step": 5, "score": None, "made_with": {"threads": 1, "torch": "2", "cpu": "x"}, "files": {}}
MISSHAPEN = {
    "a list": [1, 2],
    "a number": 7,
    "an empty object": {},
    "no files": {name: each for name, each in WHOLE.items() if name != "files"},
    "files in a list": WHOLE | {"files": []},
    "another step": WHOLE | {"step": 6},
    "a step in words": WHOLE | {"step": "5"},
    "no threads": WHOLE | {"made_with": {"torch": "2", "cpu": "x"}},
    "no cpu": WHOLE | {"made_with": {"threads": 1, "torch": "2"}},
    "a score in words": WHOLE | {"score": "1"},
    "a file elsewhere": WHOLE | {"files": {"../other": {"sha256": "0", "bytes": 1}}},
    "a file without hash": WHOLE | {"files": {"state.json": {"bytes": 1}}},
    "one file of two without hash": WHOLE
    | {"files": {"state.json": {"bytes": 1}, "policy.safetensors": {"bytes": 1, "sha256": "0" * 64}}},
}


@pytest.mark.parametrize("written", [1, 2])
@pytest.mark.parametrize("shape", MISSHAPEN)
def test_a_manifest_of_another_shape_is_damage_of_its_checkpoint(tmp_path: Path, shape: str, written: int) -> None:
    fill(tmp_path, 3, 5)
    content = MISSHAPEN[shape]
    if isinstance(content, dict):
        content = {"format": written, **content}
        if written == 2:
            text = json.dumps(content, sort_keys=True, separators=(",", ":"))
            content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "step-000005" / "manifest.json").write_text(json.dumps(content))
    with refused("step-000005/manifest.json: damaged:", "checkpoint is", "step-000003.", error=RunError):
        load_latest(tmp_path)


def test_no_bit_of_a_manifest_flips_unnoticed(tmp_path: Path) -> None:
    """Every bit of the file: it is told as damage, or what is read is the same."""
    save(tmp_path, 5, {"policy": {"w": torch.ones(2)}}, {}, score=0.25)
    path = tmp_path / "step-000005"
    whole, content = read_manifest(path), bytearray((path / "manifest.json").read_bytes())
    assert whole.score == 0.25
    unnoticed = []
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        try:
            if manifest_from(bytes(content), path.name) != whole:
                unnoticed.append(bit)
        except DamageError:
            pass
        content[bit // 8] ^= 1 << bit % 8
    assert unnoticed == []


def test_the_hash_of_a_manifest_is_of_its_content_in_whatever_order(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    file = tmp_path / "step-000005" / "manifest.json"
    content = json.loads(file.read_text())
    before = read_manifest(file.parent)
    file.write_text(json.dumps(dict(reversed(content.items()))))
    assert read_manifest(file.parent) == before


def test_a_folder_that_cannot_be_looked_into_is_not_taken_for_an_empty_one(tmp_path: Path, monkeypatch) -> None:
    """Root may look into all of them, so the answer of the system is put in."""
    (tmp_path / "step-000005").mkdir()
    assert list(saved_steps(tmp_path, empty=True)) == [5]
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.F_OK)
    assert list(saved_steps(tmp_path, empty=True)) == []


def test_a_manifest_of_an_earlier_version_has_no_hash_and_is_read(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    file = tmp_path / "step-000005" / "manifest.json"
    content = json.loads(file.read_text())
    del content["sha256"]
    file.write_text(json.dumps(content))
    with refused("SHA-256", error=RunError):  # of this version it would have one
        load_latest(tmp_path)
    file.write_text(json.dumps({**content, "format": 1}))
    assert load_latest(tmp_path).step == 5


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: os.truncate(file, 30)], ids=["missing", "cut"])
def test_an_older_checkpoint_without_its_manifest_does_not_end_a_healthy_run(tmp_path: Path, harm) -> None:
    fill(tmp_path, 5, 10, 15)
    harm(tmp_path / "step-000015" / "manifest.json")
    fill(tmp_path, 20)
    (wrong,) = prune(tmp_path, keep_last=2, keep_best=1)
    assert str(tmp_path / "step-000015" / "manifest.json") in wrong
    assert list(saved_steps(tmp_path)) == [10, 15, 20]  # it is none of the two that are of use, and may be mended


STRAY = ["step-000003-backup", "step-3", "step-000012 (copy)", "notes.txt", ".DS_Store", "step-000099", ".tmp-file"]


def test_what_somebody_else_put_beside_checkpoints_breaks_nothing(tmp_path: Path) -> None:
    fill(tmp_path, 5, 10)
    for name in STRAY:
        (tmp_path / name).write_text("mine")
    (tmp_path / "step-000020.bak").mkdir()
    (tmp_path / "step-000010" / "._policy.safetensors").write_text("of another system")
    saved = load_latest(tmp_path)
    assert (saved.step, list(saved.tensors)) == (10, ["policy"])
    fill(tmp_path, 15)
    prune(tmp_path, keep_last=1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*STRAY, "step-000020.bak", "step-000015"} - {".tmp-file"}


def test_any_good_checkpoint_can_be_gone_on_from_and_a_damaged_or_absent_one_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, 5, 10, 15)
    flip_bit(tmp_path / "step-000010" / "policy.safetensors")
    assert load_step(tmp_path, 5).state == {"step": 5}
    with refused("step-000010/policy", "checkpoint is", "step-000005.", "--from-step 5", error=RunError):
        load_step(tmp_path, 10)
    with refused("from_step = 7:", "no checkpoint of that step.", "one of 5, 10, 15."):
        load_step(tmp_path, 7)
    with refused("There is none"):
        load_step(tmp_path / "empty", 7)


def test_later_checkpoints_are_forgotten_damaged_or_not(tmp_path: Path) -> None:
    fill(tmp_path, 5, 10, 15)
    (tmp_path / "step-000010" / "manifest.json").unlink()
    assert forget_after(tmp_path, 5) == [10, 15]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]
    assert forget_after(tmp_path, 5) == []


def test_a_checkpoint_holds_the_recipe_that_it_was_made_with(tmp_path: Path) -> None:
    save(tmp_path, 5, {}, {}, recipe="run: {seed: 7}\n")
    saved = load_latest(tmp_path)
    assert saved.recipe == (tmp_path / "step-000005" / "config.yaml").read_text() == "run: {seed: 7}\n"
    (tmp_path / "step-000005" / "config.yaml").write_text("run: {seed: 8}\n")
    with refused("config.yaml: damaged: its SHA-256", error=RunError):
        load_latest(tmp_path)


WITH_KL = {"name": "grpo", "kl": {"coefficient": 0.1}}


def stages_of(refresh_every: int) -> Stages:
    """Policy, optimiser and reference are all of a seed that training has not touched."""
    made = stages_with(WITH_KL)
    settings = replace(made.learner.settings, refresh_reference_every=refresh_every)
    return replace(made, learner=Learner(made.policy, made.learner.algorithm, settings))


def saved_by(trained: Trained[RunState], folder: RunFolder) -> None:
    """As a run saves a step."""
    options = HarnessOptions(run=RunOptions(), checkpoint=CheckpointOptions(keep_last=2, keep_best=False))
    Harness(folder, trained, options).save(score=0.5)


@pytest.mark.parametrize("refresh_every", [0, 2])
def test_a_saved_run_goes_on_from_its_weights_momentum_counts_and_reference(tmp_path: Path, refresh_every: int) -> None:
    stages = stages_of(refresh_every)
    trained = trained_by_reward(stages.learner)
    with RunFolder.create(tmp_path / "run", "") as folder:
        for step in (1, 2, 3):
            stages.learn(stages.credited(step))
            trained.run.step, trained.run.num_updates = step, stages.learner.num_updates
            saved_by(trained, folder)
        assert sorted(saved_steps(folder.checkpoints)) == [2, 3]  # as many as are to be kept
        saved = load_latest(folder.checkpoints)
    # A reference that never changes is the model that training started from: no need to save it.
    assert ("reference" in saved.tensors) == bool(refresh_every)
    again = stages_of(refresh_every)
    resumed = trained_by_reward(again.learner)
    resumed.restore(saved)
    assert resumed.run == trained.run
    assert (resumed.step, again.learner.num_updates) == (3, 3)
    assert torch.equal(weights(again.policy), weights(stages.policy))
    expected = stages.learner.reference.policy if refresh_every else tiny_policy()
    assert torch.equal(weights(again.learner.reference.policy), weights(expected))
    # What comes next is the same to the bit, momentum and all.
    for one in (stages, again):
        one.learner.reference = FrozenCopy(tiny_policy())
        one.learn(one.credited(4))
    assert torch.equal(weights(again.policy), weights(stages.policy))


def test_without_a_reference_none_is_saved(tmp_path: Path) -> None:
    stages = stages_of(2)
    stages.learner.reference = None
    with RunFolder.create(tmp_path / "run", "") as folder:
        saved_by(trained_by_reward(stages.learner), folder)
        saved = load_latest(folder.checkpoints)
    assert set(saved.tensors) == {"policy", "optimizer"}


def test_what_was_a_tuple_is_one_again_and_a_list_stays_a_list() -> None:
    assert like([0.8, 0.95], (0.9, 0.999)) == (0.8, 0.95)
    assert like([1, 2], [3, 4]) == [1, 2]


def test_patience_is_counted_from_the_last_evaluation_that_beat_all_before() -> None:
    state, seen = RunState(), []
    for accuracy in (0.0, 0.3, 0.3, 0.2, 0.3, 0.4, 0.4):
        state.saw_evaluation(accuracy)
        seen.append((state.best_accuracy, state.evaluations_since_best))
    # As good as the best is not better than it.
    assert seen == [(0.0, 0), (0.3, 0), (0.3, 1), (0.3, 2), (0.3, 3), (0.4, 0), (0.4, 1)]


def test_the_seconds_of_stages_add_up_whichever_a_step_has() -> None:
    trained = trained_by_reward(stages_with(WITH_KL).learner)
    trained.add_seconds({"rollout": 2.0, "update": 0.5})
    trained.add_seconds({"rollout": 3.0, "grade": 0.25})
    assert trained.run.seconds == {"rollout": 5.0, "update": 0.5, "grade": 0.25}
    assert trained.seconds == 5.75


def test_the_seconds_of_an_earlier_version_s_supervised_run_are_those_of_its_updates() -> None:
    state = SftState()
    state.restore({"step": 3, "next_example": 12, "seconds": 1.5, "best_eval_loss": 2.0})
    state.add_seconds({"update": 0.5, "evaluate": 1.0})
    assert (state.step, state.first, state.best_eval_loss) == (3, 12, 2.0)
    assert state.seconds == {"update": 2.0, "evaluate": 1.0}


GRPO = {"name": "grpo"}
PPO = {"name": "ppo", "critic": {"fit_steps": 0}}


def trained(algorithm: Mapping[str, object], folder: Path) -> Stages:
    """The stages of a run with one step, and its checkpoint in a folder."""
    stages = stages_with(algorithm)
    stages.learn(stages.credited())
    saved(stages.learner, folder)
    return stages


def saved(learner: Learner, folder: Path) -> None:
    folder.mkdir()
    trained = trained_by_reward(learner)
    checkpoint.save(folder / "checkpoints", 1, trained.tensors(), trained.state())


def moments(learner: Learner, module: str) -> list[Tensor]:
    """What the optimiser keeps of a module's parameters, in order."""
    state, groups = learner.optimizer.state, learner.optimizer.param_groups
    parameters = [each for group in groups if group["module"] == module for each in group["params"]]
    return [state[each][entry] for each in parameters if each in state for entry in ("step", "exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize(("before", "after"), [(GRPO, GRPO), (GRPO, PPO), (PPO, GRPO), (PPO, PPO)])
def test_moments_go_on_in_the_modules_that_both_train(
    before: Mapping[str, object], after: Mapping[str, object], tmp_path: Path
) -> None:
    first, second = trained(before, tmp_path / "run").learner, stages_with(after)
    second.learner.load_optimizer_state(str(tmp_path / "run"))
    for module in ("policy", "critic"):
        theirs, ours = moments(first, module), moments(second.learner, module)
        both = module == "policy" or before is after is PPO
        assert len(ours) == (len(theirs) if both else 0)
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs if both else [], strict=True))
    assert moments(second.learner, "policy")[0] >= 1
    counts = moments(second.learner, "policy")[0].item()
    metrics = second.learn(second.credited())
    assert moments(second.learner, "policy")[0].item() == counts + metrics["num_updates"]


def test_an_optimiser_of_another_kind_is_refused_and_none_of_ones_own_is_touched(tmp_path: Path) -> None:
    policy = tiny_policy()
    settings = LearnerSettings(update=UpdateOptions(), max_completion_tokens=8)
    stages = stages_with(GRPO)
    momentum = torch.optim.SGD(policy.model.parameters(), lr=0.1, momentum=0.9)
    own = Learner(policy, stages.learner.algorithm, settings, own_optimizer=OwnOptimizer(optimizer=momentum))
    matrices, others = ([p for p in policy.model.parameters() if (p.ndim >= 2) == wide] for wide in (True, False))
    two = torch.optim.SGD([{"params": matrices}, {"params": others}], lr=0.1, momentum=0.9)
    for each in policy.model.parameters():
        each.grad = torch.ones_like(each)
    two.step()
    other = Learner(policy, stages.learner.algorithm, settings, own_optimizer=OwnOptimizer(optimizer=two))
    saved(other, tmp_path / "sgd")
    with refused("update.optimizer_from", "momentum_buffer", "AdamW"):
        stages.learner.load_optimizer_state(str(tmp_path / "sgd"))
    with refused("update.optimizer_from", "AdamW"):
        own.load_optimizer_state(str(tmp_path / "sgd"))


def test_an_optimiser_of_other_parameters_is_refused(tmp_path: Path) -> None:
    trained(GRPO, tmp_path / "run")
    settings = LearnerSettings(update=UpdateOptions(), max_completion_tokens=8)
    narrow = tiny_policy()
    for each in list(narrow.model.parameters())[:2]:
        each.requires_grad_(False)
    learner = Learner(narrow, stages_with(GRPO).learner.algorithm, settings)
    with refused("update.optimizer_from", "`policy`", "parameters"):
        learner.load_optimizer_state(str(tmp_path / "run"))
