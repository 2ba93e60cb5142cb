"""What holds for every test: shapes are checked, randomness is fixed, one thread, no network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

# Before the first import of posttrain: from here on beartype checks every annotation of it, shapes included.
install_import_hook("posttrain", "beartype.beartype")

# Two workers share two cores; and a float sum over one thread has one order.
torch.set_num_threads(1)

# The same examples each time, so that a failure in CI is a failure here, and a slow machine fails nothing.
settings.register_profile("posttrain", derandomize=True, deadline=None, database=None, print_blob=False)
settings.load_profile("posttrain")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
