"""Several ranks by the real commands: the same run as one process, and one end for all where a rank fails."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain.ranks.group import Dealt, RankGroup
from posttrain.runs.run_steps import StartOptions
from tests.support.accidents import Accident
from tests.support.rank_runs import WAITING, by_ranks, ended_ranks, environments, start_ranks
from tests.support.runs import command, metrics_of, rollout_rows, save_tiny_model, start, start_program, tiny_recipe

SAMPLED = ("prompt_id", "tokens", "logprobs", "reward", "advantage")
SMALL = {"update": {"tokens_per_microbatch": 128}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ranks")
    save_tiny_model(place / "model")
    return place


@pytest.fixture(scope="module")
def of_two(folder: Path) -> Path:
    """A run by two ranks."""
    ended = by_ranks("rl", tiny_recipe(folder / "two", **SMALL, run={"keep_token_columns": True}), folder=folder)
    assert ended.code == 0, ended.err
    return folder / "two" / "run"


def weights(run: Path) -> Mapping[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def largest_difference(run: Path, other: Path) -> float:
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def test_two_ranks_sample_the_same_tokens_and_train_the_same_weights_as_one(folder: Path, of_two: Path) -> None:
    ended = command("rl", tiny_recipe(folder / "one", **SMALL, run={"keep_token_columns": True}), folder=folder)
    assert ended.code == 0, ended.err
    one = folder / "one" / "run"
    for step in range(1, 5):
        for ours, theirs in zip(rollout_rows(one, step), rollout_rows(of_two, step), strict=True):
            same = [name for name in ours if "logprob" not in name]
            assert [ours[name] for name in same] == [theirs[name] for name in same]
            assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-5)
        kept = [rollout_rows(run, step, "token_columns") for run in (one, of_two)]
        for ours, theirs in zip(*kept, strict=True):
            assert all(ours[name] == theirs[name] for name in ("update", "draw", "sample"))
            assert ours["policy_logprobs"] == pytest.approx(theirs["policy_logprobs"], abs=1e-4)
        assert sum(row["update"] is None for row in kept[0]) == len(rollout_rows(one, step))
    assert largest_difference(one, of_two) < 1e-6
    for ours, theirs in zip(metrics_of(one), metrics_of(of_two), strict=True):
        for name in ("reward", "kl_behaviour", "loss", "grad_norm", "eval/accuracy_sampled", "eval/mean_length"):
            assert (name in ours) == (name in theirs)
            assert name not in ours or ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
    manifest = json.loads((of_two / "checkpoints" / "step-000004" / "manifest.json").read_text())
    assert manifest["made_with"]["ranks"] == 2
    assert sum(name.startswith("shard-") for name in manifest["files"]) == 2


def test_a_killed_rank_ends_all_and_the_run_resumes_to_the_same_bits(folder: Path, of_two: Path) -> None:
    place = folder / "killed"
    recipe = tiny_recipe(place, **SMALL, rewards=[{"path": f"{place}/waiting.py:patient"}])
    (place / "waiting.py").write_text(WAITING)
    started = start_ranks("rl", recipe, folder=place)
    started[0].wait_until((place / "in_step_3").exists)
    started[1].signal(signal.SIGKILL)
    killed = time.monotonic()
    (place / "go").touch()
    first, other = ended_ranks(started)
    assert time.monotonic() - killed < 10
    assert (first.code, other.code) == (1, -signal.SIGKILL)
    assert "step 3: rank 1 died without a message" in first.err
    assert "step-000002" in first.err
    ended = by_ranks("rl", "--resume", place / "run", folder=place)
    assert ended.code == 0, ended.err
    assert largest_difference(place / "run", of_two) == 0
    for step in range(1, 5):
        for ours, theirs in zip(rollout_rows(place / "run", step), rollout_rows(of_two, step), strict=True):
            assert [ours[name] for name in SAMPLED] == [theirs[name] for name in SAMPLED]


def test_a_run_of_two_ranks_is_not_replayed(folder: Path, of_two: Path) -> None:
    ended = command("replay", of_two, folder=folder)
    assert ended.code == 2
    assert "was made by 2 ranks.  A replay runs in one process" in ended.err


def test_a_checkpoint_of_two_ranks_is_resumed_by_one_and_back(folder: Path, of_two: Path) -> None:
    run = folder / "two" / "run"
    ended = command("rl", "--resume", run, "--from-step", "2", folder=folder)
    assert ended.code == 0, ended.err
    assert "ranks is 1 here, but was 2 when the checkpoint was made" in ended.out
    once = weights(run)
    ended = by_ranks("rl", "--resume", run, "--from-step", "4", "--run.num-steps", "5", folder=folder)
    assert ended.code == 0, ended.err
    assert "ranks is 2 here, but was 1" in ended.out
    whole = tiny_recipe(folder / "five", **SMALL, run={"num_steps": 5})
    assert command("rl", whole, folder=folder).code == 0
    assert largest_difference(folder / "five" / "run", run) < 1e-6
    assert max((once[name] - each).abs().max().item() for name, each in weights(run).items()) > 1e-4


def test_ranks_with_other_settings_are_refused(folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "run", model={"path": str(folder / "model")})
    first, other = ended_ranks(start_ranks("rl", recipe, folder=tmp_path, last=("--update.learning-rate", "0.5")))
    assert "the settings of rank 1 differ" in first.err
    assert (first.code, other.code) == (1, 1)
    assert "Traceback" not in first.err + other.err


OWN_POLICY = """
import os
os.environ.update({environment!r})
import posttrain
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained({model!r}) for kind in (AutoModelForCausalLM, AutoTokenizer))
posttrain.train(posttrain.load_recipe({recipe!r}), policy=posttrain.as_policy(model, tokenizer))
"""


def test_ranks_whose_own_policies_have_other_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    recipe, started = tiny_recipe(tmp_path / "run", model={"path": str(folder / "model")}), []
    for rank, environment in enumerate(environments(2)):
        (logs := tmp_path / f"rank-{rank}").mkdir()
        model = str(save_tiny_model(logs / "model", seed=rank))
        program = OWN_POLICY.format(environment=environment, model=model, recipe=str(recipe))
        started.append(start_program(program, folder=tmp_path, logs=logs))
    ended = ended_ranks(started)
    assert "the weights of rank 1 differ from those of rank 0" in ended[0].err
    assert all(each.code for each in ended)


def test_only_the_first_rank_reads_models(folder: Path, tmp_path: Path) -> None:
    """The other one has neither the model nor the reference, and trains both."""
    kl = {"algorithm": {"kl": {"coefficient": 0.1}}, "reference": {"path": "reference"}}
    recipe = tiny_recipe(tmp_path / "run", model={"path": str(folder / "model")}, **kl, run={"num_steps": 1})
    save_tiny_model(tmp_path / "reference", seed=1)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    first, second = environments(2)
    started = [
        start("rl", recipe, folder=tmp_path, environment=first),
        start("rl", recipe, "--model.path", "nowhere", folder=elsewhere, environment=second),
    ]
    ended = ended_ranks(started, timeout=200)
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    assert metrics_of(tmp_path / "run" / "run")[-1]["kl"] > 1e-3  # of the policy itself it is 0 before the first update


def test_a_full_disk_of_rank_1_ends_both_with_one_message(folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "run", model={"path": str(folder / "model")})
    started = []
    for rank, environment in enumerate(environments(2)):
        (logs := tmp_path / f"rank-{rank}").mkdir()
        full = Accident(largest_file=20_000 if rank else None)
        started.append(start("rl", recipe, folder=tmp_path, logs=logs, environment=environment, accident=full))
    first, other = ended_ranks(started)
    assert "step-000002: cannot be written: File too large (rank 1).  Kept: " in first.err
    assert "Traceback" not in first.err + other.err
    assert (first.code, other.code) == (1, 1)


def test_ranks_that_share_no_network_name_the_variable_that_chooses_one(folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "run", model={"path": str(folder / "model")})
    first, _ = environments(2)
    apart = {**first, "GLOO_SOCKET_IFNAME": "no-such-network"}
    ended = start("rl", recipe, folder=tmp_path, environment=apart).ended()
    assert ended.code == 1
    assert "cannot connect to each other" in ended.err
    assert "Set GLOO_SOCKET_IFNAME" in ended.err
    assert "Traceback" not in ended.err


class RestartedRanks(RankGroup):
    """Ranks whose earlier attempt had begun the run."""

    def has_begun(self) -> bool:
        return True


def test_restarted_ranks_resume_from_the_last_checkpoint_and_not_from_the_step_of_the_command() -> None:
    again = StartOptions(resume=True, from_step=10).now(RestartedRanks())
    assert (again.resume, again.from_step) == (True, None)
    first = StartOptions(resume=True, from_step=10).now(RankGroup())
    assert (first.resume, first.from_step) == (True, 10)
    assert StartOptions().now(RestartedRanks()).resume


RESTARTED = """
import os, signal, sys
from posttrain.runs.progress import Progress

