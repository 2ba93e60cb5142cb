"""Mistakes in a script for TRL are told by the names that the script has for things, and not by ours alone."""

from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RunError, UserError
from posttrain.trl import GRPOConfig, SFTConfig
from posttrain.trl.fields.grpo_config import GRPO_RULES
from posttrain.trl.fields.sft_config import SFT_RULES
from posttrain.trl.fields.told_in_fields import told_in_fields
from posttrain.trl.saved_models import resume_step
from posttrain.trl.training_rows import require_prompts, rows_of_dataset


@pytest.mark.parametrize(
    ("given", "message", "told"),
    [
        ({}, "rollout.group_size = 1 leaves nobody", "GRPOConfig: num_generations: rollout.group_size"),
        ({}, "learning_rate = 0 cannot teach", "GRPOConfig: learning_rate: learning_rate = 0"),
        ({"top_k": 3}, "set rollout.allow_cut_sampling: true", "GRPOConfig: top_k: set rollout.allow"),
        ({}, "raise update.tokens_per_microbatch.", "GRPOConfig: per_device_train_batch_size: raise"),
        ({"warmup_ratio": 0.1}, "update.warmup_steps = 9", "GRPOConfig: warmup_ratio: update.warmup_steps"),
        ({}, "algorithm.kl.coefficient = -1", "GRPOConfig: beta: algorithm.kl.coefficient"),
    ],
)
def test_a_message_about_an_option_of_ours_begins_with_the_field_that_sets_it(
    given: dict[str, Any], message: str, told: str
) -> None:
    with pytest.raises(RunError) as caught, told_in_fields(GRPOConfig(**given), GRPO_RULES):
        raise RunError(message)
    assert str(caught.value).startswith(told)
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize(
    "message",
    [
        "prompts[3]: nothing of ours",
        "SFTConfig: max_length = 0: use more; sft.max_length is ours",
        "mysft.max_length, sft.max_lengths and sft.max_length.more are no options",
    ],
)
def test_other_messages_are_as_they_were(message: str) -> None:
    with pytest.raises(UserError) as caught, told_in_fields(SFTConfig(), SFT_RULES):
        raise UserError(message)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"question": "a"}], "train_dataset: row 0: the column `prompt` is missing; it has question.  Give every row"),
        ([{"prompt": "a"}, {"prompt": ""}], "train_dataset: row 1: the column `prompt` is empty"),
        ([{"prompt": "a"}, {"answer": "b"}], "train_dataset: row 1: the column `prompt` is missing"),
    ],
)
def test_rows_without_prompts_are_told_by_row_and_by_columns(rows: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        require_prompts(rows, "train_dataset")


def test_prompts_may_be_in_conversations_and_in_preferences() -> None:
    require_prompts([{"messages": []}], "train_dataset")
    require_prompts([{"chosen": "a b", "rejected": "a c"}], "train_dataset")


def test_a_stream_to_evaluate_on_and_what_is_no_row_are_told() -> None:
    with pytest.raises(UserError, match=r"eval_dataset: it has no length, as a stream .* list\(data.take\(100\)\)"):
        rows_of_dataset(iter([{"prompt": "a"}]), "eval_dataset", most=None)
    with pytest.raises(UserError, match="train_dataset: it has no length, so max_steps has to say"):
        rows_of_dataset(iter([{"prompt": "a"}]), "train_dataset", most=None)
    with pytest.raises(UserError, match=r"train_dataset: 'a prompt' \(str\) is not a row.  Give dicts of columns"):
        rows_of_dataset(["a prompt"], "train_dataset", most=None)


def test_resuming_where_nothing_began_is_told_by_the_folder(tmp_path: Path) -> None:
    for asked in (True, str(tmp_path / "checkpoints" / "step-000001")):
        with pytest.raises(UserError, match=r"resume_from_checkpoint = .*output_dir\) holds no run to continue"):
            resume_step(asked, tmp_path)
    assert resume_step(None, tmp_path) == resume_step(False, tmp_path) == (False, None)
