"""A policy from a model folder, from the hub or its cache, or from the package."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.quantization_config import Mxfp4Config

from posttrain.errors import UserError
from posttrain.models.adapters.peft_format import SavedAdapter, read_adapter
from posttrain.models.adapters.quantized import compute_unpacked_in, quantize, require_half_in_4_bits
from posttrain.models.loading.adapter_folder import (
    adapter_template,
    base_options,
    name_stop_ids,
    named_stop_ids,
    put_over,
    require_adapter_for_peft,
    tokenizer_folder,
    with_chat_template,
)
from posttrain.models.loading.construction import (
    ONE_AT_A_TIME,
    freeze,
    hold_all_in,
    hold_frozen_in,
    hold_rest_in,
    lacking_weights,
    linear_matrices,
    transformers_load_errors,
    without_progress_bars,
)
from posttrain.models.loading.devices import chosen_device
from posttrain.models.loading.folder_kinds import (
    DEQUANTISED_AT_LOAD,
    IN_4_BITS,
    SAFE_WEIGHTS,
    bundled_folder,
    hub_folder,
    needs_code,
    quantisation,
    read_json,
    require_model_folder,
)
from posttrain.models.loading.text_part import is_wrapper, require_causal_class, require_text_part, text_part
from posttrain.models.model_outputs import enable_recomputation
from posttrain.models.policy import Policy, as_policy, chosen_dtype
from posttrain.options.adapter import is_adapter_folder
from posttrain.options.model import ModelOptions

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Types by their names in safetensors files."""


def load_policy(options: ModelOptions, *, seed: int = 0, inference: bool = False) -> Policy:
    """Load a model, or an adapter with the model below it; then put a new adapter over it, where one is asked for.

    All of it is made ready on the CPU and goes to its device then; only what is put into 4 bits goes there before,
    layer by layer.  So neither ever holds more than the model as it is stored, or as it will be, and one layer.
    The seed draws a new adapter; `inference` is for a model that is never trained.  Raises UserError where there is
    neither a causal language model nor an adapter that can be loaded.
    """
    return policy_from(located_model(options), options, seed=seed, inference=inference)


def load_policy_to_train(
    options: ModelOptions, *, seed: int = 0, saves_whole: bool = False, may_adapt: bool = True
) -> Policy:
    """`load_policy` for a run that trains the policy and saves it, an adapter apart unless it `saves_whole` models.

    `may_adapt` says whether the user can put an adapter over the model, which is then a remedy.
    Raises UserError too where peft or transformers could not read what the run would save.
    """
    located = located_model(options)
    require_trainable_weights(located, options, saves_whole=saves_whole, may_adapt=may_adapt)
    policy = policy_from(located, options, seed=seed, inference=False)
    if not saves_whole:
        require_adapter_for_peft(policy.model, options)
    return policy


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedModel:
    """The folders that a policy is loaded from, on this machine."""

    folder: Path
    base: ModelOptions
    """How the model in the folder is loaded: below a saved adapter, by the path that this names."""
    saved: SavedAdapter | None
    quantisation: str | None
    """How the weights in the folder are quantised, None where they are not."""


def located_model(options: ModelOptions) -> LocatedModel:
    """Find what the options name, and read its small files and its adapter."""
    saved = None
    if not options.is_bundled and is_adapter_folder(options.folder):
        saved = read_adapter(options.folder)
    base = options if saved is None else base_options(options, saved)
    folder = located_folder(base)
    found = quantisation(read_json(folder / "config.json", path_option(base)))
    if found is not None and options.quantization is not None:
        raise UserError(
            f"model.quantization = {options.quantization}: the weights in {base.path} are quantised already ({found})."
            "  Leave model.quantization out."
        )
    if found is not None:  # such a base is in 4 bits without being asked
        base = replace(base, quantization=None)
    return LocatedModel(folder=folder, base=base, saved=saved, quantisation=found)


def policy_from(located: LocatedModel, options: ModelOptions, *, seed: int, inference: bool) -> Policy:
    """See `load_policy`."""
    saved, base, folder = located.saved, located.base, located.folder
    device = chosen_device(base.device)
    config = loaded_config(folder, base)
    with load_errors(base):
        stored = stored_dtype(folder, config)
    model, dtype = plain_model(folder, config, base, device, inference=inference)
    if options.quantization is not None and saved is None:  # an adapter that was trained over such a base is still read
        require_half_in_4_bits(model)
    adapter = None if saved is None else saved.folder
    tokenizer = loaded_tokenizer(folder, base, adapter)
    name_stop_ids(model, [] if adapter is None else named_stop_ids(adapter))
    if base.gradient_checkpointing:
        enable_recomputation(model)
    put_over(model, options, saved, seed=seed)
    if base.weights == "auto" and stored == dtype:  # so no bit of what is frozen is lost
        hold_frozen_in(model, dtype)
    if located.quantisation is None:
        cast(torch.nn.Module, model).to(device)
    policy = as_policy(
        model,
        tokenizer,
        dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        context=base.context,
        stop_tokens=base.stop_tokens,
    )
    return replace(policy, stored_dtype=stored)


