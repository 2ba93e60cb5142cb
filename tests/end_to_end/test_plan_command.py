"""`posttrain plan` and `doctor`: what a run needs of memory, the machine, its sandbox, a model as a run takes it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Lfm2Config, Lfm2ForCausalLM, MistralConfig, MistralForCausalLM

from posttrain.models.loading.new_model import new_tokenizer
from posttrain.sandbox import process_pool as pools
from posttrain.sandbox.probes import PROBES
from posttrain.sandbox.process_pool import ForkServerClient, ServerLost
from tests.support.commands import called, printed, refusal
from tests.support.families import family_model
from tests.support.model_folders import changed, family_folder, small_folder
from tests.support.refusals import mentions
from tests.support.tiny import SHAPE

LARGE = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
"""Of 70 billion parameters: 1.1 TB to train in full."""


@pytest.fixture
def large(tmp_path: Path) -> str:
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LARGE))
    return str(folder)


def planned(*arguments: str) -> dict:
    return json.loads(printed("plan", *arguments, "--json"))


def test_a_model_without_weights_is_planned_and_what_would_fit_is_said(large: str) -> None:
    said = printed("plan", "countdown-tiny", "--model.path", large, "--gpu-gb", "80")
    mentions(said, "70.55 B", "this run will not fit", "80.0 GB of GPU memory", "model.gradient_checkpointing = true")


def test_the_bundled_model_fits_anywhere_and_its_table_has_all_columns() -> None:
    said = printed("plan", "countdown-tiny")
    assert "It fits" in said
    mentions(
        said, "recipe", "PPO", "GRPO LoRA", "GRPO QLoRA", "1.3 M", "K/V cache", "activations", "learning rate 0.0001"
    )


def test_json_says_the_same_in_bytes(large: str) -> None:
    made = planned("--model.path", large, "--gpu-gb", "80")
    assert made["machine_bytes"] == 80 * 10**9
    recipe = made["plans"]["recipe"]
    assert recipe["parameters"] == recipe["trained_parameters"] == 70_553_706_496
    assert not recipe["fits"]
    assert made["changes"][0]["saves"] > 0


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--prompt-tokens", "600"], "key_value_cache"),
        (["--rollout.max-completion-tokens", "800"], "key_value_cache"),
        (["--rollout.max-rows", "512", "--rollout.prompts-per-step", "64"], "key_value_cache"),
        (["--update.tokens-per-microbatch", "8192"], "activations"),
    ],
)
def test_what_bounds_tokens_in_memory_moves_the_plan(flags: list[str], part: str) -> None:
    def size(made: dict) -> int:
        recipe = made["plans"]["recipe"]
        return {**recipe["sampling"], **recipe["updating"]}[part]

    assert size(planned("countdown-tiny", *flags)) > size(planned("countdown-tiny"))


def test_a_supervised_recipe_has_a_plan_of_its_own() -> None:
    made = planned("countdown-base")
    assert [*made["plans"]] == ["recipe"]
    assert set(made["plans"]["recipe"]["sampling"].values()) == {0}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["irl-course"], "does not train a language model"),
        (["--prompt-tokens", "0"], "--prompt-tokens = 0: must be at least 1"),
        (["--gpu-gb", "0"], "--gpu-gb = 0.0: must be at least"),
        (["--model.path", "nowhere"], "no such folder"),
    ],
)
def test_what_cannot_be_planned_is_an_error_with_its_remedy(arguments: list[str], says: str) -> None:
    assert says in refusal("plan", *arguments)


def test_a_config_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of nobody"}')
    assert "transformers cannot load it" in refusal("plan", "--model.path", str(tmp_path))


def test_a_dry_run_has_the_plan_in_a_line() -> None:
    small = ["--rollout.prompts-per-step", "2", "--rollout.group-size", "2", "--run.threads", "1"]
    said = printed("rl", "countdown-tiny", "--dry-run", *small)
    assert "memory     at most about" in said
    assert "will not fit" not in said


RECIPE_OPTIONS = {
    "weights": (["--model.weights", "bfloat16"], "always", "optimizer", 0.5),
    "checkpointing": (["--model.gradient-checkpointing"], "updating", "activations", 0.4),
    "adapter": (["--model.adapter.rank", "16"], "always", "optimizer", 0.16),
    "rank": (["--model.adapter.rank", "4"], "always", "optimizer", 0.04),
    "frozen": (["--model.frozen", "*embed_tokens*"], "always", "optimizer", 0.97),
    "4 bits": (["--model.adapter.rank", "4", "--model.quantization", "nf4"], "always", "weights", 0.4),
    "context": (["--model.context", "300"], "sampling", "key_value_cache", 0.6),
}


@pytest.mark.parametrize("name", RECIPE_OPTIONS)
def test_options_of_the_model_reach_the_plan(name: str) -> None:
    """The bundled model has 1.3 M parameters and 195 K in an adapter of rank 16; 640 tokens become 320."""
    flags, phase, part, at_most = RECIPE_OPTIONS[name]
    with_option, without = (planned(*flags)["plans"]["recipe"][phase][part] for flags in (flags, []))
    assert 0 < with_option <= at_most * without


IN_4_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize("stored", [IN_4_BITS, {"quant_method": "fp8"}, {"quant_method": "mxfp4"}])
@pytest.mark.parametrize("recipe", ["own-model", "own-sft", "countdown-tiny-dpo"])
def test_no_4_bits_are_advised_over_a_quantised_folder_and_those_that_are_there_count(
    recipe: str, stored: dict, large: str, tmp_path: Path
) -> None:
    given = ["plan", recipe, "--model.path", large, "--model.adapter.rank", "2", "--json", "--gpu-gb", "20"]
    found = []
    for config in (LARGE, {**LARGE, "quantization_config": stored}):
        Path(large, "config.json").write_text(json.dumps(config))
        found.append(json.loads(printed(*given)))
    whole, quantised = found
    advised = [[each["setting"] for each in plan["changes"]] for plan in found]
    assert [("model.quantization = nf4" in each) for each in advised] == [True, False]
    assert "GRPO QLoRA" not in quantised["plans"]
    fewer = quantised["plans"]["recipe"]["always"]["weights"] < whole["plans"]["recipe"]["always"]["weights"] / 3
    assert fewer == (stored is IN_4_BITS)


def test_a_supervised_plan_reads_every_setting_of_the_model_and_has_no_row_for_sampling(large: str) -> None:
    def shown(*settings: str) -> str:
        return printed("plan", "own-sft", "--model.path", large, "--gpu-gb", "80", *settings)

    whole, lora, nf4, small, recomputing = (
        json.loads(shown("--json", *settings))["plans"]["recipe"]
        for settings in (
            [],
            ["--model.adapter.rank", "16"],
            ["--model.adapter.rank", "16", "--model.quantization", "nf4"],
            ["--model.weights", "bfloat16"],
            ["--model.gradient-checkpointing"],
        )
    )
    # Bytes of a weight: 4 and 8 of moments; under an adapter 2 or 4.127 bits; 2 of all in bfloat16.
    assert whole["always"]["optimizer"] == 8 * whole["parameters"]
    assert lora["always"]["optimizer"] == 8 * lora["trained_parameters"]
    assert lora["always"]["weights"] < 0.55 * whole["always"]["weights"]
    assert nf4["always"]["weights"] < 0.3 * lora["always"]["weights"]
    assert small["always"]["weights"] == whole["always"]["weights"] // 2
    assert recomputing["updating"]["activations"] < whole["updating"]["activations"] / 4
    table = shown("--model.gradient-checkpointing")
    assert "sampling" not in table
    assert "gradient_checkpointing = true" not in table


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (["own-sft", "--model.path", "LARGE", "--model.frozen", '["*embed*"]'], "model.adapter.rank"),
        (["own-sft", "--model.path", "LARGE", "--model.dtype", "float32"], "model.weights"),
        (["countdown-base", "--model.hidden-size", "4096"], "model.adapter.rank"),
    ],
)
def test_every_setting_that_is_advised_is_one_that_the_recipe_takes(given: list[str], refused: str, large: str) -> None:
    def shown(*more: str) -> str:
        return printed("plan", *(each.replace("LARGE", large) for each in given), "--gpu-gb", "1", *more)

    advised = [change["setting"] for change in json.loads(shown("--json"))["changes"]]
    assert refused not in [setting.partition(" ")[0] for setting in advised]
    for setting in advised:
        option, _, value = setting.partition(" = ")
        shown(f"--{option.replace('_', '-')}", *([] if value == "true" else [value]))


def test_where_nothing_helps_or_one_setting_does_the_warning_says_so() -> None:
    given = ["plan", "countdown-base", "--gpu-gb", "0.1"]
    said = printed(*given, "--sft.tokens-per-microbatch", "512")
    assert "GPU memory.  Use a smaller model." in said
    assert "together" not in said
    assert "By itself" not in said
    assert "With sft.tokens_per_microbatch = " in (said := printed(*given, "--sft.tokens-per-microbatch", "99999"))
    assert "together" not in said


@pytest.mark.parametrize("targets", ["[all-linear]", "[experts]"])
def test_the_share_that_an_adapter_on_linear_layers_reaches_is_said_where_experts_have_none(
    targets: str, tmp_path: Path
) -> None:
    family_model("qwen3_moe").config.save_pretrained(tmp_path)
    given = ["--model.path", str(tmp_path), "--model.adapter.rank", "2", "--model.adapter.targets", targets]
    assert ("all-linear and nf4 reach" in printed("plan", "own-sft", *given)) == (targets == "[all-linear]")


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


def test_the_sandbox_of_a_recipe_is_checked_without_its_model(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {path: not-here}\n")
    assert "safe: every probe passed" in printed("doctor", str(tmp_path / "recipe.yaml"))


def test_a_sandbox_that_is_not_safe_or_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "ForkServerClient", lambda options: ForkServerClient(replace(options, sealed=False)))
    ended = called("doctor")
    assert ended.code == 1
    mentions(ended.out, "NOT SAFE  read a file", "NOT SAFE: posttrain will not run programs here")

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
    assert "of the trained weights are too large for a step of 1e-06 to move them" in said
    assert int(said.split("% of the trained weights")[0].split()[-1]) > 90  # weights of about .02
    assert "model.weights: auto" in said
    assert "too large in bfloat16" not in printed(*PLAN, "0.5", "--model.weights", "bfloat16")
