"""Does a server hold the trainer's weights?  Tested after every update, before a token is trained on.

A few fixed prefixes, over the vocabulary and up to the run's longest sequence, are continued by a server and scored by
the trainer.  vLLM also scores the prefixes.  The largest difference of a log-prob must be what rounding explains.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from posttrain.errors import RunError
from posttrain.generation.http.completion_requests import CompletionJob, UnsoundAnswer
from posttrain.generation.parity import BFLOAT16_NATS, gap_limit, is_rounded_mixture, most_of
from posttrain.generation.request import Continuation, Request, Sampled, StreamKey
from posttrain.generation.rl_protocol import Facts, GenerateRequest, GenerateResponse
from posttrain.models.context import num_embeddings
from posttrain.models.forward import Completions
from posttrain.models.policy import Policy
from posttrain.options.rollout import SamplingParams

FLOAT32_NATS = 3e-5
"""Largest difference in float32; correct servers had 4e-6 to 9e-6."""
NUM_SEQUENCES, SAMPLED_TOKENS = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """One server's answer to the probe."""

    url: str
    facts: Facts
    sampled: Sequence[Sampled]
    """One completion of each prefix."""
    prefixes: Sequence[Sequence[float] | None]
    """log-probs of each prefix from its second token on, at temperature 1; None if the server gives none."""


class ServerProbe:
    """The sequences of a run's probe."""

    def __init__(self, policy: Policy, longest: int, sampling: SamplingParams) -> None:
        """`longest` is the run's longest prompt and completion; of how it samples, the probe has the temperature."""
        self.stop_ids = policy.stop_ids
        plain = SamplingParams(temperature=sampling.recorded_temperature)
        self.request = Request(sampling=plain, key=StreamKey(0, "probe", 0))
        vocabulary, dice = num_embeddings(policy.model), random.Random(0)
        most = max(1, longest - SAMPLED_TOKENS)
        lengths = [max(1, round(most ** (place / (NUM_SEQUENCES - 1)))) for place in range(NUM_SEQUENCES)]
        self.jobs = [
            CompletionJob(
                (
                    Continuation(
                        prefix=tuple(dice.randrange(vocabulary) for _ in range(length)),
                        draw=draw,
                        sample=0,
                        limit=max(1, min(SAMPLED_TOKENS, longest - length)),
                        name=f"probe of {length} tokens",
                    ),
                )
            )
            for draw, length in enumerate(lengths)
        ]

    def body(self, job: CompletionJob, facts: Facts, request_id: str) -> GenerateRequest:
        made = job.body(self.request, self.stop_ids, request_id)
        if facts.ours:
            return made
        return replace(made, sampling_params=replace(made.sampling_params, prompt_logprobs=0))

    def require_parity(self, policy: Policy, answers: Sequence[ProbeAnswer], version: int) -> float:
        """The largest difference from the policy's log-probs, in nats.

        Raises RunError, with the likely cause, where it is above the limit.
        """
        worst = 0.0
        for answer in answers:
            gap, limit = self.gap(policy, answer), limit_of(policy, answer.facts)
            worst = max(worst, gap)
            if not gap <= limit:
                raise RunError(
                    f"engine http: {answer.url}: probe of weights {version}: log-probs differ from the trainer's by"
                    f" {gap:.2g} nats; rounding explains {limit:g}.  {self.likely_cause(policy, answer)}"
                )
        return worst

    def gap(self, policy: Policy, answer: ProbeAnswer) -> float:
        """The largest difference of a log-prob of this answer."""
        return max(self.sampled_gap(policy, answer), self.prefix_gap(policy, answer))

    def sampled_gap(self, policy: Policy, answer: ProbeAnswer, *, temperature: float | None = None) -> float:
        """The same for the sampled tokens."""
        temperature = self.request.sampling.temperature if temperature is None else temperature
        prompts, completions = zip(*((each.continuation.prefix, each.tokens) for each in answer.sampled), strict=True)
        theirs = [value for each in answer.sampled for value in each.logprobs]
        return difference(policy, Completions(prompts, completions, range(len(prompts))), theirs, temperature)

    def prefix_gap(self, policy: Policy, answer: ProbeAnswer) -> float:
        """The same for the tokens of the prefixes; 0 where the server gives none."""
        prefixes = [job.first.prefix for job in self.jobs]
        given = [(prefix, said) for prefix, said in zip(prefixes, answer.prefixes, strict=True) if said]
        if not given:
            return 0.0
        theirs = [value for _, said in given for value in said or ()]
        batch = Completions([p[:1] for p, _ in given], [p[1:] for p, _ in given], range(len(given)))
        return difference(policy, batch, theirs, 1.0)

    def likely_cause(self, policy: Policy, answer: ProbeAnswer) -> str:
        """What explains a difference, and the remedy."""
        limit = limit_of(policy, answer.facts)
        temperature = self.request.sampling.temperature
        if temperature != 1 and self.sampled_gap(policy, answer, temperature=1.0) <= limit:
            return f"They are those at temperature 1, not {temperature:g}: use --logprobs-mode processed_logprobs."
        if any(said for said in answer.prefixes) and self.prefix_gap(policy, answer) <= limit:
            return (
                "It scores given tokens as the trainer does, and samples others: it adds sampling options, such as a"
                " top-p of generation_config.json.  Use --generation-config vllm."
            )
        tied = bool(getattr(policy.model.config, "tie_word_embeddings", False))
        if tied and not answer.facts.ours:
            return (
                "The output layer is tied to the embedding, and the server may still have its old copy of it: install"
                " this version of posttrain-vllm there.  Else it has older weights, or another model."
            )
        return "It has older weights, or another model: restart it with the model that is trained."


def prefix_logprobs(job: CompletionJob, answer: GenerateResponse) -> list[float] | None:
    """The log-probs of a prefix from its second token on; None if the answer has none.  Raises UnsoundAnswer."""
    prefix, said = job.first.prefix, answer.prompt_logprobs
    if said is None:
        return None
    entries = [(each or {}).get(str(token)) for token, each in zip(prefix, said, strict=False)]
    found = [each.logprob for each in entries[1:] if each is not None]
    if len(found) != len(prefix) - 1:
        raise UnsoundAnswer(f"log-probs of {len(found)} tokens of a prefix of {len(prefix)}")
    return found


@torch.inference_mode()
def difference(policy: Policy, batch: Completions, theirs: Sequence[float], temperature: float) -> float:
    """The largest difference of a log-prob; of mixtures in bfloat16 that of most tokens."""
    ours = policy.completion_logprobs(batch, temperature=temperature).double().cpu()
    gaps = (ours - torch.tensor(theirs, dtype=torch.float64)).abs().nan_to_num(nan=torch.inf)
    return most_of(gaps) if is_rounded_mixture(policy) else gaps.max().item()


def limit_of(policy: Policy, facts: Facts) -> float:
    """Allowed difference, in nats."""
    in_float32 = facts.dtype in ("float32", "float64") and gap_limit(policy) < BFLOAT16_NATS
    return FLOAT32_NATS if in_float32 else BFLOAT16_NATS