def plain_model(
    folder: Path, config: PreTrainedConfig, options: ModelOptions, device: torch.device, *, inference: bool
) -> tuple[PreTrainedModel, torch.dtype]:
    """The model of a folder without an adapter, in 4 bits where that is asked for, and the type of its products."""
    narrow = read_as_stored(folder, config, options, device)
    model = loaded_model(folder, config, options, torch.bfloat16 if narrow else memory_dtype(options))
    method = quantisation(read_json(folder / "config.json", path_option(options)))
    if method == IN_4_BITS:  # bitsandbytes leaves the others in the type that they are stored in
        hold_all_in(model, memory_dtype(options))
    elif method is not None and not getattr(model, "is_quantized", False):
        as_never_quantised(model, memory_dtype(options))
    if narrow:
        hold_rest_in(model, torch.float32)
        model.config.dtype = torch.float32
    freeze(model, options.frozen)
    dtype = chosen_dtype(options.dtype, torch.float32 if narrow else model.dtype, device)
    compute_unpacked_in(model, dtype)
    if options.quantization is not None:
        packed = inference and dtype == torch.bfloat16
        quantize(model, dtype, made_from=memory_dtype(options), device=device, packed_kernel=packed)
    if narrow and (options.weights == "float32" or dtype != torch.bfloat16):
        for matrix in linear_matrices(model):  # such as the output layer's, which is not in 4 bits
            matrix.data = matrix.data.float()
    return model, dtype


def read_as_stored(folder: Path, config: PreTrainedConfig, options: ModelOptions, device: torch.device) -> bool:
    """Whether weights are read in bfloat16, to be held in it or put into 4 bits, though `weights` is float32 or auto.

    Where all are stored in it and the base is frozen, that is the same numbers for half the memory.  Not so where
    the family keeps constants in the type that it is made in.
    """
    if not options.trains_adapter or options.weights == "bfloat16" or model_is_quantised(folder):
        return False
    held = options.weights == "auto" and chosen_dtype(options.dtype, torch.float32, device) == torch.bfloat16
    if options.quantization is None and not held:
        return False
    with load_errors(options):
        return stored_dtypes(folder) == {torch.bfloat16} and not has_buffers_of_its_type(config)


def has_buffers_of_its_type(config: PreTrainedConfig) -> bool:
    """Whether a model of this config has buffers that are as wide as its weights, such as Gemma's scale."""
    auto: Any = AutoModelForImageTextToText if is_wrapper(config) else AutoModelForCausalLM
    with ONE_AT_A_TIME, torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
    return any(buffer.dtype == torch.bfloat16 for buffer in model.buffers())


def as_never_quantised(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Take a model that transformers has dequantised for one that was stored in whole weights, all of one type.

    It would be saved under the names of quantised weights otherwise, which it has no longer.
    """
    vars(model).pop("_weight_conversions", None)
    cast(torch.nn.Module, model).to(dtype)


def require_trainable_weights(
    located: LocatedModel, options: ModelOptions, *, saves_whole: bool, may_adapt: bool
) -> None:
    """Refuse to train weights that are stored quantised, and to merge an adapter into those that are not dequantised.

    transformers dequantises MXFP4 as it loads it, so such a model is trained and saved as any other.
    """
    method, base = located.quantisation, path_option(located.base)
    if method is None or method == DEQUANTISED_AT_LOAD:
        return
    if not options.trains_adapter:
        merges = may_adapt and (not saves_whole or method == IN_4_BITS)
        remedy = "Train an adapter over them (model.adapter.rank: 16), or give" if merges else "Give"
        raise UserError(
            f"{base}: its weights are stored quantised ({method}) and cannot be trained.  {remedy} the folder of the"
            " model that it was quantised from."
        )
    save = "merged" if saves_whole else options.adapter.save if options.adapter is not None else "adapter"
    if save != "adapter" and method != IN_4_BITS:
        remedy = "Give" if saves_whole else "Set model.adapter.save: adapter, or give"
        raise UserError(
            f"{base}: its weights are stored quantised ({method}), and an adapter is only merged into whole weights or"
            f" 4-bit ones of bitsandbytes.  {remedy} the folder of the model that it was quantised from."
        )


def memory_dtype(options: ModelOptions) -> torch.dtype:
    """The type that weights are held in unless they are frozen."""
    return torch.bfloat16 if options.weights == "bfloat16" else torch.float32


def located_folder(options: ModelOptions) -> Path:
    """The folder that the options name, on this machine; one of the hub is downloaded where the cache lacks it."""
    options.require_files()
    if options.is_bundled:
        return bundled_folder(options.path)
    if options.hub_name is None:
        folder = options.folder
    else:
        folder = hub_folder(options.hub_name, options.hub_revision, with_code=options.trust_remote_code)
    require_model_folder(
        folder,
        path_option(options),
        trust_remote_code=options.trust_remote_code,
        attention=options.attn_implementation,
    )
    return folder


def loaded_config(folder: Path, options: ModelOptions) -> PreTrainedConfig:
    """The config of a folder, with the attention that the options ask for."""
    chosen = options.attn_implementation
    known = {"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    if chosen != "auto" and chosen not in known:
        raise UserError(
            f"model.attn_implementation = {chosen}: none that transformers knows; use auto, {', '.join(sorted(known))}."
        )
    with load_errors(options):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
        if is_wrapper(config):
            require_text_part(config, path_option(options))
        else:
            require_causal_class(config, path_option(options))
    return cast(PreTrainedConfig, config)


def loaded_model(folder: Path, config: PreTrainedConfig, options: ModelOptions, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a folder, on the CPU, its weights in one type."""
    whole = is_wrapper(config)
    loader: Any = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    asked: dict[str, Any] = {}
    if options.attn_implementation != "auto":
        asked["attn_implementation"] = options.attn_implementation
    if quantisation(read_json(folder / "config.json", path_option(options))) == DEQUANTISED_AT_LOAD:
        asked["quantization_config"] = Mxfp4Config(dequantize=True)  # its kernels for GPUs compute no gradient
    with load_errors(options), without_progress_bars():  # they would write over ours
        model, found = loader.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            trust_remote_code=options.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # which is then refused below
            **asked,
        )
    lacking = lacking_weights(found)
    if lacking:
        raise UserError(
            f"{path_option(options)}: the weights lack {len(lacking)} of what a {type(model).__name__} needs"
            f" ({', '.join(lacking[:3])}{' ...' if len(lacking) > 3 else ''}), which would be made up at random.  The"
            " files are those of another model, or not whole."
        )
    return text_part(model) if whole else cast(PreTrainedModel, model)


