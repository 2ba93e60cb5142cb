"""What to use in place of names that TRL has, or had, and this package does not."""

from collections.abc import Collection, Sequence
from inspect import signature

from posttrain.schemas import did_you_mean

COMPLETIONS = "Every completion is in rollouts/ of the run's folder; for other actions write a TrainerCallback."
PAIRS = "For pairs of answers use DPOTrainer with DPOConfig."
ONLINE = "To train by reward use GRPOTrainer with GRPOConfig, or posttrain.train with another algorithm."
INSTEAD = {
    "setup_chat_format": "TRL has dropped it too.  Give a tokenizer with a chat_template as processing_class.",
    "clone_chat_template": "Give a tokenizer with that chat_template as processing_class.",
    "DatasetMixtureConfig": "Load the data in the script, and give the rows to the trainer.",
    "get_dataset": "Load the data in the script, and give the rows to the trainer.",
    "DataCollatorForCompletionOnlyLM": "Give rows of `prompt` and `completion`, and leave it out.",
    "LogCompletionsCallback": COMPLETIONS,
    "RichProgressCallback": COMPLETIONS,
    "WinRateCallback": COMPLETIONS,
    "SyncRefModelCallback": "Set sync_ref_model=True in GRPOConfig.",
    "AutoModelForCausalLMWithValueHead": "A critic is made by posttrain.train with the algorithm `ppo`.",
    "PPOTrainer": "Use posttrain.train with the algorithm `ppo`.",
    "PPOConfig": "Use posttrain.train with the algorithm `ppo`.",
    "GKDTrainer": "Use posttrain.train with the algorithm `distill`.",
    "GKDConfig": "Use posttrain.train with the algorithm `distill`.",
    "create_reference_model": "A trainer makes its reference; leave it out.",
    **{f"{kind}{part}": PAIRS for kind in ("KTO", "ORPO", "CPO", "BCO") for part in ("Trainer", "Config")},
    **{f"{kind}{part}": ONLINE for kind in ("OnlineDPO", "NashMD", "XPO") for part in ("Trainer", "Config")},
}


def not_here_message(name: str, known: Sequence[str]) -> str:
    """Why an import fails, and what to use instead."""
    remedy = INSTEAD.get(name) or did_you_mean(name, known)
    return f"cannot import {name!r} from posttrain.trl: it is not here.  {remedy}"


def unknown_argument_message(trainer: type, name: str, fields: Collection[str]) -> str:
    """Why an argument of a trainer is refused, and where it belongs; `fields` are those of its config."""
    known = [each for each in signature(trainer).parameters if each not in ("self", "not_here")]
    remedy = "Set it in `args`." if name in fields else did_you_mean(name, known)
    remedy = "It is called `processing_class`." if name == "tokenizer" else remedy
    return f"{trainer.__name__}: there is no argument {name!r}.  {remedy}"
