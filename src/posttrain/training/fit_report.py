"""Output of runs on rows or pairs: plan, first rows or pairs, model and summary."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from posttrain.models.loading.description import adapter_lines, model_lines
from posttrain.models.loading.saving import save_trained
from posttrain.models.memory.memory_plan import MemoryPlan
from posttrain.models.memory.model_shape import object_shape
from posttrain.models.policy import Policy
from posttrain.options.model import ModelOptions
from posttrain.options.new_model import NewModelOptions
from posttrain.records import Example, Preference
from posttrain.runs.curves import draw_curves
from posttrain.runs.files import writing
from posttrain.runs.planned_memory import held_by, machine_memory, memory_line, memory_warning
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.summary import peak_memory_bytes, versions
from posttrain.training.fit_session import FitObjective, FitSession, Item

LEARNED = "⟪", "⟫"
SHOWN_CHARACTERS = 400
"""Of each part of a row or a pair."""


def plan_lines(session: FitSession[Item]) -> list[str]:
    """The plan."""
    objective = session.objective
    policy, options = objective.policy, objective.options
    on_cuda, shape = policy.device.type == "cuda", object_shape(policy.model)
    memory = MemoryPlan(shape, held_by(policy, objective.memory(shape, on_cuda=on_cuda)))
    machine = machine_memory(on_cuda=on_cuda)
    first, *more = session.source.described()
    return [
        *model_lines(policy, session.model_name),
        *adapter_lines(policy, options),
        f"data       {first}; {objective.num_held_out} held out",
        *(f"           {line}" for line in more),
        *objective.loss_lines(),
        f"one step   {objective.batch_words()}, learning rate {options.largest_rate:g} ({options.schedule})",
        f"steps      {session.num_steps}" + ("" if options.num_epochs is None else f": {options.num_epochs:g} epochs"),
        memory_line(memory, machine),
        *memory_warning(memory, machine),
        f"folder     {session.config.run.folder}",
    ]


def preview_lines(objective: FitObjective[Item], items: Sequence[Item]) -> list[str]:
    """Rows or pairs as the model reads them, line by line."""
    tokenizer = objective.policy.tokenizer
    lines = [f"The first of them, as tokens that are read and {LEARNED[0]}learned{LEARNED[1]}:"]
    for item in items:
        if isinstance(item, Example):
            lines.append(f"--- {len(item.tokens)} tokens, {item.num_sampled} learned")
            lines += marked(tokenizer, item).split("\n")
        else:
            lines += pair_lines(tokenizer, item, objective.answers(item))
    return lines


def pair_lines(
    tokenizer: PreTrainedTokenizerBase, pair: Preference, answers: tuple[Sequence[int], Sequence[int]]
) -> list[str]:
    """A pair as it is read: its prompt and both answers."""
    margin = "" if pair.margin is None else f", margin {pair.margin:g}"
    lines = [f"--- {pair.where}: {len(pair.prompt.tokens)} tokens of prompt{margin}"]
    lines += shortened(str(tokenizer.decode([*pair.prompt.tokens]))).split("\n")
    for name, tokens in zip(("chosen", "rejected"), answers, strict=True):
        lines.append(f"{name:8} {LEARNED[0]}{shortened(str(tokenizer.decode([*tokens])))}{LEARNED[1]}")
    return lines


def marked(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    parts: list[tuple[bool, list[int]]] = []
    for token, learned in zip(example.tokens, example.sampled, strict=True):
        if not parts or parts[-1][0] != learned:
            parts.append((learned, []))
        parts[-1][1].append(token)
    written = [(learned, shortened(str(tokenizer.decode(tokens)))) for learned, tokens in parts]
    return "".join(f"{LEARNED[0]}{text}{LEARNED[1]}" if learned else text for learned, text in written)


def shortened(text: str) -> str:
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"


def summary_of(session: FitSession[Item]) -> dict[str, object]:
    run = session.trained.run
    return {
        "before": run.before,
        "after": run.after,
        "steps": run.step,
        "seconds": session.trained.seconds,
        "tokens": run.num_tokens,
        "peak_memory_bytes": peak_memory_bytes(),
        "versions": versions(),
        **session.objective.summary(),
        **session.source.summary(),
    }


def model_card(folder: Path, tag: str, about: str) -> str:
    return (
        f"---\nlibrary_name: transformers\ntags: [posttrain, {tag}]\n---\n\n# {folder.name}\n\n{about}\n\n"
        "The recipe is `config.yaml` in the run folder.\n"
    )


def write_model(
    model: ModelOptions | NewModelOptions, policy: Policy, run: RunFolder, *, curves: bool, card: str
) -> None:
    """Save the model or adapter of a finished run, and its curves."""
    adapter = model.adapter if isinstance(model, ModelOptions) else None
    folder = run.path
    with writing(folder / "model", folder):
        save_trained(policy, folder, "adapter" if adapter is None else adapter.save, card)
    if curves:
        with writing(folder / "curves.png", folder):
            draw_curves(folder / "metrics.jsonl", folder / "curves.png", title=folder.name)
