"""What to use in place of names that TRL has, or had, and this package does not."""

from collections.abc import Collection, Sequence
from importlib.abc import MetaPathFinder
from inspect import signature

from posttrain.schemas import did_you_mean

COMPLETIONS = "Every completion is in rollouts/ of the run's folder; for other actions write a TrainerCallback."
PAIRS = "For pairs of answers use DPOTrainer with DPOConfig."
ONLINE = "To train by reward use GRPOTrainer with GRPOConfig, or posttrain.train with another algorithm."
TEMPLATE = "Give rows of messages: trainers apply the chat template.  Or call tokenizer.apply_chat_template."
PREFERENCES = "Give `chosen` and `rejected` as whole conversations: trainers find the prompt that both begin with."
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
    "apply_chat_template": TEMPLATE,
    "maybe_apply_chat_template": TEMPLATE,
    "maybe_convert_to_chatml": "Give the rows as they are: `conversations` with `from` and `value` are read.",
    "is_conversational": "Leave it out: trainers read rows of messages and rows of text.",
    "extract_prompt": PREFERENCES,
    "maybe_extract_prompt": PREFERENCES,
    "pack_dataset": "Leave it out: rows are not joined, and padding costs nothing here.",
    "truncate_dataset": "Set max_length in the trainer's config.",
    "create_reference_model": "A trainer makes its reference; leave it out.",
    **{f"{kind}{part}": PAIRS for kind in ("KTO", "ORPO", "CPO", "BCO") for part in ("Trainer", "Config")},
    **{f"{kind}{part}": ONLINE for kind in ("OnlineDPO", "NashMD", "XPO") for part in ("Trainer", "Config")},
}


PACKAGE = "posttrain.trl"
MODULES = {
    "trainer": f"Import trainers, configs and get_peft_config from {PACKAGE}.",
    "data_utils": TEMPLATE,
    "import_utils": "Ask importlib.util.find_spec(name) whether a package is installed.",
    "models": "Models are loaded by transformers; a critic is made by posttrain.train with the algorithm `ppo`.",
    "scripts": f"Import ScriptArguments and TrlParser from {PACKAGE}.",
    "experimental": f"{PAIRS}  {ONLINE}",
    "extras": "Leave it out; to take the best of several completions, use posttrain.collect.",
    "chat_template_utils": "Give a tokenizer with the chat template as processing_class.",
}
"""Modules of TRL's that are not here."""


class ModulesElsewhere(MetaPathFinder):
    """Says of an import from a module of TRL's what to import instead; it is asked last."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Nothing.  Raises ModuleNotFoundError for a module that TRL has."""
        name = fullname.removeprefix(f"{PACKAGE}.")
        if name != fullname and name in MODULES:
            raise ModuleNotFoundError(f"no module {fullname!r}: it is not here.  {MODULES[name]}", name=fullname)


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
