"""What TRL made of given completions (tests/data/trl_parity.json), and a session of ours that is given the same.

`make trl-parity` has TRL write the numbers anew.
"""

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from posttrain.generation.engine import Sampling, rollouts_of
from posttrain.generation.request import Continuation, Request, Sampled
from posttrain.models.policy import Policy
from posttrain.records import Finish, Group, Prompt
from posttrain.training.update import group_logprobs

FILE = Path(__file__).parents[1] / "data" / "trl_parity.json"


@cache
def numbers() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


GIVEN: dict[str, Any] = numbers()["given"]
CASES: dict[str, dict[str, Any]] = numbers()["cases"]
GROUP_SIZE = len(GIVEN["completions"][0])
END: int = GIVEN["words"].index("<end>")
FIELDS = numbers()["fields"]
"""Of GRPOConfig, in every case that says nothing else."""


def decoded(text: str, shapes: Mapping[str, Sequence[int]] | None = None) -> dict[str, Tensor]:
    """The tensors of all parameters, by name, from the numbers of all of them."""
    flat = torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype="<f4").copy())
    sizes = numbers()["model"]["shapes"] if shapes is None else shapes
    parts = flat.split([int(np.prod(shape)) for shape in sizes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(sizes.items(), parts, strict=True)}


def model() -> PreTrainedModel:
    """The model that TRL began with, in float32."""
    made = Qwen3ForCausalLM(Qwen3Config(**numbers()["model"]["config"]))
    weights = decoded(numbers()["model"]["weights"])
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(weights[name])
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token."""
    words = models.WordLevel({word: number for number, word in enumerate(GIVEN["words"])}, unk_token="<pad>")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


def rows() -> list[dict[str, str]]:
    return [{"prompt": " ".join(GIVEN["words"][token] for token in prompt)} for prompt in GIVEN["prompts"]]


def reward_functions(case: str) -> list[Callable[..., list[float | None]]]:
    """One for each list of scores of the case, which finds a completion by its tokens."""
    keys = [tuple(ids) for group in GIVEN["completions"] for ids in group]

    def function(scores: Sequence[Sequence[float | None]]) -> Callable[..., list[float | None]]:
        known = dict(zip(keys, [score for group in scores for score in group], strict=True))

        def reward(completion_ids: list[list[int]], **others: Any) -> list[float | None]:
            return [known[tuple(ids)] for ids in completion_ids]

        return reward

    made = [function(scores) for scores in GIVEN["scores with unscored" if "unscored" in case else "scores"]]
    for reward, name in zip(made, ("first", "second"), strict=True):
        reward.__name__ = name
    return made


class ForcedEngine:
    """Answers with the given completions; their log-probs are those of the policy as it is."""

    reproducible, logprob_gap, suppresses, patience_seconds = True, None, True, math.inf
    weights_version, max_positions = 0, 32

    def __init__(self, policy: Policy) -> None:
        self.policy, self.tokenizer, self.stop_ids = policy, policy.tokenizer, policy.stop_ids

    def load(self, weights: object, version: int) -> None:
        self.weights_version = version

    def open(self, request: Request) -> "ForcedSampling":
        return ForcedSampling(self, request.sampling.temperature)


class ForcedSampling(Sampling):
    def __init__(self, engine: ForcedEngine, temperature: float) -> None:
        self.engine, self.temperature = engine, temperature
        self.waiting: list[Continuation] = []

    def put(self, continuations: Sequence[Continuation]) -> None:
        self.waiting += continuations

    def take(self, seconds: float) -> list[Sampled]:
        bare = [self.forced(one) for one in self.waiting]
        groups = [
            Group(prompt=Prompt(id="", text="", tokens=one.prefix), draw=one.draw, rollouts=tuple(rollouts))
            for one, rollouts in zip(self.waiting, ([each] for each in rollouts_of(self.engine, bare)), strict=True)
        ]
        logprobs = group_logprobs(self.engine.policy, groups, temperature=self.temperature, max_tokens=10_000)
        remaining = iter(logprobs.tolist())
        return [replace(each, logprobs=tuple(next(remaining) for _ in each.tokens)) for each in bare]

    def forced(self, one: Continuation) -> Sampled:
        tokens = GIVEN["completions"][GIVEN["prompts"].index(list(one.prefix))][one.sample]
        return Sampled(
            continuation=one,
            tokens=tuple(tokens),
            logprobs=(0.0,) * len(tokens),
            finish=Finish.STOP if tokens[-1] in self.engine.stop_ids else Finish.LENGTH,
            versions=((self.engine.weights_version, len(tokens)),),
        )

    def close(self) -> None:
        self.waiting = []


@dataclass(frozen=True)
class Recorded:
    """What one update had and left, by parameter."""

    gradient: dict[str, Tensor]
    weights: dict[str, Tensor]


class RecordingSgd(torch.optim.SGD):
    """Gradient descent that keeps each gradient and the weights after each step."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], rate: float) -> None:
        super().__init__(parameters.values(), lr=rate)
        self.names, self.updates = parameters, list[Recorded]()

    def step(self, closure: Any = None) -> None:
        gradient = {name: each.grad.clone() for name, each in self.names.items()}
        super().step(closure)
        weights = {name: each.detach().clone() for name, each in self.names.items()}
        self.updates.append(Recorded(gradient=gradient, weights=weights))
