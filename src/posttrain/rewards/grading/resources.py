"""What scoring keeps open from batch to batch: owned by a session, passed to `grade`, and closed with the session.

Two sessions in one process share nothing.  Calls outside any session use `default_resources()`.

A cache of scores by content, in memory or in a file, saves scoring a completion twice.  It is only for rewards that
score each completion by itself: those of this package that say so (`Cacheable`), and functions with `cache: true`.  A
key is the SHA-256 of the reward's name, of what decides its scores and of its arguments for the row.  Failures and
invalid scores are not cached.  An image or a service that changes behind its name is not noticed.
"""

import functools
import hashlib
import importlib.metadata
import inspect
import json
import math
import platform
import sqlite3
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from posttrain.errors import RunError, UserError
from posttrain.options.reward import GradingOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.rewards.grading.answers import Score
from posttrain.rewards.grading.calls import WITHHELD, RolloutRow, reward_completion, reward_prompt
from posttrain.rewards.grading.function import Cacheable, CodeSource, Keywords, RewardFunction, keywords, may_be_cached
from posttrain.rewards.grading.worker import WorkerPool
from posttrain.rewards.grading.worker_process import NotWritableError, message_bytes, to_json
from posttrain.sandbox.sandboxes import Sandboxes

FORMAT = 1
APPLICATION = 0x70547243
LOCK_SECONDS = 10.0
"""How long to wait for another process that writes."""


