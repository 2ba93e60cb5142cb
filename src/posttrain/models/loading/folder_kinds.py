"""Model folders on this machine, in the package and from the Hugging Face hub, checked by their small files.

A folder that transformers could not load, or would load as something else, is refused in one line before any weight is
read: an adapter without its base, a model that reads and then writes, weights without a tokenizer.

A model of the hub is taken from the cache, or downloaded in one attempt.  If the hub cannot be reached, one message
says so within seconds and names what to do.  huggingface_hub reads `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN`
and `HF_HUB_OFFLINE`.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HfHubHTTPError,
    HTTPError,  # of the HTTP library that it is built on, whichever that is
    RevisionNotFoundError,
)

from posttrain.errors import UserError
from posttrain.options.model import BUNDLED, BUNDLED_MODELS

SAFE_WEIGHTS, PICKLED_WEIGHTS = "*.safetensors", "pytorch_model*.bin"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
OTHER_WEIGHTS = {"*.gguf": "llama.cpp's", "*.msgpack": "Flax's", "*.h5": "TensorFlow's", "*.onnx": "ONNX's"}
IN_4_BITS, DEQUANTISED_AT_LOAD = "bitsandbytes load_in_4bit", "mxfp4"
"""Ways in which weights are stored quantised (`quantisation`) that have whole weights again when they are saved."""
CLASSIFIER = "ForSequenceClassification"
"""How the names of transformers' classes end that score a text."""
NO_CAUSAL_HEADS = (
    *("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"),
    *("PreTraining", "ImageClassification", "CTC", "RewardModel"),
)
"""How the names of classes end whose output layer is not that of a causal language model."""


def require_model_folder(folder: Path, where: str, *, trust_remote_code: bool = False, attention: str = "auto") -> None:
    """Refuse a folder that is none of a causal language model, with its tokenizer and weights.

    `where` is how messages begin, such as `model.path = FOLDER`; `attention` is the one that the user has chosen.
    """
    require_no_adapter(folder, where)
    config = read_json(folder / "config.json", where)
    if attention == "auto":
        require_no_hub_kernel(config, where, "Set model.attn_implementation: sdpa, or remove it from config.json.")
    require_causal(config, where)
    require_model_files(folder, config, where, trust_remote_code=trust_remote_code)


def require_model_files(
    folder: Path,
    config: Mapping[str, Any],
    where: str,
    *,
    trust_remote_code: bool = False,
    option: str = "model.trust_remote_code",
) -> None:
    """Refuse a folder without weights or tokenizer, or with code that nobody trusts; `option` says who does."""
    require_trusted_code(config, where, trusted=trust_remote_code, option=option)
    if not has_weights(folder):
        others = [whose for pattern, whose in OTHER_WEIGHTS.items() if any(folder.glob(pattern))]
        found = f"; those in it are {' and '.join(others)}, which are not read" if others else ""
        raise UserError(
            f"{where}: the folder holds no weights, or not all that its index names{found}.  It needs"
            " model.safetensors, or all of its parts."
        )
    if not has_tokenizer(folder):  # transformers would make one that knows no text
        raise UserError(
            f"{where}: the folder holds no tokenizer.  Copy tokenizer.json and tokenizer_config.json into it, from the"
            " model that it was made of."
        )


