"""One rollout, token by token: pieces, numbers, the likeliest alternatives, and what graders read."""

import json
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from posttrain.rewards.parsing.tags import THINK
from posttrain.viewer.folder_files import Unreadable, json_number, json_value, mapping, noting
from posttrain.viewer.opened_run import OpenedRun
from posttrain.viewer.read_spans import details_at, text_spans
from posttrain.viewer.response_types import Link, Number, Source
from posttrain.viewer.rollout_responses import Alternative, Neighbours, Piece, Quantity, RolloutPage, TurnEntry
from posttrain.viewer.rollout_rows import NAMES, require_step, row_names, shown_row

Row = Mapping[str, Any]
MOST_ROLLOUT_TOKENS = 20_000
"""Maximum tokens of a completion to show one by one."""


@dataclass(frozen=True, slots=True)
class Coloured:
    """A column with a number per sampled token."""

    column: str
    label: str
    unit: str
    centre: float | None = None
    """The neutral value, if the sign matters."""


OF_ROLLOUT = (
    Coloured("token_advantages", "advantage", "", 0.0),
    Coloured("logprobs", "log μ", "nats"),
    Coloured("cut_logprobs", "log μ under the cut", "nats"),
    Coloured("token_values", "value", "reward"),
    Coloured("process_rewards", "process reward", "reward", 0.0),
    Coloured("token_rewards", "token reward", "reward", 0.0),
)
OF_UPDATE = (
    Coloured("policy_logprobs", "log π", "nats"),
    Coloured("ratio", "ratio π/μ", "", 1.0),
    Coloured("clipped", "clipped", "yes or no"),
    Coloured("kl", "KL to the reference", "nats"),
    Coloured("reference_logprobs", "log π of the reference", "nats"),
    Coloured("teacher_logprobs", "log π of the teacher", "nats"),
    Coloured("entropy", "entropy", "nats"),
    Coloured("entropies", "entropy", "nats"),
    Coloured("new_values", "value", "reward"),
    Coloured("values", "value before the step", "reward"),
    Coloured("returns", "return", "reward"),
    Coloured("weights", "token weight", ""),
)
"""Columns of an update in token_columns/; `log π` is before the update."""
AFTER_UPDATES = {
    "policy_logprobs": Coloured("updated_logprobs", "log π after the step", "nats"),
    "ratio": Coloured("updated_ratio", "ratio after the step", "", 1.0),
    "clipped": Coloured("updated_clipped", "clipped after the step", "yes or no"),
}
"""Columns of the rows after the last update."""
GAPS = (("teacher_logprobs", "teacher gap"), ("reference_logprobs", "log π − log of the reference"))


def rollout_page(run: OpenedRun, source: Source, step: int, names: tuple[str, str]) -> RolloutPage | None:
    """The rollout of that group and name; None if it does not exist.  Raises Unreadable."""
    file, faults = require_step(run.files(source), step), list[str]()
    order = [row_names(row) for row in run.files(source).kept(step, NAMES).to_pylist()]
    if names not in order:
        return None
    place = order.index(names)
    row: Row = file.read(file.columns, place, 1).to_pylist()[0]
    tokens = row.get("tokens") or []
    sampled = (row.get("sampled") or [True] * len(tokens))[:MOST_ROLLOUT_TOKENS]
    if len(tokens) > MOST_ROLLOUT_TOKENS:
        faults.append(
            f"only the first {MOST_ROLLOUT_TOKENS:,} of {len(tokens):,} tokens are shown singly; the text is complete"
        )
    prompt, completion, alternatives = token_texts(run, row, sampled, faults)
    prompt_text, text, prefill = row["prompt"] or "", row["completion"] or "", prefill_of(run, row)
    siblings = [at for at, (group, _) in enumerate(order) if group == names[0]]
    details: Mapping[str, object] = {}
    if source == "rollouts":
        with noting(faults):
            details = details_at(run.score_lines.of_group(step, row["draw"]), siblings.index(place))
    spans, notes = text_spans(prefill + text, row, details)
    by_update = []
    if source == "rollouts":
        with noting(faults):
            by_update = update_quantities(run, step, row, sampled)
    length = len(row["logprobs"]) if row.get("logprobs") is not None else None
    return RolloutPage(
        row=shown_row(row, source, step, length),
        prompt=prompt,
        prompt_text=prompt_text,
        prefill=prefill,
        completion=completion,
        completion_text=text,
        offsets=offsets(run, row, text),
        graded=prefill + text,
        quantities=[*rollout_quantities(row, sampled), *by_update],
        alternatives=alternatives,
        spans=spans,
        notes=notes,
        turns=turns(row),
        extras={name.removeprefix("extra/"): json_value(row[name]) for name in row if name.startswith("extra/")},
        columns=row.get("columns") or "",
        weights_version=json_number(row.get("weights_version")),
        failure=row.get("failure") or "",
        neighbours=Neighbours(
            previous=rollout_address(source, step, order[place - 1]) if place else None,
            next=rollout_address(source, step, order[place + 1]) if place + 1 < len(order) else None,
        ),
        siblings=[Link(at=rollout_address(source, step, order[at]), label=order[at][1]) for at in siblings],
        faults=faults,
    )


