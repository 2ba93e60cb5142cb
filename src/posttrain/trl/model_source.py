"""The policy that a trainer's arguments describe: a path or a model object, its tokenizer, 4 bits."""

import sys
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from transformers import AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.adapters.peft_format import unread_reason
from posttrain.models.loading.devices import chosen_device
from posttrain.models.loading.model_folder import load_policy, load_policy_to_train, loaded_config, located_folder
from posttrain.models.policy import Policy, as_policy, stop_ids
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.trl.configs.field_rules import mapping_of
from posttrain.trl.configs.training_fields import TrainingFields

if TYPE_CHECKING:
    from peft import LoraConfig

PeftConfig: TypeAlias = "LoraConfig | None"
Row = Mapping[str, object]
Dataset = Iterable[Row]
Optimizers = tuple[Optimizer | None, lr_scheduler.LRScheduler | None]
Dtype = Literal["auto", "float32", "bfloat16"]
NO_MATTER = ("device_map", "use_cache", "low_cpu_mem_usage")
"""Arguments of from_pretrained that say where and how to load, and do not change results."""


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of every trainer: model, rows, callbacks and optimiser."""

    model: str | nn.Module
    processing_class: PreTrainedTokenizerBase | None
    peft_config: PeftConfig
    quantization_config: BitsAndBytesConfig | None
    callbacks: Sequence[object] | None
    train_dataset: Dataset | None
    eval_dataset: Dataset | Mapping[str, Dataset] | None
    optimizers: Optimizers
    loaded_here: bool = False
    """Whether the trainer, not the script, loaded the model object."""


def named_folder(model: object) -> str:
    """The folder, or name on the hub, that a model object was loaded from; for a `PeftModel`, its base's."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def load_source(source: Given, args: TrainingFields, notes: list[str]) -> tuple[Policy, nn.Module, ModelOptions]:
    """The policy that a trainer trains, its model or the PeftModel around it, and the options; adds to the notes."""
    if source.peft_config is not None:
        from peft import LoraConfig

        if not isinstance(cast(object, source.peft_config), LoraConfig):
            kind = type(source.peft_config).__name__
            raise UserError(f"peft_config: a {kind} is given.  Only LoRA is supported: give a peft.LoraConfig.")
    options = model_options(source, args, notes)
    if isinstance(source.model, str):
        policy, shown, options = policy_of_path(source, options, args, notes)
    else:
        shown = model_object(source, source.model, options)
        tokenizer = source.processing_class
        if tokenizer is None:
            name = named_folder(shown)
            try:
                tokenizer = AutoTokenizer.from_pretrained(name)
            except (OSError, ValueError) as error:
                missing = f"{name}, which the model was loaded from, has no tokenizer" if name else "it is missing"
                raise UserError(f"processing_class: {missing}.  Give the model's tokenizer.") from error
        tokenizer = tokenizer_given(tokenizer)
        policy = as_policy(shown, tokenizer, dtype="auto" if options.dtype == "float32" else options.dtype)
        options = replace(options, path=ModelOptions.path)
    if source.processing_class is not None and source.processing_class is not policy.tokenizer:
        tokenizer = tokenizer_given(source.processing_class)
        policy = replace(policy, tokenizer=tokenizer, stop_ids=stop_ids(policy.model, tokenizer))
    text_config = policy.model.config.get_text_config()
    coefficient = getattr(text_config, "router_aux_loss_coef", None)
    if args.router_aux_loss_coef is None and coefficient and hasattr(text_config, "output_router_logits"):
        given = f"router_aux_loss_coef = {coefficient} of the model"
        notes.append(f"{given}: TRL adds the loss of its router, and none is added here.")
    unread = unread_reason(policy.model)
    if unread is not None:
        notes.append(f"PEFT will read the saved adapter, but posttrain's commands will not.  {unread}")
    policy = with_tokenizer_fields(policy, args)
    if lora_layers(policy.model) and find_spec("peft") is None:
        notes.append("peft is not installed: save the adapter by trainer.save_model, not by trainer.model.")
    return policy, policy.model if shown is None else shown, options


def is_peft_model(model: object) -> bool:
    peft = sys.modules.get("peft")  # whoever has such a model has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


