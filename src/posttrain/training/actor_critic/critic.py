"""The critic of an actor-critic algorithm: a value head on the policy's trunk, or on a trunk of its own.

It expects, before each token of a completion, what the completion will earn.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn

from posttrain.batch import Batch, completions_of
from posttrain.errors import UserError
from posttrain.models.adapters.quantized import stays_quantised
from posttrain.models.classifiers.heads import ValueHead
from posttrain.models.classifiers.last_token_scores import ScoredBody
from posttrain.models.forward import ForwardNeeds
from posttrain.models.model_outputs import trunk as without_output_layer
from posttrain.models.policy import Policy
from posttrain.models.shared_prompt.gradients import gradients_in_place
from posttrain.options.critic import CriticOptions
from posttrain.records import Group, Rollout
from posttrain.runs.tensor_state import Tensors, module_tensors, refuse_mismatch, restore_module, shapes
from posttrain.training.actor_critic.critic_folder import has_head, loaded_head, loaded_trunk, require_head_of_policy
from posttrain.training.optimizer import POLICY, ParameterGroup

CRITIC = "critic"
"""Its name as a parameter group, and as a file of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedValues:
    """What the critic expected of some groups."""

    values: Float64[Tensor, " token"]
    """Before each sampled token of each completion."""
    final_values: Float64[Tensor, "prompt group"]
    """After the last token of each that was cut off; 0 for the others."""


class Critic:
    """A value head and what it reads."""

    def __init__(self, policy: Policy, options: CriticOptions, *, seed: int) -> None:
        """A new one, or what `options.path` holds.  Raises UserError where that is no critic for this policy."""
        self.policy, self.options = policy, options
        found = own_trunk(policy, options)
        self.own_trunk: Policy | None = None if found is None else found.body
        """The model that the head reads, where it is not the policy."""
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
        """Whether the head was trained before; a new one is first told the mean reward."""
        if score is not None:
            self.head.load_score(score)
        elif self.begun:
            loaded_head(self.head, options.path)

    @property
    def trunk(self) -> Policy:
        """Whose hidden states the head reads."""
        return self.policy if self.own_trunk is None else self.own_trunk

    def values(self, hidden: Float[Tensor, "token hidden"]) -> Float[Tensor, " token"]:
        """What is expected at each hidden state of the trunk, with the gradient that the options allow."""
        whole = self.options.through_trunk or self.own_trunk is not None  # which nothing else trains
        return cast(Tensor, self.head(hidden if whole else hidden.detach()))

    def values_of(self, micro: Batch) -> Float[Tensor, " token"]:
        """The same of a micro-batch's tokens, through the critic's own trunk."""
        with gradients_in_place():
            return self._values(micro)

    @torch.no_grad()
    def of_groups(self, groups: Sequence[Group], *, max_tokens: int) -> CollectedValues:
        """What is expected before every sampled token of the groups, and after completions that were cut off."""
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
        """What of it is trained: the head, and a trunk of its own without the output layer."""
        yield "head", self.head
        if self.own_trunk is not None:
            yield "trunk", without_output_layer(self.own_trunk.model)

    @property
    def parameter_group(self) -> ParameterGroup:
        """Its parameters, with a rate and a clipping of their own."""
        return ParameterGroup(
            module=CRITIC,
            parameters=[each for _, module in self.modules for each in module.parameters() if each.requires_grad],
            rate_scale=self.options.rate_scale,
            max_grad_norm=self.options.max_grad_norm,
        )

    def tensors(self) -> dict[str, Tensor]:
        """All that training changes of it."""
        return {
            f"{name}.{key}": tensor for name, module in self.modules for key, tensor in module_tensors(module).items()
        }

    def restore(self, tensors: Tensors) -> None:
        """Be as `tensors` once said."""
        refuse_mismatch("the critic", shapes(self.tensors()), tensors)
        for name, module in self.modules:
            own = {key.removeprefix(f"{name}."): each for key, each in tensors.items() if key.startswith(f"{name}.")}
            restore_module(module, own)


def own_trunk(policy: Policy, options: CriticOptions) -> ScoredBody | None:
    """A model of the critic's own, from a folder or a copy of the policy; None where it reads the policy's.

    Of a reward model its score is there as well.  A copy shares what the policy does not train, and the output layer,
    which a critic does not use.
    """
    size = sum(each.numel() for each in policy.model.parameters())
    if not options.has_own_trunk(size):
        return None
    loaded = loaded_trunk(options.path, policy) if options.path else None
    if loaded is not None:
        return loaded
    if stays_quantised(policy.model):
        raise UserError(
            f"algorithm.critic.trunk = {options.trunk}: the critic's trunk is a copy of the policy that is saved whole,"
            " and the policy's weights are stored quantised.  Set algorithm.critic.trunk: shared, or give as model.path"
            " the folder of the model that it was quantised from."
        )
    trained = {id(each) for each in without_output_layer(policy.model).parameters() if each.requires_grad}
    kept = {id(each): each for each in policy.model.parameters() if id(each) not in trained}
    model, forward = copy.deepcopy((policy.model, policy.forward), kept)
    return ScoredBody(replace(policy, model=model, forward=forward), None)


def with_end(rollout: Rollout) -> Rollout:
    """A completion that was cut off with another sampled token: the state after all its tokens is then valued too."""
    if not rollout.finish.cut_off:
        return rollout
    sequence = rollout.sequence
    tokens = (*sequence.tokens, sequence.tokens[-1])
    logprobs = (*sequence.logprobs, 0.0)
    longer = replace(sequence, tokens=tokens, sampled=(*sequence.sampled, True), logprobs=logprobs)
    return replace(rollout, sequence=longer)


def ends_of(groups: Sequence[Group]) -> Bool[Tensor, " token"]:
    """Which sampled tokens `with_end` added."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return torch.tensor([t == each.num_sampled for each in rollouts for t in range(with_end(each).num_sampled)])


def truncated_of(groups: Sequence[Group]) -> Bool[Tensor, "prompt group"]:
    """Which completions a limit cut off."""
    return torch.tensor([[rollout.finish.cut_off for rollout in group.rollouts] for group in groups])


def trained_groups(
    policy: Policy, critic: Critic | None, given: Sequence[ParameterGroup]
) -> Sequence[ParameterGroup] | Iterable[nn.Parameter]:
    """The parameters to train: the caller's groups or all of the policy's, and the critic's."""
    if critic is None:
        return given or policy.model.parameters()
    own = given or [ParameterGroup(module=POLICY, parameters=list(policy.model.parameters()))]
    return [*own, critic.parameter_group]
