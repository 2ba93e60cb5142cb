"""The rows that are decoded together, one token each at a time, and the forward passes that they need."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from posttrain.generation.request import Continuation, Request, Sampled, uniform_table
from posttrain.generation.sampling import require_finite, sample
from posttrain.generation.steps import DrawingSteps, PrefilledPrompts, Steps
from posttrain.models.native.native_decoder import DrawRequest
from posttrain.models.policy import Policy
from posttrain.records import Alternatives, Finish

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


@dataclass(frozen=True, slots=True)
class KeptRow:
    """The cache of a completion that has ended, for a continuation of it."""

    tokens: tuple[int, ...]
    cached: Sequence[Tensor]
    length: int
    """Tokens in the cache: all but the last, which has predicted nothing yet."""
    prefilled: int
    """How many of them one prefill computed; the others went through the model one per step."""


@dataclass(slots=True)
class Member:
    """A row being decoded."""

    continuation: Continuation
    given: list[int]
    """Tokens of the prefix that have yet to go through the model, the next one last."""
    prefilled: int
    """See `KeptRow.prefilled`."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens): what earlier weights sampled of it."""

    def spans(self, version: int, length: int) -> list[tuple[int, int]]:
        """The weights' versions for its `length` tokens; `version` sampled the last ones."""
        rest = length - sum(count for _, count in self.versions)
        return [*self.versions, *([(version, rest)] if rest else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The rows being decoded, one entry a row; entries are written as tokens are sampled."""

    count: Int64[Tensor, " row"]
    """Tokens sampled so far."""
    limit: Int64[Tensor, " row"]
    """Tokens after which the completion is cut off."""
    uniforms: Float64[Tensor, "row position"]
    """The uniform number that each token is drawn with."""
    tokens: Int64[Tensor, "row position"]
    logprobs: Float64[Tensor, "row position"]
    cut_logprobs: Float64[Tensor, "row position"]
    alternatives: Int64[Tensor, "row position kept"]
    alternative_logprobs: Float64[Tensor, "row position kept"]

    @staticmethod
    def empty(num_alternatives: int, device: torch.device) -> "Columns":
        """No rows, of completions of no tokens, with this many alternatives of each token."""
        number = torch.zeros(0, 0, num_alternatives, dtype=torch.long, device=device)
        real = number.double()
        return Columns(
            count=number.new_zeros(0),
            limit=number.new_zeros(0),
            uniforms=real.new_zeros(0, 0),
            tokens=number.new_zeros(0, 0),
            logprobs=real.new_zeros(0, 0),
            cut_logprobs=real.new_zeros(0, 0),
            alternatives=number,
            alternative_logprobs=real,
        )

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "Columns":
        """Every column, changed by name."""
        return Columns(**{each.name: change(each.name, getattr(self, each.name)) for each in fields(self)})

    def alternatives_of(self, row: int, length: int) -> Alternatives:
        both = (self.alternatives[row, :length].tolist(), self.alternative_logprobs[row, :length].tolist())
        return tuple(tuple(zip(tokens, logprobs, strict=True)) for tokens, logprobs in zip(*both, strict=True))

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def add(self, limit: Int64[Tensor, " new"], uniforms: Float64[Tensor, "new position"]) -> "Columns":
        """These rows, followed by new ones that have no token yet, with room for their tokens."""
        new, more = {"limit": limit, "uniforms": uniforms}, uniforms.shape[1] - self.width

        def extended(name: str, values: Tensor) -> Tensor:
            if values.ndim > 1 and more:
                values = torch.nn.functional.pad(values, (*(0, 0) * (values.ndim - 2), 0, more))
            empty = values.new_zeros(len(limit), *values.shape[1:])
            return torch.cat([values, new.get(name, empty)])

        return self.map(extended)

    def keep(self, source: Int64[Tensor, " moved"], target: Int64[Tensor, " moved"], num_left: int) -> "Columns":
        """The first `num_left` rows, after those at `source` have taken the places at `target`."""

        def kept(_: str, values: Tensor) -> Tensor:
            values[target] = values[source]
            return values[:num_left]

        return self.map(kept)


class Rows:
    """The rows being decoded together."""

    def __init__(self, policy: Policy, steps: Steps, request: Request, *, weights_version: int) -> None:
        self.policy, self.steps, self.request = policy, steps, request
        self.weights_version, self.slots = weights_version, steps.slots()
        self.stop_ids = torch.tensor(policy.stop_ids, device=policy.device)
        self.suppressed = torch.tensor(request.suppressed, dtype=torch.long, device=policy.device)
        self.members: list[Member] = []
        self.columns = Columns.empty(request.keep_alternatives, policy.device)
        self.finished: list[tuple[Sampled, KeptRow | None]] = []
        """Completions that are done and were not taken, each with its cache where caches are kept."""
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
            prefilled, at = items[0].prefilled, torch.tensor([item.row for item in items], device=device)
            self.slots.add(prefilled.cached, prefilled.lengths.index_select(0, at), at)
            torch.index_select(prefilled.logits, 0, at, out=logits[done : done + len(at)])
            done += len(at)
        self._add([Member(each, list(reversed(each.prefix[item.length :])), item.length) for item, each in rows])
        ready = [row for row, (item, each) in enumerate(rows) if len(each.prefix) == item.length]
        if len(ready) < len(rows):
            self._any_given = True
            logits = logits[ready]
        if ready:
            self._sample(logits, torch.tensor(ready, device=device) + before)

    def resume(self, rows: Sequence[tuple[KeptRow, Continuation]]) -> None:
        """Put kept rows back.  The tokens after a cache go through the model one per step, with all other rows."""
        for kept, _ in rows:
            self.slots.add(kept.cached, torch.tensor([kept.length], device=self.policy.device))
        self._add([Member(each, list(reversed(each.prefix[kept.length :])), kept.prefilled) for kept, each in rows])
        self._any_given = True

    def _add(self, members: Sequence[Member]) -> None:
        device, new = self.policy.device, [member.continuation for member in members]
        width = max(self.columns.width, *(each.limit for each in new))
        table = np.empty((len(new), width))
        keys = [each.key or self.request.key for each in new]
        for key in dict.fromkeys(keys):
            of_key = [row for row, each in enumerate(keys) if each == key]
            places = [(new[row].draw, new[row].sample, new[row].first_position) for row in of_key]
            table[of_key] = uniform_table(key, places, count=width)
        limit = torch.tensor([each.limit for each in new], device=device)
        self.columns = self.columns.add(limit, torch.from_numpy(table).to(device))
        self.members += members

    def reload(self, version: int) -> None:
        """Continue with other weights: every row's cache is computed again from its tokens."""
        none = torch.zeros(0, dtype=torch.long, device=self.policy.device)
        self.slots.move(none, none, 0)
        counts, sampled = self.columns.count.tolist(), self.columns.tokens.tolist()
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
        """One more token for every row; sampled if the row has no more given tokens."""
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
        last[given] = torch.tensor([self.members[row].given.pop() for row in given], device=last.device)
        logits = self.steps.step(last, self.slots)
        ready = [row for row, member in enumerate(self.members) if not member.given]
        self._any_given = len(ready) < self.num_rows
        if ready:
            self._sample(logits[ready], rows[ready])

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
        done = stopped | (columns.count >= columns.limit)
        if bool(done.any()):
            self._retire(rows[done], stopped[done], None)

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
        stopped = torch.isin(drawn.tokens, self.stop_ids)
        done, by_text = stopped | (at + 1 >= columns.limit[rows]), None
        if self.request.stop_texts:
            by_text = self._ends_in_stop_text(rows) & ~stopped
            done |= by_text
        if bool(done.any()):
            self._retire(rows[done], stopped[done], None if by_text is None else by_text[done])

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

    def _retire(
        self, rows: Int64[Tensor, " done"], stopped: Bool[Tensor, " done"], by_text: Bool[Tensor, " done"] | None
    ) -> None:
        """Take finished rows out; the last rows move into the gaps, so the batch stays dense."""
        kept, members = self.columns, [self.members[row] for row in rows.tolist()]
        # A NaN stays NaN in the sum; one look at all rows instead of one each.
        require_finite(kept.logprobs[rows].sum(dim=1), row_name=lambda i: members[i].continuation.label)
        lists = [values[rows].tolist() for values in (kept.tokens, kept.logprobs, kept.cut_logprobs, kept.count)]
        ends = stopped.tolist(), [False] * len(members) if by_text is None else by_text.tolist()
        for row, member, stop, text, tokens, logprobs, cut, length in zip(
            rows.tolist(), members, *ends, *lists, strict=True
        ):
            sampled = Sampled(
                continuation=member.continuation,
                tokens=tuple(tokens[:length]),
                logprobs=tuple(logprobs[:length]),
                cut_logprobs=tuple(cut[:length]) if self.request.sampling.cuts else None,
                alternatives=kept.alternatives_of(row, length) if self.request.keep_alternatives else None,
                finish=Finish.STOP if stop else Finish.LENGTH,
                ended_by_text=text,
                versions=tuple(member.spans(self.weights_version, length)),
            )
            cache = KeptRow(sampled.sequence, *self.slots.row(row), member.prefilled) if self.request.keep else None
            self.finished.append((sampled, cache))
        self._remove(set(rows.tolist()))

    def drop(self, numbers: Collection[int]) -> int:
        """Take rows and results out by the `id` of their continuations, and say how many."""
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
        from_rows = torch.tensor(source, dtype=torch.long, device=self.policy.device)
        to_rows = torch.tensor(target, dtype=torch.long, device=self.policy.device)
        self.slots.move(from_rows, to_rows, left)
        self.columns = self.columns.keep(from_rows, to_rows, left)
        for moved, hole in zip(source, target, strict=True):
            self.members[hole] = self.members[moved]
        del self.members[left:]
