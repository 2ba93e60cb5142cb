"""`posttrain doctor`: the machine, its sandbox, and a model as a run would take it, which a plan begins with."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Lfm2Config, Lfm2ForCausalLM, MistralConfig, MistralForCausalLM

from posttrain.models.loading.new_model import new_tokenizer
from posttrain.sandbox import process_pool as pools
from posttrain.sandbox.probes import PROBES
from posttrain.sandbox.process_pool import ForkServerClient, ServerLost
from tests.support.commands import called, printed, refusal
from tests.support.model_folders import changed, family_folder, small_folder
from tests.support.refusals import mentions
from tests.support.tiny import SHAPE

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
PLAN = [
    *("rl", "--model.path", "model", "--dry-run", "--rollout.prompts-per-step", "2", "--rollout.group-size", "2"),
    *("--rollout.max-completion-tokens", "3", "--task.held-out-size", "2", "--evaluation.samples", "1"),
    *("--run.num-steps", "1", "--run.threads", "1", "--update.learning-rate"),
]


def test_it_shows_the_machine_and_every_probe() -> None:
    said = printed("doctor")
    mentions(said, "python", "torch", "memory", "Landlock", "safe: every probe passed")
    assert all(f"refused   {probe.name}" in said for probe in PROBES)


def test_a_sandbox_that_is_not_safe_or_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "ForkServerClient", lambda options: ForkServerClient(replace(options, sealed=False)))
    ended = called("doctor")
    assert ended.code == 1
    mentions(ended.out, "NOT SAFE  read a file", "NOT SAFE: no program will be run here")

    def broken(_: object) -> ForkServerClient:
        raise ServerLost("it was not to be")

    monkeypatch.setattr(pools, "ForkServerClient", broken)
    ended = called("doctor")
    assert (ended.code, "does not start: it was not to be" in ended.out) == (1, True)


def test_mistakes_are_refused() -> None:
    assert "please: no such recipe" in refusal("doctor", "please")
    assert "model.path = nowhere: no such folder" in refusal("doctor", "--model", "nowhere")


def line(said: str, name: str) -> str:
    return next(each for each in said.splitlines() if each.startswith(name))


def test_a_model_of_a_family_that_the_shared_prompt_pass_knows() -> None:
    small_folder(Path("model"))
    changed(Path("model/generation_config.json"), eos_token_id=[0, 7])
    said = printed("doctor", "--model", "model", "--model.frozen", "*embed_tokens*")
    assert "the model's own forward pass" not in said
    for begins in (
        "model      model, 0.01 M parameters (0.00 M trained), float32 on ",
        "weights    float32 ",
        "context    64 tokens (the model's 64)",
        "stop ids   0 '<|end|>', 7 ",
        "sampling   by the shared-prompt pass; its log-probs are within ",
    ):
        assert f"\n{begins}" in f"\n{said}"
    assert "messages may be prompts" in line(said, "template")
    assert "384 tokens for 384 rows of the embedding" in line(said, "tokenizer")


def test_a_model_that_runs_through_its_own_forward_pass_says_why() -> None:
    family_folder(Path("model"), "gpt2_plain")
    said = printed("doctor", "--model", "model", "--model.dtype", "bfloat16", "--model.context", "30")
    assert "bfloat16 on cpu" in line(said, "model ")
    assert "by the model's own forward pass: its config has scale_attn_by" in said
    assert line(said, "context") == "context    30 tokens (the model's 64, model.context is 30)"
    assert line(said, "sampling").startswith("sampling   by the model's own forward pass")


def test_a_model_without_a_cache_says_why_and_how_far_its_layers_see() -> None:
    shape = {**SHAPE, "vocab_size": 400, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
    Lfm2ForCausalLM(Lfm2Config(**shape)).save_pretrained("model")
    new_tokenizer().save_pretrained("model")
    said = printed("doctor", "--model", "model")
    assert "sampled without a cache, whole rows again for every token: layers of a lfm2 keep more" in said
    assert line(said, "sampling").startswith("sampling   by the model's own forward pass without a cache")
    MistralForCausalLM(MistralConfig(**{**SHAPE, "vocab_size": 400}, sliding_window=8)).save_pretrained("model")
    assert "some layers look back 8" in line(printed("doctor", "--model", "model"), "context")


def test_a_plan_begins_with_the_same_line_and_says_what_has_no_effect() -> None:
    small_folder(Path("model"))
    said = printed(*PLAN, "1e-6", "--model.attn-implementation", "eager")
    assert line(said, "model ") == line(printed("doctor", "--model", "model"), "model ")
    assert "attn_implementation = eager is not used" in said
    assert "too large in bfloat16" not in said


def test_a_plan_says_which_share_of_bfloat16_weights_no_step_can_move() -> None:
    small_folder(Path("model"))
    said = printed(*PLAN, "1e-6", "--model.weights", "bfloat16")
    assert "bfloat16 on cpu" in line(said, "model ")
    assert "of the trained weights are too large in bfloat16 for a step of 1e-06 to move them" in said
    assert int(said.split("% of the trained weights")[0].split()[-1]) > 90  # weights of about .02
    assert "model.weights: auto" in said
    assert "too large in bfloat16" not in printed(*PLAN, "0.5", "--model.weights", "bfloat16")
