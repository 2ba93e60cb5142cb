"""The rows that are decoded together, one token each at a time, and the forward passes that they need."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from posttrain.generation.request import Continuation, Request, Sampled, uniform_table
from posttrain.generation.row_columns import Columns, KeptRow, Member
from posttrain.generation.sampling import require_finite, sample
from posttrain.generation.steps import DrawingSteps, PrefilledPrompts, Steps
from posttrain.models.native.native_decoder import DrawRequest
from posttrain.models.policy import Policy
from posttrain.models.transfers import numbers_on, on_cpu
from posttrain.records import Finish

PREFILL_TOKENS = 16384
"""Tokens of prefixes that go through the model at once."""


@dataclass(slots=True)
class PendingPrefix:
    """A prefilled prefix, and those of its continuations that have not started."""

    prefilled: PrefilledPrompts
    row: int
    length: int
    """Its tokens; further tokens of a continuation's prefix go through the model one per step."""
    waiting: deque[Continuation]


ASK_GPU_EVERY = 8
"""Steps between two questions to a GPU which rows have ended: the CPU waits for each answer."""


@dataclass(frozen=True, slots=True)
class EndedRows:
    """Rows that were taken out together, whose tokens have not been read."""

    members: Sequence[Member]
    columns: Columns
    caches: Sequence[Sequence[Tensor] | None]
    """Where caches are kept."""