def loaded_tokenizer(base: Path, options: ModelOptions, adapter: Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, or of the adapter over it, known to have tokens for a text; with its template.

    A template that the options name goes before that of the adapter, and that before the base's.
    """
    folder = tokenizer_folder(base, adapter)
    with load_errors(options):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    if adapter is not None and folder == base:
        tokenizer.chat_template = adapter_template(adapter) or tokenizer.chat_template
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise UserError(
            f"{path_option(options)}: its tokenizer has no token for the letter a, so its files are not whole.  Copy"
            " tokenizer.json and tokenizer_config.json into the folder, from the model that it was made of."
        )
    return with_chat_template(cast(PreTrainedTokenizerBase, tokenizer), options.chat_template)


def load_errors(options: ModelOptions) -> AbstractContextManager[None]:
    return transformers_load_errors(partial(load_message, options))


def load_message(options: ModelOptions, said: str) -> str:
    """What to do where transformers cannot load a folder, and says this of it."""
    if "trust_remote_code" in said:
        return needs_code(path_option(options), "of its tokenizer or config")
    if options.attn_implementation not in ("auto", "eager", "sdpa"):
        return f"model.attn_implementation = {options.attn_implementation}: not here ({said}).  Use auto."
    return f"{path_option(options)}: transformers cannot load it ({said}).  {load_remedy(options)}"


def load_remedy(options: ModelOptions) -> str:
    """What may help where a folder cannot be loaded."""
    folder = Path(options.path)
    method = quantisation(read_json(folder / "config.json", path_option(options))) if folder.is_dir() else None
    if method is not None:
        return (
            f"Its weights are quantised ({method}), which needs that method's own packages and often a GPU.  Give the"
            " folder of the model that it was quantised from."
        )
    return "The folder needs config.json, model.safetensors, tokenizer.json and tokenizer_config.json."


def path_option(options: ModelOptions) -> str:
    return f"model.path = {options.path}"


def model_is_quantised(folder: Path) -> bool:
    """Whether the weights of a folder are quantised: such a model is where its loader put it."""
    return quantisation(read_json(folder / "config.json", str(folder))) is not None


def stored_dtype(folder: Path, config: PreTrainedConfig) -> torch.dtype | None:
    """The type of the weights on the disk: as the config says, or else as the first of them is; None where unknown."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    for _, dtype in stored_tensors(folder):
        return dtype
    return None


def stored_dtypes(folder: Path) -> set[torch.dtype | None]:
    """The types of all weights on the disk, None among them for one of no known name; none where they are pickled."""
    return {dtype for _, dtype in stored_tensors(folder)}


def stored_tensors(folder: Path) -> Iterator[tuple[str, torch.dtype | None]]:
    """Names and types of the tensors in a folder's safetensors, by the files' headers alone."""
    for file in sorted(folder.glob(SAFE_WEIGHTS)):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118  it is not a mapping
                yield name, STORED.get(content.get_slice(name).get_dtype())
