"""Demonstrations: episodes of any length, kept end to end without padding.

An episode of T actions has T + 1 states.  `terminated` says that the world ended it, `truncated` that the recording
stopped (a time limit).  A truncated episode does not show what would have followed: it can be fitted by likelihood at
any discount, but its totals are not those of a whole episode.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from numpy import ndarray

from posttrain.errors import UserError
from posttrain.irl.arguments import NOT_AN_ARRAY, brief_repr, check_entries, check_unmasked, checked_integer
from posttrain.irl.array_files import file_path, read_arrays

FIELDS = ("states", "actions", "lengths", "terminated", "truncated")

Transitions = Sequence[Sequence[int]] | Int[ndarray, "step 3"]
"""(state, action, next state) for each step of an episode."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One demonstration: actions[t] was taken in states[t] and led to states[t + 1]."""

    states: Sequence[int] | ndarray
    actions: Sequence[int] | ndarray
    terminated: bool
    truncated: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Demonstrations:
    """Several episodes as flat arrays."""

    states: Int[ndarray, " visit"]
    actions: Int[ndarray, " step"]
    lengths: Int[ndarray, " episode"]
    """Actions in each episode."""
    terminated: Bool[ndarray, "..."]
    truncated: Bool[ndarray, "..."]
    """How each episode ended.  Both flags may be true; if neither is, it was cut off without a flag."""

    def __post_init__(self) -> None:
        vars(self).update(checked_fields(vars(self)))
        if not len(self.lengths):
            raise UserError("there are no demonstrations: give at least one episode")
        negative = self.lengths < 0
        check_entries(negative, lambda i: f"demonstration {i}: its length is {self.lengths[i]}; use 0 or more")
        num_steps = int(self.lengths.sum())
        if len(self.actions) != num_steps or len(self.states) != num_steps + len(self.lengths):
            raise UserError(
                f"demonstrations: their lengths need {num_steps} actions and {num_steps + len(self)} states (one more"
                f" per episode); {len(self.actions)} and {len(self.states)} are given"
            )
        for name in FIELDS[3:]:
            if getattr(self, name).shape != self.lengths.shape:
                raise UserError(f"demonstrations: give one flag `{name}` for each of the {len(self)} episodes")

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Episode]:
        for index, first in enumerate(self.first_visits):
            last = first + self.lengths[index]
            yield Episode(
                states=self.states[first : last + 1],
                actions=self.actions[first - index : last - index],
                terminated=bool(self.terminated[index]),
                truncated=bool(self.truncated[index]),
            )

    @staticmethod
    def from_episodes(episodes: Iterable[Episode]) -> "Demonstrations":
        """From one record for each episode."""
        listed = list_of(episodes, "demonstrations", "states", "actions", "terminated", "truncated")
        states = [whole_numbers(episode.states, "state", index) for index, episode in enumerate(listed)]
        actions = [whole_numbers(episode.actions, "action", index) for index, episode in enumerate(listed)]
        for i, (visited, taken) in enumerate(zip(states, actions, strict=True)):
            if len(visited) != len(taken) + 1:
                raise UserError(f"demonstration {i} has {len(visited)} states and {len(taken)} actions: give one more")
        return Demonstrations(
            states=np.concatenate(states or [np.zeros(0, dtype=np.int64)]),
            actions=np.concatenate(actions or [np.zeros(0, dtype=np.int64)]),
            lengths=np.array([len(taken) for taken in actions], dtype=np.int64),
            **{name: truth_values([getattr(each, name) for each in listed], name) for name in FIELDS[3:]},
        )

    @staticmethod
    def from_transitions(
        episodes: Iterable[Transitions], *, terminated: bool | Sequence[bool] | Bool[ndarray, " episode"] = True
    ) -> "Demonstrations":
        """From lists of (state, action, next state); those not `terminated` count as truncated."""
        listed = [list_of(episode, "a demonstration") for episode in list_of(episodes, "demonstrations")]
        single = isinstance(terminated, bool | np.bool_)
        ended = truth_values([terminated] * len(listed) if single else list_of(terminated, "terminated"), "terminated")
        if len(ended) != len(listed):
            raise UserError(f"`terminated` has {len(ended)} flags for {len(listed)} demonstrations")
        return Demonstrations.from_episodes(
            episode_of_transitions(i, steps, bool(ended[i])) for i, steps in enumerate(listed)
        )

    @staticmethod
    def from_minari(episodes: Iterable[object]) -> "Demonstrations":
        """From a minari data set, or any list of its episodes.

        Reads `observations` (state numbers), `actions`, `terminations` and `truncations`.
        """
        return Demonstrations.from_episodes(
            Episode(
                states=episode.observations,
                actions=episode.actions,
                terminated=bool(truth_values(episode.terminations, "terminations").any()),
                truncated=bool(truth_values(episode.truncations, "truncations").any()),
            )
            for episode in list_of(episodes, "demonstrations", "observations", "actions", "terminations", "truncations")
        )

    @staticmethod
    def from_imitation(trajectories: Iterable[object], *, time_limit: int | None = None) -> "Demonstrations":
        """From trajectories of the `imitation` library: `obs` (state numbers), `acts`, `terminal` and `infos`.

        In that library a time limit also makes an episode `terminal`.  Only the last of the infos says so, and infos
        are mostly dropped: with the environment's `time_limit`, episodes of that many actions count as truncated.
        """
        limit = None if time_limit is None else checked_integer(time_limit, "time_limit", least=1)
        return Demonstrations.from_episodes(
            Episode(trajectory.obs, trajectory.acts, terminated=not cut, truncated=cut)
            for trajectory in list_of(trajectories, "demonstrations", "obs", "acts", "terminal", "infos")
            for cut in [is_truncated(trajectory, limit)]
        )

    @staticmethod
    def load(path: Path | str) -> "Demonstrations":
        """From an .npz file with the five arrays of this record, as `save` writes it."""
        return Demonstrations.from_arrays(read_arrays(path, needed=FIELDS))

    @staticmethod
    def from_arrays(arrays: Mapping[str, ndarray]) -> "Demonstrations":
        """From the five arrays of this record by name."""
        missing = [name for name in FIELDS if not isinstance(arrays, Mapping) or name not in arrays]
        if missing:
            raise UserError(f"there is no array {missing[0]!r}: demonstrations need {', '.join(FIELDS)}")
        return Demonstrations(**checked_fields(arrays))

    def save(self, path: Path | str) -> None:
        """Write the five arrays to an .npz file of exactly this name."""
        try:
            with open(file_path(path), "wb") as file:  # numpy would add a suffix to a name without one
                np.savez_compressed(file, **{name: getattr(self, name) for name in FIELDS})
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error

    @cached_property
    def first_visits(self) -> Int[ndarray, " episode"]:
        num_states = self.lengths + 1
        before: ndarray = np.cumsum(num_states) - num_states
        return before

    @cached_property
    def visit_times(self) -> Int[ndarray, " visit"]:
        """The time t of each state in its episode."""
        times: ndarray = np.arange(len(self.states)) - np.repeat(self.first_visits, self.lengths + 1)
        return times

    @cached_property
    def acting(self) -> Bool[ndarray, " visit"]:
        """Whether an action was taken in each visited state: all but the last of each episode."""
        mask = np.ones(len(self.states), dtype=bool)
        mask[self.first_visits + self.lengths] = False
        return mask

    def step_name(self, visit: int | np.integer) -> str:
        episode = int(np.searchsorted(self.first_visits, visit, side="right")) - 1
        return f"demonstration {episode}, step {self.visit_times[visit]}"


