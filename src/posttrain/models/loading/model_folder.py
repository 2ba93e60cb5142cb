"""A policy, or only its tokenizer, from a model folder, from the hub or its cache, or from the package."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.quantization_config import Mxfp4Config

from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import add_adapter, compute_unpacked_in, quantize, require_half_in_4_bits
from posttrain.models.adapters.peft_format import SavedAdapter, put_adapter, read_adapter
from posttrain.models.loading import adapter_folder, construction, folder_kinds
from posttrain.models.loading.devices import chosen_device
from posttrain.models.model_outputs import enable_recomputation
from posttrain.models.policy import Policy, as_policy, chosen_dtype, single_token, united_stop_ids
from posttrain.models.sharding import loaded_by_first, sharded
from posttrain.options.model import ModelOptions, is_adapter_folder

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Types by their names in safetensors files."""


def load_policy(options: ModelOptions, *, seed: int = 0, inference: bool = False) -> Policy:
    """Load a model, or an adapter with its base; then add a new adapter if the options ask for one.

    Everything is prepared on the CPU and then moved to its device; only layers that are put into 4 bits go there one by
    one before.  So neither ever holds more than the stored or the final model, and one layer.  `seed` draws a new
    adapter; `inference` is for a model that is never trained.  Raises UserError if there is neither a causal
    language model nor an adapter that can be loaded.
    """
    return policy_from(located_model(options), options, seed=seed, inference=inference)


def load_policy_to_train(
    options: ModelOptions, *, seed: int = 0, saves_whole: bool = False, may_adapt: bool = True
) -> Policy:
    """`load_policy` for a run that trains and saves the policy; an adapter is saved separately unless it `saves_whole`.

    `may_adapt` says whether the user can add an adapter, which is then a remedy.
    Also raises UserError where peft or transformers could not read what the run would save.
    """
    located = located_model(options)
    require_trainable_weights(located, options, saves_whole=saves_whole, may_adapt=may_adapt)
    policy = policy_from(located, options, seed=seed, inference=False)
    if not saves_whole:
        adapter_folder.require_adapter_for_peft(policy.model, options)
    return policy


def load_beside(policy: Policy, path: str, *, option: str, inference: bool = True) -> Policy:
    """A second model, named by an option such as `reference.path`, on the policy's device, split over its ranks."""
    options = ModelOptions(path=path, device="cuda" if policy.device.type == "cuda" else "cpu")

    def load() -> tuple[Policy, None]:
        if inference:
            return load_policy(options, inference=True), None
        return load_policy_to_train(options, saves_whole=True, may_adapt=False), None

    try:
        return sharded(loaded_by_first(policy.ranks, load)[0])
    except UserError as error:  # which names `model.path`
        raise UserError(str(error).replace("model.path = ", f"{option} = ")) from error


