"""Products of few rows with one matrix: torch's own against those of a matrix packed once.

    python benchmarks/linear.py

Prints milliseconds of each (the least of several) and their ratio, for the matrices of vs_trl.py's models.
"""

import argparse
from collections.abc import Callable
from time import perf_counter

import torch
import torch.nn.functional as F

from posttrain.models.shared_prompt.linear import PackedWeight, linear

MATRICES = {"bundled": (160, 960), "100m": (896, 4864), "large-vocab head": (256, 151936)}
"""Inputs and outputs of the largest matrix of each."""
ROWS = (1, 8, 32, 256, 1200)
REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    for name, (inputs, outputs) in MATRICES.items():
        weight = torch.randn(outputs, inputs)
        if not PackedWeight.serves(weight):
            raise SystemExit("This build of torch has no packed products (oneDNN).")
        packed = PackedWeight(weight)
        print(f"{name}, {inputs} -> {outputs}; packing takes {milliseconds(lambda w=weight: PackedWeight(w)):.2f} ms")
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            own = milliseconds(lambda x=x, w=weight: F.linear(x, w))
            ours = milliseconds(lambda x=x, w=packed: linear(x, w))
            print(f"  {rows:5d} rows  {own:8.3f} ms  packed {ours:8.3f} ms  {ours / own:.2f}")


@torch.inference_mode()
def milliseconds(call: Callable[[], object]) -> float:
    """The least of several timings."""
    call()
    taken = []
    for _ in range(REPEATS):
        start = perf_counter()
        call()
        taken.append(perf_counter() - start)
    return 1000 * min(taken)


if __name__ == "__main__":
    main()
