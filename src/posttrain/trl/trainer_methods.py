"""What the trainers share: the policy and the callbacks, and the methods that scripts call besides train."""

import json
from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState

from posttrain.errors import UserError
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.adapters.peft_layers import peft_layers
from posttrain.runs.files import write_atomically
from posttrain.runs.reports import Run
from posttrain.trl import saved_models
from posttrain.trl.callback_watcher import Events, made_callback
from posttrain.trl.configs.field_rules import config_from, errors_by_field, lines_about, require_values
from posttrain.trl.configs.recipe import folder_of_run
from posttrain.trl.configs.training_fields import OneProcess, TrainingFields
from posttrain.trl.log_entries import Entry
from posttrain.trl.model_source import Given, Row, is_peft_model, load_source, named_folder
from posttrain.trl.names_elsewhere import MISSING, CheckedOverrides, overrides, require_called

Args = TypeVar("Args", bound=TrainingFields)


class TrainerMethods(CheckedOverrides, Generic[Args]):
    """The loaded model and the callbacks.  `notes` lists what TRL would do differently."""

    settable = frozenset({"train_dataset", "eval_dataset"})
    not_called = frozenset(
        {"accelerator", "is_deepspeed_enabled", "is_fsdp_enabled", "is_model_parallel"}
        | {"create_model_card", "get_eval_dataloader", "get_train_dataloader", "save_metrics", "save_state"}
    )
    is_deepspeed_enabled = is_fsdp_enabled = is_model_parallel = False
    config_class: ClassVar[type[TrainingFields]]
    _tag_names: Sequence[str] = ()
    """Tags that a script's own trainer adds to a model card."""

    def __init__(self, given: Given, args: Args) -> None:
        require_called(type(self))  # a class may have been patched since it was made
        args, self.notes = config_from(args, cast(type[Args], self.config_class))
        self.args = args
        require_values(args)
        self.notes += lines_about(args)
        with errors_by_field(args):
            self.policy, self.loaded_model, self.model_options = load_source(given, args, self.notes)
        self.processing_class = self.policy.tokenizer
        self.events = Events(
            args=args,
            model=lambda: self.model,
            processing_class=self.policy.tokenizer,
            callbacks=[made_callback(each) for each in given.callbacks or ()],
            log_step=lambda entry, start_time: self.log(entry, start_time),
            save_model=self._save_checkpoint_model,
        )
        self.run: Run | None = None

    def _finish_init(self) -> None:
        for note in self.notes:
            print(f"posttrain.trl: {note}", flush=True)
        self.made = True
        self.events.call("on_init_end")

    @property
    def model(self) -> nn.Module:
        """With an adapter a PeftModel around the policy, or around a classifier of its layers."""
        return self._shown_model

    @cached_property
    def _shown_model(self) -> nn.Module:
        policy, loaded = self.policy.model, self.loaded_model
        adapted = lora_layers(policy) or (loaded is not policy and peft_layers(policy))
        if not adapted or is_peft_model(loaded) or find_spec("peft") is None:
            return loaded
        from posttrain.trl.peft_models import with_peft_around

        return with_peft_around(policy, cast(PreTrainedModel, loaded))

    @property
    def model_wrapped(self) -> nn.Module:
        return self.model

    @property
    def control(self) -> TrainerControl:
        return self.events.control

    @property
    def accelerator(self) -> OneProcess:
        """The only process, with the attributes of accelerate that scripts read."""
        return OneProcess(self.policy.device)

    @property
    def hub_model_id(self) -> str:
        """The name on the hub that `push_to_hub` uploads to: by default that of the folder."""
        return self.args.hub_model_id or self.folder.resolve().name

    @property
    def state(self) -> TrainerState:
        return self.events.state

    @property
    def folder(self) -> Path:
        return Path(folder_of_run(self.args))

    def is_world_process_zero(self) -> bool:
        return True

    is_local_process_zero = is_world_process_zero

    def get_num_trainable_parameters(self) -> int:
        return sum(each.numel() for each in self.model.parameters() if each.requires_grad)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The rows in batches of a device, in order, for scripts to read; training draws its batches itself."""
        return loader(cast(Any, self).train_dataset, "train_dataset", self.args.per_device_train_batch_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The same for the evaluation rows; a name selects one of several data sets."""
        given = cast(Any, self).eval_dataset
        if eval_dataset is not None:
            given = given[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        return loader(given, "eval_dataset", self.args.per_device_eval_batch_size)

    def save_state(self) -> None:
        """Write `state` to trainer_state.json in the folder of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        saved_models.write_state(self.state, self.folder)

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

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or only the adapter where one is trained, with the tokenizer, for from_pretrained.

        A script's override also writes the files of checkpoints: as in transformers, `_internal_call` is then True.
        """
        self.write_model(Path(output_dir) if output_dir else self.folder)

    def write_model(self, folder: Path) -> None:
        saved_models.save_model_folder(self.policy, folder)

    def write_checkpoint_model(self, folder: Path) -> None:
        saved_models.save_into_checkpoint(self.policy, folder)

    def _save_checkpoint_model(self, checkpoint: Path) -> None:
        if overrides(self, "save_model"):
            self.save_model(str(checkpoint), _internal_call=True)
        else:
            self.write_checkpoint_model(checkpoint)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | Sequence[str] | None = None
    ) -> None:
        """Write README.md into the folder of the run: the base model, the data, the tags and how it was trained."""
        given = {"model_name": model_name, "dataset_name": dataset_name, "tags": tags}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_card(self.folder, given)

    def _write_card(self, folder: Path, given: Mapping[str, object]) -> None:
        base = named_folder(self.policy.model)
        text = saved_models.trainer_card(given, trainer=type(self).__name__, base=base, tags=self._tag_names)
        write_atomically(folder / "README.md", text.encode())

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> str:
        """Upload the trained model to the hub, as `hub_model_id`; returns where it is when it is there.

        `card` is what its README.md says: model_name, dataset_name, tags; and `private`, of the hub.
        """
        private = card.pop("private", None)
        if not blocking:
            print("posttrain.trl: blocking = False: push_to_hub returns when the model is uploaded.", flush=True)
        folder = self.folder / "pushed"
        self.write_model(folder)
        self._write_card(folder, card)
        return saved_models.push(
            folder,
            self.hub_model_id,
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            private=self.args.hub_private_repo if private is None else private,
            message=commit_message or "End of training",
        )

    def add_callback(self, callback: Any) -> None:
        self.events.callbacks.append(made_callback(callback))

    def remove_callback(self, callback: Any) -> None:
        self.pop_callback(callback)

    def pop_callback(self, callback: Any) -> TrainerCallback:
        callbacks = self.events.callbacks
        found = next((each for each in callbacks if each is callback or type(each) is callback), None)
        if found is None:
            raise UserError(f"remove_callback: {callback!r:.60} is not one of the trainer's callbacks.")
        callbacks.remove(found)
        return found

    def log(self, logs: Entry, start_time: float | None = None) -> None:
        """Add an entry to `state.log_history` and call `on_log`.  Training calls a script's override.

        `start_time` is when training began, in seconds since 1970.
        """
        self.events.log(logs)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    write_atomically(file, json.dumps(dict(content), indent=4, sort_keys=True).encode())


