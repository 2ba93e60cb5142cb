"""What the trainers share: the policy and the callbacks, and the methods that scripts call beside train."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import PreTrainedModel, TrainerState

from posttrain.runs.files import write_atomically
from posttrain.runs.reports import Run
from posttrain.trl.as_config import folder_of_run
from posttrain.trl.best_model import saved_state, write_state
from posttrain.trl.callback_watcher import Events, made_callback
from posttrain.trl.fields.field_rules import Rules, lines_about, require_numbers
from posttrain.trl.fields.told_in_fields import told_in_fields
from posttrain.trl.fields.training_fields import TrainingFields
from posttrain.trl.log_entries import Entry
from posttrain.trl.model_source import ModelSource, loaded
from posttrain.trl.saved_models import push, save

Args = TypeVar("Args", bound=TrainingFields)


class TrainerMethods(Generic[Args]):
    """A model, loaded, and the callbacks; what TRL reads otherwise is told when it is made, and kept in `notes`."""

    def __init__(self, source: ModelSource, args: Args, rules: Rules, callbacks: Sequence[object] | None) -> None:
        self.args, self.rules = args, rules
        require_numbers(args, rules)
        self.notes = list(lines_about(args, rules))
        with told_in_fields(args, rules):
            self.policy, self.model_options, notes = loaded(source, args)
        self.notes += notes
        self.processing_class = self.policy.tokenizer
        self.events = Events(args=args, policy=self.policy, callbacks=[made_callback(each) for each in callbacks or ()])
        self.run: Run | None = None
        """The run that train() made: its folder and its summary."""

    def tell(self) -> None:
        """Print the notes, and tell the callbacks that the trainer is made."""
        for note in self.notes:
            print(f"posttrain.trl: {note}", flush=True)
        self.events.tell("on_init_end")

    @property
    def model(self) -> PreTrainedModel:
        """What is trained."""
        return self.policy.model

    @property
    def state(self) -> TrainerState:
        """How far training is, and `log_history`."""
        return self.events.state

    @property
    def folder(self) -> Path:
        """Of the run: output_dir."""
        return Path(folder_of_run(self.args))

    def _begin(self, from_step: int | None, *, resume: bool) -> None:
        """Have the state be that of the checkpoint a run goes on from, or that of a run which begins."""
        checkpoints = self.folder / "checkpoints"
        self.events.begin(saved_state(checkpoints, from_step) if resume else TrainerState())

    def is_world_process_zero(self) -> bool:
        """Whether this is the process that writes: it is the only one."""
        return True

    def save_state(self) -> None:
        """Write `state` to trainer_state.json in the folder of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_state(self.state, self.folder)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print numbers of a part of the data ("train", "eval"), a line each."""
        width = max(map(len, metrics), default=0)
        print(f"posttrain.trl: {split} metrics", flush=True)
        for name in sorted(metrics):
            value = metrics[name]
            print(f"  {name:<{width}} = {value:.4g}" if isinstance(value, float) else f"  {name:<{width}} = {value}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write numbers to SPLIT_results.json in the folder of the run, and with `combined` into all_results.json."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / f"{split}_results.json", metrics)
        if combined:
            file = self.folder / "all_results.json"
            earlier = json.loads(file.read_bytes()) if file.is_file() else {}
            write_json(file, {**earlier, **metrics})

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model, or the adapter alone where one is trained, with the tokenizer, for from_pretrained."""
        save(self.policy, Path(output_dir) if output_dir else self.folder)

    def push_to_hub(self, commit_message: str = "End of training") -> str:
        """Upload the trained model to the hub, as `hub_model_id`; returns where it is."""
        folder = self.folder / "pushed"
        save(self.policy, folder)
        return push(folder, self.args, commit_message)

    def add_callback(self, callback: Any) -> None:
        """One callback more, an object or a class."""
        self.events.add(callback)

    def remove_callback(self, callback: Any) -> None:
        """One less, given as the object or by its class."""
        self.events.remove(callback)

    def log(self, logs: Entry) -> None:
        """An entry of your own in `state.log_history`, told to the callbacks."""
        self.events.log(logs)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a mapping, its names in order."""
    write_atomically(file, json.dumps(dict(content), indent=4, sort_keys=True).encode())