class Cache:
    """Scores by key; the oldest are dropped first."""

    def __init__(self, entries: int, file: str = "", *, sandbox: SandboxOptions | None = None) -> None:
        """`sandbox` is where the programs of the scored completions run."""
        self.entries, self.file = entries, str(Path(file).absolute()) if file else ""
        self.sandbox = sandbox or SandboxOptions()
        with self._reporting():
            self.database = sqlite3.connect(
                self.file or ":memory:", timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                with self.database:
                    self._prepare()
            except BaseException:
                self.database.close()
                raise

    def _prepare(self) -> None:
        """Make the table in a new file; reject files that are not caches."""
        self.database.execute("BEGIN IMMEDIATE")
        (application,) = self.database.execute("PRAGMA application_id").fetchone()
        (version,) = self.database.execute("PRAGMA user_version").fetchone()
        (tables,) = self.database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and (application, version) != (APPLICATION, FORMAT):
            raise self._unusable("it is not a cache of scores, or has another version")
        if not tables:
            self.database.execute(f"PRAGMA application_id = {APPLICATION}")
            self.database.execute(f"PRAGMA user_version = {FORMAT}")
            columns = "number INTEGER PRIMARY KEY, key BLOB UNIQUE, said TEXT, seal BLOB"
            self.database.execute(f"CREATE TABLE scores ({columns})")

    def known(self, keys: Iterable[bytes]) -> dict[bytes, Score]:
        found = {}
        with self._reporting():
            for key in set(keys):
                row = self.database.execute("SELECT said, seal FROM scores WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    found[key] = self._opened(key, *row)
        return found

    def remember(self, scores: Mapping[bytes, Score]) -> None:
        """Add scores; drop the oldest beyond `entries`."""
        rows = [(key, score_text(score), seal(key, score_text(score))) for key, score in scores.items()]
        with self._reporting(), self.database:  # all or nothing
            self.database.execute("BEGIN IMMEDIATE")
            self.database.executemany("INSERT OR IGNORE INTO scores (key, said, seal) VALUES (?, ?, ?)", rows)
            newest = "(SELECT max(number) FROM scores)"
            self.database.execute(f"DELETE FROM scores WHERE number <= {newest} - ?", (self.entries,))

    def close(self) -> None:
        self.database.close()

    def _opened(self, key: bytes, said: object, sealed: object) -> Score:
        if not isinstance(said, str) or sealed != seal(key, said):
            raise self._unusable("a score in it is damaged")
        value, *more = json.loads(said)
        return Score(math.nan if value is None else value, *more)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            locked = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
            busy = f"another process has been writing to it for {LOCK_SECONDS:g} s"
            raise self._unusable(busy if locked else str(error)) from error

    def _unusable(self, why: str) -> RunError:
        where = f"grading.cache_file = {self.file}" if self.file else "the cache of scores"
        return RunError(f"{where}: {why}. Remove the file or name another, and resume the run.")


def require_use_for_cache(functions: Iterable[RewardFunction], grading: GradingOptions) -> None:
    if grading.cache_file and not any(map(may_be_cached, functions)):
        remedy = "Remove it, or set `cache: true` on a reward that scores each completion by itself."
        raise UserError(f"grading.cache_file = {grading.cache_file}: no reward here may be cached. {remedy}")


def score_text(score: Score) -> str:
    value = None if math.isnan(score.value) else score.value
    more = [score.extra, None, score.marks] if score.marks else [score.extra] if score.extra is not None else []
    return json.dumps([value, score.outcome, score.details, *more])


def seal(key: bytes, said: str) -> bytes:
    """Proves that a score was written for this key and has not changed."""
    return hashlib.sha256(key + said.encode()).digest()[:8]


def keys_of(function: RewardFunction, rows: Sequence[RolloutRow], sandbox: SandboxOptions) -> list[bytes | None]:
    """The key of each row, None if it cannot be compared, which is a UserError with `cache: true`."""
    source, wanted = identity(function, sandbox), keywords(function)
    everywhere = {name: None for row in rows for name in row.group.prompt.columns if name not in WITHHELD}
    columns: dict[int, str | None] = {}
    keys: list[bytes | None] = []
    for row in rows:
        given = row.group.prompt.columns
        if id(row.group) not in columns:  # once for all completions of a prompt: tests can be long
            seen = dict(given) if wanted.one_by_one else {name: given.get(name) for name in everywhere}
            columns[id(row.group)] = digest_of_columns(function, wanted, seen)
        of_columns = columns[id(row.group)]
        shown = [reward_prompt(row, function), reward_completion(row, function), row.rollout.finish, row.base]
        if wanted.wants("completion_ids"):
            shown.append(list(row.rollout.tokens))
        content = message_bytes([function.name, source, of_columns, to_json(shown)])
        keys.append(None if of_columns is None else hashlib.sha256(content).digest())
    return keys


def digest_of_columns(function: RewardFunction, wanted: Keywords, columns: Mapping[str, object]) -> str | None:
    """The SHA-256 of the columns that a function asks for, None if they cannot be compared."""
    truth = {"answer"} if wanted.wants("ground_truth") else set()
    digest = hashlib.sha256()
    for name in sorted(name for name in columns if wanted.wants(name) or name in truth):
        try:
            digest.update(message_bytes([name, to_json(columns[name])]) + b"\n")
        except NotWritableError as error:
            if not function.settings.cache:
                return None
            where = f"reward {function.name!r}: cannot be cached: the column {name!r} holds {error}"
            raise UserError(f"{where}. Use numbers, texts, lists and mappings, or remove `cache`.") from None
    return digest.hexdigest()


def identity(function: RewardFunction, sandbox: SandboxOptions) -> list[str]:
    call: object = function.call
    if isinstance(call, Cacheable):
        place = replace(sandbox, at_once=0)  # does not change a score
        modules = tuple(getattr(call, "modules", ()))  # that its programs may import
        return [repr(call), repr(place), *installed_versions(modules), *package()]
    source = function.find_source()
    return [source.file, source.name, source.digest]


@functools.cache
def installed_versions(modules: tuple[str, ...]) -> tuple[str, ...]:
    """NAME==VERSION of the packages that install the modules, without the standard library."""
    if not modules:
        return ()
    installed = importlib.metadata.packages_distributions()
    behind = {name for module in modules for name in installed.get(module.partition(".")[0], ())}
    return tuple(f"{name}=={importlib.metadata.version(name)}" for name in sorted(behind))


@functools.cache
def package() -> tuple[str, ...]:
    """This package's rewards and what they run on: all their sources, Python, and math-verify."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for file in sorted([*root.glob("rewards/**/*.py"), *root.glob("sandbox/**/*.py")]):
        digest.update(file.read_bytes())
    try:
        verify = importlib.metadata.version("math-verify")
    except importlib.metadata.PackageNotFoundError:
        verify = ""
    return digest.hexdigest(), platform.python_version(), verify


Kept = TypeVar("Kept")


class Resources:
    """Sandboxes, workers, score caches and rewards' memory, opened when first needed; for one thread at a time."""

    def __init__(self, sandbox: SandboxOptions | None = None) -> None:
        self.sandboxes = Sandboxes(sandbox)
        self._pools: dict[tuple[str, CodeSource, int], WorkerPool] = {}
        self._caches: dict[GradingOptions, Cache] = {}
        self._memory: dict[tuple[Hashable, Callable[[], object]], object] = {}
        weakref.finalize(self, close_all, self.sandboxes, self._pools, self._caches)

    def __enter__(self) -> "Resources":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pool_for(self, function: RewardFunction) -> WorkerPool:
        """The workers of a function, none of which is started before the first call; two names have two pools."""
        source, size = function.find_source(), function.settings.workers
        return self._pools.setdefault((function.name, source, size), WorkerPool(source, size))

    def cache_for(self, grading: GradingOptions) -> Cache | None:
        if grading.cache_entries and grading not in self._caches:
            options = self.sandboxes.options
            self._caches[grading] = Cache(grading.cache_entries, grading.cache_file, sandbox=options)
        return self._caches.get(grading)

    def memory(self, reward: Hashable, kind: Callable[[], Kept]) -> Kept:
        """A reward's state, made by `kind` on first use; equal rewards share it."""
        return cast(Kept, self._memory.setdefault((reward, kind), kind()))

    def close(self) -> None:
        """End processes, close files and forget everything; later use opens them again."""
        self._memory.clear()
        close_all(self.sandboxes, self._pools, self._caches)


def close_all(sandboxes: Sandboxes, *opened: dict[Any, WorkerPool] | dict[Any, Cache]) -> None:
    """Close each, even if closing another fails."""
    with ExitStack() as stack:
        stack.callback(sandboxes.close)
        for each in opened:
            while each:
                stack.callback(each.popitem()[1].close)


@runtime_checkable
class NeedsResources(Protocol):
    """A reward that runs programs, or remembers something from batch to batch: bound to a session's resources."""

    def with_resources(self, resources: Resources) -> Callable[..., object]: ...


@runtime_checkable
class ChecksRows(Protocol):
    """A reward that can find rows (name, columns) before training whose completions could not be scored."""

    def check_rows(self, rows: Sequence[tuple[str, Mapping[str, object]]], resources: Resources) -> None: ...


class CallSignature:
    """The signature of a `SessionReward`'s call; the class keeps its constructor's."""

    def __get__(self, reward: "SessionReward | None", owner: type) -> inspect.Signature | None:
        if reward is None:
            return None
        _, *others = inspect.signature(reward.scores).parameters.values()
        return inspect.Signature(others)


class SessionReward:
    """A reward that scores on a session's resources, or on those of the process when called directly.

    A subclass defines `scores(resources, /, *, completions, …)`; its other parameters are the reward's signature.
    """

    scores: Callable[..., Any]

    __signature__ = CallSignature()

    def __call__(self, /, **columns: Any) -> Any:
        return self.scores(default_resources(), **columns)

    def with_resources(self, resources: Resources) -> Callable[..., Any]:
        return partial(self.scores, resources)


@functools.cache
def default_resources() -> Resources:
    """Resources with default options for scoring outside any session; for one thread."""
    return Resources()
