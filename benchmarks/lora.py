"""LoRA and full training of one model side by side: seconds and peak memory of a step, and of a forward pass.

    python benchmarks/lora.py                    random weights of about 100 M parameters, CPU, one thread
    python benchmarks/lora.py --small            a shape for trying the script
    python benchmarks/lora.py --device cuda --bases float32 bfloat16 nf4

Each line runs in a process of its own, one after the other, in rounds, so that what else the machine does meets all of
them; seconds are the least of the rounds, on a CPU those of the processor.  Memory is the process's peak, or the
device's, over what it had before the model was made.  Ratios are to full training in float32, and, of the forward
pass, to the frozen model without adapter.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, process_time

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from posttrain.models.adapters.adaptable import add_adapter, quantize
from posttrain.models.adapters.in_force import adapter_dropout
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import AdapterOptions
from posttrain.options.training import UpdateOptions
from posttrain.records import Example, TokenSequence
from posttrain.training.optimizer import apply_gradients, new_optimizer
from posttrain.training.sft.sft_run import accumulate_examples, learned_tokens


@dataclass(frozen=True)
class Shape:
    """The decoder, and the batch of a step."""

    hidden: int
    layers: int
    heads: int
    mlp: int
    vocab: int
    rows: int
    tokens: int
    """Of a prompt, and of a completion."""


LARGE = Shape(hidden=768, layers=12, heads=12, mlp=2048, vocab=32_000, rows=4, tokens=64)
SMALL = Shape(hidden=64, layers=2, heads=4, mlp=128, vocab=500, rows=2, tokens=16)
MIB = 2**20
WAYS = ("full", "frozen", "lora", "lora, dropout")
DROPOUT = 0.05
"""Of the last way, in its steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bases", nargs="+", default=["float32", "bfloat16", "nf4"])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--line", nargs=2, metavar=("WAY", "BASE"), help="measure this one alone, and print JSON")
    given = parser.parse_args()
    if given.line is not None:
        print(json.dumps(measured(given)))
        return
    lines = [(way, base) for base in given.bases for way in given.ways if way.startswith("lora") or base != "nf4"]
    found: dict[tuple[str, str], dict[str, float]] = {}
    for _ in range(given.rounds):
        for line in lines:
            new = in_a_process(line)
            old = found.get(line, new)
            found[line] = {name: min(value, old[name]) for name, value in new.items()}
    print(table(found))


def in_a_process(line: tuple[str, str]) -> dict[str, float]:
    done = subprocess.run([sys.executable, *sys.argv, "--line", *line], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: dict[tuple[str, str], dict[str, float]]) -> str:
    """A row per line."""
    full = found[("full", "float32")] if ("full", "float32") in found else next(iter(found.values()))
    rows = ["| trained | base | step, s | to full | forward, s | to frozen | peak, MiB | to full |", "|" + "---|" * 8]
    for (way, base), now in found.items():
        frozen = found.get(("frozen", base), found.get(("frozen", "float32"), now))
        step = "" if way == "frozen" else f"{now['step']:.2f} | {now['step'] / full['step']:.2f}"
        rows.append(
            f"| {way} | {base} | {step or ' | '} | {now['forward']:.3f} | {now['forward'] / frozen['forward']:.2f}"
            f" | {now['peak'] / MIB:.0f} | {now['peak'] / full['peak']:.2f} |"
        )
    return "\n".join(rows)


def measured(given: argparse.Namespace) -> dict[str, float]:
    """One line: seconds of a forward pass (without gradients), of a step, and the peak of memory."""
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    shape, (way, base) = SMALL if given.small else LARGE, given.line
    before = peak_memory(given.device)
    policy = policy_of(shape, way, base, given)
    examples = [
        Example(
            TokenSequence(
                tokens=tuple(torch.randint(10, shape.vocab, (2 * shape.tokens,)).tolist()),
                sampled=(False,) * shape.tokens + (True,) * shape.tokens,
            )
        )
        for _ in range(shape.rows)
    ]
    forward = seconds(lambda: forwards(policy, examples))
    if way == "frozen":
        return {"forward": forward, "step": 0.0, "peak": peak_memory(given.device) - before}
    options = UpdateOptions(learning_rate=1e-5)
    optimizer = new_optimizer(policy.model.parameters(), options)

    def step() -> None:
        with adapter_dropout(policy.model, 0, 0):
            accumulate_examples(policy, examples, 1 << 20)
        apply_gradients(optimizer, 1e-5, 1.0)

    return {"forward": forward, "step": seconds(step), "peak": peak_memory(given.device) - before}


@torch.no_grad()
def forwards(policy: Policy, examples: list[Example]) -> None:
    learned_tokens(policy, examples)


def seconds(call: Callable[[], None]) -> float:
    """The least of three, after one that is not counted."""
    taken, on_cuda = [], torch.cuda.is_available()
    clock = perf_counter if on_cuda else process_time
    for _ in range(4):
        start = clock()
        call()
        if on_cuda:
            torch.cuda.synchronize()
        taken.append(clock() - start)
    return min(taken[1:])


def peak_memory(device: str) -> float:
    """Bytes: of the process so far, or of the device."""
    if device == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def policy_of(shape: Shape, way: str, base: str, given: argparse.Namespace) -> Policy:
    """The model of a line, its base in the type that its products are in."""
    compute = "bfloat16" if base == "bfloat16" or given.device == "cuda" else "float32"
    model = random_model(shape, torch.bfloat16 if compute == "bfloat16" and way != "full" else torch.float32)
    model.to(given.device)
    if base == "nf4":
        quantize(model, torch.bfloat16 if compute == "bfloat16" else torch.float32)
    model.requires_grad_(way == "full")
    if way.startswith("lora"):
        add_adapter(model, AdapterOptions(rank=given.rank, dropout=DROPOUT if way != "lora" else 0.0), seed=0)
    policy = as_policy(model, new_tokenizer(), dtype=compute)
    assert policy.forward_reason is None, policy.forward_reason
    return policy


def random_model(shape: Shape, dtype: torch.dtype) -> PreTrainedModel:
    """Random weights."""
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(default)


if __name__ == "__main__":
    main()
