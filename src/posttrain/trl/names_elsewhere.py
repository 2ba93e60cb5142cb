"""TRL names that this package does not have or does not call: each is rejected with what to use instead."""

import json
import re
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.errors import UserError
from posttrain.trl.configs.trainer_configs import GRPOConfig, SFTConfig

TRAINER_NAMES = Path(__file__).with_name("trainer_names.json")
"""Methods and attributes of TRL's trainers over transformers, under "made by" the versions; "Trainer" is for all.

`python benchmarks/trl/trainer_names.py` writes this file, and `make trl-parity` compares it.
"""
NAMES = {kind: frozenset(" ".join(lines).split()) for kind, lines in json.loads(TRAINER_NAMES.read_bytes()).items()}
COMPLETIONS = "Every completion is in rollouts/ of the run's folder; for other actions write a TrainerCallback."
PAIRS = "For pairs of answers use DPOTrainer with DPOConfig."
ONLINE = "To train by reward use GRPOTrainer with GRPOConfig, or posttrain.train with another algorithm."
TEMPLATE = "Give rows of messages: trainers apply the chat template.  Or call tokenizer.apply_chat_template."
PREFERENCES = "Give `chosen` and `rejected` as whole conversations: trainers find the prompt that both begin with."
INSTEAD = {
    "setup_chat_format": "TRL has dropped it too.  Give a tokenizer with a chat_template as processing_class.",
    "clone_chat_template": "Give a tokenizer with that chat_template as processing_class.",
    **dict.fromkeys(("DatasetMixtureConfig", "get_dataset"), "Load the data in the script, and give the trainer rows."),
    "DataCollatorForCompletionOnlyLM": "Give rows of `prompt` and `completion`, and leave it out.",
    **{f"{kind}Callback": COMPLETIONS for kind in ("LogCompletions", "RichProgress", "WinRate")},
    "SyncRefModelCallback": "Set sync_ref_model=True in GRPOConfig.",
    "AutoModelForCausalLMWithValueHead": "A critic is made by posttrain.train with the algorithm `ppo`.",
    **dict.fromkeys(("PPOTrainer", "PPOConfig"), "Use posttrain.train with the algorithm `ppo`."),
    **dict.fromkeys(("GKDTrainer", "GKDConfig"), "Use posttrain.train with the algorithm `distill`."),
    **dict.fromkeys(("apply_chat_template", "maybe_apply_chat_template"), TEMPLATE),
    **dict.fromkeys(("extract_prompt", "maybe_extract_prompt"), PREFERENCES),
    "maybe_convert_to_chatml": "Give the rows as they are: `conversations` with `from` and `value` are read.",
    "is_conversational": "Leave it out: trainers read rows of messages and rows of text.",
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


class ModulesElsewhere(MetaPathFinder):
    """Says what to import instead of a TRL module; it runs after all other finders."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Nothing.  Raises ModuleNotFoundError for a module that TRL has."""
        name = fullname.removeprefix(f"{PACKAGE}.")
        if name != fullname and name in MODULES:
            raise ModuleNotFoundError(f"no module {fullname!r}: it is not here.  {MODULES[name]}", name=fullname)


LOSS = r"loss|training_step|prediction_step|logps|entropy|forward|weights"
REMEDIES = (
    (r"optimizer|scheduler|decay", "Give `optimizers=(optimizer, scheduler)` where the trainer takes them."),
    (r"dataset|dataloader|collat|sampler|batch_samples|column|tokeniz|prepare_input", "Give rows that are ready."),
    (r"save|checkpoint|push|card|hub|hf_repo", "Use the `on_save` of a TrainerCallback."),
    (r"evaluat|predict|metrics|eval_", "Override `evaluate`, or measure in the `on_evaluate` of a TrainerCallback."),
    (r"^model", "Make a trainer with that model."),
    (r"", "Use a TrainerCallback, an argument of the trainer, or posttrain.train."),
)
"""What to do instead of overriding a name, by the first pattern that it contains."""
BY_REWARD = (
    (
        r"reward|advantage|score_|_log_|_pending|^_metrics|^_logs",
        "Write a reward function; its `log_metric` adds to the log.",
    ),
    (r"generat|rollout|vllm|tool|environment", "Set `trainer.engine` to an engine."),
)
"""The same for trainers by reward, checked first."""
BY_NAME = {
    "callback_handler": "Use add_callback, pop_callback and remove_callback of the trainer.",
    "get_batch_logps": "Use posttrain.models.logprobs.token_logprobs.",
    "is_in_train": "Read `state.global_step`, or use the `on_train_begin` and `on_train_end` of a TrainerCallback.",
    "label_names": "Nothing here is named as a label: give rows, and SFTTrainer.train_dataset shows their `labels`.",
    "tokenizer": "Use `processing_class`.",
    "predict": "Use `evaluate(rows)` for metrics, and `generate` of the model for texts.",
}
FORMER = frozenset({"get_batch_logps", "tokenizer"})
"""Old names of TRL's trainers that scripts still use."""
MISSING = object()
FIELDS = GRPOConfig.field_rules.keys() | SFTConfig.field_rules.keys()


class CheckedOverrides:
    """Rejects names that TRL's trainers use but ours do not, in subclasses, mixins, patches and on trainers."""

    settable: ClassVar[frozenset[str]] = frozenset()
    """Attributes that a script may replace on a trainer, and that training reads."""
    not_called: ClassVar[frozenset[str]] = frozenset()
    """Methods that a script may call, but that training does not use."""
    defined: ClassVar[frozenset[str]] = frozenset()
    """Names that this package, not a script, defines in a class."""
    by_reward: ClassVar[bool] = False
    """Whether completions are sampled and rewarded."""
    loss_remedy: ClassVar[str] = "The loss of this trainer cannot be replaced; train with transformers' Trainer."
    made = False

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls.defined = frozenset(vars(cls)) if cls.__module__.startswith("posttrain.trl.") else frozenset()
        require_called(cls)

    def __setattr__(self, name: str, value: object) -> None:
        """Once the trainer is made, reject attributes that training would not read, unless the value is the same."""
        found = getattr(type(self), name, None)
        read_only = isinstance(found, property) and found.fset is None
        if self.made and (name in not_here(type(self)) - self.settable or read_only):
            if value is not getattr(self, name, MISSING):
                raise override_error(type(self), name)
            return
        super().__setattr__(name, value)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Reject names that only TRL's trainers have, with AttributeError, so that `hasattr` works."""
            if name in theirs(type(self)):
                raise AttributeError(f"{type(self).__name__}.{name} is not here.  {override_remedy(type(self), name)}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def theirs(kind: type) -> frozenset[str]:
    of_kind = next((NAMES[each.__name__] for each in kind.__mro__ if each.__name__ in NAMES), frozenset())
    return NAMES["Trainer"] | FORMER | of_kind


def not_here(kind: type[CheckedOverrides]) -> frozenset[str]:
    ours = {name for each in kind.__mro__ for name in vars(each).get("defined", ())}
    return (theirs(kind) - ours) | kind.not_called


def require_called(kind: type[CheckedOverrides]) -> None:
    """Reject names that training would not use if a subclass, a mixin or a patch defines them."""
    refused = not_here(kind)
    for each in kind.__mro__[: kind.__mro__.index(CheckedOverrides)]:
        for name in vars(each).keys() - vars(each).get("defined", frozenset()):
            if name in refused:
                raise override_error(kind, name)


def overrides(made: CheckedOverrides, name: str) -> bool:
    """Whether a script overrides a method, in a subclass, by a patch or on the trainer."""
    ours = next(vars(each)[name] for each in type(made).__mro__ if name in vars(each).get("defined", ()))
    return getattr(getattr(made, name), "__func__", None) is not ours


def override_error(kind: type[CheckedOverrides], name: str) -> UserError:
    remedy = override_remedy(kind, name)
    return UserError(f"{kind.__name__}.{name}: training does not use it here, so it would be ignored.  {remedy}")


def override_remedy(kind: type[CheckedOverrides], name: str) -> str:
    if name in FIELDS and name not in BY_NAME:
        return "Set it in `args`, and make a trainer with them."
    known = (*(BY_REWARD if kind.by_reward else ()), (LOSS, kind.loss_remedy), *REMEDIES)
    return BY_NAME.get(name) or next(says for pattern, says in known if re.search(pattern, name))
