"""What a trainer saves: model folders, checkpoints, a model card, and the same on the hub.

As in transformers, a checkpoint is `checkpoint-N` in output_dir, N in updates: a link to the run's
`checkpoints/step-M`.  A model's files are written into it too, so that transformers and peft load it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerState

from posttrain.errors import RunError, UserError
from posttrain.models.adapters.peft_layers import adapted_names
from posttrain.models.loading.construction import without_progress_bars
from posttrain.models.loading.saving import require_loadable, save_adapter, save_policy
from posttrain.models.policy import Policy
from posttrain.runs.checkpoint import discard
from posttrain.runs.files import NAME, saved_steps, write_atomically, writing
from posttrain.runs.tensor_state import trained_names, untied
from posttrain.schemas import did_you_mean
from posttrain.trl.configs.recipe import folder_of_run
from posttrain.trl.configs.training_fields import TrainingFields
from posttrain.trl.model_source import named_folder
from posttrain.trl.names_elsewhere import CheckedOverrides, overrides

STATE_FILE = "trainer_state.json"
HEADER = {
    "dataset_name": "datasets",
    "dataset": "datasets",
    "dataset_tags": "datasets",
    "finetuned_from": "base_model",
    "language": "language",
    "license": "license",
    "tasks": "pipeline_tag",
    "dataset_args": "dataset_args",
}
"""Arguments of TRL's and transformers' cards, and where they go in the header."""
KNOWN = ("model_name", "tags", *HEADER)


def save_model_folder(policy: Policy, folder: Path) -> None:
    """Write the model, or only the adapter if one is trained, with the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (save_adapter if adapted_names(policy.model) else save_policy)(policy, folder)
    require_loadable(policy.model, folder)


def save_into_checkpoint(policy: Policy, checkpoint: Path) -> None:
    """Make a checkpoint a folder that from_pretrained reads.  Raises RunError if it cannot be read."""
    named = untied(policy.model)
    if adapted_names(policy.model):
        save_adapter(policy, checkpoint)
    elif trained_names(policy.model, named) != named.keys():
        save_policy(policy, checkpoint)  # the frozen weights are not there
    else:
        # The checkpoint has all weights: the other files of a model's folder are added.
        model, weights = policy.model, checkpoint / "model.safetensors"
        if not weights.exists():
            os.link(checkpoint / "policy.safetensors", weights)
        with without_progress_bars():
            model.config.save_pretrained(checkpoint)
            if model.can_generate() and model.generation_config is not None:
                model.generation_config.save_pretrained(checkpoint)
            policy.tokenizer.save_pretrained(checkpoint)
    require_loadable(policy.model, checkpoint)


def link_checkpoint(run: Path, checkpoint: Path, num_updates: int) -> None:
    """Link `checkpoint-N` to a checkpoint, and remove links to deleted checkpoints; other folders stay."""
    link = run / f"checkpoint-{num_updates}"
    with writing(link, run):
        remove_dangling(run)
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(checkpoint.relative_to(run))


def remove_dangling(run: Path) -> None:
    for each in run.glob("checkpoint-*"):
        if each.is_symlink() and not each.exists():
            each.unlink()


def prune_checkpoints(folder: Path, args: TrainingFields, best: str | None) -> None:
    """Keep the newest `save_total_limit` checkpoints, and always the best and the last."""
    limit = args.save_total_limit or 0
    if limit <= 0 or args.metric_for_best_model is None:
        return
    steps = saved_steps(folder)
    kept = {max(steps), *(step for step, path in steps.items() if best is not None and path.samefile(best))}
    for step in [each for each in steps if each not in kept][: max(0, len(steps) - max(limit, len(kept)))]:
        discard(steps[step])


def write_trainer_state(state: TrainerState, folder: Path) -> None:
    """Write the state for transformers' `TrainerState.load_from_json`."""
    content = json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"
    write_atomically(folder / STATE_FILE, content.encode())


def saved_state(checkpoints: Path, step: int | None) -> TrainerState:
    """The state when a step was saved (None: the last step); a new state if the file is missing."""
    steps = saved_steps(checkpoints)
    file = steps.get(step if step is not None else max(steps, default=0), checkpoints) / STATE_FILE
    if not file.is_file():
        return TrainerState()
    state: TrainerState = TrainerState.load_from_json(str(file))
    if state.best_model_checkpoint is not None and not Path(state.best_model_checkpoint).is_dir():
        state.best_model_checkpoint = None
    return state


