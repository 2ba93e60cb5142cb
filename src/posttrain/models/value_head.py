"""A value head: what a hidden state says of the reward to come."""

from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posttrain.models.adapters.lora import stream_seed

WIDENING = 4
"""Channels of the hidden layer for each of the hidden state."""


class ValueHead(nn.Module):
    """V(h) of a final hidden state h, after the model's last norm, in units of reward.

        mlp      V = w · relu(W h + c) + b        W: 4d × d
        linear   V = w · h + b

    w is 0 at first, so that V is b everywhere: the mean reward, once that is known (`expect`).  In float32 at least,
    whatever the model computes in.  W is drawn from a stream of its own, uniform within ±1/√d.
    """

    def __init__(
        self, hidden: int, kind: Literal["mlp", "linear"], *, seed: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.kind = kind
        dtype = torch.promote_types(dtype, torch.float32)
        self.widening = None if kind == "linear" else nn.Linear(hidden, WIDENING * hidden, dtype=dtype)
        self.output = nn.Linear(hidden if self.widening is None else WIDENING * hidden, 1, dtype=dtype)
        with torch.no_grad():
            if self.widening is not None:
                stream = torch.Generator().manual_seed(stream_seed(seed, "value head"))
                drawn = torch.rand(self.widening.weight.shape, generator=stream, dtype=torch.float64) * 2 - 1
                self.widening.weight.copy_(drawn / hidden**0.5)
                self.widening.bias.zero_()
            self.output.weight.zero_()
            self.output.bias.zero_()

    def forward(self, hidden: Float[Tensor, "token hidden"]) -> Float[Tensor, " token"]:
        """V of each hidden state."""
        x = hidden.to(self.output.weight.dtype)
        if self.widening is not None:
            x = torch.relu(self.widening(x))
        return cast(Tensor, self.output(x))[:, 0]

    @torch.no_grad()
    def expect(self, mean: float) -> None:
        """Make b the mean reward, which is what a new head then expects everywhere."""
        self.output.bias.fill_(mean)

    @torch.no_grad()
    def load_score(self, w: Float[Tensor, " hidden"]) -> None:
        """Make a new head V(h) = w · h, as a reward model's is; of an mlp two channels say it.

        w · h = relu(w · h) - relu(-w · h)
        """
        self.output.bias.zero_()
        if self.widening is None:
            self.output.weight.copy_(w)
            return
        self.widening.weight[0].copy_(w)
        self.widening.weight[1].copy_(-w)
        self.output.weight[0, :2] = torch.tensor([1.0, -1.0])
