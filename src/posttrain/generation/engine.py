"""The in-process sampler: many completions side by side, from the trainer's own weights.

Each prompt goes through the model once, however many completions it gets.  A row that finishes leaves the batch at
once and a waiting one takes its place.  A completion is a function of its prompt, the weights and its own
stream of uniform numbers, so neither batch-mates nor their order nor `max_rows` change it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from posttrain.errors import UserError
from posttrain.generation.sampling import require_finite, sample
from posttrain.generation.sampling_options import Sampling
from posttrain.generation.static import StaticSteps
from posttrain.generation.stepping import DecoderSteps, ModelSteps, Prefilled, Steps
from posttrain.generation.streams import StreamKey, uniform_table
from posttrain.models.loading import Policy
from posttrain.records import Finish, Group, Prompt, Rollout

PREFILL_TOKENS = 16384
"""Prompt tokens that go through the model at once."""
REFILL_SHARE = 4
"""Waiting rows are let in once one row in this many is free."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to sample for each prompt."""

    group_size: int
    """Completions per prompt."""
    max_completion_tokens: int
    """Longest completion; also bounded by the room that the prompt leaves in the model's context."""
    sampling: Sampling
    key: StreamKey
    suppressed: tuple[int, ...] = ()
    """Tokens that are never sampled; for studies of a policy, not for training: log-probs are those among the rest."""
    weights_version: int = 0
    """Recorded with every rollout: optimiser updates behind the weights."""


