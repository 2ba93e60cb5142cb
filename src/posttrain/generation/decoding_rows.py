"""The rows that are being decoded side by side: one token each at a time, out as soon as they end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from posttrain.generation.request import Request
from posttrain.generation.sampling import require_finite, sample
from posttrain.generation.stepping import Prefilled, Steps
from posttrain.generation.streams import uniform_table
from posttrain.models.policy import Policy
from posttrain.records import Finish, Prompt, Rollout


@dataclass(slots=True)
class Pending:
    """A prefilled prompt some of whose completions have not started."""

    prefilled: Prefilled
    row: int
    index: int
    limit: int
    started: int = 0


@dataclass(slots=True)
class Finished:
    """A completion that has ended, its stop token included."""

    index: int
    sample: int
    tokens: list[int]
    logprobs: list[float]
    cut_logprobs: list[float] | None
    stopped: bool


class Rows:
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
        self.finished: list[Finished] = []

    @property
    def num_rows(self) -> int:
        return len(self.names)

    def add(self, rows: Sequence[tuple[Pending, int]]) -> None:
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
            self.finished.append(Finished(index, number, tokens[:length], logprobs[:length], kept, stop))
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
    rows: Sequence[tuple[Pending, int]],
) -> Iterator[tuple[Prefilled, list[tuple[Pending, int]]]]:
    """Rows in order, in runs that share one prefill."""
    run: list[tuple[Pending, int]] = []
    for row in rows:
        if run and run[0][0].prefilled is not row[0].prefilled:
            yield run[0][0].prefilled, run
            run = []
        run.append(row)
    if run:
        yield run[0][0].prefilled, run
