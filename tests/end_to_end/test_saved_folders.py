"""Models of other families and quantised folders: trained as they are sampled, saved, and read by peft and by us."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.integrations import accelerate

from posttrain.cli import main
from posttrain.errors import RunError
from posttrain.models.adapters import peft_format
from posttrain.models.adapters.adaptable import whole_weight
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.adapters.peft_layers import WEIGHTS
from posttrain.models.classifiers.heads import ValueHead
from posttrain.models.loading import model_folder
from posttrain.models.loading.saving import save_adapter
from posttrain.models.memory.model_shape import object_shape
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.runs.planned_memory import held_as
from posttrain.training.critic import loaded_trunk, save_critic
from posttrain.trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from posttrain.trl.saved_models import save_into_checkpoint, save_model_folder
from tests.support.commands import refusal
from tests.support.families import family_policy
from tests.support.family_measures import apart, few_steps, loaded, read_by_peft, read_by_transformers, saved
from tests.support.model_folders import in_4_bits, in_8_bits, in_fp8, in_mxfp4
from tests.support.refusals import mentions, refused
from tests.support.runs import save_tiny_model

ADAPTER = ("--model.adapter.rank", "2")
pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")


@pytest.mark.parametrize("made", [in_4_bits, in_8_bits, in_fp8])
def test_whole_training_is_refused_before_the_first_step_and_an_adapter_is_the_remedy(
    made: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = made(tmp_path / "base")
    assert few_steps(base, tmp_path / "whole") == 2
    said = capsys.readouterr().err
    mentions(said, "its weights are stored quantised", "model.adapter.rank")
    assert not (tmp_path / "whole").exists()
    if made is not in_4_bits:
        assert few_steps(base, tmp_path / "merged", *ADAPTER, "--model.adapter.save", "merged") == 2
        assert "model.adapter.save: adapter" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["rl", "reward-model"])
def test_what_is_saved_whole_is_refused_over_a_folder_in_8_bits(command: str, tmp_path: Path) -> None:
    base, rows = in_8_bits(tmp_path / "base"), tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "chosen": "2", "rejected": "3"}\n')
    ppo = ("--algorithm.name", "ppo", "--algorithm.critic.trunk", "own")
    flags = ("--task.path", str(rows)) if command == "reward-model" else ("--task.name", "countdown", *ppo)
    for adapter in ADAPTER, (*ADAPTER, "--model.adapter.save", "adapter"):
        made = ("--model.path", str(base), *adapter, *flags, "--run.folder", str(tmp_path / "run"))
        said = refusal(command, *made, "--run.threads", "1")
        assert "quantised" in said
        assert "model.adapter" not in said
        assert ("algorithm.critic.trunk" in said) == (command == "rl")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("made", [in_4_bits, in_8_bits])
def test_a_critic_does_not_start_from_a_quantised_folder(made: Callable[[Path], Path], tmp_path: Path) -> None:
    with refused("algorithm.critic.path =", "stored quantised", "Give the folder") as raised:
        loaded_trunk(str(made(tmp_path / "base")), loaded(in_8_bits(tmp_path / "policy")))
    assert "adapter" not in str(raised.value)


@pytest.mark.parametrize("made", [in_4_bits, in_8_bits])
def test_a_loaded_model_knows_in_its_plan_how_it_was_stored(made: Callable[[Path], Path], tmp_path: Path) -> None:
    policy = loaded(made(tmp_path / "base"), adapter=AdapterOptions(rank=2))
    setup = held_as(ModelOptions(adapter=AdapterOptions(rank=2)), object_shape(policy.model), on_cuda=False)
    assert setup.quantized == (made is in_4_bits)
    assert "model.quantization" in setup.refused


def test_an_adapter_over_a_folder_in_4_bits_is_opened_by_every_command_and_merged(tmp_path: Path) -> None:
    base, run = in_4_bits(tmp_path / "base"), tmp_path / "run"
    assert few_steps(base, run, *ADAPTER, "--model.adapter.save", "both") == 0
    assert main(["doctor", "--model", str(run / "adapter")]) == 0
    assert few_steps(run / "adapter", tmp_path / "second") == 0
    adapted = loaded(run / "adapter", dtype="float32").model
    assert apart(adapted, loaded(tmp_path / "second", dtype="float32").model) > 0.01
    merged = read_by_transformers(run / "model")
    assert merged.config.dtype == torch.float32
    require_merged(adapted, merged)


def require_merged(adapted: PreTrainedModel, merged: PreTrainedModel) -> None:
    """W + s·B·A, each number rounded to bfloat16, in which the folder says that weights are stored."""
    for name, layer in lora_layers(adapted).items():
        change = layer.scale * (layer.lora_B @ layer.lora_A)
        expected = (whole_weight(layer.base_layer).float() + change).bfloat16()
        assert change.abs().max() > 0.01
        assert merged.get_submodule(name).weight.bfloat16().equal(expected)


def test_4_bits_are_not_asked_for_over_a_folder_in_4_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = in_4_bits(tmp_path / "base")
    assert few_steps(base, tmp_path / "run", *ADAPTER, "--model.quantization", "nf4") == 2
    assert "are quantised already (bitsandbytes load_in_4bit)" in capsys.readouterr().err


def test_a_model_stored_in_mxfp4_is_saved_with_whole_weights_that_transformers_reads(tmp_path: Path) -> None:
    base = in_mxfp4(tmp_path / "base")
    assert few_steps(base, tmp_path / "whole") == 0
    trained = read_by_transformers(tmp_path / "whole" / "model")
    assert not hasattr(trained.config, "quantization_config")
    assert apart(loaded(tmp_path / "whole").model, trained) == 0
    assert apart(loaded(base).model, trained) > 0.1
    assert few_steps(base, tmp_path / "run", *ADAPTER, "--model.adapter.save", "both") == 0
    adapted = loaded(tmp_path / "run" / "adapter").model
    assert apart(adapted, read_by_peft(base, tmp_path / "run" / "adapter")) < 1e-4
    merged = read_by_transformers(tmp_path / "run" / "model")
    require_merged(adapted, merged)


def test_an_adapter_over_fp8_is_trained_and_read_again(tmp_path: Path) -> None:
    base = in_fp8(tmp_path / "base")
    assert few_steps(base, tmp_path / "run", *ADAPTER) == 0
    assert apart(loaded(tmp_path / "run").model, loaded(base).model) > 0.1
    assert {each.dtype for each in loaded(base).model.parameters()} == {torch.float32}


def test_a_model_that_transformers_would_make_weights_up_of_is_said_when_it_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, run = in_mxfp4(tmp_path / "base"), tmp_path / "run"
    monkeypatch.setattr(model_folder, "as_never_quantised", lambda model, dtype: None)
    assert few_steps(base, run) == 1
    said = capsys.readouterr().err
    mentions(said, "4 weights are missing", "down_proj_blocks", "The folder is kept")


PAIRS = [{"prompt": f"{number} + 1 =", "chosen": f" {number + 1}", "rejected": " no"} for number in range(4)]


def critic(policy: Policy, folder: Path) -> None:
    save_critic(ValueHead(16, "linear", seed=0), policy, folder)


def checkpoint(policy: Policy, folder: Path) -> None:
    folder.mkdir()
    policy.model.save_pretrained(folder)
    (folder / "model.safetensors").rename(folder / "policy.safetensors")
    save_into_checkpoint(policy, folder)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> RewardTrainer:
    base = save_tiny_model(tmp_path_factory.mktemp("base") / "model")
    return RewardTrainer(model=str(base), args=RewardConfig(str(base.parent / "run")), train_dataset=PAIRS)


@pytest.fixture
def loses_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PreTrainedModel.save_pretrained

    def without_the_last(model: Any, folder: Path, **given: Any) -> None:
        whole(model, folder, **given)
        tensors = load_file(folder / "model.safetensors")
        del tensors[max(tensors)]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", without_the_last)
    monkeypatch.setattr(accelerate, "is_accelerate_available", lambda *_: False)


@pytest.mark.usefixtures("loses_a_weight")
@pytest.mark.parametrize("saved", [critic, save_model_folder, checkpoint])
@pytest.mark.parametrize("family", ["mistral", "qwen3_moe"])
def test_a_folder_that_lost_a_weight_is_told(
    saved: Callable[[Policy, Path], None], family: str, tmp_path: Path
) -> None:
    with refused("out: transformers would not load", "are missing", "The folder is kept", error=RunError):
        saved(family_policy(family), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.usefixtures("loses_a_weight")
def test_a_reward_model_that_lost_a_weight_is_told(trainer: RewardTrainer, tmp_path: Path) -> None:
    with refused("out: transformers would not load", "score.weight", error=RunError):
        trainer.save_model(str(tmp_path / "out"))


def test_a_trainers_reward_model_reads_texts_as_that_of_its_run(trainer: RewardTrainer, tmp_path: Path) -> None:
    trainer.args.max_steps, trainer.args.save_steps = 1, 1
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    run = trainer.folder
    for folder in run / "model", run / "checkpoint-1", tmp_path / "out":
        assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"][-1] == trainer.policy.stop_ids[0], folder
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        assert model.config.reading["plain"] is True


def sft(base: Path, run: Path, *more: str) -> int:
    """Supervised training with an adapter."""
    return few_steps(base, run, *ADAPTER, *more)


def test_an_adapter_over_a_wrapper_is_read_by_peft_and_by_every_command(tmp_path: Path) -> None:
    base, run = saved("gemma3", tmp_path / "base"), tmp_path / "run"
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


def test_default_targets_leave_out_what_peft_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, run = saved("mamba2", tmp_path / "base"), tmp_path / "run"
    assert sft(base, run) == 0
    assert apart(loaded(run).model, read_by_peft(base, run / "adapter")) < 1e-4
    named = ("--model.adapter.targets", "[in_proj, out_proj]")
    assert sft(base, tmp_path / "refused", *named) == 2
    said = capsys.readouterr().err
    mentions(said, "out_proj", "model.adapter.save: merged")
    assert not (tmp_path / "refused").exists()
    assert sft(base, tmp_path / "merged", *named, "--model.adapter.save", "merged") == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "model")


def test_dropout_before_what_peft_takes_for_an_expert_is_refused(tmp_path: Path, capsys) -> None:
    base = saved("qwen3_moe with dense layers", tmp_path / "base")
    drops = ("--model.adapter.dropout", ".1")
    assert sft(base, tmp_path / "refused", *drops) == 2
    said = capsys.readouterr().err
    mentions(said, "model.adapter.dropout = 0.1", "save: merged")
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


def wrapped(label: str, base: Path, kind: Any) -> Any:
    """The library's model of a family under an adapter of peft."""
    model = kind.from_pretrained(saved(label, base), dtype=torch.float32)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


