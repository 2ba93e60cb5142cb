"""What a server says about itself, and what a run rejects before it samples there."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from posttrain.errors import UserError
from posttrain.generation.http.server_calls import ServerCalls, ServerFault, json_in, key_of, require_httpx
from posttrain.generation.http.vllm_settings import BACKEND, CPU_HEAD_WIDTHS, PROCESSED, SETTINGS, TOKENIZE, VllmFacts
from posttrain.generation.rl_protocol import (
    GENERATE,
    IS_PAUSED,
    WEIGHT_INFO,
    Facts,
    GenerateRequest,
    PausedInfo,
    SamplingFields,
    WeightInfo,
    written,
)
from posttrain.models.context import num_embeddings
from posttrain.models.policy import Policy
from posttrain.models.rendering import token_ids, tokenizer_digest
from posttrain.options.rollout import HttpOptions, SamplingParams

TOKENIZED = "Use 12, 7 and 305 to make 24.\n<think> naïve café — 東京 </think>"
"""A text that two tokenizers are unlikely to split alike."""
SAME_MODEL = "Serve the model that is trained"
WITH_BACKEND = f"""Install posttrain-vllm there, and add --weight-transfer-config '{{"backend": "{BACKEND}"}}'"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run needs from each server, apart from its model."""

    longest: int
    """The longest prompt and completion, in tokens."""
    sampling: SamplingParams
    transport: str
    """How the recipe says that weights travel."""

    def require(self, calls: ServerCalls, facts: Facts) -> None:
        """Raise UserError if a server lacks it."""
        require_context(calls, facts, self.longest)
        require_sampling(calls, facts, self.sampling)
        if self.transport == "put" and not facts.ours:
            raise refusal(
                calls, "engine.transport = put: vLLM reads weights from a folder only", "Use engine.transport: folder"
            )


async def facts_again(calls: ServerCalls, policy: Policy, needs: Needs) -> Facts:
    """`facts_of` a server that was left out: it may have been started again, as another one.

    Raises ServerFault if it cannot sample for this run, so that it stays left out.
    """
    try:
        facts = await facts_of(calls, policy)
        needs.require(calls, facts)
    except ServerFault:
        raise
    except UserError as error:
        raise ServerFault(calls.url, "connect", str(error).removeprefix(f"engine http: {calls.url}: ")) from None
    return facts


async def first_facts_of(calls: ServerCalls, policy: Policy) -> Facts:
    """`facts_of` before anything is sampled, when a server that cannot be reached is a mistake."""
    try:
        return await facts_of(calls, policy)
    except ServerFault as fault:
        if fault.status is not None:
            raise
        says = str(fault).removeprefix(f"engine http: {calls.url}: ").rstrip(".")
        raise refusal(calls, says, "Start it, or correct engine.urls") from None


async def facts_of(calls: ServerCalls, policy: Policy) -> Facts:
    """Ask a server what it is.  Raises ServerFault or UserError where it cannot sample for this policy."""
    connect = calls.seconds.connect
    try:
        info = await calls.ask_for(WeightInfo, "connect", WEIGHT_INFO, seconds=connect)
    except ServerFault as fault:
        if fault.status in (404, 405):
            raise refusal(
                calls,
                "it has no routes for weights",
                "Start vLLM as docs/guides/engines.md says (VLLM_SERVER_DEV_MODE=1, --enable-scale-out)",
            ) from None
        if fault.status in (401, 403):
            raise refusal(calls, "it refuses the key", "Name the variable with its key in engine.key_env") from None
        raise
    if info.posttrain is not None:
        ours = info.posttrain
        if ours.vocabulary != (size := num_embeddings(policy.model)):
            raise refusal(calls, f"its vocabulary has {ours.vocabulary} logits, and the policy's {size}", SAME_MODEL)
        if ours.tokenizer_digest != tokenizer_digest(policy.tokenizer):
            raise refusal(calls, "its tokenizer has other tokens", SAME_MODEL)
        return ours
    return await vllm_facts(calls, policy)


async def vllm_facts(calls: ServerCalls, policy: Policy) -> VllmFacts:
    """The facts of a vLLM server, whose settings say what it would add to a request."""
    seconds = calls.seconds.update
    facts = await calls.ask_for(VllmFacts, "settings", SETTINGS, seconds=seconds)
    checks: Sequence[tuple[bool, str, str]] = (
        (facts.backend == BACKEND, f"its weight transfer is {facts.backend}", WITH_BACKEND),
        (
            facts.generation_config == "vllm",
            f"generation_config = {facts.generation_config}: it adds sampling options of its model's folder",
            "Start it with --generation-config vllm",
        ),
        (
            not facts.override_generation_config,
            f"it adds sampling options: {facts.override_generation_config}",
            "Start it without --override-generation-config",
        ),
        (
            not facts.prefix_caching,
            "it caches prefixes, which would be those of older weights",
            "Start it with --no-enable-prefix-caching",
        ),
    )
    for holds, fault, remedy in checks:
        if not holds:
            raise refusal(calls, fault, remedy)
    if not (await calls.ask_for(PausedInfo, "settings", IS_PAUSED, seconds=seconds)).is_paused:
        await require_vocabulary(calls, policy)  # a trainer that was killed in an update leaves a server paused
    await require_tokenizer(calls, policy)
    return replace(facts, dtype=facts.dtype.removeprefix("torch."))


