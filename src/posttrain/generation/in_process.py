"""The in-process sampler: many completions at once, from the trainer's own weights.

Each prefix is prefilled once.  A row that finishes leaves the batch at once and a waiting one takes its place.  A
completion is a function of its prefix, the weights and its stream of uniform numbers: other continuations, their order,
the time of `put` and `max_rows` change nothing.

Weights may be loaded while completions are in progress: each continues with the new weights from its next token, and
all caches are computed again.

If the request keeps caches, a continuation of a result reuses its cache: the given tokens that follow go through the
model one per step, with the other rows.  If they are too many (`GIVEN_SHARE`), all is prefilled again.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from posttrain.errors import UserError
from posttrain.generation.decoder_steps import DecoderSteps, StaticSteps
from posttrain.generation.decoding_rows import PREFILL_TOKENS, PendingPrefix, Rows
from posttrain.generation.engine import Sampling, SamplingTimeout
from posttrain.generation.model_steps import ModelSteps, RecomputedSteps
from posttrain.generation.native_steps import NativeSteps
from posttrain.generation.request import Continuation, Request, Sampled, SampledToken, StreamKey
from posttrain.generation.row_columns import KeptRow
from posttrain.generation.sampling import require_finite
from posttrain.generation.steps import Steps
from posttrain.models.context import num_embeddings, require_embeddings
from posttrain.models.forward import SharedPromptForward
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.native.native_decoder import native_refusal
from posttrain.models.policy import Policy
from posttrain.models.sharding import sharded_forward
from posttrain.models.transfers import numbers_on, on_cpu

REFILL_SHARE = 4
"""Waiting rows start once one row in this many is free."""
GIVEN_SHARE = 2
"""A cache is reused for given tokens if it holds at least this many times as many."""

WaitingPrefix = tuple[tuple[int, ...], deque[Continuation]]
Place = tuple[StreamKey | None, int, int]
"""Streams, draw and sample of a completion."""


class InProcessEngine:
    """Samples from a policy in memory; an `Engine`."""

    reproducible = True
    logprob_gap: float | None = None
    suppresses = True
    patience_seconds = math.inf

    def __init__(self, policy: Policy, *, max_rows: int = 256) -> None:
        self.policy, self.max_rows, self.weights_version = policy, max_rows, 0
        self.tokenizer, self.stop_ids, self.max_positions = policy.tokenizer, policy.stop_ids, policy.max_positions
        self._steps: Steps | None = None
        self._open: list[InProcessSampling] = []

    def load(self, weights: ExportedWeights, version: int) -> None:
        """Note the version: the weights are the trainer's own.  Open samplings read them now, later ones when opened.

        Do not sample between a change of the weights and this call.
        """
        self.weights_version = version
        if self._open and self._steps is not None:
            self._steps.refresh()
            for sampling in self._open:
                sampling.reload()

    def open(self, request: Request) -> "InProcessSampling":
        """Start sampling from the current weights; several samplings may be open, each with its own cache."""
        self.policy.require_as_made()
        if self._steps is None:
            self._steps = steps_for(self.policy)
        if not self._open:
            self._steps.refresh()
        self._open.append(InProcessSampling(self, self._steps, request))
        return self._open[-1]

    def forget(self, sampling: "InProcessSampling") -> None:
        """Called by a sampling that closes; the last one frees what only samplings need."""
        self._open.remove(sampling)
        if not self._open and self._steps is not None:
            self._steps.release()


class InProcessSampling(Sampling):
    """Decides which completions are decoded when: as many rows at once as fit, in the order of `put`.

    Kept rows count as rows in use.  They are freed, the oldest first, once nothing else can be decoded.  On a CPU a
    freed cache is computed again in the steps that made it, so its bits do not depend on when rows are freed.
    """

    def __init__(self, engine: InProcessEngine, steps: Steps, request: Request) -> None:
        self.engine, self.policy, self.steps, self.request = engine, engine.policy, steps, request
        self.max_positions = engine.max_positions
        self.closed = False
        self.waiting: deque[WaitingPrefix] = deque()
        """Prefixes that are not prefilled, each with its continuations."""
        self.pending: deque[PendingPrefix] = deque()
        """Prefilled prefixes whose continuations have not all started."""
        self.continuing: list[tuple[KeptRow, Continuation]] = []
        self.kept: dict[Place, KeptRow] = {}
        """The oldest first."""
        self.freed: dict[Place, KeptRow] = {}
        """Rows whose cache was freed and will be computed again, without their tensors."""
        self.num_open, self.num_tokens = 0, num_embeddings(self.policy.model)
        self.rows = Rows(self.policy, steps, request, weights_version=engine.weights_version)

    def put(self, continuations: Sequence[Continuation]) -> None:
        self._require_open()
        for each in continuations:
            room = self.max_positions - len(each.prefix)
            if not each.prefix or not 1 <= each.limit <= room:
                given = f"a prefix of {len(each.prefix)} tokens and limit = {each.limit}"
                fault = f"{each.label}: {given}, in a context of {self.max_positions}"
                raise UserError(f"{fault}.  Give at least 1 token, and a limit of 1 to {max(room, 1)}.")
            require_embeddings(each.prefix, self.num_tokens, self.policy.tokenizer, each.name or each.label)
        self.num_open += len(continuations)
        prefix, group = None, deque[Continuation]()
        for each in continuations:
            place = place_of(each)
            kept = self.kept.get(place) or self.freed.get(place)
            if kept is not None and each.prefix[: len(kept.tokens)] == kept.tokens:
                cached = self.kept.pop(place, None)
                self.freed.pop(place, None)
                if GIVEN_SHARE * (len(each.prefix) - len(kept.tokens)) <= kept.length:
                    if cached is not None:
                        self.continuing.append((cached, each))
                    else:
                        self.waiting.append((each.prefix[: kept.prefilled], deque([each])))
                    continue
            if each.prefix != prefix:
                prefix, group = each.prefix, deque()
                self.waiting.append((prefix, group))
            group.append(each)

    @torch.inference_mode()
    def take(self, seconds: float) -> list[Sampled]:
        self._require_open()
        if not self.num_open:
            raise UserError(f"engine {type(self.engine).__name__}: take: nothing is open.  Put continuations first.")
        until = time.monotonic() + seconds
        while not self.rows.finished:
            self._advance()  # at least once, so that a take of 0 seconds makes progress too
            if time.monotonic() > until and not self.rows.finished:
                raise SamplingTimeout(type(self.engine).__name__, seconds, self.num_open)
        finished, self.rows.finished = self.rows.finished, []
        for sampled, cache in finished:
            if cache is not None:
                self.kept[place_of(sampled.continuation)] = cache
        self.num_open -= len(finished)
        return [sampled for sampled, _ in finished]

    @torch.inference_mode()
    def tokens_after(self, seen: Mapping[int, int]) -> dict[int, list[SampledToken]]:
        """New tokens of rows that are being decoded, after the first `seen`, by the `id` of their continuation.

        Raises RunError on non-finite logits.
        """
        members, columns = self.rows.members, self.rows.columns
        found = [row for row, member in enumerate(members) if id(member.continuation) in seen]
        numbers = [id(members[row].continuation) for row in found]
        rows = numbers_on(self.policy.device, found)
        first = numbers_on(self.policy.device, [seen[each] for each in numbers])
        num_new = (columns.lengths[rows] - first).tolist()
        if not any(num_new):
            return {}
        places = first[:, None] + torch.arange(max(num_new), device=self.policy.device)
        at = rows[:, None], places.clamp(max=columns.width - 1)
        kept = on_cpu(
            [columns.tokens[at], columns.logprobs[at], columns.alternatives[at], columns.alternative_logprobs[at]]
        )
        require_finite(kept[1].sum(dim=1), row_name=lambda i: members[found[i]].continuation.label)
        made = {}
        for number, count, *lists in zip(numbers, num_new, *(each.tolist() for each in kept), strict=True):
            made[number] = [
                SampledToken(token, logprob, tuple(zip(likeliest, theirs, strict=True)))
                for token, logprob, likeliest, theirs in list(zip(*lists, strict=True))[:count]
            ]
        return made

    def release(self, sampled: Iterable[Sampled]) -> None:
        for each in sampled:
            self._forget(place_of(each.continuation))

    @torch.inference_mode()
    def drop(self, continuations: Sequence[Continuation]) -> None:
        """End these continuations (the same objects that were put) without a result, and free their caches."""
        for each in continuations:
            self._forget(place_of(each))
        numbers = {id(each) for each in continuations}
        num_before = sum(map(len, self._groups())) + len(self.continuing)
        for group in self._groups():
            left = [each for each in group if id(each) not in numbers]
            group.clear()
            group.extend(left)
        self.waiting = deque(each for each in self.waiting if each[1])
        self.pending = deque(each for each in self.pending if each.waiting)
        self.continuing = [each for each in self.continuing if id(each[1]) not in numbers]
        num_unstarted = num_before - sum(map(len, self._groups())) - len(self.continuing)
        self.num_open -= num_unstarted + self.rows.drop(numbers)

    def _groups(self) -> list[deque[Continuation]]:
        """Continuations that have not started, by their prefix."""
        return [*(group for _, group in self.waiting), *(item.waiting for item in self.pending)]

    @torch.inference_mode()
    def reload(self) -> None:
        """Continue with the weights that were just loaded."""
        started = [(item.waiting[0].prefix, item.waiting) for item in self.pending]
        continued = [(each.prefix, deque([each])) for _, each in self.continuing]
        self.waiting.extendleft(reversed([*started, *continued]))
        for stale in (self.pending, self.continuing, self.kept, self.freed):
            stale.clear()
        self.rows.reload(self.engine.weights_version)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.engine.forget(self)
            for held in (self.waiting, self.pending, self.continuing, self.kept, self.freed):
                held.clear()
            del self.rows  # with the caches of rows in progress

    def _forget(self, place: Place) -> None:
        self.kept.pop(place, None)
        self.freed.pop(place, None)

    def _free(self, place: Place) -> None:
        kept = self.kept.pop(place)
        if self.policy.device.type == "cpu":
            self.freed[place] = replace(kept, cached=())

    def _require_open(self) -> None:
        if self.closed:
            raise UserError(f"engine {type(self.engine).__name__}: this sampling is closed.  Open another one.")

    def _advance(self) -> None:
        """One step of the model: prefills waiting prefixes, or decodes a token of every row."""
        if self.continuing:
            self.rows.resume(self.continuing)
            self.continuing = []
        max_rows, num_rows = self.engine.max_rows, self.rows.num_rows
        free = max_rows - num_rows - len(self.kept)
        if not num_rows and free < max(1, max_rows // REFILL_SHARE):
            for oldest in list(self.kept)[: max(1, max_rows // REFILL_SHARE) - free]:
                self._free(oldest)
            free = max_rows - len(self.kept)
        enough = free * REFILL_SHARE >= max_rows or not num_rows
        if (self.waiting or self.pending) and enough:
            self._admit(free)
        else:
            self.rows.decode()

    def _admit(self, free: int) -> None:
        """Fill free rows, first from prefilled prefixes, then from new ones."""
        short = free - sum(len(item.waiting) for item in self.pending)
        chosen: list[WaitingPrefix] = []
        tokens = 0
        while self.waiting and short > 0 and (not chosen or tokens < PREFILL_TOKENS):
            chosen.append(self.waiting.popleft())
            prefix, continuations = chosen[-1]
            tokens += len(prefix)
            short -= len(continuations)
        if chosen:
            prefilled = self.steps.prefill([prefix for prefix, _ in chosen])
            self.pending.extend(
                PendingPrefix(prefilled, row, len(prefix), waiting) for row, (prefix, waiting) in enumerate(chosen)
            )
        starting: list[tuple[PendingPrefix, Continuation]] = []
        while self.pending and len(starting) < free:
            item = self.pending[0]
            starting.append((item, item.waiting.popleft()))
            if not item.waiting:
                self.pending.popleft()
        self.rows.start(starting)


def place_of(continuation: Continuation) -> Place:
    return continuation.key, continuation.draw, continuation.sample


def steps_for(policy: Policy) -> Steps:
    """Steps through the policy's kind of forward pass; those of the shared-prompt one are captured on CUDA.

    A sharded model is not captured: its frozen weights change address each time they are gathered.
    """
    if not isinstance(policy.forward, SharedPromptForward):
        return ModelSteps(policy) if policy.cache_refusal is None else RecomputedSteps(policy)
    if native_refusal(policy) is None:
        return NativeSteps(policy)
    is_captured = policy.device.type == "cuda" and sharded_forward(policy) is None
    return StaticSteps(policy) if is_captured else DecoderSteps(policy)
