"""The run that `trace` is given: its critic, the reference of its KL, and the numbers of its last step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.algorithms.algorithm import Algorithm
from posttrain.algorithms.credit import Whitening
from posttrain.config import Config
from posttrain.config.reading import recipe_kind
from posttrain.errors import UserError
from posttrain.options.model import ModelOptions, is_run_folder
from posttrain.runs.checkpoint import load_latest
from posttrain.runs.files import read_metrics
from posttrain.runs.run_folder import METRICS
from posttrain.runs.run_inputs import began_with
from posttrain.runs.same_recipe import run_recipe
from posttrain.training.actor_critic_state import SCALE, SHIFT, restored
from posttrain.training.critic import has_head, saved_options
from posttrain.training.learner import Learner


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """A finished run by reward, and its recipe."""

    folder: Path
    algorithm: Mapping[str, Any]
    first_model: str

    @property
    def critic(self) -> str:
        folder = str(self.folder / "critic")
        return folder if has_head(folder) else ""

    def with_critic(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm with the run's trained critic, unless another one is named."""
        given, began_with = algorithm.critic, (self.algorithm.get("critic") or {}).get("path", "")
        if given is None or not self.critic or given.path not in ("", began_with):
            return algorithm
        return replace(algorithm, critic=saved_options(self.critic))

    def with_reference(self, config: Config, algorithm: Algorithm) -> Config:
        """The config with the reference of the run's KL in the reward: with the trained policy itself it would be 0.

        Raises UserError if the model that the run began with is gone, or was never in a folder.
        """
        reference = config.reference
        if algorithm.kl_penalty is None or reference.path or reference.refresh_every:
            return config
        first, gone = ModelOptions(path=self.first_model), ""
        if "policy" in began_with(self.folder).objects:
            gone = "which was an object in Python"
        elif not first.is_bundled and first.hub_name is None and not first.folder.is_dir():
            gone = f"{first.path}, which is not there"
        if gone:
            rule = f"its rewards contain a KL to the model that the run began with, {gone}"
            raise UserError(f"{self.folder}: {rule}.  Set --reference.path, or trace without it: --algorithm.kl null.")
        return replace(config, reference=replace(reference, path=first.path))

    def restore(self, learner: Learner, config: Config) -> None:
        """Restore a KL coefficient, a scale of rewards or a reference that changed from step to step."""
        algorithm = learner.algorithm
        if not (algorithm.adaptive_kl or algorithm.reward_scaling or config.reference.refresh_every):
            return
        saved = load_latest(self.folder / "checkpoints") if (self.folder / "checkpoints").is_dir() else None
        if saved is None or config.algorithm != self.algorithm:
            return
        learner.actor_critic_state = restored(saved.state, learner.actor_critic_state, algorithm)
        if learner.reference is not None and "reference" in saved.tensors:
            learner.reference.restore(saved.tensors["reference"])

    def whitening(self, config: Config) -> "StepWhitening | None":
        """The whitening of its last step, for the same algorithm."""
        if config.algorithm != self.algorithm:
            return None
        whitened = [line for line in read_metrics(self.folder / METRICS) if SHIFT in line and SCALE in line]
        if not whitened:
            return None
        step, shift, scale = (whitened[-1][name] for name in ("step", SHIFT, SCALE))
        return StepWhitening(int(str(step)), Whitening(float(str(shift)), float(str(scale))))


@dataclass(frozen=True)
class StepWhitening:
    """The whitening of a step's advantages."""

    step: int
    by: Whitening


def traced_run(model: str) -> TracedRun | None:
    """The run by reward in a folder; None for a model's folder and for runs of other kinds."""
    if not is_run_folder(Path(model)):
        return None
    recipe = run_recipe(Path(model))
    if recipe_kind([recipe]) is not Config:
        return None
    sections: Mapping[str, Any] = recipe.sections
    return TracedRun(
        folder=Path(model),
        algorithm=sections.get("algorithm") or {},
        first_model=str((sections.get("model") or {}).get("path", ModelOptions().path)),
    )
