"""What a trainer writes: a folder that from_pretrained reads, and the same on the hub."""

import re
from pathlib import Path

from posttrain.errors import RunError, UserError
from posttrain.models.adapters.peft_layers import adapted_names
from posttrain.models.loading.saving import save_adapter, save_policy
from posttrain.models.policy import Policy
from posttrain.trl.fields.training_fields import TrainingFields


def save(policy: Policy, folder: Path) -> None:
    """The model, or the adapter alone where one is trained, with the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (save_adapter if adapted_names(policy.model) else save_policy)(policy, folder)


def require_free(folder: Path, args: TrainingFields) -> None:
    """Refuse the folder of another run, unless it may be deleted."""
    if (folder / "config.yaml").is_file() and not args.overwrite_output_dir:
        raise UserError(
            f"output_dir = {folder}: there is a run in it already.  Go on with it, resume_from_checkpoint=True; or give"
            " another folder, or overwrite_output_dir=True, which deletes that run."
        )


def push(folder: Path, args: TrainingFields, message: str) -> str:
    """Upload a folder to the hub; returns where it is."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP library, whichever that is

    name = args.hub_model_id or Path(args.output_dir or folder).resolve().name
    try:
        hub = HfApi(token=args.hub_token)
        made = hub.create_repo(name, private=args.hub_private_repo, exist_ok=True)
        hub.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message, revision=args.hub_revision)
    except (HTTPError, OSError) as error:  # OSError: no token, offline by an environment variable
        raise RunError(
            f"push_to_hub: {name} could not be written to the hub ({' '.join(str(error).split())[:200]}).  The model is"
            f" in {folder}; it can be pushed later: huggingface-cli upload {name} {folder}."
        ) from error
    return str(made)


def resume_step(given: str | bool | None, folder: Path) -> tuple[bool, int | None]:
    """Whether a run is resumed, and from which step's checkpoint; None is the last."""
    if given is None or given is False:
        return False, None
    if not (folder / "config.yaml").is_file():
        raise UserError(
            f"resume_from_checkpoint = {given}: {folder} (output_dir) holds no run to go on with.  Leave it out the"
            " first time."
        )
    if given is True:
        return True, None
    found = re.fullmatch(r"(?:step|checkpoint)-(\d+)", Path(given).name)
    if found is None or folder.resolve() not in Path(given).resolve().parents:
        raise UserError(
            f"resume_from_checkpoint = {given}: no checkpoint of the run in {folder}.  Give True for its last, or a"
            f" folder such as {folder}/checkpoints/step-000100."
        )
    return True, int(found[1])
