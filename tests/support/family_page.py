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

What posttrain does with a tiny random model of every `model_type` that transformers has a causal language model for, of
some that wrap one, and of some variants. Each was saved as a folder and loaded as a recipe loads one. This page is
written by the first of these, and the second prints some of its rows:

```console
$ make families
$ .venv/bin/python -m tests.families olmo3 "llama, rope yarn"
```

It was written on {versions}.

The figures are the greatest differences, in nats, of any token's log-prob from those of the library's own model, which
reads one row at a time by its written-out (`eager`) attention, without cache or padding: of the *sampler*, and of the
*trainer*. Rows are of 2 to 43 tokens, sampled side by side at temperature 0.8; windows are of 8 tokens, the original
context of `longrope` is of 16. Weights are uniform numbers and much sharper than those of trained models, so bfloat16
errs more here than it does there; it is arithmetic over float32 weights, the library's as ours. Where experts are
chosen, a rounding may choose another one, which is what figures of tenths in bfloat16 are. *Updates* says whether two
optimiser steps on those rows, in several micro-batches, moved the weights to finite ones.

The last figures are of what a run saves: the greatest difference of any log-prob, in float32, between the policy and
what is read from its folders. *Model* is `RUN/model`, and *merged* the same with an adapter in it, both loaded by
transformers, which must find every weight and no other. *Adapter in peft* is `RUN/adapter` over the library's own
model, whole, and *in posttrain* the same folder loaded by us.

A new version of a family, a layer of one's own or a hook may take another way. What a model of yours gets is said by
`posttrain doctor --model PATH` and at the start of every run, where sampler and trainer are held against each other.
"""
SECTIONS = {
    FAST: ("The shared-prompt pass", "A prompt is computed once for its group, in sampling and in training."),
    CACHED: ("The model's own pass, with a cache", "One padded row for each completion; keys and values are kept."),
    RECOMPUTED: (
        "The model's own pass, without a cache",
        "Right for every causal model, and slow: each token takes the whole row again.",
    ),
    REFUSED: ("Refused", "In one message, before anything is trained; `FOLDER` stands for the model's."),
    FAULT: ("Faults", "Tracebacks, to be mended."),
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
    parts.append("## Not tried\n\nNo tiny model is made of them.\n")
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
    notes += [f"- `{label}` is held against `{name}`: {why}." for label, (name, why) in others.items()]
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
