"""The settings of a vLLM 0.32 server that decide what it samples, as its route SETTINGS has them.  Torch-free."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import AliasPath, Field

from posttrain.generation.rl_protocol import OPEN, Facts

SETTINGS, TOKENIZE = "/server_info?config_format=json", "/tokenize"
BACKEND = "safetensors_file"
"""The backend of `--weight-transfer-config` that the package posttrain-vllm adds."""
PROCESSED = "processed_logprobs"
CPU_HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head widths that its attention supports on a CPU; with another one it dies at the first request."""


def at(section: str, name: str) -> Any:
    """A field's place in the answer."""
    return Field(validation_alias=AliasPath("vllm_config", section, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts(Facts):
    """The answer to SETTINGS."""

    __pydantic_config__ = OPEN
    ours: ClassVar[bool] = False
    kind: ClassVar[str] = "vLLM"
    max_rows: Annotated[int, at("scheduler_config", "max_num_seqs")]
    max_positions: Annotated[int, at("model_config", "max_model_len")]
    dtype: Annotated[str, at("model_config", "dtype")]
    logprobs_mode: Annotated[str, at("model_config", "logprobs_mode")]
    generation_config: Annotated[str, at("model_config", "generation_config")] = "vllm"
    override_generation_config: Annotated[dict[str, Any], at("model_config", "override_generation_config")] = field(
        default_factory=dict
    )
    prefix_caching: Annotated[bool | None, at("cache_config", "enable_prefix_caching")]
    backend: Annotated[str, at("weight_transfer_config", "backend")] = "off"
    """How weights reach it."""