def model_options(source: Given, args: TrainingFields, notes: list[str]) -> ModelOptions:
    """The arguments about loading, as options."""
    given = mapping_of(args, "model_init_kwargs")
    dtype = dtype_of(given.pop("dtype", given.pop("torch_dtype", None)), args, notes)
    quantization = given.pop("quantization_config", None) or source.quantization_config
    if not isinstance(source.model, str) and not source.loaded_here:
        says = "sets nothing: the model is loaded already."
        notes += [f"model_init_kwargs: {name} = {value!r:.60} {says}" for name, value in given.items()]
        given = {}
    options = ModelOptions(
        path=source.model if isinstance(source.model, str) else ModelOptions.path,
        revision=revision_of(given.pop("revision", None)),
        trust_remote_code=bool(given.pop("trust_remote_code", args.trust_remote_code)),
        attn_implementation=given.pop("attn_implementation", None) or "auto",
        device="cpu" if args.use_cpu or args.no_cuda else "auto",
        gradient_checkpointing=bool(args.gradient_checkpointing or args.activation_checkpointing),
        dtype=dtype,
        template_options=mapping_of(args, "chat_template_kwargs") if "chat_template_kwargs" in vars(args) else {},
        adapter=AdapterOptions() if quantization is not None else None,  # its layers depend on the model
        quantization=quantized(quantization, notes),
    )
    for name, value in given.items():
        if name not in NO_MATTER:
            raise UserError(
                f"model_init_kwargs: {name} = {value!r:.60} is not dtype, attn_implementation, revision,"
                " trust_remote_code or quantization_config.  For others load the model yourself and give it as `model`."
            )
        notes.append(f"{name} = {value!r:.60} sets nothing here")
    return options


def revision_of(given: object) -> str:
    return "" if given in (None, "main") else str(given)


def dtype_of(value: object, args: TrainingFields, notes: list[str]) -> Dtype:
    """The type of matrix products: bfloat16 on a GPU if a script requests half precision, or nothing."""
    name = "auto" if value is None else str(value).removeprefix("torch.")
    if name not in ("auto", "float32", "bfloat16", "float16"):
        raise UserError(f"model_init_kwargs: dtype = {name}: use auto, float32 or bfloat16.")
    given = [f"{field} = True" for field in ("bf16", "fp16") if vars(args)[field]]
    given += [f"dtype = {name}"] if name in ("bfloat16", "float16") else []
    if args.use_cpu or args.no_cuda or not torch.cuda.is_available():
        if given:
            notes.append(f"{given[0]}: there is no GPU here, so everything is computed in float32.")
        return "float32"
    if not given:
        return "float32" if args.bf16 is False else "auto"
    if args.fp16 or name == "float16":
        used: Dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
        notes.append(f"{given[-1]}: products are computed in {used}, as float16 overflows in this training.")
        return used
    return "bfloat16"


def quantized(config: object, notes: list[str]) -> Literal["nf4"] | None:
    """Whether the frozen weights are held in 4 bits."""
    if config is None:
        return None
    if not isinstance(config, BitsAndBytesConfig) or not config.load_in_4bit or config.bnb_4bit_quant_type != "nf4":
        raise UserError(
            "quantization_config: only NF4 is supported.  Give BitsAndBytesConfig(load_in_4bit=True,"
            ' bnb_4bit_quant_type="nf4"), or load the model yourself and give the object.'
        )
    if not config.bnb_4bit_use_double_quant:
        notes.append("quantization_config: the scales of 4-bit weights are quantised as well (double quantisation).")
    return "nf4"


def policy_of_path(
    source: Given, options: ModelOptions, args: TrainingFields, notes: list[str]
) -> tuple[Policy, nn.Module | None, ModelOptions]:
    """A policy from a folder or the hub, and the PeftModel around it, if any."""
    config = source.peft_config
    if config is None:
        if options.quantization is not None:
            raise UserError("quantization_config: weights in 4 bits cannot be trained.  Give peft_config as well.")
        return load_policy_to_train(options, seed=args.seed), None, options
    from posttrain.trl.peft_models import adapter_options, with_peft

    plain = replace(options, adapter=None, quantization=None)
    adapter = adapter_options(config, str(loaded_config(located_folder(plain), plain).model_type))
    if adapter is not None:
        options = replace(options, adapter=adapter)
        return load_policy_to_train(options, seed=args.seed), None, options
    if options.quantization is not None:
        raise UserError(
            "peft_config: with 4 bits only rank, alpha, dropout, target_modules by name and use_rslora are supported."
            "  Leave the rest out, or the quantisation."
        )
    notes.append("peft_config says more than rank, alpha, dropout and layers, so the adapter's layers are peft's own.")
    policy, shown = with_peft(load_policy(options, seed=args.seed), config, seed=args.seed)
    return policy, shown, options


