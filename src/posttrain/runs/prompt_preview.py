"""Prompts and completions as the model reads and writes them, shown before training."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from transformers import PreTrainedTokenizerBase

from posttrain.records import Finish, Grades, Group, Prompt, Rollout
from posttrain.runs.progress import visible

OPEN, CLOSE, PREFILL, GIVEN, BACK = "⟦", "⟧", "▶", "«", "»"
"""Marks around a special token, before the prefill, and around an environment's reply."""
LEGEND = f"{OPEN}…{CLOSE} is a special token; the prefill begins at {PREFILL}"
ENDED = {
    Finish.STOP: "stopped",
    Finish.LENGTH: "cut off at the limit",
    Finish.TURNS: "cut off after its last turn",
    Finish.ENVIRONMENT: "ended by the environment",
    Finish.FAILED: "the environment failed",
}
LAST_TOKENS = 4
"""Number of last token ids to show: they reveal a prompt that ends differently than in training."""
MOST_CHARACTERS = 4000
"""Characters of a prompt or completion; the middle of a longer one is omitted."""
MOST_OF_A_COLUMN = 60
MOST_MARKS = 8
"""Number of a completion's process rewards to show; the rest are counted."""
OPEN_THOUGHT = re.compile(r"<(think|thinking|thought|reason|reasoning)>\s*$")
"""Tags with which templates of thinking models begin an answer; other tags there may name the speaker."""
Piece = tuple[str, bool]
"""A text, and whether it is a special or added token."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The parts of a model that decide how it reads prompts."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: Sequence[int]
    template_file: str = ""
    """The file of a template that replaces the model's."""
    template_options: Mapping[str, object] = field(default_factory=dict)


def prompt_preview_lines(prompts: Sequence[Prompt], reader: Reader) -> list[str]:
    """Prompts with their special tokens, last ids and columns, and the stop tokens; safe to print."""
    shown = [line for prompt in prompts for line in ("", *prompt_lines(prompt, reader.tokenizer))]
    return [*head_lines(prompts, reader), *shown]


def first_step_lines(groups: Sequence[Group], grades: Grades, count: int, reader: Reader) -> list[str]:
    """The first `count` prompts of a step, each with its first completion and the scores of this completion."""
    lines = head_lines([group.prompt for group in groups[:count]], reader)
    for position, group in enumerate(groups[:count]):
        lines += ["", *prompt_lines(group.prompt, reader.tokenizer)]
        lines += graded_lines(group, grades, position, reader.tokenizer)
    return lines


def head_lines(prompts: Sequence[Prompt], reader: Reader) -> list[str]:
    if all(prompt.messages is None for prompt in prompts):
        template = (
            f"not used: the prompts are text{' (the model has a template)' if reader.tokenizer.chat_template else ''}"
        )
    else:
        options = ", ".join(f"{name} = {value!r}" for name, value in reader.template_options.items())
        template = (reader.template_file or "the model's own") + (f", with {options}" if options else "")
    return [
        visible(f"template   {template}"),
        f"stop ids   {', '.join(named_token(token, reader.tokenizer) for token in reader.stop_ids)}",
        f"marks      {LEGEND}",
    ]


