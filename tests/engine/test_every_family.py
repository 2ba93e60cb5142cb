"""docs/models.md says what the code does: the way of every family that the library has, and what it refuses.

`make families` writes that page, with figures for all of them; here are those of a few that no other test has.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from posttrain.models.policy import as_policy
from tests.support.every_family import BESIDES, NOT_BUILT, VARIANTS, every_label, small_config, small_model
from tests.support.families import CONTEXT
from tests.support.family_measures import (
    CACHED,
    FAST,
    FAULT,
    FOUND_OUT,
    RECOMPUTED,
    REFUSED,
    Distances,
    Exports,
    Route,
    distances,
    exports,
    probed,
    quick_route,
    saved,
)
from tests.support.family_page import PAGE, Measured, page, routes
from tests.support.refusals import refused
from tests.support.tiny import tokenizer

WRITTEN = routes(PAGE.read_text(encoding="utf-8"))
FOUND_BY_SAMPLING = sorted(label for label, route in WRITTEN.items() if FOUND_OUT in route.remarks)
SHARED = ("gemma3n_text with shared keys", "gemma4_text with shared keys")
SOME = ("cohere2", "falcon with ALiBi", *SHARED, "llama4", "olmo3", "opt", "qwen2 with windows")

SAVED = ("afmoe", "beam", "deepseek_v3", "falcon_h1", "gemma4", "gpt2", "llama4", "phi3", "qwen3_5_moe")
"""Families with traps for adapters: mixtures, state spaces, wrappers, transposed and joined matrices."""


def test_every_family_of_the_library_is_on_the_page_or_said_to_be_left_out() -> None:
    assert set(WRITTEN) == set(every_label())
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | set(BESIDES) | set(VARIANTS) == set(WRITTEN) | set(NOT_BUILT)
    assert set(NOT_BUILT) < set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("label", [label for label in every_label() if label not in FOUND_BY_SAMPLING])
def test_a_family_takes_the_way_that_the_page_says(label: str, tmp_path: Path) -> None:
    assert quick_route(label, tmp_path) == WRITTEN[label]


@pytest.mark.parametrize("label", FOUND_BY_SAMPLING)
def test_what_only_sampling_finds_out_is_found_out(label: str, tmp_path: Path) -> None:
    """A cache that the library itself gets wrong is not used."""
    assert quick_route(label, tmp_path).name != WRITTEN[label].name
    assert probed(saved(label, tmp_path), "float32")[1].name == WRITTEN[label].name


@pytest.mark.parametrize("label", SAVED)
def test_what_a_run_saves_is_the_same_model_in_transformers_in_peft_and_here(label: str, tmp_path: Path) -> None:
    found = exports(saved(label, tmp_path / "base"), tmp_path / "out")
    assert found.model == found.again == 0
    assert isinstance(found.adapter, float)
    assert isinstance(found.merged, float)
    assert max(found.adapter, found.merged) <= 1e-4


@pytest.mark.parametrize("label", SOME)
def test_sampler_and_trainer_are_the_librarys_own_model(label: str, tmp_path: Path) -> None:
    policy, _ = probed(saved(label, tmp_path), "float32")
    assert policy is not None
    found = distances(policy, label, tmp_path)
    assert 0 < found.sampler <= 1e-4
    assert 0 < found.trainer <= 1e-4
    assert found.moved


def test_the_page_is_read_as_it_is_written() -> None:
    figures = Distances(1e-6, 2e-6, True)
    found = {
        "a": Route(FAST, ""),
        "b": Route(CACHED, "logits are capped at 30"),
        "c, in a way": Route(RECOMPUTED, "a c has no cache; needs `model.context`"),
        "d": Route(REFUSED, "model: no (at all)."),
    }
    read = Exports(0.0, 1e-6, 0.0, 2e-6)
    rows = {label: Measured(route, figures, route, figures, read) for label, route in found.items()}
    assert routes(page(rows, "")) == found


def test_the_page_says_what_updates_and_bfloat16_did() -> None:
    read = Exports(0.0, 1e-6, 0.0, 2e-6)
    none = Exports(0.0, "no such layer", "no such layer", "no such layer")
    rows = {
        "a": Measured(
            Route(FAST, ""), Distances(1e-6, 2e-6, True), Route(CACHED, "half"), Distances(0.1, 0.2, False), read
        ),
        "b": Measured(Route(FAST, ""), Distances(3e-6, 4e-6, True), Route(REFUSED, "not in half"), None, none),
    }
    text = page(rows, "")
    assert "| `a` | 1.0e-06 | 2.0e-06 | 1.0e-01 | 2.0e-01 | **no** | 0e+00 | 1e-06 | 0e+00 | 2e-06 |" in text
    assert "| `b` | 3.0e-06 | 4.0e-06 | refused | refused | yes | 0e+00 | refused | refused | refused |" in text
    assert "- `b`, an adapter: no such layer" in text
    assert "- `a` in bfloat16: plain with a cache: half" in text
    assert "- `b` in bfloat16: refused: not in half" in text


def test_a_model_that_wants_more_than_tokens_is_refused_in_its_own_words() -> None:
    config = small_config("xmod")
    config.default_language = None
    with refused("a XmodForCausalLM cannot read", "(ValueError: Input language"):
        as_policy(AutoModelForCausalLM.from_config(config), tokenizer())


def test_a_model_whose_layers_do_not_take_bfloat16_is_refused_where_that_is_asked_for() -> None:
    model = small_model("dbrx")
    assert as_policy(model, tokenizer(), dtype="float32").compute_dtype == torch.float32
    with refused("a DbrxForCausalLM cannot", "set model.dtype to float32."):
        as_policy(model, tokenizer(), dtype="bfloat16")


def test_a_family_that_has_gradients_in_training_mode_alone_is_refused() -> None:
    with refused("a ReformerModelWithLMHead computes gradients only in training mode"):
        as_policy(small_model("reformer"), tokenizer())


def test_no_family_ends_in_a_traceback() -> None:
    assert FAULT not in {route.name for route in WRITTEN.values()}


def test_hidden_states_that_are_divided_before_the_output_layer_are_a_scale() -> None:
    policy = as_policy(small_model("inkling_text"), tokenizer(), context=CONTEXT)
    assert policy.output_layer.scale == pytest.approx(1 / policy.model.config.logits_mup_width_multiplier)