def list_of(given: object, what: str, *names: str) -> list[Any]:
    """The entries of an iterable, each with the attributes `names`."""
    if isinstance(given, ndarray) and given.ndim:
        given = given.tolist()
    try:
        if isinstance(given, str | bytes | Mapping):
            raise TypeError
        listed: list[Any] = list(given)  # type: ignore[call-overload]
    except TypeError:
        raise UserError(f"{what}: {brief_repr(given)} is not a list") from None
    for index, entry in enumerate(listed):
        missing = [name for name in names if not hasattr(entry, name)]
        if missing:
            raise UserError(f"demonstration {index} is {brief_repr(entry)}, and has no {missing[0]!r}")
    return listed


def checked_fields(given: Mapping[str, Any]) -> dict[str, ndarray]:
    whole = {name: whole_numbers(given[name], name.removesuffix("s")) for name in FIELDS[:3]}
    return whole | {name: truth_values(given[name], name) for name in FIELDS[3:]}


def whole_numbers(numbers: object, what: str, episode: int | None = None) -> Int[ndarray, " entry"]:
    """Numbers, or a column of them, as integers; refuses vectors and fractions."""
    where = "demonstrations" if episode is None else f"demonstration {episode}"
    check_unmasked(numbers, f"{where}: the array of each {what}")
    rule = f"{where}: each {what} must be one whole number"
    try:
        array = np.asarray(numbers)
        column = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
        with np.errstate(invalid="ignore"):
            whole: ndarray = column.astype(np.int64)
    except NOT_AN_ARRAY:
        raise UserError(rule) from None
    if column.ndim != 1 or column.dtype.kind not in "biufO":
        raise UserError(f"{rule}; they have the shape {array.shape} and the type {array.dtype}")
    check_entries(whole != column, lambda entry: f"{rule}; entry {entry} is {column[entry]}")
    return whole


def truth_values(given: object, name: str) -> Bool[ndarray, " episode"]:
    """A flag for each episode."""
    rule = f"demonstrations: `{name}` must be one true or false for each episode"
    check_unmasked(given, f"demonstrations: `{name}`")
    try:
        numbers = np.asarray(given)
    except NOT_AN_ARRAY:
        raise UserError(rule) from None
    if numbers.ndim != 1 or numbers.dtype.kind not in "biuf" or not np.isin(numbers, (0, 1)).all():
        raise UserError(f"{rule}; it has the shape {numbers.shape} and the type {numbers.dtype}")
    return numbers.astype(bool)


def is_truncated(trajectory: Any, time_limit: int | None) -> bool:
    [ended] = truth_values([trajectory.terminal], "terminal")
    if not ended or len(whole_numbers(trajectory.acts, "action")) == time_limit:
        return True
    infos = [] if trajectory.infos is None else list_of(trajectory.infos, "the infos of a trajectory")
    if not all(isinstance(one, Mapping) for one in infos):
        raise UserError("demonstrations: the infos of a trajectory must be dictionaries, one for each action")
    return bool(infos) and bool(infos[-1].get("TimeLimit.truncated", False))


def episode_of_transitions(index: int, steps: Sequence[Sequence[int]], terminated: bool) -> Episode:
    """An episode from its transitions, each of which must begin where the one before ended."""
    if not steps:
        raise UserError(f"demonstration {index} has no transitions: leave it out")
    for time, step in enumerate(steps):
        if not isinstance(step, Sequence) or len(step) != 3:
            raise UserError(f"demonstration {index}, step {time}: {step!r} is not (state, action, next state)")
        if time and step[0] != steps[time - 1][2]:
            raise UserError(
                f"demonstration {index}, step {time}: it begins in state {step[0]}, but the step before it ended in"
                f" state {steps[time - 1][2]}"
            )
    states = [steps[0][0], *(following for _, _, following in steps)]
    return Episode(states, [action for _, action, _ in steps], terminated=terminated, truncated=not terminated)
