"""Models of the Hugging Face hub: from the cache on this machine, or else downloaded in one attempt.

Where the hub cannot be reached that is told within seconds, by one message that names what to do: most machines that
train have no way out.  `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they mean to
huggingface_hub, which reads them.

`model_digest` tells a model folder from another one, or from itself after more training.
"""

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HfHubHTTPError,
    HTTPError,  # of the HTTP library that it is built on, whichever that is
    RevisionNotFoundError,
)

from posttrain.errors import UserError
from posttrain.models.loading.folder_kinds import PICKLED_WEIGHTS, SAFE_WEIGHTS, has_tokenizer, has_weights

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
            f" {remedy(name, option)}"
        )
    try:
        told = HfApi(endpoint=constants.ENDPOINT).model_info(name, revision=revision or None, timeout=SECONDS)
        patterns = wanted([each.rfilename for each in told.siblings or ()], with_code=with_code)
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
        raise UserError(refusal(what, name, error.response.status_code, option)) from error
    except (HTTPError, OSError) as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"{what}: not in the cache of this machine, and {constants.ENDPOINT} cannot be reached ({said})."
            f"{remedy(name, option)}"
        ) from error


def wanted(files: Sequence[str], *, with_code: bool) -> list[str]:
    """Patterns of the files to download: pickled weights only where there are no others, code only where it is run."""
    safe = any(file.endswith(".safetensors") for file in files)
    return [*FILES, SAFE_WEIGHTS if safe else PICKLED_WEIGHTS, *(["*.py"] if with_code else [])]


def refusal(what: str, name: str, status: int, option: str) -> str:
    """What an answer of the hub that is no model means."""
    if status in NO_ENTRY:
        return (
            f"{what}: the hub does not let you in ({status}): the model is private or gated, or there is none of this"
            f" name.  Accept its terms at {constants.ENDPOINT}/{name}, then log in by `hf auth login` or set HF_TOKEN."
        )
    if status == 404:
        return f"{what}: neither a folder here nor a model of the hub ({constants.ENDPOINT} answers 404)."
    return f"{what}: {constants.ENDPOINT} answers {status}.  Try again later. {remedy(name, option)}"


def remedy(name: str, option: str) -> str:
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
