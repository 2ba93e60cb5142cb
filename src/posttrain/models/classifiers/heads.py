"""Scalar heads over a language model's hidden states: a reward model's score, and a critic's value.

    r = w · h_last      h_last: the final, normed hidden state at the last token of prompt and answer

The score has no bias: pairs do not determine it, and transformers' classifiers over decoders have no bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from posttrain.models.adapters.lora import stream_seed
from posttrain.models.forward import Completions, ForwardNeeds
from posttrain.models.policy import Policy

Tokens = Sequence[int]


class ScoreHead(nn.Module):
    """The vector w, in float32 whatever the body computes in.

    Drawn from N(0, 1/(d + 1)), d the width of the hidden states (Stiennon et al. 2020, arXiv:2009.01325, as reported by
    Huang et al. 2024, arXiv:2403.17031), from a stream of the seed.
    """

    def __init__(self, width: int, *, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(stream_seed(seed, "reward head"))
        drawn = torch.randn(1, width, generator=stream, dtype=torch.float64) / (width + 1) ** 0.5
        self.weight = nn.Parameter(drawn.to(dtype))

    def forward(self, hidden: Float[Tensor, "text hidden"]) -> Float[Tensor, " text"]:
        return F.linear(hidden.to(self.weight.dtype), self.weight).squeeze(-1).clone()  # no view: sharding hooks it


@dataclass(frozen=True, slots=True)
class TextScorer:
    """A language model and the head that scores texts."""

    policy: Policy
    head: ScoreHead

    def scores(
        self, prompts: Sequence[Tokens], answers: Sequence[Tokens], prompt_of: Sequence[int]
    ) -> Float[Tensor, " answer"]:
        """r of each answer, with gradients; answer i, of at least one token, continues prompt `prompt_of[i]`.

        Read at the last token by the texts' lengths: no pad token is searched, so none is mistaken for a text's end.
        """
        # The state at an answer's last token is the one that would predict the next token.
        extended = [(*tokens, tokens[-1]) for tokens in answers]
        last = torch.tensor([t == len(tokens) for tokens in answers for t in range(len(tokens) + 1)])
        batch = Completions(prompts, extended, prompt_of, sampled=last)
        scores = self.policy.forward.completion_logprobs(batch, ForwardNeeds(logprobs=False, values=self.head)).values
        assert scores is not None
        return scores

    @property
    def body_parameters(self) -> list[nn.Parameter]:
        """The body's trained parameters, without an untied output layer, which no score uses."""
        model = self.policy.model
        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        unused = set() if output.weight is embedding.weight else {id(each) for each in output.parameters()}
        return [each for each in model.parameters() if each.requires_grad and id(each) not in unused]


def new_scorer(policy: Policy, *, seed: int) -> TextScorer:
    dtype = torch.float64 if policy.model.dtype == torch.float64 else torch.float32
    head = ScoreHead(policy.hidden_width, seed=seed, dtype=dtype)
    return TextScorer(policy, head.to(policy.device))


WIDENING = 4
"""Channels of the hidden layer per channel of the hidden state."""


class ValueHead(nn.Module):
    """V(h) of a final hidden state h, after the model's last norm, in units of reward.

        mlp      V = w · relu(W h + c) + b        W: 4d × d
        linear   V = w · h + b

    w starts at 0, so V is b everywhere: the mean reward, once that is known (`expect`).  In float32 at least.  W is
    drawn from a stream of the seed, uniform within ±1/√d.
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
        x = hidden.to(self.output.weight.dtype)
        if self.widening is not None:
            x = torch.relu(self.widening(x))
        return cast(Tensor, self.output(x))[:, 0].clone()  # no view: sharding hooks it

    @torch.no_grad()
    def expect(self, mean: float) -> None:
        """Set b to the mean reward."""
        self.output.bias.fill_(mean)

    @torch.no_grad()
    def load_score(self, w: Float[Tensor, " hidden"]) -> None:
        """Make a new head V(h) = w · h, as a reward model's; an mlp uses two channels: relu(w · h) - relu(-w · h)."""
        self.output.bias.zero_()
        if self.widening is None:
            self.output.weight.copy_(w)
            return
        self.widening.weight[0].copy_(w)
        self.widening.weight[1].copy_(-w)
        self.output.weight[0, :2] = torch.tensor([1.0, -1.0])