def loader(given: object, name: str, size: int) -> DataLoader[Any]:
    return DataLoader(cast(Any, rows_of_dataset(given, name, most=size)), batch_size=size, collate_fn=list)


def rows_of_dataset(given: object, name: str, *, most: int | None) -> list[Row]:
    """The rows; of what has no length, such as a stream, as many as a run can draw."""
    kind = type(given).__name__
    if isinstance(given, Mapping):
        names = ", ".join(map(str, given))
        raise UserError(f"{name}: a {kind} of {names} is given.  Give one of them: {name}=data[{next(iter(given))!r}].")
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise UserError(f"{name}: {given!r:.60} ({kind}) is given.  Give a datasets.Dataset or a list of dicts.")
    if not isinstance(given, Sized) and most is None:
        remedy = "set max_steps, which ends the run" if name == "train_dataset" else "give a list: list(data.take(100))"
        raise UserError(f"{name}: it has no length, so {remedy}.")
    rows = list(given) if isinstance(given, Sized) else list(islice(given, most))
    if not rows:
        raise UserError(f"{name}: it is empty.  Give at least one row.")
    if (other := next((row for row in rows if not isinstance(row, Mapping)), MISSING)) is not MISSING:
        raise UserError(f"{name}: {other!r:.60} ({type(other).__name__}) is not a row.  Give dicts of columns.")
    return rows