def require_no_adapter(folder: Path, where: str) -> None:
    """Refuse an adapter below an adapter, for one is loaded over a whole model alone."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        adapter = read_json(folder / "adapter_config.json", where)
        kind, base = adapter.get("peft_type", "unknown"), adapter.get("base_model_name_or_path") or "it does not say"
        raise UserError(
            f"{where}: an adapter of peft ({kind}, over {base}) where a whole model is needed.  Merge it into its base"
            " with peft's merge_and_unload and save that."
        )


def is_classifier_folder(folder: Path) -> bool:
    """Whether a folder here is that of a model for sequence classification, by its config.json."""
    if not (folder / "config.json").is_file():
        return False
    return architecture_name(read_json(folder / "config.json", str(folder))).endswith(CLASSIFIER)


def architecture_name(config: Mapping[str, Any]) -> str:
    """The class that a model was saved as; its family where its config does not say."""
    named = config.get("architectures") or config.get("model_type", "a model")
    return str(named[0] if isinstance(named, list) else named)


def require_causal(config: Mapping[str, Any], where: str) -> None:
    """Refuse models of other kinds, by their name."""
    made_as = architecture_name(config)
    if config.get("is_encoder_decoder"):
        raise UserError(
            f"{where}: {made_as} has an encoder and a decoder, and only causal language models (a decoder alone) are"
            " trained here."
        )
    if made_as.endswith(NO_CAUSAL_HEADS):
        raise UserError(
            f"{where}: {made_as} is not a causal language model: its output layer does not give the next token."
        )


def require_trusted_code(
    config: Mapping[str, Any], where: str, *, trusted: bool, option: str = "model.trust_remote_code"
) -> None:
    """Refuse a model whose code comes with it, unless that is trusted."""
    from transformers import CONFIG_MAPPING

    own = config.get("auto_map") or {}
    if own and not trusted and str(config.get("model_type")) not in CONFIG_MAPPING:
        named = own.values() if isinstance(own, Mapping) else [own]
        raise UserError(needs_code(where, ", ".join(sorted({str(name) for name in named})), option))


def require_no_hub_kernel(config: Mapping[str, Any], where: str, remedy: str) -> None:
    """Refuse a config that asks for attention, or experts, from a kernel hub: code that the user did not ask for.

    transformers downloads and runs it where the package `kernels` is installed.
    """
    for name, value in nested_items(config):
        asks = re.search("_implementation(_internal)?$", name) is not None
        if asks and "/" in str(value):
            raise UserError(
                f"{where}: config.json has {name} = {value!s:.80}, which would download code from a kernel hub and run"
                f" it.  {remedy}"
            )


def nested_items(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys of an object and of the objects in it, with their values."""
    for name, value in content.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from nested_items(value)


def needs_code(where: str, names: str, option: str = "model.trust_remote_code") -> str:
    return (
        f"{where}: the model needs Python code of its own ({names}), which runs only where you trust it: read it, then"
        f" set {option}: true" + (" (--model.trust-remote-code)." if option.startswith("model.") else ".")
    )


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights, all of them where an index says which they are."""
    for index in sorted(folder.glob("*.index.json")):
        named = read_json(index, str(folder)).get("weight_map")
        if not isinstance(named, dict):
            raise UserError(
                f"{index}: has no weight_map, which says which file each weight is in.  Copy the index anew from where"
                " the model comes from."
            )
        return all((folder / str(file)).is_file() for file in set(map(str, named.values())))
    return any(any(folder.glob(pattern)) for pattern in (SAFE_WEIGHTS, PICKLED_WEIGHTS))


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer, or code that makes one."""
    if any((folder / name).is_file() for name in TOKENIZER_FILES) or any(folder.glob("*.tiktoken")):
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and "auto_map" in read_json(settings, str(folder))


def quantisation(config: Mapping[str, Any]) -> str | None:
    """How the weights of a folder are quantised, None where they are not."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method", "an unnamed method"))
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if found.get(name)]
    return " ".join([method, *bits])


def read_json(file: Path, where: str) -> dict[str, Any]:
    """The content of one of the folder's small files."""
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
        raise UserError(
            f"model.path = {path}: this installation lacks the bundled model ({folder})."
            f"  Make it with `posttrain sft {name}` and copy RUN/model there, or reinstall."
        )
    return folder


SECONDS = 8.0
"""Longest wait for an answer of the hub."""
NO_ENTRY = (401, 403)
"""Answers of the hub to whom it does not know, or has not let in."""
FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
"""What a model is made of beside its weights, as patterns."""