class Rows:
    """The rows being decoded together."""

    def __init__(self, policy: Policy, steps: Steps, request: Request, *, weights_version: int) -> None:
        self.policy, self.steps, self.request = policy, steps, request
        self.weights_version, self.slots = weights_version, steps.slots()
        self.stop_ids = numbers_on(policy.device, policy.stop_ids)
        self.suppressed = numbers_on(policy.device, request.suppressed)
        self.members: list[Member] = []
        self.columns = Columns.empty(request.keep_alternatives, policy.device)
        self.finished: list[tuple[Sampled, KeptRow | None]] = []
        """Completions that are done and were not taken, each with its cache where caches are kept."""
        self._ended: list[EndedRows] = []
        self._step = self._asked = 0  # decoding steps so far, and the step after which a GPU was last asked
        waits = policy.device.type != "cpu" and not request.stop_texts
        self._ask_every = ASK_GPU_EVERY if waits else 1
        self._any_given = False
        self._may_complete: dict[int, bool] = {}

    @property
    def num_rows(self) -> int:
        return len(self.members)

    def start(self, rows: Sequence[tuple[PendingPrefix, Continuation]]) -> None:
        """Start completions of prefilled prefixes: cache, uniform numbers and a first token each."""
        device, before = self.policy.device, self.num_rows
        some = rows[0][0].prefilled.logits
        logits = some.new_empty(len(rows), some.shape[1])
        done = 0
        for _, run in groupby((item for item, _ in rows), key=lambda item: id(item.prefilled)):
            items = list(run)  # in order, those that share one prefill
            prefilled, rows_at = items[0].prefilled, torch.tensor([item.row for item in items])
            self.slots.add(prefilled.cached, prefilled.lengths.index_select(0, rows_at), rows_at)
            at = rows_at.to(device, non_blocking=True)
            torch.index_select(prefilled.logits, 0, at, out=logits[done : done + len(at)])
            done += len(at)
        self._add([self._member(each, item.length, item.length) for item, each in rows])
        ready = [row for row, (item, each) in enumerate(rows) if len(each.prefix) == item.length]
        if len(ready) < len(rows):
            self._any_given = True
            logits = logits[numbers_on(device, ready)]
        if ready:
            self._sample(logits, numbers_on(device, ready) + before)
            self._end_step()

    def resume(self, rows: Sequence[tuple[KeptRow, Continuation]]) -> None:
        """Put kept rows back.  The tokens after a cache go through the model one per step, with all other rows."""
        for kept, _ in rows:
            self.slots.add(kept.cached, torch.tensor([kept.length]))
        self._add([self._member(each, kept.length, kept.prefilled) for kept, each in rows])
        self._any_given = True

    def _member(self, continuation: Continuation, cached: int, prefilled: int) -> Member:
        """A row that begins now, with this many tokens of its prefix in the cache."""
        given = list(reversed(continuation.prefix[cached:]))
        return Member(continuation, given, prefilled, last_step=self._step + len(given) + continuation.limit - 1)

    def _add(self, members: Sequence[Member]) -> None:
        device, new = self.policy.device, [member.continuation for member in members]
        width = max(self.columns.width, *(each.limit for each in new))
        table = np.empty((len(new), width))
        keys = [each.key or self.request.key for each in new]
        for key in dict.fromkeys(keys):
            of_key = [row for row, each in enumerate(keys) if each == key]
            places = [(new[row].draw, new[row].sample, new[row].first_position) for row in of_key]
            table[of_key] = uniform_table(key, places, count=width)
        limit = numbers_on(device, [each.limit for each in new])
        self.columns = self.columns.add(limit, torch.from_numpy(table).to(device, non_blocking=True))
        self.members += members

    def reload(self, version: int) -> None:
        """Continue with other weights: every row's cache is computed again from its tokens."""
        self.settle()
        none = torch.zeros(0, dtype=torch.long)
        self.slots.move(none, none, 0)
        counts, sampled = (each.tolist() for each in on_cpu([self.columns.count, self.columns.tokens]))
        chunk: list[tuple[int, ...]] = []
        for member, count, tokens in zip(self.members, counts, sampled, strict=True):
            member.versions = member.spans(self.weights_version, count)
            prefix = member.continuation.prefix
            known = prefix[: len(prefix) - len(member.given)] + tuple(tokens[: max(count - 1, 0)])
            member.prefilled = len(known)
            if chunk and sum(map(len, chunk)) + len(known) > PREFILL_TOKENS:
                self._prefill(chunk)
                chunk = []
            chunk.append(known)
        if chunk:
            self._prefill(chunk)
        self.weights_version = version
        self.finished = [(each, None) for each, _ in self.finished]

    def _prefill(self, sequences: Sequence[tuple[int, ...]]) -> None:
        prefilled = self.steps.prefill(sequences)
        self.slots.add(prefilled.cached, prefilled.lengths)

    def decode(self) -> None:
        """One more token for every row; several where the steps draw.  Then completions that ended may leave."""
        if self.members:
            self._step += 1
            self._decode()
            self._end_step()
        else:
            self.settle()

    def _decode(self) -> None:
        """A token for every row; sampled if the row has no more given tokens."""
        columns = self.columns
        rows = torch.arange(self.num_rows, device=columns.count.device)
        if isinstance(self.steps, DrawingSteps) and self.steps.draws(self.request):
            self._draw(self.steps, rows)
            return
        if not self._any_given:
            last = columns.tokens[rows, columns.count - 1]
            self._sample(self.steps.step(last, self.slots), rows)
            return
        last = columns.tokens[rows, (columns.count - 1).clamp(min=0)]
        given = [row for row, member in enumerate(self.members) if member.given]
        at, device = numbers_on(rows.device, given), rows.device
        last[at] = numbers_on(device, [self.members[row].given.pop() for row in given])
        logits = self.steps.step(last, self.slots)
        ready = [row for row, member in enumerate(self.members) if not member.given]
        self._any_given = len(ready) < self.num_rows
        if ready:
            at = numbers_on(device, ready)
            self._sample(logits[at], rows[at])

    def _draw(self, steps: DrawingSteps, rows: Int64[Tensor, " row"]) -> None:
        """Several more tokens of every row in one call."""
        columns, sampling = self.columns, self.request.sampling
        left = columns.limit - columns.count
        num_ahead = [len(member.given) for member in self.members]
        num_steps = min(steps.num_steps(self.num_rows), int((left + torch.tensor(num_ahead)).max()))
        last = columns.tokens[rows, (columns.count - 1).clamp(min=0)]
        given, num_given = torch.zeros(self.num_rows, num_steps, dtype=torch.long), torch.zeros_like(rows)
        for row, member in enumerate(self.members if self._any_given else ()):
            if not member.given:
                continue
            following = member.given[-2 : -2 - num_steps : -1]
            last[row], num_given[row] = member.given[-1], len(following)
            given[row, : len(following)] = torch.tensor(following, dtype=torch.long)
            del member.given[-num_steps:]
        self._any_given = any(member.given for member in self.members)
        places = columns.count[:, None] + torch.arange(num_steps)
        request = DrawRequest(
            given=given,
            num_given=num_given,
            uniforms=columns.uniforms.gather(1, places.clamp(max=columns.width - 1)),
            limits=left,
            stops=self.stop_ids,
            temperature=sampling.recorded_temperature,
            greedy=sampling.greedy,
            suppressed=self.suppressed,
        )
        drawn = steps.draw(last, self.slots, request)
        is_drawn = torch.arange(num_steps) < drawn.counts[:, None]
        at = rows[:, None].expand_as(places)[is_drawn], places[is_drawn]
        columns.tokens[at] = drawn.tokens[is_drawn]
        columns.logprobs[at] = drawn.logprobs[is_drawn].float().double()
        columns.count.add_(drawn.counts)
        stopped = torch.isin(columns.tokens[rows, columns.count - 1], self.stop_ids) & (drawn.counts > 0)
        columns.stopped[stopped] = columns.count[stopped]

    def _sample(self, logits: Tensor, rows: Int64[Tensor, " row"]) -> None:
        columns = self.columns
        at = columns.count[rows]
        if self.request.suppressed:
            logits = logits.index_fill(1, self.suppressed, -torch.inf)
        drawn = sample(logits, columns.uniforms[rows, at], self.request.sampling)
        columns.tokens[rows, at] = drawn.tokens
        columns.logprobs[rows, at] = drawn.logprobs.double()
        if drawn.cut_logprobs is not None:
            columns.cut_logprobs[rows, at] = drawn.cut_logprobs.double()
        if count := self.request.keep_alternatives:
            scaled = logits.float() / self.request.sampling.recorded_temperature
            likeliest = scaled.log_softmax(dim=-1).topk(count)
            columns.alternatives[rows, at] = likeliest.indices
            columns.alternative_logprobs[rows, at] = likeliest.values.double()
        columns.count[rows] += 1
        stops = torch.isin(drawn.tokens, self.stop_ids)
        if self._ask_every > 1 or bool(stops.any()):
            before = columns.stopped[rows]
            columns.stopped[rows] = torch.where(stops & (before == 0), at + 1, before)
        if self.request.stop_texts:
            self._note_stop_texts(rows)

    def _note_stop_texts(self, rows: Int64[Tensor, " row"]) -> None:
        ends = self._ends_in_stop_text(rows) & (self.columns.stopped[rows] == 0)
        for row in rows[ends].tolist():
            self.members[row].ended_by_text = True

    def _ends_in_stop_text(self, rows: Int64[Tensor, " row"]) -> Bool[Tensor, " row"]:
        """Which rows have just completed a stop text: the last tokens are searched, then the whole text.

        A token is a byte at least, so a text has no more tokens than bytes; three more may begin inside a character.
        """
        texts, decode, columns = self.request.stop_texts, self.policy.tokenizer.batch_decode, self.columns
        window = max(len(text.encode("utf-8")) for text in texts) + 4
        newest = columns.tokens[rows, columns.count[rows] - 1].tolist()
        near = [at for at, token in enumerate(newest) if self._may_complete_text(token)]
        found = [False] * len(newest)
        if near:
            chosen = rows[near].tolist()
            tokens = [columns.tokens[row, : columns.count[row]].tolist() for row in chosen]
            tails = decode([each[-window:] for each in tokens], skip_special_tokens=False)
            for at, own, tail in zip(near, tokens, tails, strict=True):
                if any(text in tail for text in texts):
                    whole = decode([own], skip_special_tokens=False)[0]
                    found[at] = any(text in whole for text in texts)
        return torch.tensor(found, device=rows.device)

    def _may_complete_text(self, token: int) -> bool:
        """Whether a stop text may end in this token: it has the last character of one, or part of a character.

        A tokenizer may drop spaces at the end of a text, so every token may complete a stop text that ends in a space.
        """
        known = self._may_complete.get(token)
        if known is None:
            text = self.policy.tokenizer.batch_decode([[token]], skip_special_tokens=False)[0]
            lasts = {text[-1] for text in self.request.stop_texts}
            known = "\ufffd" in text or any(last.isspace() or last in text for last in lasts)
            self._may_complete[token] = known
        return known

    def _end_step(self) -> None:
        """Deliver completions that have ended, or on a GPU take out those at their limit, which needs no answer.

        A GPU is asked every few steps: until then a row that has stopped goes on, and its further tokens are cut.
        """
        if self._ask_every == 1 or self._step - self._asked >= self._ask_every:
            self.settle()
        elif at_limit := [row for row, member in enumerate(self.members) if member.last_step <= self._step]:
            self._end(at_limit)

    def settle(self) -> None:
        """Deliver every completion that has ended; the only place where the sampler waits for a GPU."""
        self._asked = self._step
        if self.members:
            columns = self.columns
            (done,) = on_cpu([(columns.stopped > 0) | (columns.count >= columns.limit)])
            if self.request.stop_texts:
                done[[row for row, member in enumerate(self.members) if member.ended_by_text]] = True
            if bool(done.any()):
                self._end(done.nonzero()[:, 0].tolist())
        if self._ended:
            self._deliver()

    def _end(self, rows: Sequence[int]) -> None:
        """Take rows out; the last rows move into the gaps, so the batch stays dense."""
        columns = self.columns.drawn(numbers_on(self.policy.device, rows))
        caches = [self.slots.row(row) for row in rows] if self.request.keep else [None] * len(rows)
        self._ended.append(EndedRows([self.members[row] for row in rows], columns, caches))
        self._remove(set(rows))

    def _deliver(self) -> None:
        """Make results of the rows that were taken out."""
        ended, self._ended = self._ended, []
        members = [member for each in ended for member in each.members]
        caches = [cache for each in ended for cache in each.caches]
        kept = Columns.joined([each.columns for each in ended])
        # A NaN stays NaN in the sum; one look at all rows instead of one each.
        inside = torch.arange(kept.width) < kept.lengths[:, None]
        sums = torch.where(inside, kept.logprobs, 0.0).sum(dim=1)
        require_finite(sums, row_name=lambda i: members[i].continuation.label)
        lists = [each.tolist() for each in (kept.tokens, kept.logprobs, kept.cut_logprobs, kept.lengths, kept.stopped)]
        for row, (member, cache, tokens, logprobs, cut, length, stopped) in enumerate(
            zip(members, caches, *lists, strict=True)
        ):
            sampled = Sampled(
                continuation=member.continuation,
                tokens=tuple(tokens[:length]),
                logprobs=tuple(logprobs[:length]),
                cut_logprobs=tuple(cut[:length]) if self.request.sampling.cuts else None,
                alternatives=kept.alternatives_of(row, length) if self.request.keep_alternatives else None,
                finish=Finish.STOP if stopped else Finish.LENGTH,
                ended_by_text=member.ended_by_text,
                versions=tuple(member.spans(self.weights_version, length)),
            )
            whole = sampled.sequence
            kept_row = None if cache is None else KeptRow(whole, cache, len(whole) - 1, member.prefilled)
            self.finished.append((sampled, kept_row))

    def drop(self, numbers: Collection[int]) -> int:
        """Take rows and results out by the `id` of their continuations, and say how many."""
        if self._step != self._asked or self._ended:
            self.settle()
        gone = {row for row, member in enumerate(self.members) if id(member.continuation) in numbers}
        left = [each for each in self.finished if id(each[0].continuation) not in numbers]
        count = len(gone) + len(self.finished) - len(left)
        self.finished = left
        if gone:
            self._remove(gone)
        return count

    def _remove(self, gone: set[int]) -> None:
        left = self.num_rows - len(gone)
        source = [row for row in range(left, self.num_rows) if row not in gone]
        target = [row for row in sorted(gone) if row < left]
        from_rows, to_rows = torch.tensor(source, dtype=torch.long), torch.tensor(target, dtype=torch.long)
        self.slots.move(from_rows, to_rows, left)
        there = [rows.to(self.policy.device, non_blocking=True) for rows in (from_rows, to_rows)]
        self.columns = self.columns.keep(there[0], there[1], left)
        for moved, hole in zip(source, target, strict=True):
            self.members[hole] = self.members[moved]
        del self.members[left:]
