"""Rows of Parquet and Arrow files, of folders that `datasets` saved, and of the hub."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote
from urllib.request import Request, urlopen

from posttrain.errors import RunError, UserError

if TYPE_CHECKING:
    from pyarrow import Table

HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")
"""OWNER/NAME."""
HUB_SECONDS = 5.0
"""How long a hub may take to answer."""


@contextmanager
def reading(file: Path, kind: str) -> Iterator[None]:
    """Inside, errors of a damaged file are the user's."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as {kind}: {error}") from error


def parquet_rows(file: Path) -> Sequence[object]:
    from pyarrow import parquet

    with reading(file, "parquet"):
        return list(parquet.read_table(file).to_pylist())


def arrow_rows(file: Path) -> Sequence[object]:
    """The rows of an Arrow file, in the format of streams (as `datasets` caches it) or of files."""
    import pyarrow as pa

    with reading(file, "arrow"), pa.memory_map(str(file)) as content:
        is_file = content.read(6) == b"ARROW1"
        content.seek(0)
        opened = pa.ipc.open_file(content) if is_file else pa.ipc.open_stream(content)
        return list(opened.read_all().to_pylist())


def is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def saved_folder(folder: Path, split: str) -> Path:
    listing = folder / "dataset_dict.json"
    if not listing.is_file():
        if split:
            raise UserError(f"{folder}: split = {split}, but it holds a single data set; leave the split out")
        return folder
    names = json.loads(listing.read_text(encoding="utf-8"))["splits"]
    return folder / chosen_split(str(folder), names, split)


def chosen_split(path: str, names: Iterable[str], split: str) -> str:
    """The requested split; by default `train`, or the only one."""
    known = [*names]
    chosen = split or ("train" if "train" in known else known[0] if len(known) == 1 else "")
    if chosen not in known:
        problem = f"no split {split}" if split else "several splits"
        raise UserError(f"{path}: {problem}. There are {', '.join(known)}; name one as `split`.")
    return chosen


def saved_rows(folder: Path, split: str) -> Sequence[object]:
    """The rows of a data set that `datasets` saved, read without `datasets`."""
    import pyarrow as pa

    try:
        home = saved_folder(folder, split)
        files = json.loads((home / "state.json").read_text(encoding="utf-8"))["_data_files"]
        tables = [arrow_table(home / each["filename"]) for each in files]
        rows: list[object] = pa.concat_tables(tables).to_pylist()
    except (pa.ArrowException, OSError, KeyError, json.JSONDecodeError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder}: damaged ({fault}); save it again with save_to_disk of `datasets`") from error
    return rows


def arrow_table(file: Path) -> "Table":
    import pyarrow as pa

    with pa.memory_map(str(file)) as content:
        return pa.ipc.open_stream(content).read_all()


def hub_rows(path: str, *, subset: str, split: str, revision: str) -> Sequence[object]:
    """The rows of a data set on the hub.  Raises UserError with the remedy where it cannot be had, within seconds."""
    remedy = f"Where there is a network, `hf download` gets the files of {path} (type dataset); then name those."
    if find_spec("datasets") is None:
        raise UserError(f"{path}: no such file or folder. For the hub: `pip install posttrain[data]`. {remedy}")
    commit = hub_commit(path, revision)
    if not commit:
        raise RunError(f"{path}: no such file or folder, and the hub did not answer in {HUB_SECONDS:g} s. {remedy}")
    import datasets

    try:
        names = datasets.get_dataset_split_names(path, subset or None, revision=commit)
        chosen = chosen_split(path, names, split)
        return list(datasets.load_dataset(path, subset or None, split=chosen, revision=commit))
    except UserError:  # of a split that does not exist
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise RunError(f"{path}: the library datasets cannot load it: {error}. {remedy}") from error


def hub_commit(path: str, revision: str) -> str:
    """The commit that a data set on the hub is at; empty where that cannot be learned within seconds."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        return ""
    address = f"{constants.ENDPOINT}/api/datasets/{path}/revision/{quote(revision or 'main', safe='')}"
    request = Request(address, headers=build_hf_headers())
    try:
        with urlopen(request, timeout=HUB_SECONDS) as answer:
            return str(json.load(answer)["sha"])
    except (OSError, ValueError, KeyError):  # no network, no such data set, no answer of a hub
        return ""