async def require_vocabulary(calls: ServerCalls, policy: Policy) -> None:
    """Refuse a server that knows fewer tokens than the policy, or more, or that cannot generate from token ids."""
    size = num_embeddings(policy.model)
    for token, known in ((size - 1, True), (size, False)):
        asked = GenerateRequest(
            token_ids=(token,), sampling_params=SamplingFields(max_tokens=1), request_id=f"vocabulary-{token}"
        )
        try:
            await calls.ask("generate one token", GENERATE, written(asked), seconds=calls.seconds.update)
        except ServerFault as fault:
            if fault.status in (404, 405):
                remedy = "Start vLLM with --enable-scale-out"
                raise refusal(calls, f"it has no route {GENERATE}", remedy) from None
            if fault.status is not None and fault.status >= 500:
                raise UserError(
                    f"{fault}  It is up, and fails at a request of one token.{head_width_note(policy)}"
                ) from None
            if fault.status != 400:
                raise
            accepted = False
        else:
            accepted = True
        if accepted != known:
            more = "fewer" if known else "more"
            raise refusal(calls, f"its model has {more} than {size} tokens, which the policy has", SAME_MODEL)


async def require_tokenizer(calls: ServerCalls, policy: Policy) -> None:
    """Refuse a server whose tokenizer splits a text in another way; one without a tokenizer is as good."""
    body = json.dumps({"prompt": TOKENIZED, "add_special_tokens": False}).encode()
    try:
        answer = json_in(await calls.ask("tokenizer", TOKENIZE, body, seconds=calls.seconds.update))
    except ServerFault as fault:
        if fault.status is None or fault.status >= 500:
            raise
        return
    found = answer.get("tokens") if isinstance(answer, dict) else None
    if found != token_ids(policy.tokenizer, TOKENIZED, special=False):
        raise refusal(calls, "its tokenizer has other tokens", SAME_MODEL)


def require_context(calls: ServerCalls, facts: Facts, longest: int) -> None:
    """Refuse a server whose context is shorter than the run's longest prompt and completion."""
    if facts.max_positions < longest:
        flag = "--model.context" if facts.ours else "--max-model-len"
        fault = f"its context has {facts.max_positions} tokens, and this run needs {longest}"
        raise refusal(calls, fault, f"Start it with {flag} {longest} or more, or lower rollout.max_completion_tokens")


def require_sampling(calls: ServerCalls, facts: Facts, sampling: SamplingParams) -> None:
    """Reject settings for which a vLLM server does not return the log-probs that a run records."""
    if not isinstance(facts, VllmFacts):
        return
    temperature = sampling.recorded_temperature
    if temperature != 1 and facts.logprobs_mode != PROCESSED:
        fault = f"temperature = {temperature:g}, and its log-probs are those at 1 ({facts.logprobs_mode})"
        raise refusal(calls, fault, f"Start it with --logprobs-mode {PROCESSED}")
    if sampling.cuts:
        fault = "a top-k, top-p or min-p cut, of which vLLM gives no log-probs before the cut"
        raise refusal(calls, fault, "Leave the cut out, or sample on a server of posttrain's")


def server_lines(options: HttpOptions) -> list[str]:
    """What each server says about itself, or why it does not answer."""
    require_httpx()

    async def line(url: str) -> str:
        calls = ServerCalls(url, options.seconds, key_of(options))
        try:
            info = await calls.ask_for(WeightInfo, "connect", WEIGHT_INFO, seconds=options.seconds.connect)
        except ServerFault as fault:
            return str(fault)
        finally:
            await calls.close()
        kind = (info.posttrain or VllmFacts).kind
        return f"{url} ({kind}), with weights of version {info.weight_version[:40]}"

    async def lines() -> list[str]:
        return list(await asyncio.gather(*map(line, (*options.urls, *filter(None, [options.evaluation])))))

    return asyncio.run(lines())


def refusal(calls: ServerCalls, fault: str, remedy: str) -> UserError:
    return UserError(f"engine http: {calls.url}: {fault}.  {remedy}.")


def head_width_note(policy: Policy) -> str:
    """A likely cause where a vLLM server dies at the first request."""
    config = policy.model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width in CPU_HEAD_WIDTHS:
        return ""
    known = ", ".join(map(str, CPU_HEAD_WIDTHS))
    return f"  The model's heads have a width of {width}; vLLM's attention on a CPU knows {known}."
