"""The critic of an actor-critic algorithm: a value head on the policy's trunk, or on a separate trunk.

Before each token of a completion it predicts what the completion will earn.  On disk:

critic/value_head.safetensors    widening.weight, widening.bias, output.weight, output.bias
critic/config.json ...           a separate trunk, as transformers reads it
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Bool, Float, Float64
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.batch import Batch, completions_of
from posttrain.errors import UserError
from posttrain.models.adapters.quantized import stays_quantised
from posttrain.models.classifiers.heads import ValueHead
from posttrain.models.classifiers.last_token_scores import ScoredBody, scored_body
from posttrain.models.forward import ForwardNeeds
from posttrain.models.loading.folder_kinds import is_classifier_folder
from posttrain.models.loading.model_folder import load_beside
from posttrain.models.loading.saving import require_loadable, save_policy, whole_folder
from posttrain.models.model_outputs import trunk as without_output_layer
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt.fused import gradients_in_place
from posttrain.options.algorithm import CriticOptions
from posttrain.options.model import ModelOptions
from posttrain.records import Group, Rollout
from posttrain.runs.tensor_state import Tensors, module_tensors, refuse_mismatch, restore_module, shapes, untied
from posttrain.training.optimizer import POLICY, ParameterGroup
from posttrain.training.reference import require_same_tokens

CRITIC = "critic"
"""Its name as a parameter group, and as a file of a checkpoint."""
HEAD_FILE = "value_head.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedValues:
    """Predictions for some groups."""

    values: Float64[Tensor, " token"]
    """Before each sampled token."""
    final_values: Float64[Tensor, "prompt group"]
    """After the last token of each completion that was cut off; 0 for the others."""


class Critic:
    """A value head and the trunk that it reads."""

    def __init__(self, policy: Policy, options: CriticOptions, *, seed: int) -> None:
        """A new one, or that of `options.path`.  Raises UserError if that does not fit this policy."""
        self.policy, self.options = policy, options
        found = own_trunk(policy, options)
        self.own_trunk: Policy | None = None if found is None else found.body
        """The model that the head reads; None reads the policy."""
        if options.path and self.own_trunk is None:
            require_head_of_policy(options.path)
        self.head = ValueHead(
            self.trunk.hidden_width,
            options.head,
            seed=seed,
            dtype=torch.promote_types(policy.model.dtype, torch.float32),
        ).to(policy.device)
        score = None if found is None else found.score
        self.begun = score is not None or (bool(options.path) and has_head(options.path))
        """Whether the head was trained before; a new one starts from the mean reward."""
        if score is not None:
            self.head.load_score(score)
        elif self.begun:
            loaded_head(self.head, options.path)

    @property
    def trunk(self) -> Policy:
        return self.policy if self.own_trunk is None else self.own_trunk

    def values(self, hidden: Float[Tensor, "token hidden"]) -> Float[Tensor, " token"]:
        """A value for each hidden state; its gradient stops at a shared trunk unless `through_trunk`."""
        whole = self.options.through_trunk or self.own_trunk is not None
        return cast(Tensor, self.head(hidden if whole else hidden.detach()))

    def values_of(self, micro: Batch) -> Float[Tensor, " token"]:
        with gradients_in_place():
            return self._values(micro)

    @torch.no_grad()
    def of_groups(self, groups: Sequence[Group], *, max_tokens: int) -> CollectedValues:
        with_ends = completions_of([replace(group, rollouts=tuple(map(with_end, group.rollouts))) for group in groups])
        budget = with_ends.split(max_tokens, padded=self.trunk.forward.padded)
        found = torch.cat([self._values(micro).double().cpu() for micro in budget])
        is_end, truncated = ends_of(groups), truncated_of(groups)
        final = torch.zeros(truncated.shape, dtype=torch.float64)
        final[truncated] = found[is_end]
        return CollectedValues(values=found[~is_end], final_values=final)

    def _values(self, micro: Batch) -> Float[Tensor, " token"]:
        found = self.trunk.forward.completion_logprobs(micro, ForwardNeeds(logprobs=False, values=self.values)).values
        assert found is not None
        return found

    @property
    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        yield "head", self.head
        if self.own_trunk is not None:
            yield "trunk", without_output_layer(self.own_trunk.model)

    @property
    def parameter_group(self) -> ParameterGroup:
        return ParameterGroup(
            module=CRITIC,
            parameters=[each for _, module in self.modules for each in module.parameters() if each.requires_grad],
            rate_scale=self.options.rate_scale,
            max_grad_norm=self.options.max_grad_norm,
        )

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": tensor for name, module in self.modules for key, tensor in module_tensors(module).items()
        }

    def restore(self, tensors: Tensors) -> None:
        refuse_mismatch("the critic", shapes(self.tensors()), tensors)
        for name, module in self.modules:
            own = {key.removeprefix(f"{name}."): each for key, each in tensors.items() if key.startswith(f"{name}.")}
            restore_module(module, own)


def own_trunk(policy: Policy, options: CriticOptions) -> ScoredBody | None:
    """The critic's separate model, with its score if it is a reward model's; None if the head reads the policy.

    A copy of the policy shares the weights that are not trained, and the output layer, which a critic does not use.
    """
    size = sum(each.numel() for each in policy.model.parameters())
    if not options.has_own_trunk(size):
        return None
    loaded = loaded_trunk(options.path, policy) if options.path else None
    if loaded is not None:
        return loaded
    if stays_quantised(policy.model):
        raise UserError(
            f"algorithm.critic.trunk = {options.trunk}: would copy a policy whose weights are stored quantised.  Set it"
            " to shared.  Give the folder of the unquantised model as model.path to copy it."
        )
    trained = {id(each) for each in without_output_layer(policy.model).parameters() if each.requires_grad}
    kept = {id(each): each for each in policy.model.parameters() if id(each) not in trained}
    model, forward = copy.deepcopy((policy.model, policy.forward), kept)
    return ScoredBody(replace(policy, model=model, forward=forward), None)


def with_end(rollout: Rollout) -> Rollout:
    """If it was cut off, the completion with one more sampled token, so that the state after its last is valued too."""
    if not rollout.finish.cut_off:
        return rollout
    sequence = rollout.sequence
    tokens = (*sequence.tokens, sequence.tokens[-1])
    logprobs = (*sequence.logprobs, 0.0)
    longer = replace(sequence, tokens=tokens, sampled=(*sequence.sampled, True), logprobs=logprobs)
    return replace(rollout, sequence=longer)


def ends_of(groups: Sequence[Group]) -> Bool[Tensor, " token"]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return torch.tensor([t == each.num_sampled for each in rollouts for t in range(with_end(each).num_sampled)])


def truncated_of(groups: Sequence[Group]) -> Bool[Tensor, "prompt group"]:
    return torch.tensor([[rollout.finish.cut_off for rollout in group.rollouts] for group in groups])


def trained_groups(
    policy: Policy, critic: Critic | None, given: Sequence[ParameterGroup]
) -> Sequence[ParameterGroup] | Iterable[nn.Parameter]:
    if critic is None:
        return given or policy.model.parameters()
    own = given or [ParameterGroup(module=POLICY, parameters=list(policy.model.parameters()))]
    return [*own, critic.parameter_group]


def save_critic(head: ValueHead, own_trunk: Policy | None, folder: Path) -> None:
    with whole_folder(folder) as made:
        if own_trunk is not None:
            save_policy(own_trunk, made)
        save_file({name: each.detach().cpu().contiguous() for name, each in untied(head).items()}, made / HEAD_FILE)
    if own_trunk is not None:
        require_loadable(own_trunk.model, folder)


def has_head(path: str) -> bool:
    return (Path(path) / HEAD_FILE).is_file()


def saved_options(path: str) -> CriticOptions:
    """The options that load a saved critic; not those that it was trained with."""
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
            " RUN/critic of a run, or set trunk = own to read the folder's model, such as a reward model."
        )
    if (Path(path) / "config.json").is_file():
        raise UserError(f"{where}: its head reads the model in that folder, not the policy.  Set critic.trunk = own.")


def loaded_head(head: ValueHead, path: str) -> None:
    """Be the head of a folder.  Raises UserError where that is of another shape."""
    saved, own = load_file(Path(path) / HEAD_FILE), untied(head)
    there = {name: [*each.shape] for name, each in saved.items()}
    if there != {name: [*each.shape] for name, each in own.items()}:
        raise UserError(
            f"algorithm.critic.path = {path}: its head is {there}, and critic.head = {head.kind} over this model has"
            f" {own['output.weight'].shape[-1]} channels.  Use the head and the model width that it was trained with."
        )
    head.load_state_dict(saved)


def loaded_trunk(path: str, policy: Policy) -> ScoredBody | None:
    """The model of a folder, with its score if it is a reward model's; None if the folder only holds a head."""
    if has_head(path) and not (Path(path) / "config.json").is_file():
        return None
    if is_classifier_folder(ModelOptions(path=path).folder):
        return scored_body(policy, path, option="algorithm.critic.path")
    model = load_beside(policy, path, option="algorithm.critic.path", inference=False)
    require_same_tokens(policy, model, f"algorithm.critic.path = {path}")
    return ScoredBody(model, None)
