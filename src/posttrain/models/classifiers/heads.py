"""Scalar heads over a language model's hidden states: a reward model's score, and a critic's value.

    r = w · h_last      h_last: the final, normed hidden state at the last token of prompt and answer

The score has no bias: pairs do not determine it, and the classifiers of transformers over decoders have none.
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

    Drawn from N(0, 1/(d + 1)), d the width of the hidden states (Stiennon et al. 2020, arXiv:2009.01325, as told by
    Huang et al. 2024, arXiv:2403.17031), from a stream that the seed decides and nothing else does.
    """

    def __init__(self, width: int, *, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(stream_seed(seed, "reward head"))
        drawn = torch.randn(1, width, generator=stream, dtype=torch.float64) / (width + 1) ** 0.5
        self.weight = nn.Parameter(drawn.to(dtype))

    def forward(self, hidden: Float[Tensor, "text hidden"]) -> Float[Tensor, " text"]:
        """The score of each hidden state."""
        return F.linear(hidden.to(self.weight.dtype), self.weight).squeeze(-1)


@dataclass(frozen=True, slots=True)
class TextScorer:
    """A language model and the head that scores what it has read."""

    policy: Policy
    head: ScoreHead

    def scores(
        self, prompts: Sequence[Tokens], answers: Sequence[Tokens], prompt_of: Sequence[int]
    ) -> Float[Tensor, " answer"]:
        """r of each answer, with gradients; answer i, of one token at least, continues prompt `prompt_of[i]`.

        Read at the last token that there is, by the lengths of the texts: no pad token is looked for, so that none can
        be mistaken for the text's end, nor the end for padding.
        """
        # The state at an answer's last token is the one that would predict a token behind it.
        extended = [(*tokens, tokens[-1]) for tokens in answers]
        last = torch.tensor([t == len(tokens) for tokens in answers for t in range(len(tokens) + 1)])
        batch = Completions(prompts, extended, prompt_of, sampled=last)
        scores = self.policy.forward.completion_logprobs(batch, ForwardNeeds(logprobs=False, values=self.head)).values
        assert scores is not None
        return scores

    @property
    def body_parameters(self) -> list[nn.Parameter]:
        """What of the body is trained: not an output layer of its own, which no score passes through."""
        model = self.policy.model
        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        unused = set() if output.weight is embedding.weight else {id(each) for each in output.parameters()}
        return [each for each in model.parameters() if each.requires_grad and id(each) not in unused]


def new_scorer(policy: Policy, *, seed: int) -> TextScorer:
    """A policy's body under a head that nobody has trained."""
    dtype = torch.float64 if policy.model.dtype == torch.float64 else torch.float32
    head = ScoreHead(policy.hidden_width, seed=seed, dtype=dtype)
    return TextScorer(policy, head.to(policy.device))


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
