"""RewardConfig: the fields of TRL 1.16's, with its names, order and defaults, and what becomes of each."""

from dataclasses import dataclass

from posttrain.trl.fields.field_rules import Rules, supported
from posttrain.trl.fields.number_rules import at_least
from posttrain.trl.fields.pair_rules import LENGTHS, pair_rules
from posttrain.trl.fields.sft_config import TOKENIZER_RULES
from posttrain.trl.fields.training_fields import TrainingFields


@dataclass
class RewardConfig(TrainingFields):
    """How RewardTrainer trains; the page "TRL's fields" says what becomes of each."""

    learning_rate: float = 1e-4
    remove_unused_columns: bool | None = True
    chat_template_path: str | None = None
    disable_dropout: bool = True
    dataset_num_proc: int | None = None
    eos_token: str | None = None
    max_length: int | None = 1024
    pad_to_multiple_of: int | str | None = "auto"
    center_rewards_coefficient: float | None = None
    activation_offloading: bool = False
    pad_token: str | None = None


REWARD_RULES: Rules = {
    **pair_rules("reward_model"),
    **TOKENIZER_RULES,
    "max_length": supported(
        "reward_model.max_length, reward_model.long_pairs", "longer pairs are left out", numbers=LENGTHS
    ),
    "center_rewards_coefficient": supported(
        "reward_model.center_coefficient", "None is 0", numbers=at_least(0, or_none=True)
    ),
}
