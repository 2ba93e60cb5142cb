"""RLOOConfig: the fields of TRL 1.16's, with its names, order and defaults, and what becomes of each."""

from dataclasses import dataclass, fields

from posttrain.trl.fields.field_rules import Rules, supported
from posttrain.trl.fields.grpo_config import GRPO_RULES, SampledFields
from posttrain.trl.fields.number_rules import Numbers, at_least


@dataclass
class RLOOConfig(SampledFields):
    """How RLOOTrainer trains; the page "TRL's fields" says what becomes of each."""

    num_generations: int | None = 2
    beta: float = 0.05
    normalize_advantages: bool = False
    reward_clip_range: tuple[float, float] | None = None


RLOO_RULES: Rules = {
    **{each.name: GRPO_RULES[each.name] for each in fields(SampledFields)},
    "beta": supported(
        "algorithm.kl.coefficient", "k1, taken off the rewards; 0 keeps no reference", numbers=at_least(0)
    ),
    "mask_truncated_completions": supported(
        "algorithm.mask_truncated", "no loss and no KL on a completion that is cut off; its reward counts in its group"
    ),
    "normalize_advantages": supported("algorithm.normalize_advantages", "with 1e-4 added to the deviation"),
    "reward_clip_range": supported(
        "algorithm.reward_range", "of the weighted sum, before the KL is taken off", numbers=Numbers(or_none=True)
    ),
}