def load_tokenizer(options: ModelOptions) -> tuple[PreTrainedTokenizerBase, tuple[int, ...]]:
    """The tokenizer that a policy of these options has, and its stop tokens, without loading weights."""
    located = located_model(options)
    options, folder = located.base, located.folder
    config, tokenizer = loaded_config(folder, options), loaded_tokenizer(folder, options, located.saved)
    with load_errors(options):
        stored, kind = (folder / "generation_config.json").is_file(), transformers.GenerationConfig
        generation = kind.from_pretrained(folder) if stored else kind.from_model_config(config)
    own = (generation.eos_token_id, getattr(config, "eos_token_id", None), tokenizer.eos_token_id)
    texts = [single_token(tokenizer, text) for text in options.stop_tokens]
    return tokenizer, united_stop_ids((*own, texts, adapter_folder.named_stop_ids(located.saved)), options.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedModel:
    """The local folders that a policy is loaded from."""

    folder: Path
    base: ModelOptions
    """Options of the model in the folder: below a saved adapter, with the path that this names."""
    saved: SavedAdapter | None
    quantisation: str | None
    """How the stored weights are quantised; None if they are not."""


def located_model(options: ModelOptions) -> LocatedModel:
    """Find the model that the options name, and read its small files and its adapter."""
    saved = read_adapter(options.folder) if not options.is_bundled and is_adapter_folder(options.folder) else None
    base = options if saved is None else adapter_folder.base_options(options, saved)
    folder = located_folder(base)
    found = folder_kinds.quantisation(folder, path_option(base))
    if found is not None and options.quantization is not None:
        fault = f"the weights in {base.path} are quantised already ({found})"
        raise UserError(f"model.quantization = {options.quantization}: {fault}.  Leave model.quantization out.")
    if found is not None:
        base = replace(base, quantization=None)
    return LocatedModel(folder=folder, base=base, saved=saved, quantisation=found)


def policy_from(located: LocatedModel, options: ModelOptions, *, seed: int, inference: bool) -> Policy:
    """See `load_policy`."""
    saved, base, folder = located.saved, located.base, located.folder
    device = chosen_device(base.device)
    config = loaded_config(folder, base)
    with load_errors(base):
        stored = config.dtype if isinstance(config.dtype, torch.dtype) else next(stored_types(folder), None)
    model, dtype = plain_model(located, config, device, inference=inference)
    if options.quantization is not None and saved is None:  # an adapter that was trained over such a base is still read
        require_half_in_4_bits(model)
    tokenizer = loaded_tokenizer(folder, base, saved)
    adapter_folder.name_stop_ids(model, adapter_folder.named_stop_ids(saved))
    if base.gradient_checkpointing:
        enable_recomputation(model)
    if saved is not None:
        put_adapter(model, saved, options.adapter)
    elif options.adapter is not None:
        add_adapter(model, options.adapter, seed=seed)
    if base.weights == "auto" and stored == dtype:  # so no bit of what is frozen is lost
        construction.hold_frozen_in(model, dtype)
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
    located: LocatedModel, config: PreTrainedConfig, device: torch.device, *, inference: bool
) -> tuple[PreTrainedModel, torch.dtype]:
    """The model of a folder without an adapter, in 4 bits if the options say so, and the type of its products."""
    folder, options, method = located.folder, located.base, located.quantisation
    memory_dtype = torch.bfloat16 if options.weights == "bfloat16" else torch.float32
    narrow = method is None and read_as_stored(folder, config, options, device)
    model = loaded_model(folder, config, options, torch.bfloat16 if narrow else memory_dtype)
    if method == folder_kinds.IN_4_BITS:  # bitsandbytes leaves the others in the type that they are stored in
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(memory_dtype)
    elif method is not None and not getattr(model, "is_quantized", False):
        as_never_quantised(model, memory_dtype)
    if narrow:
        matrices = {id(each) for each in construction.linear_matrices(model)}
        for parameter in model.parameters():
            if id(parameter) not in matrices and parameter.is_floating_point():
                parameter.data = parameter.data.float()
        model.config.dtype = torch.float32
    construction.freeze(model, options.frozen)
    dtype = chosen_dtype(options.dtype, torch.float32 if narrow else model.dtype, device)
    compute_unpacked_in(model, dtype)
    if options.quantization is not None:
        packed = inference and dtype == torch.bfloat16
        quantize(model, dtype, made_from=memory_dtype, device=device, packed_kernel=packed)
    if narrow and (options.weights == "float32" or dtype != torch.bfloat16):
        for matrix in construction.linear_matrices(model):  # such as the output layer's, which is not in 4 bits
            matrix.data = matrix.data.float()
    return model, dtype


def read_as_stored(folder: Path, config: PreTrainedConfig, options: ModelOptions, device: torch.device) -> bool:
    """Whether weights are read in bfloat16, to be held in it or put into 4 bits, though `weights` is float32 or auto.

    If all are stored in it and the base is frozen, that is the same numbers for half the memory.  Not so if the family
    has buffers in the type of its weights, such as Gemma's scale.
    """
    if not options.trains_adapter or options.weights == "bfloat16":
        return False
    held = options.weights == "auto" and chosen_dtype(options.dtype, torch.float32, device) == torch.bfloat16
    if options.quantization is None and not held:
        return False
    with load_errors(options):
        if set(stored_types(folder)) != {torch.bfloat16}:
            return False
        with construction.ONE_AT_A_TIME, torch.device("meta"):
            model = construction.auto_class(config).from_config(config, dtype=torch.bfloat16)
        return all(buffer.dtype != torch.bfloat16 for buffer in model.buffers())