def rollout_address(source: Source, step: int, names: tuple[str, str]) -> str:
    return "/".join((source, str(step), *names))


def prefill_of(run: OpenedRun, row: Row) -> str:
    """The end of the prompt that is graded with the completion; older files leave it to the recipe."""
    if isinstance(row.get("prefill"), str):
        return str(row["prefill"])
    try:
        task = run.section("task")
    except Unreadable:
        return ""
    found = str(task.get("prefill") or (THINK if task.get("prefill_think") else ""))
    return found if (row["prompt"] or "").endswith(found) else ""


def token_texts(
    run: OpenedRun, row: Row, sampled: Sequence[bool], faults: list[str]
) -> tuple[list[Piece], list[Piece], list[list[Alternative]] | None]:
    """Pieces of the prompt and of the completion, and the alternatives at each token; empty without a tokenizer."""
    prompt: list[Piece] = []
    completion: list[Piece] = []
    alternatives: list[list[Alternative]] | None = None
    with noting(faults):
        prompt = run.pieces.given(row.get("prompt_tokens") or [])
        completion = run.pieces.pieces((row.get("tokens") or [])[: len(sampled)], sampled)
        if row.get("alternative_tokens") is not None:
            likeliest = iter(alternatives_of(run, row["alternative_tokens"], row.get("alternative_logprobs") or []))
            alternatives = [next(likeliest, []) if own else [] for own in sampled]
    return prompt, completion, alternatives


def alternatives_of(
    run: OpenedRun, tokens: Sequence[Sequence[int] | None], logprobs: Sequence[Sequence[float] | None]
) -> list[list[Alternative]]:
    """The likeliest tokens at each sampled token, with their log-probs."""
    pieces = iter(run.pieces.given([token for at in tokens for token in at or []]))
    texts = [list(islice(pieces, len(at or []))) for at in tokens]
    return [
        [
            Alternative(text=piece["text"], id=piece["id"], logprob=json_number(logprob))
            for piece, logprob in zip(of_token, numbers or [], strict=False)
        ]
        for of_token, numbers in zip(texts, logprobs, strict=False)
    ]


def offsets(run: OpenedRun, row: Row, text: str) -> list[int]:
    """Where each token begins in the completion, in characters, and its end; empty if tokens do not add up to the text.

    A token that the text leaves out, such as the stop token, has no width, and one that ends inside a character leaves
    it to the token that completes it.
    """
    try:
        spelled = run.pieces.spelled((row.get("tokens") or [])[:MOST_ROLLOUT_TOKENS])
    except Unreadable:
        return []
    whole = len(spelled) < MOST_ROLLOUT_TOKENS
    last = len(spelled) - 1
    for left_out in (
        {last} if whole else set(),
        {place for place, (_, special) in enumerate(spelled) if special},
        set(),
    ):
        content = [b"" if place in left_out else each for place, (each, _) in enumerate(spelled)]
        for stripped in (content, [content[0].removeprefix(b" "), *content[1:]] if content else []):
            ends, said = decoded_ends(stripped)
            if said == text or (not whole and text.startswith(said[:-1])):
                return ends
    return []


def decoded_ends(content: Sequence[bytes]) -> tuple[list[int], str]:
    """How many characters there are after each token, and the text; bytes that are not UTF-8 become U+FFFD."""
    decoder = getincrementaldecoder("utf-8")("replace")
    ends, parts = [0], list[str]()
    for place, each in enumerate(content):
        parts.append(decoder.decode(each, place == len(content) - 1))
        ends.append(ends[-1] + len(parts[-1]))
    return ends, "".join(parts)


def over_all_tokens(values: Sequence[Any] | None, sampled: Sequence[bool]) -> list[Number]:
    """Values of sampled tokens as values of all tokens; null for tokens that were not sampled."""
    given = iter(values or [])
    return [finite_number(next(given, None)) if own else None for own in sampled]


def finite_number(value: object) -> Number:
    return int(value) if isinstance(value, bool) else json_number(value)