def resume_step(given: str | bool | None, folder: Path) -> tuple[bool, int | None]:
    """Whether a run is resumed, and from which step's checkpoint; None: the last."""
    if given is None or given is False:
        return False, None
    field = f"resume_from_checkpoint = {given}"
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{field}: output_dir = {folder} does not contain a run.  Leave it out the first time.")
    if given is True:
        return True, None
    path = Path(given).resolve()  # `checkpoint-500` leads to `checkpoints/step-000500`
    found = NAME.fullmatch(path.name)
    if found is None or folder.resolve() not in path.parents:
        remedy = f"Give True for its last, or {folder}/checkpoint-100."
        raise UserError(f"{field}: not a checkpoint of the run in {folder}.  {remedy}")
    return True, int(found[1])


class ModelWriter(CheckedOverrides):
    """What a trainer saves: its model, metrics and a card, and the same on the hub."""

    policy: Policy
    args: TrainingFields
    _tag_names: Sequence[str] = ()
    """Tags that a script's own trainer adds to a model card."""

    @property
    def folder(self) -> Path:
        return Path(folder_of_run(self.args))

    @property
    def hub_model_id(self) -> str:
        """The name on the hub that `push_to_hub` uploads to; default: the folder's name."""
        return self.args.hub_model_id or self.folder.resolve().name

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write numbers to SPLIT_results.json in the folder of the run, and with `combined` into all_results.json."""
        self.folder.mkdir(parents=True, exist_ok=True)
        given = {f"{split}_results.json": dict(metrics)}
        if combined:
            file = self.folder / "all_results.json"
            earlier = json.loads(file.read_bytes()) if file.is_file() else {}
            given[file.name] = {**earlier, **metrics}
        for name, content in given.items():
            write_atomically(self.folder / name, json.dumps(content, indent=4, sort_keys=True).encode())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or only the adapter if one is trained, with the tokenizer, for from_pretrained.

        A script's override also writes the files of checkpoints: as in transformers, `_internal_call` is then True.
        """
        self.write_model(Path(output_dir) if output_dir else self.folder)

    def write_model(self, folder: Path) -> None:
        save_model_folder(self.policy, folder)

    def write_checkpoint_model(self, folder: Path) -> None:
        save_into_checkpoint(self.policy, folder)

    def _save_checkpoint_model(self, checkpoint: Path) -> None:
        if overrides(self, "save_model"):
            self.save_model(str(checkpoint), _internal_call=True)
        else:
            self.write_checkpoint_model(checkpoint)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | Sequence[str] | None = None
    ) -> None:
        """Write README.md into the run's folder: the base model, the data, the tags and how it was trained."""
        given = {"model_name": model_name, "dataset_name": dataset_name, "tags": tags}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_card(self.folder, given)

    def _write_card(self, folder: Path, given: Mapping[str, object]) -> None:
        """A card in Markdown."""
        for name in given:
            if name not in KNOWN:
                raise UserError(f"a model card has no {name!r}.  {did_you_mean(name, KNOWN)}")
        trainer, base = type(self).__name__, named_folder(self.policy.model)
        found: dict[str, object] = {"library_name": "transformers", **({"base_model": base} if base else {})}
        found |= {HEADER[name]: value for name, value in given.items() if name in HEADER and value is not None}
        more: Any = given.get("tags") or ()
        tags = ["posttrain", trainer.removesuffix("Trainer").lower(), *self._tag_names]
        found["tags"] = list(dict.fromkeys([*tags, *([more] if isinstance(more, str) else more)]))
        data = f" on {found['datasets']}" if "datasets" in found else ""
        text = (
            f"---\n{yaml.safe_dump(found, sort_keys=False)}---\n\n# {given.get('model_name') or 'Model card'}\n\n"
            f"{base or 'A model'} was trained{data} with the {trainer} of posttrain {version('posttrain')}.\n"
        )
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
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP library, whichever

        private = card.pop("private", None)
        private = self.args.hub_private_repo if private is None else private
        if not blocking:
            print("posttrain.trl: blocking = False: push_to_hub returns when the model is uploaded.", flush=True)
        folder, name, revision = self.folder / "pushed", self.hub_model_id, revision or self.args.hub_revision
        self.write_model(folder)
        self._write_card(folder, card)
        message = commit_message or "End of training"
        try:
            hub = HfApi(token=token or self.args.hub_token)
            made = hub.create_repo(name, private=private, exist_ok=True)
            if revision:
                hub.create_branch(made.repo_id, branch=revision, exist_ok=True)
            hub.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message, revision=revision)
        except (HTTPError, OSError) as error:  # OSError: no token, offline by an environment variable
            reason = " ".join(str(error).split())[:200]
            remedy = f"It can be pushed later: huggingface-cli upload {name} {folder}."
            raise RunError(f"push_to_hub: {name} could not be written to the hub ({reason}).  {remedy}") from error
        return str(made)
