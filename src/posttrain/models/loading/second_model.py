"""A model beside the policy: a reference, a teacher, the trunk of a critic."""

from posttrain.errors import UserError
from posttrain.models.loading.model_folder import load_policy, load_policy_to_train
from posttrain.models.policy import Policy
from posttrain.options.model import ModelOptions


def load_beside(policy: Policy, path: str, *, option: str, inference: bool = True) -> Policy:
    """The model that an option such as `reference.path` names, on the device that the policy is on.

    Without `inference` it is trained, and saved whole.
    Raises UserError, of that option, where it is none that can be loaded.
    """
    options = ModelOptions(path=path, device="cuda" if policy.device.type == "cuda" else "cpu")
    try:
        if inference:
            return load_policy(options, inference=True)
        return load_policy_to_train(options, saves_whole=True, may_adapt=False)
    except UserError as error:  # which speaks of the section `model`
        if "model.path = " not in str(error):
            raise
        raise UserError(str(error).replace("model.path = ", f"{option} = ")) from error
