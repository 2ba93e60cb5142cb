"""Continuations as requests to a server, and its answers as completions."""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from posttrain.generation.engine import ROUNDING_NATS
from posttrain.generation.request import Continuation, Request, Sampled
from posttrain.generation.rl_protocol import (
    Choice,
    GenerateRequest,
    GenerateResponse,
    OwnFields,
    SamplingFields,
    Stream,
)
from posttrain.options.rollout import SamplingParams
from posttrain.records import Finish

MOST_TOGETHER = 1024
"""Completions of one request."""
MOST_LOGPROBS = 1 << 19
"""Most log-probs in one answer, unless one completion has more: about 50 MB."""


def stream_of(continuation: Continuation, request: Request) -> Stream:
    """The stream of uniform numbers that its tokens are drawn with."""
    key = continuation.key or request.key
    return Stream(seed=key.seed, purpose=key.purpose, step=key.step, draw=continuation.draw, sample=continuation.sample)


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """Continuations that one request asks for: one, or a group with one prefix and consecutive sample numbers."""

    continuations: tuple[Continuation, ...]

    @property
    def first(self) -> Continuation:
        return self.continuations[0]

    @property
    def num_tokens(self) -> int:
        """The most tokens that it can hold at its end."""
        return sum(len(each.prefix) + each.limit for each in self.continuations)

    def body(self, request: Request, stop_ids: Sequence[int], request_id: str) -> GenerateRequest:
        """The request; vLLM ignores our fields."""
        first, greedy = self.first, request.sampling.greedy
        sampling = SamplingParams() if greedy else request.sampling
        return GenerateRequest(
            token_ids=first.prefix,
            request_id=request_id,
            sampling_params=SamplingFields(
                max_tokens=first.limit,
                n=len(self.continuations),
                temperature=0.0 if greedy else sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                logprobs=request.keep_alternatives,
                stop_token_ids=tuple(stop_ids),
                stop=request.stop_texts,
                detokenize=bool(request.stop_texts),
                ignore_eos=True,
            ),
            posttrain=OwnFields(
                **asdict(stream_of(first, request)),
                first_position=first.first_position,
                suppressed=request.suppressed,
                keep=request.keep,
            ),
        )


def num_logprobs(asked: GenerateRequest) -> int:
    """The most log-probs that an answer can have."""
    fields = asked.sampling_params
    prompt = 0 if fields.prompt_logprobs is None else len(asked.token_ids)
    return prompt + fields.n * fields.max_tokens * (1 + (fields.logprobs or 0))


def jobs_of(continuations: Sequence[Continuation], request: Request) -> list[CompletionJob]:
    """The requests for continuations: one for each group (more for a large one) and one for each conversation."""

    def place(pair: tuple[int, Continuation]) -> object:
        index, each = pair
        same = (each.draw, each.sample - index, each.limit, each.first_position, each.key, each.prefix)
        return index if request.keep else same

    jobs = []
    for _, pairs in groupby(enumerate(continuations), place):
        group = tuple(each for _, each in pairs)
        most = MOST_LOGPROBS // (group[0].limit * (1 + request.keep_alternatives))
        size = min(max(most, 1), MOST_TOGETHER)
        jobs += [CompletionJob(group[at : at + size]) for at in range(0, len(group), size)]
    return jobs


class UnsoundAnswer(Exception):
    """An answer that does not fit its request; the message says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What an answer may have, whatever its request."""

    stop_ids: Sequence[int]
    vocabulary: int
    """Token ids are below it."""
    versions: Collection[int] = ()
    """Versions of the weights that may have sampled."""


def completions_of(job: CompletionJob, answer: GenerateResponse, request: Request, allowed: Allowed) -> list[Sampled]:
    """The completions in an answer.  Raises UnsoundAnswer."""
    by_index = {choice.index: choice for choice in answer.choices}
    if sorted(by_index) != [*range(len(job.continuations))] or len(answer.choices) != len(by_index):
        raise UnsoundAnswer(f"{len(answer.choices)} completions; {len(job.continuations)} were requested")
    return [completion(each, by_index[index], request, allowed) for index, each in enumerate(job.continuations)]