def rollout_quantities(row: Row, sampled: Sequence[bool]) -> Iterator[Quantity]:
    """Numbers per token in rollouts/; if tokens do not have advantages, the completion's is used."""
    if row.get("token_advantages") is None and json_number(row.get("advantage")) is not None:
        yield shown_quantity(OF_ROLLOUT[0], over_all_tokens([row["advantage"]] * len(sampled), sampled))
    for each in OF_ROLLOUT:
        values = over_all_tokens(row.get(each.column), sampled)
        if any(value is not None for value in values):  # process rewards of an unmarked completion are all NaN
            yield shown_quantity(each, values)
    for name in row:
        if name.startswith("marks/") and (values := marks_on_tokens(row[name])):
            function = name.removeprefix("marks/")
            yield shown_quantity(Coloured(name, f"marks by {function}", "reward", 0.0), values)


def marks_on_tokens(marks: object) -> list[Number]:
    try:
        tokens = json.loads(marks)["tokens"] if isinstance(marks, str) else []
        return [json_number(each) for each in tokens]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []


def shown_quantity(drawn: Coloured, values: Sequence[Number], update: int | None = None) -> Quantity:
    """A quantity as the page shows it."""
    of_update = "" if update is None else f", update {update}"
    found = Quantity(
        name=drawn.column if update is None else f"{drawn.column}.{update}",
        label=drawn.label + of_update,
        unit=drawn.unit,
        values=list(values),
        diverging=drawn.centre is not None,
        centre=drawn.centre or 0.0,
    )
    return found if update is None else {**found, "update": update}


def update_quantities(run: OpenedRun, step: int, row: Row, sampled: Sequence[bool]) -> list[Quantity]:
    """What each update of the step computed for the tokens of a rollout, and log π after the last one, where saved."""
    if step not in run.token_columns.steps():
        return []
    file = run.token_columns.file(step)
    found: list[Quantity] = []
    for place in places_of(run, step, row):
        computed: Row = file.read(file.columns, place, 1).to_pylist()[0]
        found += after_updates(computed, sampled) if computed["update"] is None else of_update(computed, sampled)
    return found


def places_of(run: OpenedRun, step: int, row: Row) -> list[int]:
    """The rows of a rollout in token_columns/, update by update, and the row after the last update."""
    keys = run.token_columns.kept(step, ("draw", "sample", "update")).to_pylist()
    wanted = [(key["update"] is None, key["update"] or 0, at) for at, key in enumerate(keys) if is_of(key, row)]
    return [at for _, _, at in sorted(wanted)]


def is_of(key: Row, row: Row) -> bool:
    return (key["draw"], key["sample"]) == (row["draw"], row["sample"])


def of_update(computed: Row, sampled: Sequence[bool]) -> Iterator[Quantity]:
    """The quantities of one update: known columns, gaps between log-probs, then all others."""
    update = int(computed["update"])
    known = {each.column for each in OF_UPDATE}
    for each in OF_UPDATE:
        if is_numbers(computed.get(each.column)):
            yield shown_quantity(each, over_all_tokens(computed[each.column], sampled), update)
    policy = computed.get("policy_logprobs")
    for column, label in GAPS:
        if is_numbers(policy) and is_numbers(computed.get(column)):
            signed = -1.0 if column == "teacher_logprobs" else 1.0
            gaps = [logprob_difference(a, b, signed) for a, b in zip(policy or [], computed[column], strict=False)]
            yield shown_quantity(Coloured(f"{column}_gap", label, "nats", 0.0), over_all_tokens(gaps, sampled), update)
    for name, values in computed.items():
        if name not in known and name not in ("advantages", "behaviour_logprobs") and is_numbers(values):
            yield shown_quantity(Coloured(name, name.replace("_", " "), ""), over_all_tokens(values, sampled), update)


def after_updates(computed: Row, sampled: Sequence[bool]) -> Iterator[Quantity]:
    """The quantities of the policy after the last update."""
    for column, drawn in AFTER_UPDATES.items():
        if is_numbers(computed.get(column)):
            yield shown_quantity(drawn, over_all_tokens(computed[column], sampled))


def logprob_difference(policy: object, other: object, signed: float) -> float | None:
    if not isinstance(policy, float) or not isinstance(other, float):
        return None
    return signed * (policy - other)


def is_numbers(values: object) -> bool:
    return isinstance(values, list) and all(each is None or isinstance(each, bool | int | float) for each in values)


def turns(row: Row) -> list[TurnEntry]:
    """The turns that got a reply, with the tools that were called."""
    try:
        calls = json.loads(row.get("turn_calls") or "[]")
        listed = [row[name] for name in ("turn_ends", "turn_given", "turn_rewards")] if row.get("turn_ends") else []
        return [
            TurnEntry(
                end=int(end),
                given=int(given),
                reward=json_number(reward),
                calls=[dict(mapping(json_value(each))) for each in of],
            )
            for end, given, reward, of in zip(*listed, calls, strict=True)
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
