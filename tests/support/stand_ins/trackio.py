"""In place of Trackio: keeps the calls that it gets, under the names that the library has."""

from typing import Any

CALLS: list[tuple[str, Any]] = []


class Table:
    def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
        self.columns, self.data = columns, data


class Run:
    def __init__(self, name: str) -> None:
        self.name = name

    def log(self, numbers: dict[str, Any], step: int) -> None:
        CALLS.append(("log", (step, numbers)))

    def finish(self) -> None:
        CALLS.append(("finish", None))


def init(*, project: str, name: str, config: dict[str, Any], resume: str, embed: bool) -> Run:
    CALLS.append(("init", {"project": project, "name": name, "config": config, "resume": resume}))
    return Run(name)