def completion(continuation: Continuation, choice: Choice, request: Request, allowed: Allowed) -> Sampled:
    """One of them, checked against what was asked for."""
    tokens, reason = choice.token_ids, choice.finish_reason
    if not 1 <= len(tokens) <= continuation.limit:
        raise UnsoundAnswer(f"{len(tokens)} tokens; 1 to {continuation.limit} were requested ({reason!r:.40})")
    content = choice.logprobs.content if choice.logprobs is not None else None
    if content is None or [each.token_id for each in content] != [*tokens]:
        raise UnsoundAnswer(f"log-probs of {len(content or ())} tokens for {len(tokens)} tokens, or of others")
    require_tokens(tokens, allowed.vocabulary)
    logprobs = tuple(each.logprob for each in content)
    for numbers in (logprobs, logprobs if choice.cut_logprobs is None else choice.cut_logprobs):
        require_logprobs(numbers, len(tokens))
    stopped = tokens[-1] in allowed.stop_ids
    by_text = not stopped and reason == "stop" and choice.stop_reason in request.stop_texts
    if not (stopped or by_text or (reason == "length" and len(tokens) == continuation.limit)):
        given = f"finish_reason = {reason!r:.40}, stop_reason = {choice.stop_reason!r:.40}"
        raise UnsoundAnswer(f"it ended a completion after {len(tokens)} of {continuation.limit} tokens ({given})")
    count = request.keep_alternatives
    alternatives = tuple(each.likeliest(count) for each in content) if count else None
    require_tokens([token for each in alternatives or () for token, _ in each], allowed.vocabulary)
    return Sampled(
        continuation=continuation,
        tokens=tokens,
        logprobs=logprobs,
        cut_logprobs=choice.cut_logprobs,
        alternatives=alternatives,
        finish=Finish.STOP if stopped else Finish.LENGTH,
        ended_by_text=by_text,
        versions=spans_of(choice, allowed.versions),
    )


def require_tokens(tokens: Sequence[int], vocabulary: int) -> None:
    if (other := next((each for each in tokens if not 0 <= each < vocabulary), None)) is not None:
        raise UnsoundAnswer(f"token id {str(other)[:40]}; the policy has 0 to {vocabulary - 1}")


def require_logprobs(numbers: Sequence[float], count: int) -> None:
    """Raise UnsoundAnswer unless there are `count` of them, each finite and at most 0 (up to rounding)."""
    other = next((each for each in numbers if not -math.inf < each <= ROUNDING_NATS), None)
    if other is not None or len(numbers) != count:
        fault = f"{len(numbers)} log-probs" if other is None else f"a log-prob of {other:g}"
        raise UnsoundAnswer(f"{fault} for {count} sampled tokens; each has one, finite and at most 0")


def spans_of(choice: Choice, versions: Collection[int]) -> tuple[tuple[int, int], ...]:
    """(version, tokens) in order.  Raises UnsoundAnswer if tokens have no version, or one that was not sent."""
    spans, end, sent = choice.weight_versions or (), 0, {str(each) for each in versions}
    for span in spans:
        if span.start != end or span.end <= span.start:
            raise UnsoundAnswer(f"weight_versions has a gap at token {end}")
        if span.version not in sent:
            known = ", ".join(map(str, sorted(versions)))
            raise UnsoundAnswer(f"it sampled with weights {span.version[:40]!r}; version {known} was sent")
        end = span.end
    if end != len(choice.token_ids):
        raise UnsoundAnswer(f"weight_versions covers {end} of {len(choice.token_ids)} tokens")
    return tuple((int(span.version), span.end - span.start) for span in spans)
