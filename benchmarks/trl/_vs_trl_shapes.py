"""The models and batches that vs_trl.py compares on."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Network:
    """A decoder with random weights."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int


@dataclass(frozen=True, kw_only=True)
class Line:
    """One comparison on a shape's model and prompts."""

    reward: str = "hash"
    """hash or countdown."""
    exact_tokens: int | None = None
    """Length of every completion of a trained model, whose end token is then out of its reach; None: as it likes."""

    def __str__(self) -> str:
        return f"{self.reward} reward" + (f", {self.exact_tokens} tokens each" if self.exact_tokens else "")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One GRPO step: the model, how many prompts, and how long everything is."""

    network: Network | None
    """None: the model folder that comes with the package, or --model, on the Countdown task."""
    prompts: int
    group_size: int = 8
    prompt_tokens: int = 0
    """Exact length of each random prompt; Countdown's prompts are as long as they are."""
    completion_tokens: int
    """Exact length of each completion of a random model; on Countdown the length limit."""
    learning_rate: float
    tokens_per_microbatch: int = 4096
    """Ours; TRL's completions per pass are tried out."""
    lines: tuple[Line, ...] = (Line(),)
    steps: int
    """Measured steps, unless --steps says otherwise."""


SHAPES = {
    # Limit and learning rate of recipes/countdown-tiny.yaml; 68 tokens is about the mean length under that recipe.
    "bundled": Shape(
        network=None,
        prompts=32,
        completion_tokens=400,
        learning_rate=1e-4,
        lines=(Line(exact_tokens=68), Line(), Line(reward="countdown")),
        steps=10,
    ),
    "100m": Shape(
        network=Network(family="qwen3", hidden=896, layers=12, heads=14, kv_heads=2, mlp=2432, vocab=103),
        prompts=4,
        prompt_tokens=300,
        completion_tokens=32,
        learning_rate=1e-6,
        steps=3,
    ),
    # Positions that are learned: through the model's own forward pass, without prompts that are shared.
    "gpt2-124m": Shape(
        network=Network(family="gpt2", hidden=768, layers=12, heads=12, kv_heads=12, mlp=3072, vocab=50257),
        prompts=4,
        prompt_tokens=128,
        completion_tokens=48,
        learning_rate=1e-6,
        tokens_per_microbatch=2048,
        steps=3,
    ),
    "large-vocab": Shape(
        network=Network(family="qwen3", hidden=256, layers=4, heads=4, kv_heads=2, mlp=768, vocab=151936),
        prompts=4,
        prompt_tokens=64,
        completion_tokens=64,
        learning_rate=1e-6,
        tokens_per_microbatch=1024,
        steps=5,
    ),
    "qwen2.5-0.5b": Shape(
        network=Network(family="qwen2", hidden=896, layers=24, heads=14, kv_heads=2, mlp=4864, vocab=151936),
        prompts=16,
        prompt_tokens=256,
        completion_tokens=256,
        learning_rate=1e-6,
        steps=5,
    ),
}