@pytest.mark.parametrize("label", ["gemma3", "llava"])
def test_untrained_layers_beside_the_text_part_of_a_wrapper_are_left_out(label: str, tmp_path: Path) -> None:
    model = wrapped(label, tmp_path / "base", AutoModelForImageTextToText)
    up = {name: each for name, each in model.named_parameters() if "lora_B" in name}
    for name, each in up.items():
        if ".language_model." in name:
            torch.nn.init.normal_(each, std=0.3)
    policy = as_policy(model, AutoTokenizer.from_pretrained(tmp_path / "base"))
    save_adapter(policy, tmp_path / "adapter")
    assert apart(loaded(tmp_path / "adapter").model, model) == 0
    assert apart(loaded(tmp_path / "adapter").model, loaded(tmp_path / "base").model) > 0.01
    next(each for name, each in up.items() if ".vision_tower." in name).data.fill_(1.0)
    save_adapter(policy, tmp_path / "adapter")
    with refused("its adapter has trained model.vision_tower", "Merge the adapter with peft"):
        loaded(tmp_path / "adapter")


def test_an_adapter_that_only_peft_reads_is_told_at_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = wrapped("qwen3_moe", tmp_path / "base", AutoModelForCausalLM)
    SFTTrainer(model, SFTConfig(str(tmp_path / "run")), train_dataset=[{"text": "1"}])
    said = capsys.readouterr().out
    mentions(said, "PEFT will read the saved adapter, but posttrain's commands will not", "gate.weight")
