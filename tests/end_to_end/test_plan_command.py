"""`posttrain plan`: a table, a warning and JSON, from a config.json alone; and the short form where a run begins."""

import json
from pathlib import Path

import pytest

from tests.support.commands import printed, refusal
from tests.support.families import family_model
from tests.support.refusals import mentions

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
        (["irl-course"], "trains no language model"),
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
    "context": (["--model.context", "300"], "sampling", "key_value_cache", 0.6),
}


@pytest.mark.parametrize("name", RECIPE_OPTIONS)
def test_options_of_the_model_reach_the_plan(name: str) -> None:
    """The bundled model has 1.3 M parameters and 195 K in an adapter of rank 16; 640 tokens become 320."""
    flags, phase, part, at_most = RECIPE_OPTIONS[name]
    with_option, without = (planned(*flags)["plans"]["recipe"][phase][part] for flags in (flags, []))
    assert 0 < with_option <= at_most * without


def test_four_bits_reach_the_plan() -> None:
    adapter = ["--model.adapter.rank", "4"]
    quantized = planned(*adapter, "--model.quantization", "nf4")["plans"]["recipe"]["always"]
    assert quantized["weights"] < 0.4 * planned(*adapter)["plans"]["recipe"]["always"]["weights"]


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
    assert "GPU memory.  Take a smaller model." in said
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
