"""The table of families, docs/models.md: written from what was measured, and read again by the tests."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.every_family import NOT_BUILT
from tests.support.family_measures import (
    CACHED,
    FAST,
    FAULT,
    NOT_EAGER,
    RECOMPUTED,
    REFUSED,
    ROUTES,
    Distances,
    Exports,
    Route,
)

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Families of models

This page shows how well posttrain works with each family of models. It covers every `model_type` for which transformers
has a causal language model, some that wrap one, and some variants. Each was tested with a tiny random model, saved as a
folder and loaded as a recipe loads one. The first command writes this page; the second prints some of its rows:

```console
$ make families
$ .venv/bin/python -m tests.families olmo3 "llama, rope yarn"
```

It was written on {versions}.

**Sampler and trainer.** These columns show the largest difference of any token's log-prob, in nats, from the model in
transformers. That model reads one row at a time with `eager` attention, without cache or padding.

- Rows have 2 to 43 tokens, sampled together at temperature 0.8. Windows have 8 tokens, and the original context of
  `longrope` is 16.
- Weights are uniform random numbers and give much sharper distributions than trained models, so bfloat16 errors are
  larger here. Both libraries use bfloat16 arithmetic with float32 weights.
- In a mixture of experts, rounding may choose a different expert. This explains bfloat16 figures of some tenths.

**Updates** says whether two optimiser steps on those rows, in several micro-batches, changed the weights and kept them
finite.

**Saved folders.** The last columns show the largest difference of any log-prob, in float32, between the policy and what
is loaded from its folders. *Model* is `RUN/model`; *merged* is the same with an adapter merged into it. transformers
loads both, and must find every weight and no others. *Adapter in peft* is `RUN/adapter` on the model of transformers,
loaded by PEFT; *in posttrain* is the same folder loaded by posttrain.

A new version of a family, a custom layer or a hook may use another of these ways. `posttrain doctor --model PATH`
shows which way your model uses. Every run does too at its start, where it compares sampler and trainer.
"""
SECTIONS = {
    FAST: ("The shared-prompt pass", "A prompt is computed once for its group, in sampling and in training."),
    CACHED: ("The model's own pass, with a cache", "One padded row for each completion; keys and values are kept."),
    RECOMPUTED: (
        "The model's own pass, without a cache",
        "Correct for every causal model, but slow: each token computes the whole row again.",
    ),
    REFUSED: ("Refused", "Rejected with one message, before training starts; `FOLDER` stands for the model's folder."),
    FAULT: ("Faults", "Tracebacks, to be fixed."),
}
ROW = re.compile(r"\| `([^`]+)` \|(?:.*\|)? (.*) \|")


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of the page: the way in float32 and in bfloat16, each with its figures where it is not refused."""

    route: Route
    exact: Distances | None
    half_route: Route
    half: Distances | None
    exports: Exports | None = None


def page(rows: Mapping[str, Measured], versions: str) -> str:
    """The whole page."""
    parts = [HEAD.format(versions=versions)]
    for route in ROUTES:
        heading, meaning = SECTIONS[route]
        chosen = {label: row for label, row in rows.items() if row.route.name == route}
        if not chosen:
            continue
        parts.append(f"## {heading}\n\n{meaning} {len(chosen)} rows.\n")
        parts.append(refusals(chosen) if route in (REFUSED, FAULT) else table(chosen))
    parts.append("## Not tried\n\nWe have no tiny model of these.\n")
    parts.append("\n".join(f"- `{label}`: {why}." for label, why in NOT_BUILT.items()) + "\n")
    return "\n".join(parts)


def table(rows: Mapping[str, Measured]) -> str:
    """Figures of the rows of one way."""
    lines = [
        (
            "| family | float32: sampler | trainer | bfloat16: sampler | trainer | updates | model | adapter in peft"
            " | in posttrain | merged | remarks |"
        ),
        "|---|---:|---:|---:|---:|---|---:|---:|---:|---:|---|",
    ]
    for label, row in rows.items():
        cells = [*figures(row.exact), *figures(row.half), updates(row), *exported(row.exports), row.route.remarks]
        lines.append(f"| `{label}` | {' | '.join(cells)} |")
    notes = [
        f"- `{label}` in bfloat16: {how(row)}" for label, row in rows.items() if row.half_route.name != row.route.name
    ]
    notes += [f"- `{label}`, an adapter: {row.exports.adapter}" for label, row in rows.items() if refuses(row.exports)]
    others = {label: NOT_EAGER[label] for label in rows if label in NOT_EAGER}
    notes += [f"- `{label}` is compared with `{name}`: {why}." for label, (name, why) in others.items()]
    return "\n".join([*lines, "", *notes, *([""] if notes else [])])


def figures(found: Distances | None) -> list[str]:
    """Two cells."""
    return ["refused", "refused"] if found is None else [f"{found.sampler:.1e}", f"{found.trainer:.1e}"]


def exported(found: Exports | None) -> list[str]:
    """Four cells."""
    values = (None,) * 4 if found is None else (found.model, found.adapter, found.again, found.merged)
    return [f"{value:.0e}" if isinstance(value, float) else "refused" for value in values]


def refuses(found: Exports | None) -> bool:
    """Whether there is no adapter over a family by default."""
    return found is not None and isinstance(found.adapter, str)


def updates(row: Measured) -> str:
    """Whether updates move weights, in both types where both are computed."""
    return "yes" if all(found.moved for found in (row.exact, row.half) if found is not None) else "**no**"


def how(row: Measured) -> str:
    """The other way of bfloat16, in words."""
    return f"{row.half_route.name}: {row.half_route.remarks}"


def refusals(rows: Mapping[str, Measured]) -> str:
    """Messages of refusals."""
    lines = ["| family | message |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{label}` | {row.route.remarks} |" for label, row in rows.items()), ""])


def routes(text: str) -> dict[str, Route]:
    """The ways that a page says, by family."""
    found: dict[str, Route] = {}
    headings = {heading: route for route, (heading, _) in SECTIONS.items()}
    for section in text.split("\n## ")[1:]:
        route = headings.get(section.partition("\n")[0])
        for label, remarks in ROW.findall(section) if route is not None else ():
            found[label] = Route(route, remarks.strip())
    return found
