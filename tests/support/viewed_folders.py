"""Run folders that are quickly made, as `posttrain rl` leaves them, and a viewer's server that is asked about them."""

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from posttrain.server.viewer_routes import RunViewer
from posttrain.server.voting_page import TOKEN_HEADER
from posttrain.viewer.token_pieces import BYTE_OF
from posttrain.viewer.viewer_responses import OpenedRuns, viewer_response

END = 256
"""The stop token of `byte_tokenizer`."""
TEXTS = ("one", "two\n", "a longer text", "ünïcödé ✓")


def byte_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, with a stop token."""
    vocabulary = dict(BYTE_OF)
    added = [{"id": END, "content": "<|end|>", "special": True}]
    content = {"model": {"type": "BPE", "vocab": vocabulary}, "decoder": {"type": "ByteLevel"}, "added_tokens": added}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))


def rollout_row(step: int, draw: int, sample: int, text: str, reward: float | None) -> dict[str, Any]:
    """A row of rollouts/, whose tokens are bytes; log μ of token i is -i."""
    tokens, prompt = [*text.encode("utf-8"), END], f"What is {step} + {draw}? "
    return {
        "step": step,
        "draw": draw,
        "sample": sample,
        "prompt_id": f"train/{step}-{draw}",
        "prompt": prompt,
        "completion": text,
        "prompt_tokens": [*prompt.encode()],
        "tokens": tokens,
        "sampled": [True] * len(tokens),
        "logprobs": [-float(place) for place in range(len(tokens))],
        "finish": "stop",
        "weights_version": step - 1,
        "columns": json.dumps({"answer": step + draw}),
        "reward": reward,
        "advantage": None if reward is None else reward - 0.5,
        "score/maths": reward,
        "outcome/maths": "correct" if reward else "wrong",
    }


def held_out_rows(step: int, evaluation: str, right: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Rows of evaluations/: for each problem the score of each sample; the greedy completion is wrong."""
    rows = []
    for draw, scores in enumerate(right):
        for sample, (score, greedy) in enumerate([*((each, False) for each in scores), (0, True)]):
            row = rollout_row(step, draw, 0 if greedy else sample, f"answer {score}", float(score))
            del row["advantage"]
            own = {"prompt_id": f"held-out/{draw}", "prompt": f"Problem {draw}", "evaluation": evaluation}
            rows.append({**row, **own, "greedy": greedy, "judged": float(score)})
    return [row for greedy in (False, True) for row in rows if row["greedy"] == greedy]


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]], *, in_groups_of: int | None = None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist([*rows]), file, row_group_size=in_groups_of)


def step_rows(step: int, *, prompts: int = 3, group: int = 4, texts: Sequence[str] = TEXTS) -> list[dict[str, Any]]:
    """A step; the rewards of its last group do not differ."""
    return [
        rollout_row(step, draw, sample, texts[(draw + sample) % len(texts)], float(draw < prompts - 1 and sample % 2))
        for draw in range(prompts)
        for sample in range(group)
    ]


def add_step(run: Path, step: int, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
    """What a run writes in a step."""
    write_rows(run / f"rollouts/step-{step:06d}.parquet", step_rows(step) if rows is None else rows)
    line = {"step": step, "reward": step / 10, "completions/mean_length": 5.0, "seconds/update": 1.0, "step_time": 1.0}
    add_line(run, "metrics.jsonl", {**line, "outcomes/maths/correct": 0.5, "outcomes/maths/wrong": 0.5, "kl": 0.1})


def add_line(run: Path, name: str, record: Mapping[str, Any]) -> None:
    with (run / name).open("a") as file:
        file.write(json.dumps(record) + "\n")


def write_run(run: Path, steps: int = 3, *, finished: bool = True) -> Path:
    """A run folder of format 2."""
    run.mkdir(parents=True)
    (run / "format").write_text("2\n")
    recipe = {"model": {"path": "m"}, "task": {"name": "dataset"}, "algorithm": {"name": "grpo"}}
    text = json.dumps({**recipe, "run": {"num_steps": 9}})
    (run / "config.yaml").write_text(text)
    byte_tokenizer(run / "tokenizer")
    for step in range(1, steps + 1):
        add_step(run, step)
    write_rows(run / "evaluations/step-000000.parquet", held_out_rows(0, "before", [[0, 0], [1, 1], [1, 0], [0, 0]]))
    ended = [*held_out_rows(steps, "brief", [[1]]), *held_out_rows(steps, "after", [[1, 1], [1, 1], [0, 0], [0, 0]])]
    write_rows(run / f"evaluations/step-{steps:06d}.parquet", ended)
    alarm = {"alarm": "length", "says": "longer", "transcript": "t"}
    add_line(run, "alarms.jsonl", {"step": 2, **alarm})
    add_line(run, "alarms.jsonl", {"step": 3, **alarm, "rollouts": [{"draw": 1, "sample": 2}]})
    if finished:
        results = {"accuracy_sampled": 0.375, "accuracy_sampled_interval": [0.1, 0.7], "num_problems": 4}
        (run / "summary.json").write_text(json.dumps({"before": results, "after": results, "seconds": {"total": 3.0}}))
    return run


def ask(*runs: Path, path: str, **query: object) -> Any:
    """The answer at an address about some runs, through JSON."""
    found = viewer_response(OpenedRuns.of(runs), path, {name: str(value) for name, value in query.items()})
    return json.loads(json.dumps(found, allow_nan=False))


@contextmanager
def viewing(*runs: Path) -> Iterator[RunViewer]:
    """A server in a thread of this process, on a free port."""
    with RunViewer(OpenedRuns.of(runs)).in_thread() as server:
        yield server


def requested(
    server: RunViewer,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    token: str | None = "",
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers in small letters and body, asked with the server's token unless it is to be another or None."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    brought = {} if token is None else {TOKEN_HEADER: token or server.token}
    try:
        connection.request(method, path, headers={**brought, **(headers or {})})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()
