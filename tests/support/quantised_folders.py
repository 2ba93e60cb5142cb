"""Folders whose weights are stored quantised: by bitsandbytes, in MXFP4 as gpt-oss is published, in FP8."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.support.families import family_model
from tests.support.model_folders import changed
from tests.support.tiny import tokenizer

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
