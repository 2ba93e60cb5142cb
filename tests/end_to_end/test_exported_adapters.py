"""RUN/adapter of the real command: what peft makes of it over the library's own model, and what our commands do."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from posttrain.cli import main
from posttrain.models.adapters import peft_format
from posttrain.models.adapters.peft_layers import WEIGHTS
from tests.support.family_exports import apart, few_steps, loaded, read_by_peft
from tests.support.family_measures import saved

READ_AS_EXPERTS = ("qwen3_moe with dense layers", "qwen3_next")
"""Families of which peft takes layers for experts that are none, where `target_modules` names them."""
WRAPPERS = ("gemma3", "llava")


ADAPTER = ("--model.adapter.rank", "2")


def sft(base: Path, run: Path, *more: str) -> int:
    """Supervised training with an adapter."""
    return few_steps(base, run, *ADAPTER, *more)


@pytest.mark.parametrize("label", READ_AS_EXPERTS)
def test_a_mixtures_adapter_is_the_same_model_in_peft(label: str, tmp_path: Path) -> None:
    base = saved(label, tmp_path / "base")
    assert sft(base, tmp_path / "run") == 0
    trained = loaded(tmp_path / "run").model
    assert apart(trained, read_by_peft(base, tmp_path / "run" / "adapter")) < 1e-4
    assert apart(trained, loaded(base).model) > 0.1


@pytest.mark.parametrize("label", WRAPPERS)
def test_an_adapter_over_a_wrapper_is_read_by_peft_and_by_every_command(label: str, tmp_path: Path) -> None:
    base, run = saved(label, tmp_path / "base"), tmp_path / "run"
    assert sft(base, run) == 0
    trained = loaded(run).model
    assert apart(trained, read_by_peft(base, run / "adapter")) < 1e-4
    assert apart(trained, loaded(base).model) > 0.1
    assert json.loads((run / "adapter" / "base_model.json").read_text())["sha256"]
    assert main(["doctor", "--model", str(run)]) == 0
    second = sft(run, tmp_path / "second")  # the flag of a new adapter means the one that is there, of the same rank
    assert second == 0
    assert apart(loaded(tmp_path / "second").model, read_by_peft(base, tmp_path / "second" / "adapter")) < 1e-4


def test_an_adapter_over_a_wrapper_that_names_layers_as_the_text_model_does_still_loads(tmp_path: Path) -> None:
    """As runs of earlier versions wrote them, once their user has written the base into adapter_config.json."""
    base, run = saved("gemma3", tmp_path / "base"), tmp_path / "run"
    assert sft(base, run) == 0
    written = load_file(run / "adapter" / WEIGHTS)
    expected = loaded(run).model
    older = {name.replace(".language_model.", "."): tensor for name, tensor in written.items()}
    assert older.keys() != written.keys()
    save_file(older, run / "adapter" / WEIGHTS)
    assert apart(loaded(run).model, expected) == 0


def test_default_targets_leave_out_what_peft_refuses_and_named_ones_need_a_merged_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, run = saved("mamba2", tmp_path / "base"), tmp_path / "run"
    assert sft(base, run) == 0
    assert apart(loaded(run).model, read_by_peft(base, run / "adapter")) < 1e-4
    named = ("--model.adapter.targets", "[in_proj, out_proj]")
    assert sft(base, tmp_path / "refused", *named) == 2
    said = capsys.readouterr().err
    assert "out_proj" in said
    assert "model.adapter.save: merged" in said
    assert not (tmp_path / "refused").exists()
    assert sft(base, tmp_path / "merged", *named, "--model.adapter.save", "merged") == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "model")


def test_dropout_before_a_layer_that_peft_takes_for_an_expert_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = saved("qwen3_moe with dense layers", tmp_path / "base")
    drops = ("--model.adapter.dropout", ".1")
    assert sft(base, tmp_path / "refused", *drops) == 2
    said = capsys.readouterr().err
    assert "model.adapter.dropout = 0.1" in said
    assert "save: merged" in said
    assert sft(base, tmp_path / "run", *drops, "--model.adapter.targets", "[q_proj, v_proj]") == 0
    assert apart(loaded(tmp_path / "run").model, read_by_peft(base, tmp_path / "run" / "adapter")) < 1e-4


def test_an_adapter_that_peft_would_not_find_layers_for_is_said_when_it_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, run = saved("gemma3", tmp_path / "base"), tmp_path / "run"
    monkeypatch.setattr(peft_format, "peft_name", lambda model, layer: layer)  # as the text model alone has it
    assert sft(base, run) == 1
    said = capsys.readouterr().err
    assert "peft would not load what was saved (the model has no linear layer model.layers.0." in said
    assert str(run / "adapter") in said
