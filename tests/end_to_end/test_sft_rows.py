"""`posttrain sft` on a model and rows of one's own: from the first look to a model that `posttrain rl` goes on with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain.config import SftConfig
from tests.support.commands import printed, refusal
from tests.support.conversations import chat_model, chat_tokenizer
from tests.support.fit_places import KINDS, place
from tests.support.refusals import refused
from tests.support.runs import metrics_of

ROWS = KINDS["sft"].rows


def test_rows_are_learned_and_transformers_loads_the_model(finished: Callable[[str], Path]) -> None:
    run = finished("sft") / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"] - 2
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert AutoTokenizer.from_pretrained(run / "model").chat_template
    assert model.config.vocab_size == len(chat_tokenizer())


def test_a_dry_run_shows_the_masks_and_the_rows_that_are_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place("sft", tmp_path / "place"))
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "=" * 60, "completion": "4"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--task.held-out-share", "0", "--task.prompt-format", "chat", "--sft.long-rows", "skip"]
    out = printed("sft", "recipe.yaml", "--dry-run", *flags, "--sft.tokens-per-batch", "199")
    assert "1 rows of" in out
    assert "1 too long and skipped: rows.jsonl:2" in out
    assert "\n           row format prompt_completion\n" in out
    assert "\none step   5 rows or 199 tokens, learning rate" in out  # 5 rows of at most 40 tokens may be 200
    assert "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n⟪4<|im_end|>⟫\n" in out
    Path("rows.jsonl").write_text(json.dumps({"text": "=" * 200}) + "\n")
    said = refusal("sft", "recipe.yaml", "--task.held-out-share", "0", "--sft.max-length", "500")
    assert "1 rows are longer than 160 tokens: rows.jsonl:1 (201 tokens)" in said


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
    with refused("resume", "policy = GPT2LMHeadModel"):
        posttrain.train_sft(config, resume=True)
    with refused("39 rows", "40 rows"):
        posttrain.train_sft(config, rows=ROWS[1:], policy=policy, resume=True)
    with refused("rows", "countdown"):
        posttrain.train_sft(SftConfig(), rows=ROWS)


def test_a_base_model_learns_to_stop_at_the_token_that_ends_turns(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.eos_token = "<|end|>"
    policy = posttrain.as_policy(chat_model(tokenizer), tokenizer)
    options: dict[str, Any] = {
        "task": {"name": "dataset", "held_out_share": 0},
        "run": {"folder": str(tmp_path / "run"), "num_steps": 1, "threads": 1},
    }
    with refused("rows:1, message 1", "'<|end|>'"):
        posttrain.train_sft(posttrain.load_recipe(kind=SftConfig, **options), rows=ROWS, policy=policy)
    policy = posttrain.as_policy(chat_model(tokenizer), tokenizer, stop_tokens=["<|im_end|>"])
    run = posttrain.train_sft(posttrain.load_recipe(kind=SftConfig, **options), rows=ROWS, policy=policy)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    folder = run.model_folder
    saved = posttrain.as_policy(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    assert saved.stop_ids == (0, end)
