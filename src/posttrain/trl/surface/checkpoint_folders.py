"""Checkpoints where transformers has them: `checkpoint-N` in output_dir, N in updates, which it and peft can load.

Each is a link to the run's own checkpoint, `checkpoints/step-N`, into which the files of a model folder are written.
"""

import os
from pathlib import Path

from posttrain.models.adapters.peft_layers import adapted_names
from posttrain.models.loading.construction import without_progress_bars
from posttrain.models.loading.saving import require_loadable, save_adapter, save_policy
from posttrain.models.policy import Policy
from posttrain.runs.files import writing
from posttrain.runs.tensor_state import trained_names, untied


def write_model(policy: Policy, checkpoint: Path) -> None:
    """Make a checkpoint a folder that from_pretrained reads.  Raises RunError where it could not be read."""
    named = untied(policy.model)
    if adapted_names(policy.model):
        save_adapter(policy, checkpoint)
    elif trained_names(policy.model, named) != named.keys():
        save_policy(policy, checkpoint)  # the frozen weights are not there
    else:
        write_around_weights(policy, checkpoint)
    require_loadable(policy.model, checkpoint)


def write_around_weights(policy: Policy, checkpoint: Path) -> None:
    """Write what makes a checkpoint that has all weights a model's folder."""
    model, weights = policy.model, checkpoint / "model.safetensors"
    if not weights.exists():
        os.link(checkpoint / "policy.safetensors", weights)
    with without_progress_bars():
        model.config.save_pretrained(checkpoint)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(checkpoint)
        policy.tokenizer.save_pretrained(checkpoint)


def link_checkpoint(run: Path, checkpoint: Path, num_updates: int) -> None:
    """Have `checkpoint-N` lead to a checkpoint; links to others that are gone go too, folders of others stay."""
    link = run / f"checkpoint-{num_updates}"
    with writing(link, run):
        remove_dangling(run)
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(checkpoint.relative_to(run))


def remove_dangling(run: Path) -> None:
    """Remove links to checkpoints that were pruned."""
    for each in run.glob("checkpoint-*"):
        if each.is_symlink() and not each.exists():
            each.unlink()