def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    Progress.compare_with = killed  # the folder is there, and no step is
from posttrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_killed_before_its_first_step_is_restarted_by_torchrun(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(RESTARTED)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    few = ["--run.num-steps", "2", "--sft.eval-size", "4", "--run.curves", "false", "--run.threads", "1"]
    argv = [sys.executable, *launch, program, "sft", "--model.path", folder / "model", *few]
    ended = subprocess.run([*argv, "--run.folder", tmp_path / "run"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "No checkpoint yet: the run starts from the beginning." in ended.stdout


REVERSED = """
import os, sys
os.environ.update({environment!r})
from posttrain.training.learner import Learner

batches = Learner.batches
Learner.batches = lambda *given: batches(*given)[::-1]
from posttrain.cli import main
sys.exit(main(["rl", {recipe!r}]))
"""


@pytest.mark.parametrize("warm", [False, True], ids=["updates", "the critic's first updates"])
def test_ranks_with_other_batches_are_refused(folder: Path, of_two: Path, tmp_path: Path, warm: bool) -> None:
    ppo = {"name": "ppo", "critic": {"warm_start": str(of_two / "rollouts")}}
    sections = {"update": {"minibatches_per_epoch": 2}, "algorithm": ppo if warm else {"name": "grpo"}}
    recipe = tiny_recipe(tmp_path / "run", model={"path": str(folder / "model")}, **sections)
    first, second = environments(2)
    (logs := tmp_path / "second").mkdir()
    started = [
        start("rl", recipe, folder=tmp_path, environment=first),
        start_program(REVERSED.format(environment=second, recipe=str(recipe)), folder=tmp_path, logs=logs),
    ]
    ended = ended_ranks(started)
    assert ("step 1: " in ended[0].err) == (not warm)
    assert "the batches of rank 1 differ" in ended[0].err
    assert [each.code for each in ended] == [1, 1]


BROKEN = """
import os, sys
os.environ.update({environment!r})
from posttrain.errors import RunError
from posttrain.training.learner import Learner

def batches(*_):
    raise RunError("this rank cannot go on.  Mend it.")

Learner.batches = batches
from posttrain.cli import main
sys.exit(main(["rl", {recipe!r}]))
"""


def test_an_error_of_rank_1_is_told_by_rank_0_and_ends_both(folder: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "run", model={"path": str(folder / "model")})
    first, second = environments(2)
    broken = BROKEN.format(environment=second, recipe=str(recipe))
    logs = [tmp_path / "first", tmp_path / "second"]
    for log in logs:
        log.mkdir()
    started = [
        start("rl", recipe, folder=tmp_path, logs=logs[0], environment=first),
        start_program(broken, folder=tmp_path, logs=logs[1]),
    ]
    ended = ended_ranks(started)
    assert "posttrain: step 1: rank 1: this rank cannot go on.  Mend it." in ended[0].err
    assert ended[1].err == ""
    assert [each.code for each in ended] == [1, 1]


def test_a_signal_on_one_rank_saves_the_step_and_ends_all(folder: Path) -> None:
    place = folder / "signal"
    recipe = tiny_recipe(place, rewards=[{"path": f"{place}/waiting.py:patient"}])
    (place / "waiting.py").write_text(WAITING)
    started = start_ranks("rl", recipe, folder=place)
    started[0].wait_until((place / "in_step_3").exists)
    started[1].signal(signal.SIGTERM)
    (place / "go").touch()
    first, other = ended_ranks(started)
    assert (first.code, other.code) == (130, 0)
    assert "SIGTERM: stopped after step 3; everything is saved" in first.out
    assert "--ranks 2" in first.out


PAIRS = ("dpo", "--dpo.learning-rate", "1e-2", "--dpo.pairs-per-batch", "4", "--dpo.tokens-per-microbatch", "64")


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(
            (*PAIRS, "--dpo.rounds", "2", "--dpo.prompts-per-round", "4", "--dpo.steps-per-round", "2"), id="dpo"
        ),
        pytest.param(("sft", "--sft.tokens-per-batch", "400", "--sft.tokens-per-microbatch", "64"), id="sft"),
    ],
)
def test_rows_and_pairs_of_rounds_are_learned_as_by_one_process(folder: Path, argv: tuple[str, ...]) -> None:
    shared = {
        "dpo": ("--rollout.group-size", "4", "--rollout.max-completion-tokens", "6", "--task.held-out-size", "3"),
        "sft": ("--run.num-steps", "3", "--sft.learning-rate", "1e-2", "--sft.eval-size", "4"),
    }[argv[0]]
    dice = ("--rewards", f"{folder}/dice.py:dice") if argv[0] == "dpo" else ()
    shutil.copy(Path(__file__).parents[1] / "support" / "dice.py", folder)
    runs = [folder / f"{argv[0]}-{count}" for count in (1, 2)]
    whole = (*argv, *shared, *dice, "--model.path", folder / "model", "--run.threads", "1", "--run.folder")
    ended = [command(*whole, runs[0], folder=folder), by_ranks(*whole, runs[1], folder=folder)]
    assert [each.code for each in ended] == [0, 0], ended[1].err
    assert largest_difference(*runs) < 3e-6
    start_of_both = load_file(folder / "model" / "model.safetensors")
    assert max((weights(runs[0])[name] - each).abs().max().item() for name, each in start_of_both.items()) > 1e-3


class OneOfSeveral(RankGroup):
    """A rank that knows its number, and sends nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize(("costs", "size"), [([5, 1, 4, 2], 2), ([3], 3), ([7, 7, 7, 1, 1], 3), ([2] * 6, 1)])
def test_every_micro_batch_is_dealt_once_and_each_rank_gets_as_many(costs: list[int], size: int) -> None:
    hands: list[list[Dealt[Any]]] = [[*OneOfSeveral(rank, size).deal(costs, lambda cost: cost)] for rank in range(size)]
    assert {len(hand) for hand in hands} == {-(-len(costs) // size)}
    dealt = sorted(each.number for hand in hands for each in hand if each.counts)
    assert dealt == [*range(len(costs))]
    loads = [sum(each.item for each in hand if each.counts) for hand in hands]
    assert max(loads) <= sum(costs) / size + max(costs)
    loss = torch.tensor(2.0)
    assert [each.weighed(loss).item() for hand in hands for each in hand] == [
        2.0 if each.counts else 0.0 for hand in hands for each in hand
    ]


def test_ranks_of_one_machine_are_started_by_a_flag_and_end_with_a_signal(folder: Path) -> None:
    place = folder / "started"
    recipe = tiny_recipe(place, rewards=[{"path": f"{place}/waiting.py:patient"}])
    (place / "waiting.py").write_text(WAITING)
    argv = [sys.executable, "-m", "posttrain", "rl", str(recipe), "--ranks", "2", "--run.curves", "false"]
    running = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=place)
    while not (place / "in_step_3").exists():
        assert running.poll() is None, running.communicate()[0]
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    (place / "go").touch()
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "stopped after step 3; everything is saved" in said
