"""The rows that are being decoded side by side: one token each at a time, out as soon as they end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from posttrain.generation.request import Request
from posttrain.generation.sampling import require_finite, sample
from posttrain.generation.stepping import PrefilledPrompts, Steps
from posttrain.generation.streams import uniform_table
from posttrain.models.policy import Policy
from posttrain.records import Finish, Prompt, Rollout, TokenSequence


@dataclass(slots=True)
class PendingPrompt:
    """A prefilled prompt some of whose completions have not started."""

    prefilled: PrefilledPrompts
    row: int
    index: int
    limit: int
    started: int = 0


@dataclass(slots=True)
class FinishedRow:
    """A completion that has ended, its stop token included."""

    index: int
    sample: int
    tokens: list[int]
    logprobs: list[float]
    cut_logprobs: list[float] | None
    stopped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What is known of the rows being decoded, one entry a row; entries are written as tokens are sampled."""

    count: Int64[Tensor, " row"]
    """Tokens sampled so far."""
    limit: Int64[Tensor, " row"]
    """Tokens after which the completion is cut off."""
    uniforms: Float64[Tensor, "row position"]
    """The uniform number that each token is drawn with."""
    tokens: Int64[Tensor, "row position"]
    logprobs: Float64[Tensor, "row position"]
    cut_logprobs: Float64[Tensor, "row position"]

    @staticmethod
    def empty(width: int, device: torch.device) -> "Columns":
        """No rows, of completions of up to `width` tokens."""
        return Columns(
            count=torch.zeros(0, dtype=torch.long, device=device),
            limit=torch.zeros(0, dtype=torch.long, device=device),
            uniforms=torch.zeros(0, width, dtype=torch.float64, device=device),
            tokens=torch.zeros(0, width, dtype=torch.long, device=device),
            logprobs=torch.zeros(0, width, dtype=torch.float64, device=device),
            cut_logprobs=torch.zeros(0, width, dtype=torch.float64, device=device),
        )

    def add(self, limit: Int64[Tensor, " new"], uniforms: Float64[Tensor, "new position"]) -> "Columns":
        """These rows and new ones behind them, which have no token yet."""

        def with_zeros(values: Tensor) -> Tensor:
            return torch.cat([values, values.new_zeros(len(limit), *values.shape[1:])])

        return Columns(
            count=with_zeros(self.count),
            limit=torch.cat([self.limit, limit]),
            uniforms=torch.cat([self.uniforms, uniforms]),
            tokens=with_zeros(self.tokens),
            logprobs=with_zeros(self.logprobs),
            cut_logprobs=with_zeros(self.cut_logprobs),
        )

    def keep(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> "Columns":
        """The first `num_left` rows, after those at `source` have taken the places at `target`."""

        def kept(values: Tensor) -> Tensor:
            values[target] = values[source]
            return values[:num_left]

        return Columns(
            count=kept(self.count),
            limit=kept(self.limit),
            uniforms=kept(self.uniforms),
            tokens=kept(self.tokens),
            logprobs=kept(self.logprobs),
            cut_logprobs=kept(self.cut_logprobs),
        )


class Rows:
    """The rows being decoded side by side."""

    def __init__(
        self, policy: Policy, steps: Steps[Any], request: Request, prompts: Sequence[Prompt], *, weights_version: int
    ) -> None:
        device = policy.device
        self.policy, self.steps, self.request, self.prompts = policy, steps, request, prompts
        self.weights_version, self.slots = weights_version, steps.slots()
        self.stop_ids = torch.tensor(policy.stop_ids, device=device)
        self.names: list[tuple[int, int]] = []  # (prompt, sample) of each row
        self.columns = Columns.empty(request.max_completion_tokens, device)
        self.finished: list[FinishedRow] = []

    @property
    def num_rows(self) -> int:
        return len(self.names)

    def add(self, rows: Sequence[tuple[PendingPrompt, int]]) -> None:
        """Start completions of prefilled prompts: cache, uniform numbers and a first token each."""
        device, before, key = self.policy.device, self.num_rows, self.request.key
        some = rows[0][0].prefilled.logits
        logits = some.new_empty(len(rows), some.shape[1])
        done = 0
        for prefilled, members in _by_prefill(rows):
            at = torch.tensor([item.row for item, _ in members], device=device)
            cached = [each.index_select(0, at) for each in prefilled.cached]
            self.slots.add(cached, prefilled.lengths.index_select(0, at))
            torch.index_select(prefilled.logits, 0, at, out=logits[done : done + len(at)])
            done += len(at)
        names = [(item.index, key.first_sample + sample) for item, sample in rows]
        width = self.request.max_completion_tokens
        table = uniform_table(key, [(key.first_draw + i, s) for i, s in names], start=key.first_position, count=width)
        self.names += names
        limit = torch.tensor([item.limit for item, _ in rows], device=device)
        self.columns = self.columns.add(limit, torch.from_numpy(table).to(device))
        self._sample(logits, torch.arange(before, self.num_rows, device=device))

    def decode(self) -> None:
        """One more token for every row."""
        columns = self.columns
        rows = torch.arange(self.num_rows, device=columns.count.device)
        last = columns.tokens[rows, columns.count - 1]
        self._sample(self.steps.step(last, self.slots), rows)

    def _sample(self, logits: Tensor, rows: Int64[Tensor, " row"]) -> None:
        columns = self.columns
        at = columns.count[rows]
        if self.request.suppressed:
            logits = logits.index_fill(1, torch.tensor(self.request.suppressed, device=logits.device), -torch.inf)
        drawn = sample(logits, columns.uniforms[rows, at], self.request.sampling)
        columns.tokens[rows, at] = drawn.tokens
        columns.logprobs[rows, at] = drawn.logprobs.double()
        if drawn.cut_logprobs is not None:
            columns.cut_logprobs[rows, at] = drawn.cut_logprobs.double()
        columns.count[rows] += 1
        stopped = torch.isin(drawn.tokens, self.stop_ids)
        done = stopped | (at + 1 >= columns.limit[rows])
        if self.request.stop_texts:
            done |= self._ends_in_stop_text(rows)
        if bool(done.any()):
            self._retire(rows[done], stopped[done])

    def _ends_in_stop_text(self, rows: Int64[Tensor, " row"]) -> Bool[Tensor, " row"]:
        """Which rows have just completed a stop text: it is looked for in the last tokens, then in the whole.

        A token is a byte at least, so a text has no more tokens than bytes; three more may begin inside a character.
        """
        texts, decode = self.request.stop_texts, self.policy.tokenizer.batch_decode
        window = max(len(text.encode("utf-8")) for text in texts) + 4
        columns = self.columns
        tokens = [columns.tokens[row, : columns.count[row]].tolist() for row in rows.tolist()]
        tails = decode([each[-window:] for each in tokens], skip_special_tokens=False)
        found = [any(text in tail for text in texts) for tail in tails]
        for at in (at for at, near in enumerate(found) if near):
            whole = decode([tokens[at]], skip_special_tokens=False)[0]
            found[at] = any(text in whole for text in texts)
        return torch.tensor(found, device=rows.device)

    def _retire(self, rows: Int64[Tensor, " done"], stopped: Bool[Tensor, " done"]) -> None:
        """Take finished rows out; the last rows move into the gaps, so the batch stays dense."""
        kept = self.columns
        # A NaN stays NaN in the sum; one look at all rows instead of one each.
        require_finite(
            kept.logprobs[rows].sum(dim=1), row_name=lambda i: f"prompt {self.prompts[self.names[int(rows[i])][0]].id}"
        )
        lists = [values[rows].tolist() for values in (kept.tokens, kept.logprobs, kept.cut_logprobs, kept.count)]
        for row, stop, tokens, logprobs, cut, length in zip(rows.tolist(), stopped.tolist(), *lists, strict=True):
            index, number = self.names[row]
            under_cut = cut[:length] if self.request.sampling.cuts else None
            self.finished.append(FinishedRow(index, number, tokens[:length], logprobs[:length], under_cut, stop))
        gone = set(rows.tolist())
        left = self.num_rows - len(gone)
        source = [row for row in range(left, self.num_rows) if row not in gone]
        target = [row for row in sorted(gone) if row < left]
        from_rows = torch.tensor(source, dtype=torch.long, device=rows.device)
        to_rows = torch.tensor(target, dtype=torch.long, device=rows.device)
        self.slots.move(from_rows, to_rows, left)
        self.columns = kept.keep(from_rows, to_rows, left)
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
                    sequence=TokenSequence.one_turn(
                        tuple(item.tokens),
                        logprobs=tuple(item.logprobs),
                        cut_logprobs=None if item.cut_logprobs is None else tuple(item.cut_logprobs),
                        finish=Finish.STOP if item.stopped else Finish.LENGTH,
                        version=self.weights_version,
                    ),
                    text=text,
                ),
            )


def _by_prefill(
    rows: Sequence[tuple[PendingPrompt, int]],
) -> Iterator[tuple[PrefilledPrompts, list[tuple[PendingPrompt, int]]]]:
    """Rows in order, in runs that share one prefill."""
    run: list[tuple[PendingPrompt, int]] = []
    for row in rows:
        if run and run[0][0].prefilled is not row[0].prefilled:
            yield run[0][0].prefilled, run
            run = []
        run.append(row)
    if run:
        yield run[0][0].prefilled, run
