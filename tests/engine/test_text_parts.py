"""A text model that is taken out of a multimodal one gives its log-probs, or the plan says that it does not."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from posttrain.models.loading.description import model_lines
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import ModelOptions
from tests.support.every_family import SIGLIP, small_config
from tests.support.families import randomise
from tests.support.tiny import tokenizer


def aya_vision() -> PreTrainedModel:
    """Whose text part multiplies its logits by `logit_scale`, as the whole model does not."""
    text = small_config("cohere2").to_dict() | {"logit_scale": 0.3}
    return AutoModelForImageTextToText.from_config(
        AutoConfig.for_model("aya_vision", text_config=text, vision_config=SIGLIP)
    )


def gemma3() -> PreTrainedModel:
    return AutoModelForImageTextToText.from_config(small_config("gemma3"))


@pytest.mark.parametrize(("make", "differs"), [(aya_vision, True), (gemma3, False)])
def test_a_text_part_that_makes_its_logits_in_another_way_is_said(
    make: Callable[[], PreTrainedModel], differs: bool, tmp_path: Path
) -> None:
    randomise(make()).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    lines = model_lines(load_policy(ModelOptions(path=str(tmp_path), device="cpu")), "model")
    assert any(f"from those of the {make.__name__} that" in line for line in lines) == differs