class Engine:
    """Samples groups of completions from a policy."""

    def __init__(self, policy: Policy, *, max_rows: int = 256) -> None:
        self.policy = policy
        self.max_rows = max_rows
        self._steps: Steps | None = None

    def rollout(
        self, prompts: Sequence[Prompt], request: Request, *, advance: Callable[[int], None] = lambda count: None
    ) -> list[Group]:
        """A group of `group_size` completions for each prompt, in the order of the prompts.

        Raises UserError where a prompt leaves no room in the model's context, and RunError on non-finite logits.
        """
        groups: list[list[Rollout]] = [[] for _ in prompts]
        for index, rollout in self.completions(prompts, request):
            groups[index].append(rollout)
            advance(1)
        return [
            Group(
                prompt=prompt,
                draw=request.key.first_draw + index,
                rollouts=tuple(sorted(rollouts, key=lambda rollout: rollout.sample)),
            )
            for index, (prompt, rollouts) in enumerate(zip(prompts, groups, strict=True))
        ]

    @torch.inference_mode()
    def completions(self, prompts: Sequence[Prompt], request: Request) -> Iterator[tuple[int, Rollout]]:
        """Finished completions as they come, each with the index of its prompt."""
        limits = [min(request.max_completion_tokens, self.require_room(prompt)) for prompt in prompts]
        if self._steps is None:
            self._steps = steps_for(self.policy)
        else:
            self._steps.refresh()
        batch = _Batch(self.policy, self._steps, request, prompts)
        waiting = deque(range(len(prompts)))
        pending: deque[_Pending] = deque()
        while waiting or pending or batch.num_rows:
            free = self.max_rows - batch.num_rows
            if (waiting or pending) and (free * REFILL_SHARE >= self.max_rows or not batch.num_rows):
                self._admit(batch, prompts, limits, waiting, pending)
            else:
                batch.decode()
            yield from batch.take_finished()

    def _admit(
        self,
        batch: "_Batch",
        prompts: Sequence[Prompt],
        limits: Sequence[int],
        waiting: deque[int],
        pending: "deque[_Pending]",
    ) -> None:
        """Fill free rows: first with what is left of prompts that are prefilled, then with new prompts."""
        free, group_size = self.max_rows - batch.num_rows, batch.request.group_size
        wanted = -(-(free - sum(group_size - item.started for item in pending)) // group_size)
        chosen: list[int] = []
        tokens = 0
        while waiting and len(chosen) < wanted and (not chosen or tokens < PREFILL_TOKENS):
            chosen.append(waiting.popleft())
            tokens += len(prompts[chosen[-1]].tokens)
        if chosen:
            prefilled = batch.steps.prefill([prompts[index].tokens for index in chosen])
            pending.extend(_Pending(prefilled, row, index, limits[index]) for row, index in enumerate(chosen))
        rows: list[tuple[_Pending, int]] = []
        while pending and len(rows) < free:
            item = pending[0]
            rows.append((item, item.started))
            item.started += 1
            if item.started == group_size:
                pending.popleft()
        batch.add(rows)

    def require_room(self, prompt: Prompt) -> int:
        """Tokens that the model's context leaves for a completion of this prompt; UserError where there is none."""
        room = self.policy.max_positions - len(prompt.tokens)
        if room < 1 or not prompt.tokens:
            raise UserError(
                f"prompt {prompt.id}: {len(prompt.tokens)} tokens"
                + (f" leave no room in the model's context of {self.policy.max_positions}." if prompt.tokens else ".")
                + "  Every prompt needs at least 1 token, and 1 less than the context.  Shorten or drop this row."
            )
        return room


def steps_for(policy: Policy) -> Steps:
    """The forward pass that suits the model and its device: ours where the family has one, captured on CUDA."""
    if policy.decoder is None:
        return ModelSteps(policy)
    return StaticSteps(policy) if policy.device.type == "cuda" else DecoderSteps(policy)


@dataclass(slots=True)
class _Pending:
    """A prefilled prompt some of whose completions have not started."""

    prefilled: Prefilled
    row: int
    index: int
    limit: int
    started: int = 0


@dataclass(slots=True)
class _Finished:
    index: int
    sample: int
    tokens: list[int]
    logprobs: list[float]
    cut_logprobs: list[float] | None
    stopped: bool


class _Batch:
    """The rows being decoded, as tensors with one entry a row."""

    def __init__(self, policy: Policy, steps: Steps, request: Request, prompts: Sequence[Prompt]) -> None:
        device = policy.device
        self.policy, self.steps, self.request, self.prompts = policy, steps, request, prompts
        self.slots = steps.slots()
        self.stop_ids = torch.tensor(policy.stop_ids, device=device)
        self.names: list[tuple[int, int]] = []  # (prompt, sample) of each row
        self.count = torch.zeros(0, dtype=torch.long, device=device)  # tokens sampled so far
        self.limit = torch.zeros(0, dtype=torch.long, device=device)
        width = request.max_completion_tokens
        self.uniforms = torch.zeros(0, width, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(0, width, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(0, width, dtype=torch.float64, device=device)
        self.cut_logprobs = torch.zeros(0, width, dtype=torch.float64, device=device)
        self.finished: list[_Finished] = []

    @property
    def num_rows(self) -> int:
        return len(self.names)

    def add(self, rows: "Sequence[tuple[_Pending, int]]") -> None:
        """Start completions of prefilled prompts: cache, uniform numbers and a first token each."""
        device, width = self.policy.device, self.tokens.shape[1]
        before, key = self.num_rows, self.request.key
        logits = []
        for prefilled, members in _by_prefill(rows):
            at = torch.tensor([item.row for item, _ in members], device=device)
            self.slots.add(prefilled.cached.index_select(2, at), prefilled.lengths.index_select(0, at))
            logits.append(prefilled.logits.index_select(0, at))
        names = [(item.index, sample) for item, sample in rows]
        table = uniform_table(key, [(key.first_draw + i, s) for i, s in names], start=0, count=width)
        self.names += names
        self.uniforms = torch.cat([self.uniforms, torch.from_numpy(table).to(device)])
        for name in ("tokens", "logprobs", "cut_logprobs"):
            rows_of = getattr(self, name)
            setattr(self, name, torch.cat([rows_of, rows_of.new_zeros(len(rows), width)]))
        self.count = torch.cat([self.count, self.count.new_zeros(len(rows))])
        self.limit = torch.cat([self.limit, torch.tensor([item.limit for item, _ in rows], device=device)])
        self._sample(torch.cat(logits), torch.arange(before, self.num_rows, device=device))

    def decode(self) -> None:
        """One more token for every row."""
        rows = torch.arange(self.num_rows, device=self.count.device)
        last = self.tokens[rows, self.count - 1]
        self._sample(self.steps.step(last, self.slots), rows)

    def _sample(self, logits: Tensor, rows: Int64[Tensor, " row"]) -> None:
        at = self.count[rows]
        if self.request.suppressed:
            logits = logits.index_fill(1, torch.tensor(self.request.suppressed, device=logits.device), -torch.inf)
        drawn = sample(logits, self.uniforms[rows, at], self.request.sampling)
        self.tokens[rows, at] = drawn.tokens
        self.logprobs[rows, at] = drawn.logprobs.double()
        if drawn.cut_logprobs is not None:
            self.cut_logprobs[rows, at] = drawn.cut_logprobs.double()
        self.count[rows] += 1
        stopped = torch.isin(drawn.tokens, self.stop_ids)
        done = stopped | (at + 1 >= self.limit[rows])
        if bool(done.any()):
            self._retire(rows[done], stopped[done])

    def _retire(self, rows: Int64[Tensor, " done"], stopped: Bool[Tensor, " done"]) -> None:
        """Take finished rows out; the last rows move into the gaps, so the batch stays dense."""
        # A NaN stays NaN in the sum; one look at all rows instead of one each.
        require_finite(
            self.logprobs[rows].sum(dim=1), row_name=lambda i: f"prompt {self.prompts[self.names[int(rows[i])][0]].id}"
        )
        columns = [values[rows].tolist() for values in (self.tokens, self.logprobs, self.cut_logprobs, self.count)]
        for row, stop, tokens, logprobs, cut, length in zip(rows.tolist(), stopped.tolist(), *columns, strict=True):
            index, number = self.names[row]
            kept = cut[:length] if self.request.sampling.cuts else None
            self.finished.append(_Finished(index, number, tokens[:length], logprobs[:length], kept, stop))
        gone = set(rows.tolist())
        left = self.num_rows - len(gone)
        source = [row for row in range(left, self.num_rows) if row not in gone]
        target = [row for row in sorted(gone) if row < left]
        from_rows = torch.tensor(source, dtype=torch.long, device=rows.device)
        to_rows = torch.tensor(target, dtype=torch.long, device=rows.device)
        self.slots.move(from_rows, to_rows, left)
        for name in ("uniforms", "tokens", "logprobs", "cut_logprobs", "count", "limit"):
            values = getattr(self, name)
            values[to_rows] = values[from_rows]
            setattr(self, name, values[:left])
        for moved, hole in zip(source, target, strict=True):
            self.names[hole] = self.names[moved]
        del self.names[left:]

    def take_finished(self) -> Iterator[tuple[int, Rollout]]:
        """Rollouts of the rows that finished since the last call."""
        finished, self.finished = self.finished, []
        bodies = [item.tokens[:-1] if item.stopped else item.tokens for item in finished]
        texts = self.policy.tokenizer.batch_decode(bodies, skip_special_tokens=False) if bodies else []
        for item, text in zip(finished, texts, strict=True):
            yield (
                item.index,
                Rollout(
                    sample=item.sample,
                    tokens=tuple(item.tokens),
                    logprobs=tuple(item.logprobs),
                    cut_logprobs=None if item.cut_logprobs is None else tuple(item.cut_logprobs),
                    finish=Finish.STOP if item.stopped else Finish.LENGTH,
                    text=text,
                    weights_version=self.request.weights_version,
                ),
            )


def _by_prefill(
    rows: "Sequence[tuple[_Pending, int]]",
) -> "Iterator[tuple[Prefilled, list[tuple[_Pending, int]]]]":
    """Rows in order, in runs that share one prefill."""
    run: list[tuple[_Pending, int]] = []
    for row in rows:
        if run and run[0][0].prefilled is not row[0].prefilled:
            yield run[0][0].prefilled, run
            run = []
        run.append(row)
    if run:
        yield run[0][0].prefilled, run
