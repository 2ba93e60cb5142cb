"""The settings of a vLLM 0.32 server that decide what it samples, as its route SETTINGS has them.  Torch-free."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict

SETTINGS, TOKENIZE = "/server_info?config_format=json", "/tokenize"
BACKEND = "safetensors_file"
"""Of `--weight-transfer-config`: the one that the package posttrain-vllm adds."""
PROCESSED = "processed_logprobs"
CPU_HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those that its attention knows on a CPU; with another one it dies at the first request."""
OTHERS_TOO: Any = ConfigDict(extra="ignore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """The answer to IS_PAUSED."""

    __pydantic_config__ = OTHERS_TOO
    is_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmModel:
    """Of vLLM's `model_config`."""

    __pydantic_config__ = OTHERS_TOO
    max_model_len: int
    dtype: str
    logprobs_mode: str
    generation_config: str = "vllm"
    override_generation_config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmTransfer:
    """How weights reach it."""

    __pydantic_config__ = OTHERS_TOO
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCache:
    """What it keeps between requests."""

    __pydantic_config__ = OTHERS_TOO
    enable_prefix_caching: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmScheduler:
    """How much it does side by side."""

    __pydantic_config__ = OTHERS_TOO
    max_num_seqs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """Of vLLM's settings, those that decide what it samples."""

    __pydantic_config__ = OTHERS_TOO
    model_config: VllmModel
    scheduler_config: VllmScheduler
    cache_config: VllmCache
    weight_transfer_config: VllmTransfer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmInfo:
    """The answer to SETTINGS."""

    __pydantic_config__ = OTHERS_TOO
    vllm_config: VllmConfig
