"""`trainer.lr_scheduler` where the schedule is that of the arguments: the rates that the run has set, to read."""

from torch.optim import Optimizer


class RunRates:
    """The learning rates of a run's optimiser; the run sets them itself before each update."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def get_last_lr(self) -> list[float]:
        """The rate of each parameter group in the last update; before the first, the one to begin with."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, list[float]]:
        """The same under the name that schedulers of torch have for it."""
        return {"_last_lr": self.get_last_lr()}
