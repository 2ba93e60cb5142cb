"""A critic on the disk: RUN/critic holds its head, and where it has a trunk of its own that as a plain model folder.

critic/value_head.safetensors    widening.weight, widening.bias, output.weight, output.bias
critic/config.json ...           the trunk, as transformers reads it; not there where it is the policy's
"""

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from posttrain.errors import UserError
from posttrain.models.classifiers.heads import ValueHead
from posttrain.models.classifiers.last_token_scores import ScoredBody, scored_body
from posttrain.models.loading.folder_kinds import is_classifier_folder
from posttrain.models.loading.saving import require_loadable, save_policy, whole_folder
from posttrain.models.loading.tokenizer_folder import load_beside
from posttrain.models.policy import Policy
from posttrain.options.critic import CriticOptions
from posttrain.options.model import ModelOptions
from posttrain.runs.tensor_state import untied
from posttrain.training.reference import require_same_tokens

HEAD_FILE = "value_head.safetensors"


def save_critic(head: ValueHead, own_trunk: Policy | None, folder: Path) -> None:
    """Write the head and, if it has one, its own trunk.  Raises RunError where that could not be loaded again."""
    with whole_folder(folder) as made:
        if own_trunk is not None:
            save_policy(own_trunk, made)
        save_file({name: each.detach().cpu().contiguous() for name, each in untied(head).items()}, made / HEAD_FILE)
    if own_trunk is not None:
        require_loadable(own_trunk.model, folder)


def has_head(path: str) -> bool:
    """Whether a folder holds a value head."""
    return (Path(path) / HEAD_FILE).is_file()


def saved_options(path: str) -> CriticOptions:
    """The options that load a critic as its folder holds it.

    Of its training they say nothing: neither its rate nor what it started from.
    """
    with safe_open(Path(path) / HEAD_FILE, framework="pt") as head:
        is_mlp = any(name.startswith("widening.") for name in head.keys())  # noqa: SIM118
    own_trunk = (Path(path) / "config.json").is_file()
    return CriticOptions(path=path, trunk="own" if own_trunk else "shared", head="mlp" if is_mlp else "linear")


def require_head_of_policy(path: str) -> None:
    """Refuse a folder for a head on the policy's own trunk that holds none, or one that reads another trunk."""
    where = f"algorithm.critic.path = {path}"
    if not has_head(path):
        raise UserError(
            f"{where}: holds no {HEAD_FILE}, and the head reads the policy here (critic.trunk).  Give the folder"
            " RUN/critic of a run, or say trunk = own to have the folder's model, such as a reward model, read beside"
            " the policy."
        )
    if (Path(path) / "config.json").is_file():
        raise UserError(
            f"{where}: its head reads the model that lies there, and not the policy (critic.trunk).  Say trunk = own."
        )


def loaded_head(head: ValueHead, path: str) -> None:
    """Be the head of a folder.  Raises UserError where that is of another shape."""
    saved, own = load_file(Path(path) / HEAD_FILE), untied(head)
    there = {name: [*each.shape] for name, each in saved.items()}
    if there != {name: [*each.shape] for name, each in own.items()}:
        raise UserError(
            f"algorithm.critic.path = {path}: its head is {there}, and critic.head = {head.kind} over this model has"
            f" {own['output.weight'].shape[-1]} channels before the output.  Give critic.head as it was trained, and a"
            " model of the same width."
        )
    head.load_state_dict(saved)


def loaded_trunk(path: str, policy: Policy) -> ScoredBody | None:
    """The model of a folder, for a policy's tokens, with its score if it is a reward model's.

    None where the folder holds a head alone.
    """
    if has_head(path) and not (Path(path) / "config.json").is_file():
        return None
    if is_classifier_folder(ModelOptions(path=path).folder):
        return scored_body(policy, path, option="algorithm.critic.path")
    model = load_beside(policy, path, option="algorithm.critic.path", inference=False)
    require_same_tokens(policy, model, f"algorithm.critic.path = {path}")
    return ScoredBody(model, None)
