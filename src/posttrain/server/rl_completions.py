"""A trainer's requests as continuations, and completions in the format of vLLM 0.32."""

import secrets
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.generation import rl_protocol
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation, Request as SamplingRequest, Sampled
from posttrain.generation.rl_protocol import GenerateRequest, OwnFields
from posttrain.options.rollout import SamplingParams
from posttrain.server.requests import RefusedRequest, brief

MAX_STOPS = 16
Record = TypeVar("Record")


def read_record(record: type[Record], body: bytes) -> Record:
    """A record from a request.  Raises RefusedRequest with the first invalid field."""
    try:
        return rl_protocol.read(record, body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise RefusedRequest(f"{where[:80]} = {brief(first['input'])}: {first['msg'][:200]}") from error


def json_of(record: object) -> Response:
    return Response(rl_protocol.written(record), media_type="application/json")


def sampling_of(asked: GenerateRequest, engine: InProcessEngine) -> tuple[SamplingRequest, list[Continuation]]:
    """What a request samples.  Raises RefusedRequest if this engine does not support it."""
    fields = asked.sampling_params
    own = asked.posttrain
    if own is None:
        seed = secrets.randbits(62) if fields.seed is None else fields.seed
        own = OwnFields(seed=seed, purpose="serve", step=0, draw=0, sample=0)
    if fields.stop_token_ids and set(fields.stop_token_ids) != set(engine.stop_ids):
        rule = (
            f"this model's completions end at {sorted(engine.stop_ids)}.  Leave it out, or serve with these stop tokens"
        )
        raise RefusedRequest(f"sampling_params.stop_token_ids = {sorted(fields.stop_token_ids)}: {rule}")
    if fields.ignore_eos and not fields.stop_token_ids:
        raise RefusedRequest(
            "sampling_params.ignore_eos = true: completions end at the model's stop tokens.  Leave it out"
        )
    if fields.prompt_logprobs is not None:
        raise RefusedRequest("sampling_params.prompt_logprobs: only sampled tokens have log-probs.  Leave it out")
    if len(fields.stop) > MAX_STOPS or "" in fields.stop:
        raise RefusedRequest(f"sampling_params.stop: give at most {MAX_STOPS} texts, none of them empty")
    known = engine.policy.num_logits
    if (unknown := next((each for each in (*asked.token_ids, *own.suppressed) if each >= known), None)) is not None:
        raise RefusedRequest(f"token id {unknown}: must be 0 to {known - 1}")
    cuts = {name: getattr(fields, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    try:
        sampling = SamplingParams(greedy=True) if fields.temperature == 0 else SamplingParams(**cuts)
    except UserError as error:
        raise RefusedRequest(f"sampling_params: {error}") from error
    settings = SamplingRequest(
        sampling=sampling,
        key=own.key,
        suppressed=own.suppressed,
        stop_texts=fields.stop,
        keep_alternatives=fields.logprobs or 0,
        keep=own.keep,
    )
    return settings, [
        Continuation(
            prefix=asked.token_ids,
            draw=own.draw,
            sample=own.sample + number,
            first_position=own.first_position,
            limit=fields.max_tokens,
            key=own.key,
            name=f"request {asked.request_id[:40]}, draw {own.draw}",
        )
        for number in range(fields.n)
    ]


def stop_texts(
    tokenizer: PreTrainedTokenizerBase, sampled: Sequence[Sampled], texts: Sequence[str]
) -> list[str | None]:
    """The stop text that ended each completion; None if something else ended it."""
    found: list[str | None] = []
    for each in sampled:
        said = tokenizer.decode(list(each.tokens), skip_special_tokens=False) if each.ended_by_text else ""
        found.append(next((text for text in texts if text in said), None))
    return found


def choice(index: int, sampled: Sampled, logprobs: int | None, stop_text: str | None) -> rl_protocol.Choice:
    """A completion in vLLM's format."""
    end, spans = 0, []
    for version, count in sampled.versions:
        spans.append(rl_protocol.VersionSpan(version=str(version), start=end, end=end + count))
        end += count
    stopped = sampled.finish.has_stop_token or stop_text is not None
    return rl_protocol.Choice(
        index=index,
        token_ids=sampled.tokens,
        logprobs=None if logprobs is None else rl_protocol.Logprobs(content=logprobs_of(sampled)),
        finish_reason="stop" if stopped else "length",
        stop_reason=stop_text,
        weight_versions=tuple(spans),
        cut_logprobs=sampled.cut_logprobs,
    )


def logprobs_of(sampled: Sampled) -> tuple[rl_protocol.SampledLogprob, ...]:
    alternatives = sampled.alternatives or ((),) * len(sampled.tokens)
    return tuple(
        rl_protocol.SampledLogprob(
            token_id=token,
            logprob=logprob,
            top_logprobs=tuple(
                rl_protocol.TokenLogprob(token_id=other, logprob=value, rank=rank)
                for rank, (other, value) in enumerate(likeliest, start=1)
            ),
        )
        for token, logprob, likeliest in zip(sampled.tokens, sampled.logprobs, alternatives, strict=True)
    )
