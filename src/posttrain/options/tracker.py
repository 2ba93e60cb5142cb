"""The `tracker` section of a recipe: what the trackers that `run.report_to` names are told of a run."""

from dataclasses import dataclass
from typing import Literal

from posttrain.options.bounds import Bounded, NonEmptyStr, NonNegativeInt

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


@dataclass(frozen=True, kw_only=True)
class TrackerOptions(Bounded):
    """What a run is called where `run.report_to` has it told, and how much is told of it."""

    project: NonEmptyStr = "posttrain"
    """Project of W&B and Trackio, experiment of MLflow."""
    name: str = ""
    """Name of the run there; empty is the last part of run.folder."""
    offline: bool = False
    """Keep everything on this machine, whatever the environment says: W&B in files to be synced later, MLflow in
    mlflow.db beside the run folder.  TensorBoard is always local, and so is Trackio here."""
    completions: NonNegativeInt = 0
    """Completions of each step that are shown, the first ones, with reward and advantage; rollouts/ has all of them."""
