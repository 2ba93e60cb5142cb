"""Model folders made on the spot, quantised ones too, and a hub on this machine that answers as the real one does."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast

from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.options.model import NewModelOptions
from tests.support.families import family_model
from tests.support.tiny import tiny_model, tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def small_folder(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A new model of Qwen3 architecture whose embedding has a row for every token of its tokenizer."""
    shape = NewModelOptions(hidden_size=16, mlp_size=16, num_layers=2, num_heads=2, num_kv_heads=1, max_positions=64)
    tokenizer = new_tokenizer()
    new_model(shape, tokenizer, seed=seed).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def family_folder(folder: Path, family: str, *, dtype: torch.dtype = torch.float32) -> Path:
    """A model of another family, whose embedding has fewer rows than its tokenizer has tokens."""
    tiny_model(family, dtype, exact=False).save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)
    return folder


def changed(file: Path, **content: Any) -> None:
    """Set keys of one of a folder's JSON files; None takes a key away."""
    old = json.loads(file.read_text(encoding="utf-8")) | content
    file.write_text(json.dumps({key: value for key, value in old.items() if value is not None}), encoding="utf-8")


def plain_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """The tokenizer of new models with other special tokens."""
    return PreTrainedTokenizerFast(tokenizer_object=new_tokenizer().backend_tokenizer, **special)


def cached(cache: Path, name: str, source: Path, *, commit: str = COMMIT, branch: str = "main") -> Path:
    """Put a folder into a hub cache, as a download would."""
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in source.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / branch).write_text(commit, encoding="utf-8")
    return snapshot


@dataclass(kw_only=True)
class LocalHub:
    """What a hub on this machine has, and what it was asked for."""

    models: Mapping[str, Path]
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Models that it answers for by a status alone."""
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        self.asked.append(path)
        parts = path.partition("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        if name in self.refusals:
            return self.refusals[name], {"X-Error-Code": "GatedRepo"} if self.refusals[name] == 403 else {}, b"{}"
        if name not in self.models:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if api and parts[4:5] == ["revision"] and parts[5] not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if api and parts[4:5] == ["tree"]:
            tree = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name}
                for file in sorted(self.models[name].iterdir())
            ]
            return 200, {}, json.dumps(tree).encode()
        if api:
            files = [{"rfilename": file.name} for file in sorted(self.models[name].iterdir())]
            return 200, {}, json.dumps({"id": name, "sha": COMMIT, "siblings": files}).encode()
        body = (self.models[name] / parts[-1]).read_bytes()
        return 200, {"ETag": f'"{len(body)}-{parts[-1]}"', "X-Repo-Commit": COMMIT}, body


@contextmanager
def serving_hub(hub: LocalHub) -> Iterator[LocalHub]:
    """The hub at a port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *given: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


EXPERTS, WIDTH, BLOCK = 4, 32, 32
"""Numbers of an MXFP4 block share a scale; matrices are as wide as one of them."""


def in_bitsandbytes(folder: Path, **settings: object) -> Path:
    """A model that bitsandbytes has put into 4 bits, or 8."""
    plain = folder.with_name(f"{folder.name}_plain")
    family_model("mistral").save_pretrained(plain)
    quantised = BitsAndBytesConfig(**settings)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantised, dtype=torch.bfloat16).save_pretrained(
        folder
    )
    tokenizer().save_pretrained(folder)
    return folder


def in_4_bits(folder: Path) -> Path:
    """As Unsloth publishes models."""
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return in_bitsandbytes(folder, load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **options)


def in_8_bits(folder: Path) -> Path:
    """LLM.int8()."""
    return in_bitsandbytes(folder, load_in_8bit=True)


def in_mxfp4(folder: Path) -> Path:
    """A gpt-oss whose experts are in blocks of 4-bit numbers with a shared exponent."""
    whole = family_model("gpt_oss", hidden_size=WIDTH, intermediate_size=WIDTH)
    whole.to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    draws = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        del tensors[name]
        rows = 2 * WIDTH if name.endswith("gate_up_proj") else WIDTH
        blocks = (EXPERTS, rows, WIDTH // BLOCK)
        tensors[f"{name}_blocks"] = torch.randint(256, (*blocks, BLOCK // 2), generator=draws, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(blocks, 124, dtype=torch.uint8)  # 2^(124 - 127)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    changed(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return folder


def in_fp8(folder: Path) -> Path:
    """Linear layers in float8 with a scale for each block of 128 × 128, as DeepSeek and Qwen publish them."""
    family_model("mistral").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().max() / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    changed(folder / "config.json", quantization_config=scheme)
    return folder