def hub_folder(name: str, revision: str = "", *, with_code: bool = False, option: str = "model.path") -> Path:
    """The folder of a model of the hub on this machine; downloaded where the cache lacks it.

    `option` is what messages call the place where a recipe names it.  Raises UserError where it cannot be had: no hub,
    no such model or revision, no entry.
    """
    found = cached_folder(name, revision)
    return found if found is not None else downloaded(name, revision, with_code=with_code, option=option)


def cached_folder(name: str, revision: str = "") -> Path | None:
    """The folder of a model in the local cache, None where it lacks the model or a part that is needed."""
    config = try_to_load_from_cache(name, "config.json", revision=revision or None, cache_dir=constants.HF_HUB_CACHE)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if has_weights(folder) and has_tokenizer(folder) else None


def downloaded(name: str, revision: str, *, with_code: bool, option: str) -> Path:
    """The folder of a model after one attempt to download it."""
    what = f"{option} = {name}{f'@{revision}' if revision else ''}"
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"{what}: not in the cache of this machine, and HF_HUB_OFFLINE forbids to ask the hub."
            f" {offline_remedy(name, option)}"
        )
    try:
        told = HfApi(endpoint=constants.ENDPOINT).model_info(name, revision=revision or None, timeout=SECONDS)
        patterns = files_to_download([each.rfilename for each in told.siblings or ()], with_code=with_code)
        print(f"downloading {name} to {constants.HF_HUB_CACHE}", file=sys.stderr, flush=True)
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                cache_dir=constants.HF_HUB_CACHE,
                endpoint=constants.ENDPOINT,
                allow_patterns=patterns,
                etag_timeout=SECONDS,
            )
        )
    except RevisionNotFoundError as error:
        raise UserError(f"{what}: the model is on the hub, and has no revision {revision}.") from error
    except HfHubHTTPError as error:
        raise UserError(hub_refusal(what, name, error.response.status_code, option)) from error
    except (HTTPError, OSError) as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"{what}: not in the cache of this machine, and {constants.ENDPOINT} cannot be reached ({said})."
            f"{offline_remedy(name, option)}"
        ) from error


def files_to_download(files: Sequence[str], *, with_code: bool) -> list[str]:
    """Patterns of the files to download: pickled weights only where there are no others, code only where it is run."""
    safe = any(file.endswith(".safetensors") for file in files)
    return [*FILES, SAFE_WEIGHTS if safe else PICKLED_WEIGHTS, *(["*.py"] if with_code else [])]


def hub_refusal(what: str, name: str, status: int, option: str) -> str:
    """What an answer of the hub that is not a model means."""
    if status in NO_ENTRY:
        return (
            f"{what}: the hub does not let you in ({status}): the model is private or gated, or there is none of this"
            f" name.  Accept its terms at {constants.ENDPOINT}/{name}, then log in by `hf auth login` or set HF_TOKEN."
        )
    if status == 404:
        return f"{what}: neither a folder here nor a model of the hub ({constants.ENDPOINT} answers 404)."
    return f"{what}: {constants.ENDPOINT} answers {status}.  Try again later. {offline_remedy(name, option)}"


def offline_remedy(name: str, option: str) -> str:
    """How to bring a model onto a machine without the hub."""
    return (
        f" On a machine that has the hub, `hf download {name}` names the folder that it makes: copy it here and"
        f" give it as {option}, or copy its whole cache and name that by HF_HOME (here it is"
        f" {constants.HF_HUB_CACHE})."
    )


MODEL_FILES = re.compile(r"[^.].*\.(json|safetensors|bin|model|jinja|py)|(vocab|merges)\.txt")
"""The files that a model is made of; a folder may hold others, such as notes."""
MIB = 2**20


def model_digest(folder: Path) -> str:
    """A model folder by the sizes of its files and the first and last MiB of each; empty where there is none.

    Of weights that is enough to tell another model or another training from this one, and takes no time.
    """
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
