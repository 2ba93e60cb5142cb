"""Mistakes in a script for TRL: each is refused by the name of what the script wrote, with its value and what to do.

A row is a bad value and the words of its message: the name, the value, the remedy.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import posttrain.trl
from posttrain.errors import RunError, UserError
from posttrain.trl import GRPOConfig, SFTConfig, SFTTrainer, TrlParser
from posttrain.trl.configs.field_rules import errors_by_field, mapping_of
from posttrain.trl.grpo_trainer import require_prompts
from tests.support.trl_trainers import KINDS, PAIRS, PROMPTS, Kind, length, trainer

CHATS = [{"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1."}]}] * 4
TEXTS, TOKENS = [{"text": "a text"}], [{"input_ids": [5, 6, 7]}]
IN_8_BITS = BitsAndBytesConfig(load_in_8bit=True)
IN_4_BITS = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
Given = dict[str, Any]


def refused(call: Callable[[], object], *words: str, error: type[Exception] = UserError) -> None:
    """A call ends in an error whose message has all the words."""
    with pytest.raises(error) as caught:
        call()
    assert [each for each in words if each not in str(caught.value)] == [], caught.value


def stream() -> Any:
    return iter(PROMPTS)


BEST = {"eval_strategy": "steps", "metric_for_best_model": "reward", "eval_dataset": PROMPTS[:2]}
FIELDS: list[tuple[Given, tuple[str, ...]]] = [
    ({"lr_scheduler_type": "polynomial"}, ("lr_scheduler_type = 'polynomial'", "use linear, cosine, constant or")),
    ({"multi_objective_aggregation": "sum"}, ("= 'sum'", "use sum_then_normalize or normalize_then_sum")),
    ({"report_to": "all"}, ("report_to = 'all'", "tensorboard, wandb, mlflow, trackio")),
    ({"loss_type": "sapo"}, ("loss_type = 'sapo'", "use grpo, bnpo, dapo, dr_grpo, luspo or cispo")),
    ({"loss_type": "cispo"}, ("epsilon_high = 0.2", "loss_type = cispo", "Use 5.0")),
    ({"scale_rewards": "std"}, ("scale_rewards = 'std'", "use group, batch or none")),
    ({"importance_sampling_level": "word"}, ("importance_sampling_level = 'word'", "use token or sequence")),
    ({"sync_ref_model": True, "beta": 0.1}, ("ref_model_mixup_alpha = 0.6 with sync_ref_model", "use 1.0")),
    ({"sync_ref_model": True, "ref_model_mixup_alpha": 1.0}, ("sync_ref_model = True with beta = 0", "Leave one")),
    ({"max_completion_length": None}, ("max_completion_length = None", "use a whole number >= 1")),
    ({"delta": 1.1}, ("delta = 1.1", "1 + epsilon_high = 1.2", "Use at least")),
    ({"delta": 4.0, "loss_type": "cispo", "epsilon_high": 5.0}, ("delta = 4.0 with loss_type = cispo", "Leave it")),
    ({"steps_per_generation": 4, "gradient_accumulation_steps": 3}, ("steps_per_generation = 4", "a multiple of")),
    ({"steps_per_generation": 1, "gradient_accumulation_steps": 2, "num_iterations": 3}, ("num_iterations = 3",)),
    ({"steps_per_generation": 2, "generation_batch_size": 16}, ("generation_batch_size = 16", "Leave one out")),
    ({"generation_batch_size": 12, "per_device_train_batch_size": 8}, ("generation_batch_size = 12", "Use 16")),
    ({"num_generations": 1}, ("num_generations = 1", "use a whole number >= 2")),
    ({"gradient_accumulation_steps": 0}, ("gradient_accumulation_steps = 0", "use a whole number >= 1")),
    ({"steps_per_generation": 0}, ("steps_per_generation = 0", "use a whole number >= 1 or None")),
    ({"save_total_limit": -5}, ("save_total_limit = -5", "use a whole number >= -1 or None")),
    ({"logging_steps": 0}, ("logging_steps = 0", "use a number > 0")),
    ({"eval_strategy": "best"}, ("eval_strategy = 'best'", "use no, steps or epoch")),
    ({"logging_strategy": "step"}, ("logging_strategy = 'step'", "use no, steps or epoch")),
    ({"eval_strategy": "steps"}, ("eval_strategy = 'steps'", "give the trainer an eval_dataset")),
    ({"metric_for_best_model": "banana"}, ("metric_for_best_model = 'banana'", "Give eval_strategy")),
    ({**BEST, "eval_strategy": "no", "load_best_model_at_end": True}, ("load_best_model_at_end", "Set eval_strategy")),
    ({**BEST, "save_strategy": "no", "load_best_model_at_end": True}, ("save_strategy = no", "Use save_strategy")),
    ({**BEST, "save_strategy": "best", "metric_for_best_model": None}, ("= best", "metric_for_best_model")),
    ({**BEST, "save_strategy": "best", "eval_strategy": "no"}, ("save_strategy = best", "Set eval_strategy")),
    ({**BEST, "save_strategy": "worst"}, ("save_strategy = 'worst'", "use no, steps, epoch or best")),
]
"""Fields of GRPOConfig, most of which all configs have."""
ARGUMENTS: list[tuple[str, Given, tuple[str, ...]]] = [
    ("grpo", {"rollout_func": length}, ("rollout_func = ", "environment_factory", "Leave it out")),
    ("grpo", {"reward_func": length}, ("no argument 'reward_func'", "Did you mean `reward_funcs`")),
    ("grpo", {"callbacks": [object()]}, ("callbacks: ", "Inherit from transformers.TrainerCallback")),
    ("grpo", {"optimizers": (None, object())}, ("optimizers: give torch's (optimizer, scheduler)",)),
    ("grpo", {"peft_config": object()}, ("peft_config: a object", "peft.LoraConfig")),
    ("grpo", {"processing_class": object()}, ("processing_class: a object", "AutoTokenizer")),
    ("grpo", {"reward_funcs": None}, ("reward_funcs: it is missing", "Give a function")),
    ("grpo", {"reward_funcs": []}, ("reward_funcs: the list is empty", "Give a function")),
    ("grpo", {"reward_funcs": 3}, ("reward_funcs: 3 (int) cannot score completions", "Give a function")),
    ("grpo", {"reward_funcs": torch.nn.Linear(1, 1)}, ("reward_funcs: Linear", "Give a function")),
    ("grpo", {"reward_weights": [1, 2]}, ("reward_weights has 2 numbers for 1", "give one for each")),
    ("grpo", {"quantization_config": IN_4_BITS}, ("4 bits cannot be trained", "Give peft_config")),
    ("grpo", {"quantization_config": IN_8_BITS}, ("only NF4 is supported", "Give BitsAndBytesConfig")),
    ("grpo", {"model_init_kwargs": "a word"}, ("model_init_kwargs = 'a word' is not a mapping", "give a dict")),
    ("grpo", {"train_dataset": [{"question": "1"}]}, ("row 0", "`prompt` is missing", "it has question", "Give every")),
    ("grpo", {"train_dataset": [*PROMPTS, {"prompt": ""}]}, ("train_dataset: row 8", "`prompt` is empty", "Give")),
    ("grpo", {"train_dataset": [*PROMPTS, {"answer": "b"}]}, ("train_dataset: row 8", "`prompt` is missing", "Give")),
    ("grpo", {"train_dataset": stream(), "max_steps": -1}, ("train_dataset: it has no length", "max_steps")),
    ("grpo", {"train_dataset": ["a prompt"]}, ("train_dataset: 'a prompt' (str)", "Give dicts of columns")),
    ("sft", {"data_collator": print}, ("SFTTrainer: data_collator = ", "Leave it out")),
    ("sft", {"compute_metrics": print}, ("SFTTrainer: compute_metrics = ", "Leave it out")),
    ("sft", {"tokenizer": "x"}, ("no argument 'tokenizer'", "It is called `processing_class`")),
    ("sft", {"train_datset": "x"}, ("no argument 'train_datset'", "Did you mean `train_dataset`")),
    ("sft", {"eos_token": "<none such>"}, ("eos_token = '<none such>'", "Name one that it has")),
    ("sft", {"chat_template_path": "none.jinja"}, ("chat_template_path = 'none.jinja'", "there is no such file")),
    ("sft", {"chat_template_path": "/nowhere"}, ("chat_template_path = '/nowhere'", "Give a .jinja file")),
    ("sft", {"assistant_only_loss": True, "completion_only_loss": False}, ("completion_only_loss = False", "messages")),
    *(
        ("sft", {name: True, "train_dataset": fitting, where: rows}, (f"SFTConfig: {name} = True, and {where}", "Give"))
        for name, fitting, unfit in (
            ("completion_only_loss", [{"prompt": "1 =", "completion": "1"}], (TEXTS, CHATS, TOKENS)),
            ("assistant_only_loss", CHATS, (TEXTS, TOKENS)),
        )
        for rows in unfit
        for where in ("train_dataset", "eval_dataset")
    ),
    ("dpo", {"train_dataset": [row | {"images": ["a"]} for row in PAIRS]}, ("the column 'images'", "Leave it out")),
    ("reward", {"train_dataset": [row | {"images": ["a"]} for row in PAIRS]}, ("the column 'images'", "Leave it out")),
]
"""Arguments of a trainer, by its kind, and fields that need its rows or its tokenizer."""


@pytest.mark.parametrize(("given", "words"), FIELDS, ids=lambda each: " ".join(each) if isinstance(each, dict) else "")
def test_a_field_is_refused_before_a_run(given: Given, words: tuple[str, ...], model: str, tmp_path: Path) -> None:
    refused(lambda: trainer("grpo", model, tmp_path, **given).described(), "GRPOConfig: ", *words)


@pytest.mark.parametrize(("kind", "given", "words"), ARGUMENTS)
def test_an_argument_is_refused(kind: str, given: Given, words: tuple[str, ...], model: str, tmp_path: Path) -> None:
    refused(lambda: trainer(kind, model, tmp_path, **given).described(), *words)


def test_prompts_may_be_in_conversations_and_in_preferences() -> None:
    require_prompts([{"messages": []}], "train_dataset")
    require_prompts([{"chosen": "a b", "rejected": "a c"}], "train_dataset")


@Kind
def test_a_trainer_without_rows_says_so(kind: str, model: str, tmp_path: Path) -> None:
    name = KINDS[kind][0].__name__
    refused(lambda: trainer(kind, model, tmp_path, train_dataset=None), f"{name}: train_dataset is missing; give rows")
    made = trainer(kind, model, tmp_path)
    refused(made.evaluate, f"{name}: eval_dataset is missing; give rows")
    refused(lambda: made.evaluate(stream()), "eval_dataset: it has no length", "list(data.take(100))")


def test_what_a_run_finds_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer("grpo", model, tmp_path / "run", hub_model_id="me/mine", max_steps=1)
    for asked in (True, str(tmp_path / "checkpoints" / "step-000001")):
        refused(lambda: made.train(resume_from_checkpoint=asked), "resume_from_checkpoint = ", "does not contain a run")  # noqa: B023
    made.train()
    refused(made.train, "output_dir = ", "already contains a run", "resume_from_checkpoint=True")
    other = str(tmp_path / "parts" / "checkpoints" / "step-000001")
    refused(lambda: made.train(resume_from_checkpoint=other), "not a checkpoint of the run", "Give True")
    refused(lambda: made.push_to_hub(dataset_nam="x"), "no 'dataset_nam'", "Did you mean `dataset_name`")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(made.push_to_hub, "push_to_hub: me/mine could not be written", "can be pushed later", error=RunError)
    unnamed = trainer("grpo", model, tmp_path / "my-model")
    refused(unnamed.push_to_hub, "push_to_hub: my-model could not be written", error=RunError)


def test_a_model_object_without_a_tokenizer_is_refused(model: str, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model)
    wrapped: Any = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    for folder, says in (("", "it is missing"), (str(tmp_path), "has no tokenizer")):
        base.config._name_or_path = folder
        refused(lambda: trainer("grpo", wrapped, tmp_path), "processing_class: ", says, "Give the model's tokenizer")


def test_a_reference_that_is_the_policy_itself_is_refused(model: str, tmp_path: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model)
    words = ("ref_model is the trained model", "Leave it out")
    refused(lambda: trainer("dpo", policy, tmp_path, ref_model=policy), *words)


def test_other_arguments_than_a_config_are_refused(model: str, tmp_path: Path) -> None:
    given: Any = GRPOConfig(str(tmp_path))
    refused(lambda: SFTTrainer(model, given, train_dataset=TEXTS), "args: GRPOConfig is given", "Give SFTConfig")
    refused(lambda: GRPOConfig(num_generation=4), "no field 'num_generation'", "`num_generations`")  # type: ignore[call-arg]
    text: Any = "{revision: main}"
    refused(lambda: GRPOConfig(model_init_kwargs=text), "model_init_kwargs = '{revision: main}' is not JSON", "write")
    word: Any = "a word"
    refused(lambda: mapping_of(GRPOConfig(chat_template_kwargs=word), "chat_template_kwargs"), "is not a mapping")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_step: 3", ("there is no field 'max_step'", "Did you mean `max_steps`")),
        ("- 1", ("a list", "write a mapping")),
        ("a: [", ("not YAML",)),
        ("env: 3", ("env = 3", "write a mapping")),
        (None, ("config = ", "there is no such file")),
    ],
)
def test_a_file_of_fields_is_refused(text: str | None, words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    refused(lambda: TrlParser(GRPOConfig).parse_args_and_config(["--config", str(file)]), str(file), *words)


def test_a_parser_without_a_file_or_with_a_field_of_that_name_is_refused() -> None:
    @dataclass
    class Other:
        config: str = ""

    refused(lambda: TrlParser(GRPOConfig).parse_args_and_config(["--config"]), "`config`", "name a YAML file after it")
    refused(lambda: TrlParser(Other), "Other has a field `config`")


NAMES = [
    ("setup_chat_format", "Give a tokenizer with a chat_template"),
    ("KTOTrainer", "use DPOTrainer with DPOConfig"),
    ("ORPOConfig", "use DPOTrainer with DPOConfig"),
    ("get_dataset", "Load the data in the script"),
    ("LogCompletionsCallback", "rollouts/ of the run's folder"),
    ("GRPOTrainr", "Did you mean `GRPOTrainer`"),
    ("maybe_apply_chat_template", "Give rows of messages"),
    ("is_conversational", "trainers read rows of messages and rows of text"),
]
MODULES = [
    ("trainer", "Import trainers, configs and get_peft_config from posttrain.trl"),
    ("trainer.utils", "Import trainers, configs and get_peft_config from posttrain.trl"),
    ("data_utils", "Give rows of messages"),
    ("import_utils", "importlib.util.find_spec"),
    ("experimental.kto", "use DPOTrainer with DPOConfig"),
]


@pytest.mark.parametrize(("name", "remedy"), NAMES)
def test_an_import_of_what_is_not_here_says_what_is(name: str, remedy: str) -> None:
    there = f"cannot import '{name}' from posttrain.trl"  # `from posttrain.trl import NAME` calls getattr
    refused(lambda: getattr(posttrain.trl, name), there, remedy, error=ImportError)


@pytest.mark.parametrize(("name", "remedy"), MODULES)
def test_a_module_that_only_trl_has_says_where_its_names_are(name: str, remedy: str) -> None:
    there = f"no module 'posttrain.trl.{name.split('.')[0]}'"
    refused(lambda: importlib.import_module(f"posttrain.trl.{name}"), there, remedy, error=ModuleNotFoundError)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'posttrain\.trl\.other'$"):
        importlib.import_module("posttrain.trl.other")


@pytest.mark.parametrize(
    ("given", "message", "begins"),
    [
        ({}, "rollout.group_size = 1 leaves nobody", "GRPOConfig: num_generations: rollout.group_size"),
        ({}, "learning_rate = 0 cannot teach", "GRPOConfig: learning_rate: learning_rate = 0"),
        ({"top_k": 3}, "set rollout.allow_cut_sampling: true", "GRPOConfig: top_k: set rollout.allow"),
        ({}, "raise update.tokens_per_microbatch.", "GRPOConfig: per_device_train_batch_size: raise"),
        ({"warmup_ratio": 0.1}, "update.warmup_steps = 9", "GRPOConfig: warmup_ratio: update.warmup_steps"),
        ({}, "algorithm.kl.coefficient = -1", "GRPOConfig: beta: algorithm.kl.coefficient"),
    ],
)
def test_a_message_about_an_option_of_ours_begins_with_the_field(given: Given, message: str, begins: str) -> None:
    with pytest.raises(RunError) as caught, errors_by_field(GRPOConfig(**given)):
        raise RunError(message)
    assert str(caught.value).startswith(begins)
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize(
    "message",
    [
        "prompts[3]: nothing of ours",
        "SFTConfig: max_length = 0: use more; sft.max_length is ours",
        "mysft.max_length, sft.max_lengths and sft.max_length.more are no options",
    ],
)
def test_other_messages_are_left_as_they_are(message: str) -> None:
    with pytest.raises(UserError) as caught, errors_by_field(SFTConfig()):
        raise UserError(message)
    assert str(caught.value) == message