def prompt_lines(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """One prompt: its id and size, text, last ids and columns."""
    text = marked_text(prompt, tokenizer)
    unmarked = [f"prefill    {quoted(prompt.prefill)}"] if prompt.prefill and PREFILL not in text else []
    kind = "as text" if prompt.messages is None else "through the chat template"
    last = ", ".join(named_token(token, tokenizer) for token in prompt.tokens[-LAST_TOKENS:])
    columns = ", ".join(f"{name} = {excerpt(value)}" for name, value in prompt.columns.items())
    return [
        visible(f"prompt     {prompt.id}, {len(prompt.tokens)} tokens, {kind}"),
        *indented(text),
        *unmarked,
        f"last ids   {last}",
        visible(f"columns    {columns or 'none'}"),
        *(visible(f"note       {note}") for note in opening_notes(prompt)),
    ]


def graded_lines(group: Group, grades: Grades, position: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The first completion of the group at `position`, and its scores."""
    rollout = group.rollouts[0]
    outcomes = {name: f" ({of_groups[position][0]})" for name, of_groups in grades.outcomes.items()}
    named = zip(grades.names, grades.scores[:, position, 0].tolist(), strict=True)
    scores = [f"{name} {number(score)}{outcomes.get(name, '')}" for name, score in named]
    turns = f" in {rollout.num_turns} turns, replies in {GIVEN}…{BACK}" if rollout.turns else ""
    return [
        f"completion {rollout.num_sampled} tokens{turns}, {ENDED[rollout.finish]}",
        *indented(printable(said_and_given(rollout, tokenizer))),
        *(visible(f"failure    {line}") for line in rollout.failure.strip().splitlines()[-1:]),
        visible(f"scores     {', '.join(scores)}; reward {number(grades.rewards[position, 0].item())}"),
        *(visible(f"marked     {line}") for line in marked_lines(group, grades, position)),
        *(visible(f"logged     {line}") for line in logged_lines(grades, position, 0)),
    ]


def said_and_given(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> "list[Piece]":
    """The text of a completion, with marks around replies."""
    made: list[Piece] = []
    for sampled, run in groupby(zip(rollout.sequence.sampled, rollout.tokens, strict=True), key=itemgetter(0)):
        of_run = pieces([token for _, token in run], tokenizer)
        made += of_run if sampled else [(GIVEN, False), *of_run, (BACK, False)]
    return made


def marked_lines(group: Group, grades: Grades, position: int) -> list[str]:
    """Marks on tokens and spans of a group's first completion, one line per function."""
    text = group.graded_text(group.rollouts[0])
    lines: list[str] = []
    for name, of_groups in grades.marks.items():
        marks = of_groups[position][0]
        if marks is not None:
            tokens = [f"token {t} {number(value)}" for t, value in enumerate(marks.tokens) if value is not None]
            given = tokens + [f"{excerpt(text[start:end])} {number(value)}" for start, end, value in marks.spans]
            more = f", and {len(given) - MOST_MARKS} more" if len(given) > MOST_MARKS else ""
            lines.append(f"{name}: {', '.join(given[:MOST_MARKS])}{more}; {number(marks.total)} in total")
    return lines


def logged_lines(grades: Grades, position: int, sample: int) -> list[str]:
    return [
        f"{name}: {', '.join(f'{column} = {excerpt(value)}' for column, value in extra.items())}"
        for name, of_groups in grades.extras.items()
        if (extra := of_groups[position][sample])
    ]


def number(score: float) -> str:
    return "none" if math.isnan(score) else f"{score:g}"


def opening_notes(prompt: Prompt) -> Iterator[str]:
    """A note about a template that begins the answer, since rewards would not see that beginning."""
    found = OPEN_THOUGHT.search(prompt.text)
    if prompt.messages is not None and not prompt.prefill and found is not None:
        tag = found[0].replace("\n", "\\n")
        yield (
            f"the chat template begins the answer with `{tag}`, which the rewards do not see.  Set"
            f' task.prefill: "{tag}" to show it to them; the prompt still contains it only once.'
        )


def marked_text(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """A prompt's text, with a mark where its prefill begins."""
    made = pieces(prompt.tokens, tokenizer)
    text = "".join(piece for piece, _ in made)
    if not prompt.prefill or not text.endswith(prompt.prefill):
        return printable(made)
    left, before, after = len(text) - len(prompt.prefill), list[Piece](), list[Piece]()
    for piece, special in made:  # one that crosses is cut in two
        head, tail = piece[:left], piece[left:]
        left -= len(head)
        before += [(head, special)] if head or not tail else []
        after += [(tail, special)] if tail else []
    return f"{printable(before)}{PREFILL}{printable(after)}"


def pieces(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """The text of tokens; ordinary ones are decoded together, since a character may span several."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    made: list[Piece] = []
    run: list[int] = []
    for token in tokens:
        if token not in special:
            run.append(token)
            continue
        if run:
            made.append((decoded(run, tokenizer), False))
        made.append((decoded([token], tokenizer), True))
        run = []
    return [*made, (decoded(run, tokenizer), False)] if run else made


def decoded(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode([*tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def printable(made: Sequence[Piece]) -> str:
    """Pieces as text that is safe to print; the middle of a long text is left out."""
    text = "".join(f"{OPEN}{piece}{CLOSE}" if special else piece for piece, special in made)
    left_out = len(text) - MOST_CHARACTERS
    if left_out > 0:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]}\n… {left_out} characters are not shown …\n{text[-half:]}"
    return visible(text)


def indented(text: str) -> Iterator[str]:
    return (f"  {line}" for line in text.split("\n"))


def named_token(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """A token's id and text, or its vocabulary entry if it is only part of a character."""
    text = decoded([token], tokenizer)
    piece = tokenizer.convert_ids_to_tokens(token)
    return f"{token} {quoted(str(piece) if '�' in text else text)}"


def excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_OF_A_COLUMN else f"{text[: MOST_OF_A_COLUMN - 1]}…"


def quoted(text: str) -> str:
    return '"' + visible(text).replace("\n", "\\n").replace("\t", "\\t") + '"'
