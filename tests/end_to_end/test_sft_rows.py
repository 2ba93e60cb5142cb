"""`posttrain sft` on a model and rows of one's own: from the first look to a model that `posttrain rl` goes on with."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain.cli import main
from posttrain.config import SftConfig
from posttrain.errors import UserError
from tests.support.accidents import Accident
from tests.support.conversations import chat_model, chat_tokenizer, save_chat_model, turns
from tests.support.runs import command, metrics_of

ROWS = [{"messages": turns(f"{n}+1=", f"<answer>{n + 1}</answer>")} for n in range(40)]
RECIPE: dict[str, Any] = {
    "task": {"name": "dataset", "path": "rows.jsonl", "held_out_share": 0.2},
    "model": {"path": "model"},
    "sft": {"learning_rate": 1e-2, "rows_per_batch": 5, "num_epochs": 2, "eval_every": 4, "max_length": 40},
    "checkpoint": {"every_steps": 4},
    "run": {"folder": "run", "threads": 1},
}


def place(folder: Path, **sections: Any) -> Path:
    """A folder with model, rows and recipe."""
    folder.mkdir(exist_ok=True)
    save_chat_model(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    recipe = {name: {**options, **sections.get(name, {})} for name, options in RECIPE.items()}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    folder = place(tmp_path_factory.mktemp("sft") / "whole")
    ended = command("sft", "recipe.yaml", folder=folder)
    assert ended.code == 0, ended.err
    assert ended.out.endswith("talk to it   posttrain chat run\n")
    return folder


def test_a_run_measures_before_along_and_after_and_leaves_a_model_that_transformers_loads(whole: Path) -> None:
    lines, summary = metrics_of(whole / "run"), json.loads((whole / "run" / "summary.json").read_text())
    trained, apart = summary["rows"]["trained"], summary["rows"]["held_out"]
    assert trained + apart == 40
    num_steps = -(-2 * trained // 5)
    assert [line["step"] for line in lines] == [*range(num_steps + 1)]
    measured = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
    assert [*measured] == sorted({0, num_steps, *range(4, num_steps, 4)})
    assert (summary["before"]["loss"], summary["after"]["loss"]) == (measured[0], measured[num_steps])
    assert measured[num_steps] < measured[0] - 2
    assert summary["examples"] == 2 * trained
    best = max(measured, key=lambda step: -measured[step] if step else -1e9)
    assert (whole / "run" / "checkpoints" / f"step-{best:06d}").is_dir(), "the best by held-out loss is kept"
    model = AutoModelForCausalLM.from_pretrained(whole / "run" / "model")
    assert AutoTokenizer.from_pretrained(whole / "run" / "model").chat_template
    assert model.config.vocab_size == len(chat_tokenizer())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_stopped_run_on_rows_is_resumed_to_the_same_bits_in_the_midst_of_an_epoch(
    whole: Path, number: int, code: int
) -> None:
    folder = place(whole.parent / f"stopped-{number}")
    accident = Accident(moment="open metrics.jsonl 8", signal=number)  # in the sixth step, of the first epoch of seven
    ended = command("sft", "recipe.yaml", folder=folder, accident=accident)
    assert ended.code == code, ended.err
    resumed = command("sft", "--resume", "run", folder=folder)
    assert resumed.code == 0, resumed.err
    assert metrics_of(folder / "run") == metrics_of(whole / "run")
    last = max(path.name for path in (whole / "run" / "checkpoints").iterdir())
    for file in ("model/model.safetensors", f"checkpoints/{last}/optimizer.safetensors"):
        assert (folder / "run" / file).read_bytes() == (whole / "run" / file).read_bytes()


def test_other_rows_are_refused_when_a_run_goes_on_unless_that_is_accepted(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(whole, folder)
    step = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())[-2]
    with (folder / "rows.jsonl").open("a") as rows:
        rows.write(json.dumps(ROWS[0]) + "\n")
    refused = command("sft", "--resume", "run", "--from-step", int(step[5:]), folder=folder)
    assert refused.code == 2
    assert "task.path = rows.jsonl has changed since the run began" in refused.err
    accepted = command("sft", "--resume", "run", "--from-step", int(step[5:]), "--accept-changes", folder=folder)
    assert accepted.code == 0, accepted.err


def test_a_dry_run_shows_the_plan_and_the_masks_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place(tmp_path / "place"))
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "=" * 60, "completion": "4"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--task.held-out-share",
        "0",
        "--task.prompt-format",
        "chat",
        "--sft.long-rows",
        "skip",
        "--model.dtype",
        "bfloat16",
    ]
    assert main(["sft", "recipe.yaml", "--dry-run", *flags]) == 0
    out = capsys.readouterr().out
    assert "model      model, 0.0" in out
    assert "bfloat16 on cpu" in out
    assert "1 rows of" in out
    assert "1 too long and skipped: rows.jsonl:2" in out
    assert "steps      2: 2 epochs" in out
    assert "\n           row format prompt_completion\n" in out
    assert "\none step   5 rows, learning rate" in out  # 5 rows of at most 40 tokens never fill 16384
    assert "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n⟪4<|im_end|>⟫\n" in out
    assert not Path("run").exists()
    assert main(["sft", "recipe.yaml", "--dry-run", *flags, "--sft.tokens-per-batch", "199"]) == 0
    assert "\none step   5 rows or 199 tokens, learning rate" in capsys.readouterr().out
    Path("rows.jsonl").write_text(json.dumps({"text": "=" * 200}) + "\n")
    assert main(["sft", "recipe.yaml", "--task.held-out-share", "0", "--sft.max-length", "500"]) == 2
    assert "1 rows are longer than 160 tokens: rows.jsonl:1 (201 tokens)" in capsys.readouterr().err


def test_reinforcement_goes_on_from_what_was_learned(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def ends(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(40)))
    small = ["--rollout.prompts-per-step", "2", "--rollout.group-size", "2", "--rollout.max-completion-tokens", "8"]
    small += ["--evaluation.samples", "1", "--run.num-steps", "1", "--run.threads", "1", "--run.folder", "rl"]
    small += ["--update.tokens-per-microbatch", "128"]
    task = ["--task.path", "rows.jsonl", "--task.prompt-format", "chat", "--rewards", "reward.py:ends"]
    ended = command("rl", "--model.path", whole / "run" / "model", *task, *small, folder=tmp_path)
    assert ended.code == 0, ended.err
    assert (tmp_path / "rl" / "model" / "model.safetensors").is_file()


def test_from_python_the_policy_and_rows_are_objects_and_frozen_parts_stay(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    policy = posttrain.as_policy(chat_model(tokenizer, family="gpt2"), tokenizer)
    frozen = policy.model.get_input_embeddings().weight
    frozen.requires_grad_(False)
    before, moved = frozen.detach().clone(), policy.model.get_parameter("transformer.h.0.ln_1.weight")
    start = moved.detach().clone()
    config = posttrain.load_recipe(
        kind=SftConfig,
        task={"name": "dataset", "held_out_share": 0},
        sft={"rows_per_batch": 8},
        run={"folder": str(tmp_path / "run"), "num_steps": 2, "threads": 1},
    )
    run = posttrain.train_sft(config, rows=ROWS, policy=policy)
    assert torch.equal(frozen, before)
    assert not torch.equal(moved, start)
    assert run.summary["eval_loss"] is None, "nothing is held out"
    assert not any("eval/loss" in line for line in metrics_of(run.folder))
    with pytest.raises(
        UserError, match="the run was made with objects that this resume lacks: policy = GPT2LMHeadModel"
    ):
        posttrain.train_sft(config, resume=True)
    with pytest.raises(UserError, match="rows = 39 rows is given, and the run was made with 40 rows"):
        posttrain.train_sft(config, rows=ROWS[1:], policy=policy, resume=True)
    with pytest.raises(UserError, match="rows: the task is countdown"):
        posttrain.train_sft(SftConfig(), rows=ROWS)


def test_an_adapter_alone_is_trained_saved_and_resumed_at_ten_times_the_rate(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    options = {"eval_every": 4, "num_epochs": None}
    sections = {
        "model": {"adapter": {"rank": 2}},
        "sft": options,
        "run": {"num_steps": 4},
        "checkpoint": {"every_steps": 2},
    }
    folder = place(tmp_path / "place", **sections)
    text = (folder / "recipe.yaml").read_text().replace("  learning_rate: 0.01\n", "")
    (folder / "recipe.yaml").write_text(text)
    ended = command("sft", "recipe.yaml", folder=folder)
    assert ended.code == 0, ended.err
    assert "M trained)" in ended.out
    assert "learning rate 0.0001 " in ended.out
    assert "model        run/adapter\n" in ended.out
    saved = folder / "run" / "checkpoints" / "step-000004"
    before = (saved / "policy.safetensors").read_bytes()
    assert len(before) < (folder / "model" / "model.safetensors").stat().st_size / 2
    again = command("sft", "--resume", "run", "--from-step", 2, folder=folder)
    assert again.code == 0, again.err
    assert (saved / "policy.safetensors").read_bytes() == before


def test_a_base_model_learns_to_stop_at_the_token_that_ends_turns(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.eos_token = "<|end|>"
    policy = posttrain.as_policy(chat_model(tokenizer), tokenizer)
    options: dict[str, Any] = {
        "task": {"name": "dataset", "held_out_share": 0},
        "run": {"folder": str(tmp_path / "run"), "num_steps": 1, "threads": 1},
    }
    with pytest.raises(UserError, match=r"rows:1, message 1: .*stops at '<\|end\|>'"):
        posttrain.train_sft(posttrain.load_recipe(kind=SftConfig, **options), rows=ROWS, policy=policy)
    policy = posttrain.as_policy(chat_model(tokenizer), tokenizer, stop_tokens=["<|im_end|>"])
    run = posttrain.train_sft(posttrain.load_recipe(kind=SftConfig, **options), rows=ROWS, policy=policy)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    folder = run.model_folder
    saved = posttrain.as_policy(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    assert saved.stop_ids == (0, end)
