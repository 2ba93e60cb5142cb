"""What a trainer writes: a folder that from_pretrained reads, and the same on the hub."""

from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import RunError, UserError
from posttrain.models.adapters.peft_layers import adapted_names
from posttrain.models.loading.saving import require_loadable, save_adapter, save_policy
from posttrain.models.policy import Policy
from posttrain.runs.manifest import NAME
from posttrain.trl.fields.training_fields import TrainingFields


def save(policy: Policy, folder: Path) -> None:
    """The model, or only the adapter where one is trained, with the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (save_adapter if adapted_names(policy.model) else save_policy)(policy, folder)
    require_loadable(policy.model, folder)


def require_free(folder: Path, args: TrainingFields) -> None:
    """Refuse the folder of another run, unless it may be deleted."""
    if (folder / "config.yaml").is_file() and not args.overwrite_output_dir:
        raise UserError(
            f"output_dir = {folder}: there is a run in it already.  Continue it with resume_from_checkpoint=True, give"
            " another folder, or set overwrite_output_dir=True, which deletes that run."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTarget:
    """Where on the hub a model goes."""

    name: str
    token: str | None
    revision: str | None
    private: bool | None


def hub_name(folder: Path, args: TrainingFields) -> str:
    """The name on the hub: hub_model_id, or that of the folder of the run."""
    return args.hub_model_id or folder.resolve().name


def push(folder: Path, target: HubTarget, message: str) -> str:
    """Upload a folder to the hub; returns where it is."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP library, whichever that is

    name = target.name
    try:
        hub = HfApi(token=target.token)
        made = hub.create_repo(name, private=target.private, exist_ok=True)
        if target.revision:
            hub.create_branch(made.repo_id, branch=target.revision, exist_ok=True)
        hub.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message, revision=target.revision)
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
            f"resume_from_checkpoint = {given}: {folder} (output_dir) holds no run to continue.  Leave it out the"
            " first time."
        )
    if given is True:
        return True, None
    path = Path(given).resolve()  # `checkpoint-500` leads to `checkpoints/step-000500`
    found = NAME.fullmatch(path.name)
    if found is None or folder.resolve() not in path.parents:
        raise UserError(
            f"resume_from_checkpoint = {given}: not a checkpoint of the run in {folder}.  Give True for its last, or a"
            f" folder such as {folder}/checkpoint-100."
        )
    return True, int(found[1])
