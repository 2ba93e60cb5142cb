"""What the training of a reward model says in words, and the files that keep what came out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.config import RewardModelConfig
from posttrain.models.classifiers.heads import TextScorer
from posttrain.models.classifiers.saved_classifier import TextReading, save_classifier
from posttrain.models.loading.description import adapter_lines, model_lines
from posttrain.models.loading.saving import require_loadable, whole_folder
from posttrain.models.memory.memory_plan import memory_plan
from posttrain.models.memory.model_shape import object_shape
from posttrain.models.policy import Policy
from posttrain.records import Preference
from posttrain.runs.files import writing
from posttrain.runs.folder import resume_command, shown
from posttrain.runs.pair_pictures import calibration_words, draw_calibration, draw_pair_curves
from posttrain.runs.planned_memory import machine_memory, memory_line, memory_warning, pairs_setup
from posttrain.runs.summary import peak_memory_bytes, versions
from posttrain.tasks.preference_set import PreferenceSet
from posttrain.training.reward_model.calibration import HeldOutPairs
from posttrain.training.reward_model.pair_scores import PairScores
from posttrain.training.reward_model.reward_state import RewardModelState
from posttrain.training.sft.sft_report import shortened


def reward_plan_lines(
    config: RewardModelConfig, scorer: TextScorer, model: str, pairs: PreferenceSet, *, num_steps: int
) -> list[str]:
    """What the run is about to do with the model of this name."""
    options, policy = config.reward_model, scorer.policy
    shape, on_cuda = object_shape(policy.model), policy.device.type == "cuda"
    longest = max(pair.num_tokens for pair in pairs.training)
    setup = pairs_setup(config.model, options, shape, longest=longest, on_cuda=on_cuda)
    memory, machine = memory_plan(shape, setup), machine_memory(on_cuda=on_cuda)
    merged = ["           merged into the base when it is saved"] if config.model.adapter is not None else []
    with_margin = sum(pair.margin is not None for pair in pairs.training)
    margins = f", margins of {with_margin} pairs times {options.margin_scale:g}" if with_margin else ""
    first, *more = pairs.described()
    epochs = f": {options.num_epochs:g} epochs" if options.num_epochs is not None else ""
    return [
        *model_lines(policy, model),
        *adapter_lines(policy, options),
        *merged,
        f"head       {scorer.head.weight.shape[1]} weights, read at the last token of prompt and answer",
        f"data       {first}; {len(pairs.held_out)} held out",
        *(f"           {line}" for line in more),
        f"loss       -log σ(r_chosen - r_rejected), centring {options.center_coefficient:g}{margins}",
        f"one step   {options.pairs_per_batch} pairs, learning rate {options.largest_rate:g} ({options.schedule})",
        f"steps      {num_steps}{epochs}",
        memory_line(memory, machine),
        *memory_warning(memory, machine),
        f"folder     {config.run.folder}",
    ]


def pair_preview_lines(policy: Policy, pairs: Sequence[Preference]) -> list[str]:
    """Pairs as the model gets them, a line for each line of theirs."""
    decode = policy.tokenizer.decode
    lines = ["The first pairs, as they are read; the score is that of the last token:"]
    for pair in pairs:
        margin = "" if pair.margin is None else f", margin {pair.margin:g}"
        lines.append(f"--- {pair.where}: {len(pair.prompt.tokens)} tokens of prompt{margin}")
        lines += shortened(str(decode([*pair.prompt.tokens]))).split("\n")
        for name, tokens in (
            ("chosen", pair.chosen.tokens + pair.chosen_closing),
            ("rejected", pair.rejected.tokens + pair.rejected_closing),
        ):
            lines.append(f"{name:8} ⟪{shortened(str(decode([*tokens])))}⟫")
    return lines


def write_reward_model(
    config: RewardModelConfig,
    scorer: TextScorer,
    reading: TextReading,
    folder: Path,
    found: tuple[HeldOutPairs, PairScores] | None,
) -> None:
    """Save the model, curves and, where pairs are held out, the calibration picture of a finished run."""
    with writing(folder / "model", folder), whole_folder(folder / "model") as made:
        classifier = save_classifier(scorer, made, reading, card_of(config, found))
    require_loadable(classifier, folder / "model")
    if config.run.curves:
        with writing(folder / "curves.png", folder):
            draw_pair_curves(folder / "metrics.jsonl", folder / "curves.png", title=folder.name)
    if found is not None:
        with writing(folder / "calibration.png", folder):
            draw_calibration(found[0].summary(), folder / "calibration.png", title=folder.name)


CARD = """# Reward model

Trained by `posttrain reward-model` over `{base}`: one number for a prompt and an answer, higher for what was preferred.
{measured}
It is a sequence classifier of one label for `AutoModelForSequenceClassification`, which finds the end of a row by the
folder's own pad token, and a reward of posttrain by its path (`model` of an item of `rewards`).  It reads what it was
trained on: a conversation as its chat template writes it, whole; plain text as prompt, answer and stop token.  Scores
have no unit: their difference is the log-odds of a preference.

Do not generate text with it.  Where the embedding is the output layer too, `AutoModelForCausalLM` takes the folder
without complaint, but the body has learned to judge, and what comes out is of no use.
"""


def card_of(config: RewardModelConfig, found: tuple[HeldOutPairs, PairScores] | None) -> str:
    """The model card."""
    measured = ""
    if found is not None:
        low, high = found[0].accuracy_interval
        measured = (
            f"\nOf {found[0].num_pairs} held-out pairs it orders {found[0].accuracy:.1%} as people or programs did"
            f" (95%: {low:.1%} to {high:.1%}).\n"
        )
    return CARD.format(base=config.model.path, measured=measured)


def reward_summary(state: RewardModelState) -> dict[str, object]:
    """The content of summary.json, but for what it says of the rows."""
    return {
        "before": state.before,
        "after": state.after,
        "best_accuracy": state.best_accuracy,
        "steps": state.step,
        "seconds": state.seconds,
        "tokens": state.num_tokens,
        "pairs_learned": state.next_pair,
        "peak_memory_bytes": peak_memory_bytes(),
        "versions": versions(),
    }


def last_reward_lines(folder: Path, state: RewardModelState, *, finished: bool) -> list[str]:
    """The end of the output."""
    folder = shown(folder)
    if not finished:
        return [f"stopped after step {state.step}; go on with   {resume_command(folder, 'reward-model')}"]
    return [
        *result_lines(state),
        f"model        {folder / 'model'}",
        f"use it       posttrain rl RECIPE.yaml --rewards {folder / 'model'}",
    ]


def result_lines(state: RewardModelState) -> list[str]:
    """Accuracy on held-out pairs before and after, and how well its probabilities are calibrated."""
    after: dict[str, Any] = state.after
    if not after:
        return ["no pairs were held out, so nothing was measured"]
    low, high = after["accuracy_interval"]
    first = f"{state.before['accuracy']:.3f} → " if state.before else ""
    return [
        f"held-out accuracy {first}{after['accuracy']:.3f} [{low:.3f}, {high:.3f}] of {after['num_pairs']} pairs",
        f"{calibration_words(after)}, mean margin {after['margin']:.2f}",
    ]
