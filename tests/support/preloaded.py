"""What forks of tests begin with (`forks`).  It starts no thread and computes nothing with tensors."""

import gc

import bitsandbytes  # noqa: F401
import matplotlib.figure  # noqa: F401
import pandas  # noqa: F401  # which pyarrow looks for
import pyarrow.parquet  # noqa: F401
import pytest  # noqa: F401  # which `pictures` imports
import torch._dynamo  # noqa: F401  # which sharding needs
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import posttrain.commands.train
import posttrain.runs.curves
import posttrain.training.dpo.dpo_run
import posttrain.training.reward_model.reward_run
import posttrain.training.rl
import posttrain.training.sft.sft_run  # noqa: F401
from posttrain.config import Config, DpoConfig, RewardModelConfig, SftConfig
from posttrain.config.reading import checked_sections
from posttrain.config.recipes import merge

for kind in (Config, DpoConfig, RewardModelConfig, SftConfig):
    checked_sections(kind, merge([]))
get_checkpoint_conversion_mapping("qwen3")
gc.collect()
gc.freeze()  # else the garbage collection of every fork goes through all of this
