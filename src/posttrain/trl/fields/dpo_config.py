"""DPOConfig: the fields of TRL 1.16's, with its names, order and defaults, and what becomes of each."""

from dataclasses import dataclass, field

from posttrain.errors import UserError
from posttrain.trl.fields.field_rules import Rules, idle, refused, supported
from posttrain.trl.fields.number_rules import above, at_least, between
from posttrain.trl.fields.pair_rules import LENGTHS, pair_rules
from posttrain.trl.fields.training_fields import TrainingFields


@dataclass
class DPOConfig(TrainingFields):
    """How DPOTrainer trains; the page "TRL's fields" says what becomes of each."""

    remove_unused_columns: bool | None = True
    disable_dropout: bool = True
    dataset_num_proc: int | None = None
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    padding_free: bool = False
    pad_to_multiple_of: int | str | None = "auto"
    precompute_ref_log_probs: bool = False
    precompute_ref_batch_size: int | None = None
    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])
    loss_weights: list[float] | None = None
    ld_alpha: float | None = None
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    label_smoothing: float = 0.0
    beta: float = 0.1
    use_weighting: bool = False
    discopop_tau: float = 0.05
    activation_offloading: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    pad_token: str | None = None
    # Names that this class had once, and scripts still use.
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    generate_during_eval: bool = False
    reference_free: bool = False
    rpo_alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given: object = self.loss_type
        if isinstance(given, str):
            self.loss_type = [given]
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise UserError(
                f"DPOConfig: loss_weights has {len(self.loss_weights)} numbers for {len(self.loss_type)} losses of"
                " loss_type; give one for each."
            )


NOT_SYNCED = "the reference stays as it was when training began; leave it out."
ONE_DIVERGENCE = "the divergence is reverse_kl."

DPO_RULES: Rules = {
    **pair_rules("dpo"),
    "max_length": supported("dpo.max_length, dpo.long_pairs", "longer answers lose their ends", numbers=LENGTHS),
    "truncation_mode": refused("answers that are too long lose their ends; use keep_start."),
    "padding_free": idle("pairs are not padded."),
    "precompute_ref_log_probs": supported("dpo.reference", "when training begins, not when the trainer is made"),
    "precompute_ref_batch_size": idle("reference log-probs are computed in batches of as many tokens as in training."),
    "loss_type": supported(
        "dpo.loss, dpo.length_normalized, dpo.nll_weight",
        "sigmoid, hinge, ipo, robust and sigmoid_norm, with or without sft",
    ),
    "loss_weights": supported(
        "dpo.nll_weight", "the weight of sft; the other loss weighs 1", numbers=at_least(0, or_none=True)
    ),
    "ld_alpha": refused("all tokens of an answer count alike; leave it out.", 1.0, 1),
    "f_divergence_type": refused(ONE_DIVERGENCE + "  Leave it out."),
    "f_alpha_divergence_coef": idle(ONE_DIVERGENCE),
    "label_smoothing": supported(
        "dpo.label_smoothing", "with loss_type=robust only, as in TRL 1.16", numbers=between(0, 0.5, below=True)
    ),
    "beta": supported("dpo.beta", numbers=above(0)),
    "use_weighting": refused("pairs are not weighted by their likelihood (WPO); leave it out."),
    "discopop_tau": idle("the loss discopop is not here."),
    "sync_ref_model": refused(NOT_SYNCED),
    "ref_model_mixup_alpha": idle(NOT_SYNCED),
    "ref_model_sync_steps": idle(NOT_SYNCED),
    "max_prompt_length": refused("prompts are not cut; use max_length, which cuts the ends of answers."),
    "max_completion_length": refused("use max_length, which counts the prompt and cuts the ends of answers."),
    "generate_during_eval": refused("an evaluation measures pairs and samples nothing; leave it out."),
    "reference_free": refused("there is always a reference; leave it out."),
    "rpo_alpha": refused('use loss_type=["sigmoid", "sft"] with loss_weights=[1.0, ALPHA], as TRL 1.16 has it.'),
}
