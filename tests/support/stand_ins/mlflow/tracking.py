"""The client; one experiment is known to it."""

from types import SimpleNamespace
from typing import Any

CALLS: list[tuple[str, Any]] = []


class MlflowClient:
    def __init__(self, tracking_uri: str | None) -> None:
        CALLS.append(("uri", tracking_uri))

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="e1") if name == "known" else None

    def create_experiment(self, name: str) -> str:
        CALLS.append(("experiment", name))
        return "e2"

    def create_run(self, experiment: str, run_name: str) -> Any:
        CALLS.append(("create", (experiment, run_name)))
        return SimpleNamespace(info=SimpleNamespace(run_id="m1"))

    def update_run(self, run_id: str, status: str) -> None:
        CALLS.append(("update", (run_id, status)))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100
        CALLS.append(("batch", (run_id, list(metrics), list(params))))

    def log_dict(self, run_id: str, content: Any, file: str) -> None:
        CALLS.append(("dict", (run_id, content, file)))

    def set_terminated(self, run_id: str, status: str) -> None:
        CALLS.append(("end", (run_id, status)))