def as_never_quantised(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Treat a model that transformers has dequantised as one stored in whole weights, all of one type.

    Otherwise it would be saved under the names of quantised weights, which it no longer has.
    """
    vars(model).pop("_weight_conversions", None)
    cast(torch.nn.Module, model).to(dtype)


def require_trainable_weights(
    located: LocatedModel, options: ModelOptions, *, saves_whole: bool, may_adapt: bool
) -> None:
    """Refuse to train weights that are stored quantised, and to merge an adapter into those that are not dequantised.

    transformers dequantises MXFP4 when it loads it, so such a model is trained and saved as any other.
    """
    method = located.quantisation
    if method is None or method == folder_kinds.DEQUANTISED_AT_LOAD:
        return
    save = "merged" if saves_whole else options.adapter.save if options.adapter is not None else "adapter"
    if not options.trains_adapter:
        adapts = may_adapt and (not saves_whole or method == folder_kinds.IN_4_BITS)
        fault, remedy = "cannot be trained", "Train an adapter (model.adapter.rank: 16), or give" if adapts else "Give"
    elif save != "adapter" and method != folder_kinds.IN_4_BITS:
        fault = "an adapter is only merged into whole weights or 4-bit ones of bitsandbytes"
        remedy = "Give" if saves_whole else "Set model.adapter.save: adapter, or give"
    else:
        return
    raise UserError(
        f"{path_option(located.base)}: its weights are stored quantised ({method}); {fault}.  {remedy} the folder of"
        " the model that it was quantised from."
    )


def located_folder(options: ModelOptions) -> Path:
    """The local folder that the options name; a model of the hub is downloaded if the cache lacks it."""
    options.require_files()
    folder, where, trusted = local_folder(options), path_option(options), options.trust_remote_code
    if not options.is_bundled:
        folder_kinds.checked_config(folder, where, trusted=trusted, attention=options.attn_implementation)
    return folder


def local_folder(options: ModelOptions) -> Path:
    """`located_folder`, unchecked."""
    if options.is_bundled:
        return folder_kinds.bundled_folder(options.path)
    if options.hub_name is None:
        return options.folder
    return folder_kinds.hub_folder(options.hub_name, options.hub_revision, with_code=options.trust_remote_code)


def loaded_config(folder: Path, options: ModelOptions) -> PreTrainedConfig:
    """The config of a folder.  Raises UserError for a family that cannot be loaded, or an unknown attention."""
    known = {"auto", "eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    if options.attn_implementation not in known:
        fault = f"model.attn_implementation = {options.attn_implementation}: unknown to transformers"
        raise UserError(f"{fault}.  Use one of {', '.join(sorted(known))}.")
    with load_errors(options):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
        construction.require_causal_config(config, path_option(options))
    return cast(PreTrainedConfig, config)


def loaded_model(folder: Path, config: PreTrainedConfig, options: ModelOptions, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a folder, on the CPU, its weights in one type."""
    given: dict[str, Any] = {}
    if options.attn_implementation != "auto":
        given["attn_implementation"] = options.attn_implementation
    if folder_kinds.quantisation(folder, path_option(options)) == folder_kinds.DEQUANTISED_AT_LOAD:
        given["quantization_config"] = Mxfp4Config(dequantize=True)  # its kernels for GPUs compute no gradient
    given |= {"config": config, "dtype": dtype, "trust_remote_code": options.trust_remote_code}
    with load_errors(options):
        model, lacking, _ = construction.loaded(construction.auto_class(config), folder, **given)
    construction.require_no_lack(model, lacking, path_option(options))
    return construction.text_part(model) if construction.is_wrapper(config) else model


def loaded_tokenizer(base: Path, options: ModelOptions, saved: SavedAdapter | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of an adapter or of the base, with the template that the options or else the adapter name."""
    folder = saved.folder if saved is not None and folder_kinds.has_tokenizer(saved.folder) else base
    with load_errors(options):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    if saved is not None and folder == base:
        tokenizer.chat_template = adapter_folder.adapter_template(saved.folder) or tokenizer.chat_template
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        remedy = "Copy tokenizer.json and tokenizer_config.json into the folder, from the original model."
        raise UserError(f"{path_option(options)}: its tokenizer has no token for the letter a.  {remedy}")
    return adapter_folder.with_chat_template(cast(PreTrainedTokenizerBase, tokenizer), options.chat_template)


def load_errors(options: ModelOptions) -> AbstractContextManager[None]:
    """Raise transformers' error about a folder as a UserError with the remedy."""
    where, folder = path_option(options), Path(options.path)

    def message(said: str) -> str:
        if "trust_remote_code" in said:
            return f"{where}: {folder_kinds.needs_code('of its tokenizer or config')}"
        if options.attn_implementation not in ("auto", "eager", "sdpa"):
            return f"model.attn_implementation = {options.attn_implementation}: not available ({said}).  Use auto."
        method = folder_kinds.quantisation(folder, where) if folder.is_dir() else None
        remedy = "The folder needs config.json, model.safetensors, tokenizer.json and tokenizer_config.json."
        if method is not None:
            remedy = f"Its weights are quantised ({method}).  Give the folder of the model that it was quantised from."
        return f"{where}: transformers cannot load it ({said}).  {remedy}"

    return construction.transformers_load_errors(message)


def path_option(options: ModelOptions) -> str:
    return f"model.path = {options.path}"


def stored_types(folder: Path) -> Iterator[torch.dtype | None]:
    """Types of the tensors in a folder's safetensors, by the files' headers; None if unknown."""
    for file in sorted(folder.glob(folder_kinds.SAFE_WEIGHTS)):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118  it is not a mapping
                yield STORED.get(content.get_slice(name).get_dtype())
