"""What a supervised run says in words, and the files that keep what came out."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from posttrain.config import SftConfig
from posttrain.models.loading.description import adapter_lines, model_lines
from posttrain.models.loading.saving import save_trained
from posttrain.models.policy import Policy
from posttrain.options.adapter import run_model
from posttrain.options.dataset import DatasetOptions
from posttrain.options.model import ModelOptions
from posttrain.records import Example
from posttrain.runs.curves import draw_curves
from posttrain.runs.files import writing
from posttrain.runs.folder import resume_command, shown
from posttrain.runs.planned_memory import machine_memory, memory_line, memory_warning, sft_policy_plan
from posttrain.runs.summary import peak_memory_bytes, versions
from posttrain.training.sft.sft_state import SftState

LEARNED = "⟪", "⟫"
"""Around tokens that are learned, where an example is shown."""
SHOWN_CHARACTERS = 400
"""Of each part of an example that is shown."""


def sft_plan_lines(
    config: SftConfig, policy: Policy, model: str, data: Sequence[str], *, num_held_out: int, num_steps: int
) -> list[str]:
    """What the run is about to do with the model of this name, and with the data so described."""
    options = config.sft
    memory, machine = sft_policy_plan(policy, config), machine_memory(on_cuda=policy.device.type == "cuda")
    longest = min(options.max_length or policy.max_positions, policy.max_positions)
    most = [f"{options.rows_per_batch} rows"] if options.rows_per_batch else []
    if not most or options.rows_per_batch * longest > options.tokens_per_batch:  # else so many rows are never full
        most.append(f"{options.tokens_per_batch} tokens")
    first, *more = data
    rate = f"learning rate {options.largest_rate:g} ({options.schedule})"
    return [
        *model_lines(policy, model),
        *adapter_lines(policy, options),
        f"data       {first}; {num_held_out} held out",
        *(f"           {line}" for line in more),
        f"one step   {' or '.join(most)}, {rate}",
        f"steps      {num_steps}" + (f": {options.num_epochs:g} epochs" if options.num_epochs is not None else ""),
        memory_line(memory, machine),
        *memory_warning(memory, machine),
        f"folder     {config.run.folder}",
    ]


def marked(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    """An example as text, special tokens too, with ⟪what is learned⟫ marked; long parts lose their middle."""
    parts: list[tuple[bool, list[int]]] = []
    for token, learned in zip(example.tokens, example.sampled, strict=True):
        if not parts or parts[-1][0] != learned:
            parts.append((learned, []))
        parts[-1][1].append(token)
    written = [(learned, shortened(str(tokenizer.decode(tokens)))) for learned, tokens in parts]
    return "".join(f"{LEARNED[0]}{text}{LEARNED[1]}" if learned else text for learned, text in written)


def shortened(text: str) -> str:
    """A text without its middle, if it is long."""
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"


def preview_lines(policy: Policy, examples: Sequence[Example]) -> list[str]:
    """Examples as the model gets them, a line for each line of theirs."""
    lines = [f"The first rows, as tokens that are read and {LEARNED[0]}learned{LEARNED[1]}:"]
    for example in examples:
        lines.append(f"--- {len(example.tokens)} tokens, {example.num_sampled} learned")
        lines += marked(policy.tokenizer, example).split("\n")
    return lines


def write_model(config: SftConfig, policy: Policy, folder: Path) -> None:
    """Save the model, or its adapter, and curves of a finished run."""
    adapter = config.model.adapter if isinstance(config.model, ModelOptions) else None
    with writing(folder / "model", folder):
        save_trained(policy, folder, adapter.save if adapter is not None else "adapter", "")
    if config.run.curves:
        with writing(folder / "curves.png", folder):
            draw_curves(folder / "metrics.jsonl", folder / "curves.png", title=folder.name)


def summary_of(state: SftState) -> dict[str, object]:
    """The content of summary.json, but for what it says of the rows."""
    return {
        "before": state.before,
        "after": state.after,
        "eval_loss": state.eval_loss,
        "best_eval_loss": state.best_eval_loss,
        "steps": state.step,
        "seconds": state.seconds,
        "tokens": state.num_tokens,
        "examples": state.next_example,
        "peak_memory_bytes": peak_memory_bytes(),
        "versions": versions(),
    }


def last_lines(config: SftConfig, folder: Path, state: SftState, *, finished: bool) -> list[str]:
    """The end of the output; rows have no measure beside their loss, so a model that has learned them is talked to."""
    folder, rows = shown(folder), isinstance(config.task, DatasetOptions)
    if not finished:
        return [f"stopped after step {state.step}; go on with   {resume_command(folder, 'sft')}"]
    return [
        f"{result(state)} after {state.num_tokens / 1e6:.1f} M tokens",
        f"model        {run_model(folder)}",
        f"talk to it   posttrain chat {folder}" if rows else f"measure it   posttrain eval {folder}",
    ]


def result(state: SftState) -> str:
    """The held-out loss before and after."""
    if state.eval_loss is None:
        return "no rows were held out, so there is no held-out loss,"
    lowest = "" if state.eval_loss == state.best_eval_loss else f" (at its lowest {state.best_eval_loss:.4f})"
    first = f"{state.before['loss']:.4f} → " if state.before else ""
    return f"held-out loss {first}{state.eval_loss:.4f} nats/token{lowest}"