def model_object(source: Given, model: nn.Module, options: ModelOptions) -> nn.Module:
    """A model that a script has loaded, on its device, with the adapter of `peft_config`."""
    if options.quantization is not None:
        raise UserError("quantization_config: the model is loaded already.  Load it with that config, or give a path.")
    move_to(model, chosen_device(options.device))
    if options.gradient_checkpointing and hasattr(model, "gradient_checkpointing_enable"):
        cast(PreTrainedModel, model).gradient_checkpointing_enable()
    if source.peft_config is None:
        return model
    from posttrain.trl.peft_models import peft_model

    return peft_model(model, source.peft_config)


def move_to(model: nn.Module, device: torch.device) -> None:
    """Move a model to the device that trains, as transformers' Trainer does.

    A quantised model, or one spread over devices by a `device_map`, stays where its loader placed it.  A model on
    another device of the same kind stays where the script put it.
    """
    there = next((parameter.device.type for parameter in model.parameters()), device.type)
    placed = getattr(model, "hf_device_map", None) is not None or getattr(model, "is_quantized", False)
    if there != device.type and not placed:
        model.to(device)  # parameters stay the objects that an optimiser of the caller's holds


def tokenizer_given(candidate: object) -> PreTrainedTokenizerBase:
    if not isinstance(candidate, PreTrainedTokenizerBase):
        kind = type(candidate).__name__
        raise UserError(f"processing_class: a {kind} is given.  Give one of AutoTokenizer.from_pretrained.")
    return candidate


def with_tokenizer_fields(policy: Policy, args: TrainingFields) -> Policy:
    """The policy with the stop token and the chat template of the arguments; its tokenizer is changed."""
    owner, given = type(args).__name__, vars(args)
    template, eos_token = given.get("chat_template_path"), given.get("eos_token")
    if template is not None:
        copy_template(policy, str(template), owner)
    if eos_token is None:
        return policy
    tokenizer, model = policy.tokenizer, policy.model
    if eos_token not in tokenizer.get_vocab():
        raise UserError(f"{owner}: eos_token = {eos_token!r} is not a token of the tokenizer.  Name one that it has.")
    tokenizer.eos_token = eos_token
    model.config.eos_token_id = tokenizer.eos_token_id
    if model.generation_config is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    return replace(policy, stop_ids=stop_ids(model, tokenizer))


def copy_template(policy: Policy, path: str, owner: str) -> None:
    """Use the chat template of a Jinja file, or of a tokenizer in a folder or on the hub."""
    where = f"{owner}: chat_template_path = {path!r}"
    if path.endswith((".jinja", ".j2")):
        if not Path(path).is_file():
            raise UserError(f"{where}: there is no such file.")
        policy.tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        return
    try:
        other = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: no tokenizer there.  Give a .jinja file or a folder with a tokenizer.") from error
    if not other.chat_template:
        raise UserError(f"{where}: its tokenizer has no chat template.")
    missing = {*other.all_special_tokens} - policy.tokenizer.get_vocab().keys()
    if used := sorted(each for each in missing if each in str(other.chat_template)):
        raise UserError(f"{where}: the model lacks its tokens {', '.join(used)}.  Add them to model and tokenizer.")
    policy.tokenizer.chat_template = other.chat_template


def rows_of_dataset(given: object, name: str, *, most: int | None) -> list[Row]:
    """The rows; from data without a length, such as a stream, as many as a run can draw."""
    kind = type(given).__name__
    if isinstance(given, Mapping):
        names = ", ".join(map(str, given))
        raise UserError(f"{name}: a {kind} of {names} is given.  Give one of them: {name}=data[{next(iter(given))!r}].")
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise UserError(f"{name}: {given!r:.60} ({kind}) is given.  Give a datasets.Dataset or a list of dicts.")
    if not isinstance(given, Sized) and most is None:
        remedy = "set max_steps, which ends the run" if name == "train_dataset" else "give a list: list(data.take(100))"
        raise UserError(f"{name}: it has no length, so {remedy}.")
    rows = list(given) if isinstance(given, Sized) else list(islice(given, most))
    if not rows:
        raise UserError(f"{name}: it is empty.  Give at least one row.")
    for row in rows:
        if not isinstance(row, Mapping):
            raise UserError(f"{name}: {row!r:.60} ({type(row).__name__}) is not a row.  Give dicts of columns.")
    return rows
