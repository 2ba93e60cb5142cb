"""Model folders on this machine, in the package and from the Hugging Face hub, checked by their small files.

A folder that transformers could not load, or would load as something else, is refused before any weight is read.
A model of the hub comes from the cache or is downloaded in one attempt, which fails within seconds if the hub cannot be
reached.  huggingface_hub reads `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE`.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RevisionNotFoundError  # type: ignore[attr-defined]

from posttrain.errors import UserError
from posttrain.options.model import BUNDLED, BUNDLED_MODELS

SAFE_WEIGHTS, PICKLED_WEIGHTS = "*.safetensors", "pytorch_model*.bin"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
OTHER_WEIGHTS = {"*.gguf": "llama.cpp's", "*.msgpack": "Flax's", "*.h5": "TensorFlow's", "*.onnx": "ONNX's"}
IN_4_BITS, DEQUANTISED_AT_LOAD = "bitsandbytes load_in_4bit", "mxfp4"
"""Kinds of stored quantisation (`quantisation`) whose weights are whole again when they are saved."""
NO_CAUSAL_HEADS = (
    *("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"),
    *("PreTraining", "ImageClassification", "CTC", "RewardModel"),
)
"""Endings of the names of classes whose output layer does not give the next token."""


def checked_config(
    folder: Path,
    where: str,
    *,
    trusted: bool,
    option: str = "model.trust_remote_code",
    attention: str = "auto",
    causal: bool = True,
) -> dict[str, Any]:
    """The config of a folder with a whole model: weights, tokenizer and no code that `option` does not trust."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        adapter = read_json(folder / "adapter_config.json", where)
        kind, base = adapter.get("peft_type", "unknown"), adapter.get("base_model_name_or_path") or "an unnamed model"
        remedy = "Merge it into its base with peft's merge_and_unload."
        raise UserError(f"{where}: an adapter of peft ({kind}, over {base}), not a whole model.  {remedy}")
    config = read_json(folder / "config.json", where)
    for fault in folder_faults(folder, config, trusted=trusted, option=option, attention=attention, causal=causal):
        raise UserError(f"{where}: {fault}")
    return config


def folder_faults(
    folder: Path, config: Mapping[str, Any], *, trusted: bool, option: str, attention: str, causal: bool
) -> Iterator[str]:
    """Kernels from a hub, which transformers would download and run, other kinds of models, code, and missing files."""
    from transformers import CONFIG_MAPPING

    for name, value in nested_items(config):
        if attention == "auto" and re.search("_implementation(_internal)?$", name) and "/" in str(value):
            sdpa = " or set model.attn_implementation: sdpa" if causal else ""
            yield f"config.json has {name} = {value!s:.80}, code of a kernel hub.  Remove it from config.json{sdpa}."
    made_as = architecture_name(config)
    if causal and config.get("is_encoder_decoder"):
        yield f"{made_as} is not a causal language model: it has an encoder.  Use one of another family."
    if causal and made_as.endswith(NO_CAUSAL_HEADS):
        yield f"{made_as} is not a causal language model: its output layer gives no next token.  Use another one."
    code = config.get("auto_map") or {}
    if code and not trusted and str(config.get("model_type")) not in CONFIG_MAPPING:
        names = code.values() if isinstance(code, Mapping) else [code]
        yield needs_code(", ".join(sorted(set(map(str, names)))), option)
    if not has_weights(folder):
        others = [whose for pattern, whose in OTHER_WEIGHTS.items() if any(folder.glob(pattern))]
        found = f"; those in it are {' and '.join(others)}, which are not read" if others else ""
        fault = f"the folder holds no weights, or not all that its index names{found}"
        yield f"{fault}.  It needs model.safetensors, or all of its parts."
    if not has_tokenizer(folder):  # transformers would make one that knows no text
        yield "the folder holds no tokenizer.  Copy tokenizer.json and tokenizer_config.json of the original model."


def is_classifier_folder(folder: Path) -> bool:
    """Whether a local folder is of a model for sequence classification, by its config.json."""
    if not (folder / "config.json").is_file():
        return False
    return architecture_name(read_json(folder / "config.json", str(folder))).endswith("ForSequenceClassification")


def architecture_name(config: Mapping[str, Any]) -> str:
    """The class that a model was saved as, or else its family."""
    named = config.get("architectures") or config.get("model_type", "a model")
    return str(named[0] if isinstance(named, list) else named)


