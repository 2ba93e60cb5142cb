"""`posttrain doctor --model` and the first lines of a plan: what a run would make of a model."""

from pathlib import Path

import pytest
from transformers import Lfm2Config, Lfm2ForCausalLM, MistralConfig, MistralForCausalLM

from posttrain.cli import main
from posttrain.models.loading.new_model import new_tokenizer
from tests.support.model_folders import changed, family_folder, small_folder
from tests.support.tiny import SHAPE

TINY = [
    *("--rollout.prompts-per-step", "2", "--rollout.group-size", "2", "--rollout.max-completion-tokens", "3"),
    *("--task.held-out-size", "2", "--evaluation.samples", "1", "--run.num-steps", "1", "--run.threads", "1"),
]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(argv) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def line(said: str, name: str) -> str:
    return next(each for each in said.splitlines() if each.startswith(name))


def test_a_model_of_a_family_that_the_shared_prompt_pass_knows(capsys: pytest.CaptureFixture[str]) -> None:
    small_folder(Path("model"))
    changed(Path("model/generation_config.json"), eos_token_id=[0, 7])
    said = printed(capsys, "doctor", "--model", "model", "--model.frozen", "*embed_tokens*")
    assert line(said, "model ").startswith("model      model, 0.01 M parameters (0.00 M trained), float32 on ")
    assert "the model's own forward pass" not in said
    assert line(said, "weights").startswith("weights    float32 ")
    assert line(said, "context") == "context    64 tokens (the model's 64)"
    assert line(said, "stop ids").startswith("stop ids   0 '<|end|>', 7 ")
    assert "messages may be prompts" in line(said, "template")
    assert "384 tokens for 384 rows of the embedding" in line(said, "tokenizer")
    assert line(said, "sampling").startswith("sampling   by the shared-prompt pass; its log-probs are within ")


def test_a_model_that_runs_through_its_own_forward_pass_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    family_folder(Path("model"), "gpt2_plain")
    said = printed(capsys, "doctor", "--model", "model", "--model.dtype", "bfloat16", "--model.context", "30")
    assert "bfloat16 on cpu" in line(said, "model ")
    assert "by the model's own forward pass: its config has scale_attn_by" in said
    assert line(said, "context") == "context    30 tokens (the model's 64, model.context is 30)"
    assert line(said, "sampling").startswith("sampling   by the model's own forward pass")


def test_a_model_without_a_cache_says_why_and_how_far_its_layers_see(capsys: pytest.CaptureFixture[str]) -> None:
    shape = {**SHAPE, "vocab_size": 400, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
    Lfm2ForCausalLM(Lfm2Config(**shape)).save_pretrained("model")
    new_tokenizer().save_pretrained("model")
    said = printed(capsys, "doctor", "--model", "model")
    assert "sampled without a cache, whole rows again for every token: layers of a lfm2 keep more" in said
    assert line(said, "sampling").startswith("sampling   by the model's own forward pass without a cache")
    MistralForCausalLM(MistralConfig(**{**SHAPE, "vocab_size": 400}, sliding_window=8)).save_pretrained("model")
    assert "some layers look back 8" in line(printed(capsys, "doctor", "--model", "model"), "context")


def test_a_folder_that_is_no_model_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "nowhere"]) == 2
    assert "model.path = nowhere: no such folder" in capsys.readouterr().err


def test_a_plan_begins_with_the_same_line_and_says_what_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    small_folder(Path("model"))
    options = ["--model.attn-implementation", "eager"]
    said = printed(capsys, "rl", "--model.path", "model", *options, *TINY, "--dry-run")
    assert line(said, "model ") == line(printed(capsys, "doctor", "--model", "model"), "model ")
    assert "attn_implementation = eager is not used" in said


def test_a_plan_says_which_share_of_bfloat16_weights_no_step_can_move(capsys: pytest.CaptureFixture[str]) -> None:
    small_folder(Path("model"))
    plan = ["rl", "--model.path", "model", *TINY, "--dry-run", "--update.learning-rate"]
    assert "too large in bfloat16" not in printed(capsys, *plan, "1e-6")
    said = printed(capsys, *plan, "1e-6", "--model.weights", "bfloat16")
    assert "bfloat16 on cpu" in line(said, "model ")
    assert "of the trained weights are too large in bfloat16 for a step of 1e-06 to move them" in said
    assert int(said.split("% of the trained weights")[0].split()[-1]) > 90  # weights of about .02
    assert "model.weights: auto" in said
    assert "too large in bfloat16" not in printed(capsys, *plan, "0.5", "--model.weights", "bfloat16")
