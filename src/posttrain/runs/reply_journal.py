"""replies.jsonl: replies of environments that are not reproducible, so that a resumed step gets the same replies.

    {"place": "step", "purpose": "rollout", "step": 7, "draw": 3, "exchanges": [[{"said": "", "reply": null, …}, …], …]}

One line per group, written before anything reads its completions: the exchanges of every completion, `reset` first.  A
resume reads the lines of steps that it repeats, and adds to the file; the last line of a group counts.  If the policy
says something else than in the journal, the environment is asked again.  So is a completion that failed at the end of
the file: its step was not finished, perhaps because of it.  A line {"place": "changed"} invalidates earlier lines.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain.environments.protocol import Reply, Said
from posttrain.environments.workers import Exchange
from posttrain.errors import RunError
from posttrain.runs.files import LineJournal, write_atomically, writing
from posttrain.runs.run_folder import FAILURES, REPLIES, RunFolder
from posttrain.turns import ToolCall

KEY = ("place", "purpose", "step", "draw")
STEP, CHANGED = "step", "changed"


class ReplyFile:
    """The `ReplyJournal` of a run, with the lines that existed when it was opened."""

    def __init__(self, folder: RunFolder, *, changed: bool = False) -> None:
        """`changed` accepts another environment: the replies so far are never read again."""
        self.folder, self._places = folder, threading.local()
        records = LineJournal(folder.path / REPLIES).records() if folder.begun else []
        if changed and records:
            folder.append_reply({"place": CHANGED})
            records = []
        start = max((at for at, record in enumerate(records, start=1) if record.get("place") == CHANGED), default=0)
        counted = records[start:]
        self.known = {tuple(record.get(name) for name in KEY): record.get("exchanges") for record in counted}
        steps = [record for record in counted if record.get("place") == STEP]
        self.unfinished = {(last[-1].get("place"), last[-1].get("step")) for last in (counted, steps) if last}

    @property
    def place(self) -> str:
        """State of this thread: one may evaluate while another collects."""
        return getattr(self._places, "place", STEP)

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Mark replies as part of an evaluation, not of the run's steps: evaluations reuse the same streams."""
        before, self._places.place = self.place, place
        try:
            yield
        finally:
            self._places.place = before

    def get(self, purpose: str, step: int, draw: int) -> Sequence[Sequence[Exchange]] | None:
        """The exchanges of each completion of a draw, `reset` first; None if the group was not finished."""
        exchanges: Any = self.known.get((self.place, purpose, step, draw))
        if exchanges is None:
            return None
        try:
            found = [[exchange_of(each) for each in of_completion] for of_completion in exchanges]
        except (TypeError, KeyError, AttributeError) as error:
            path = self.folder.path / REPLIES
            raise RunError(f"{path}: step {step}, draw {draw}: damaged.  Restore the file or delete it.") from error
        if (self.place, step) not in self.unfinished:
            return found
        return [[] if any(each.failure for each in of_completion) else of_completion for of_completion in found]

    def put(self, purpose: str, step: int, draw: int, exchanges: Sequence[Sequence[Exchange]]) -> None:
        """Save the exchanges of a finished group, before anything reads it."""
        record = dict(zip(KEY, (self.place, purpose, step, draw), strict=True))
        listed = [[asdict(each) for each in of_completion] for of_completion in exchanges]
        try:
            self.folder.append_reply({**record, "exchanges": listed})
        except (TypeError, ValueError) as error:
            fault = f"a reply of step {step} is not plain data, so it cannot be saved ({error})"
            remedy = "Reply with text or messages of plain data, or set reproducible = True on the class"
            raise RunError(f"environment: {fault}.  {remedy}.") from error

    def keep_failures(self, text: str) -> Path:
        """A file next to the run's folder, while that has an earlier run or does not exist yet."""
        path = self.folder.path
        file = path / FAILURES if self.folder.begun else path.with_name(f"{path.name}-{FAILURES}")
        with writing(file, path):
            write_atomically(file, text.encode("utf-8", "backslashreplace"))
        return file


def exchange_of(record: Mapping[str, Any]) -> Exchange:
    given = record["reply"]
    reply = None
    if given is not None:
        content: Said = given["content"] if isinstance(given["content"], str) else tuple(given["content"])
        calls = tuple(ToolCall(**call) for call in given["calls"])
        reply = Reply(content=content, reward=given["reward"], done=given["done"], calls=calls)
    return Exchange(said=record["said"], reply=reply, failure=record["failure"], seconds=record["seconds"])