def nested_items(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from nested_items(value)


def needs_code(names: str, option: str = "model.trust_remote_code") -> str:
    flag = " (--model.trust-remote-code)" if option.startswith("model.") else ""
    return f"the model brings Python code ({names}).  Read it; if you trust it, set {option}: true{flag}."


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights, all of them if an index lists them."""
    for index in sorted(folder.glob("*.index.json")):
        named = read_json(index, str(folder)).get("weight_map")
        if not isinstance(named, dict):
            raise UserError(f"{index}: weight_map, the file of each weight, is missing.  Copy the index again.")
        return all((folder / str(file)).is_file() for file in set(map(str, named.values())))
    return any(any(folder.glob(pattern)) for pattern in (SAFE_WEIGHTS, PICKLED_WEIGHTS))


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer, or code that makes one."""
    if any((folder / name).is_file() for name in TOKENIZER_FILES) or any(folder.glob("*.tiktoken")):
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and "auto_map" in read_json(settings, str(folder))


def quantisation(folder: Path, where: str) -> str | None:
    """How the weights of a folder are stored quantised, by its config.json; None if they are not."""
    found = read_json(folder / "config.json", where).get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method", "an unnamed method"))
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if found.get(name)]
    return " ".join([method, *bits])


def read_json(file: Path, where: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {file.name} cannot be read ({error}).") from error
    if not isinstance(content, dict):
        raise UserError(f"{where}: {file.name} holds a {type(content).__name__}, not a JSON object.")
    return content


def bundled_folder(path: str = BUNDLED) -> Path:
    """The folder of a model that comes with the package."""
    name = BUNDLED_MODELS[path]
    folder = Path(str(files("posttrain") / "assets" / name))
    if not (folder / "model.safetensors").is_file():
        fault = f"model.path = {path}: the bundled model is missing ({folder})"
        raise UserError(f"{fault}.  Reinstall, or make it with `posttrain sft {name}` and copy RUN/model there.")
    return folder


SECONDS = 8.0
"""Longest wait for an answer of the hub."""
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
"""Patterns of a model's files other than weights and code."""


def hub_folder(name: str, revision: str = "", *, with_code: bool = False, option: str = "model.path") -> Path:
    """The local folder of a model of the hub, downloaded in one attempt if the cache lacks it.

    Pickled weights are downloaded only if there are no others, and code only `with_code`.  `option` is the recipe's
    option, for messages.  Raises UserError without a hub, the model, the revision or access.
    """
    if (found := cached_folder(name, revision)) is not None:
        return found
    what = f"{option} = {name}{f'@{revision}' if revision else ''}"
    offline = (
        f"Run `hf download {name}` on a machine that has the hub and copy the folder that it names here as {option}, or"
        f" copy its cache and set HF_HOME (here {constants.HF_HUB_CACHE})."
    )
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{what}: not in the cache of this machine, and HF_HUB_OFFLINE is set.  {offline}")
    try:
        info = HfApi(endpoint=constants.ENDPOINT).model_info(name, revision=revision or None, timeout=SECONDS)
        safe = any(each.rfilename.endswith(".safetensors") for each in info.siblings or ())
        print(f"downloading {name} to {constants.HF_HUB_CACHE}", file=sys.stderr, flush=True)
        patterns = [*SMALL_FILES, SAFE_WEIGHTS if safe else PICKLED_WEIGHTS, *(["*.py"] if with_code else [])]
        hub: dict[str, Any] = {"cache_dir": constants.HF_HUB_CACHE, "endpoint": constants.ENDPOINT}
        hub |= {"allow_patterns": patterns, "etag_timeout": SECONDS}
        return Path(snapshot_download(name, revision=revision or None, **hub))
    except RevisionNotFoundError as error:
        raise UserError(f"{what}: the model has no revision {revision} on the hub.  Use another one.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        terms = (
            f"the hub does not let you in ({status}): the model is private, gated or missing.  Accept its terms at"
            f" {constants.ENDPOINT}/{name}, then log in by `hf auth login` or set HF_TOKEN."
        )
        nowhere = f"neither a folder here nor a model of the hub ({constants.ENDPOINT}: 404)."
        known = {401: terms, 403: terms, 404: nowhere}
        again = f"{constants.ENDPOINT} answers {status}.  Try again later.  {offline}"
        raise UserError(f"{what}: {known.get(status, again)}") from error
    except (HTTPError, OSError) as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        missing = f"not in the cache of this machine, and {constants.ENDPOINT} cannot be reached ({said})"
        raise UserError(f"{what}: {missing}.  {offline}") from error


def cached_folder(name: str, revision: str = "") -> Path | None:
    """The folder of a model in the local cache; None if the model or a needed part is missing."""
    config = try_to_load_from_cache(name, "config.json", revision=revision or None, cache_dir=constants.HF_HUB_CACHE)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if has_weights(folder) and has_tokenizer(folder) else None


MODEL_FILES = re.compile(r"[^.].*\.(json|safetensors|bin|model|jinja|py)|(vocab|merges)\.txt")
"""The files of a model; a folder may hold others, such as notes."""
MIB = 2**20


def model_digest(folder: Path) -> str:
    """A digest of the sizes of a folder's files and the first and last MiB of each; empty if there is no model."""
    digest = hashlib.sha256()
    files = [file for file in sorted(folder.glob("*")) if MODEL_FILES.fullmatch(file.name)]
    try:
        for file in files:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as content:
                digest.update(content.read(MIB))
                content.seek(max(content.tell(), file.stat().st_size - MIB))
                digest.update(content.read(MIB))
    except OSError:
        return ""
    return digest.hexdigest() if files else ""
