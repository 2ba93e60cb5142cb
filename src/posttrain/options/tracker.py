"""The `tracker` section of a recipe: what the trackers in `run.report_to` get."""

from dataclasses import dataclass
from typing import Literal

from posttrain.options.bounds import Bounded, NonEmptyStr, NonNegativeInt

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


@dataclass(frozen=True, kw_only=True)
class TrackerOptions(Bounded):
    """A run's name in the trackers of `run.report_to`, and how much they get."""

    project: NonEmptyStr = "posttrain"
    """Project of W&B and Trackio, experiment of MLflow."""
    name: str = ""
    """Name of the run there; empty is the last part of run.folder."""
    offline: bool = False
    """Keep everything on this machine, whatever the environment says: W&B in files to sync later, MLflow in mlflow.db
    next to the run folder.  TensorBoard and Trackio are always local."""
    completions: NonNegativeInt = 0
    """The first completions of each step to show, with reward and advantage; rollouts/ has all of them."""
