"""The critic of an actor-critic algorithm: a value head on the policy's trunk, or on a separate trunk.

Before each token, it predicts what the completion will earn.  On disk:

critic/value_head.safetensors    widening.weight, widening.bias, output.weight, output.bias
critic/config.json ...           a separate trunk, as transformers reads it
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.batch import Batch, completions_of
from posttrain.errors import UserError
from posttrain.models.adapters.adaptable import stays_quantised
from posttrain.models.classifiers.heads import ValueHead
from posttrain.models.classifiers.last_token_scores import ScoredBody, scored_body
from posttrain.models.forward import ForwardNeeds
from posttrain.models.loading.folder_kinds import is_classifier_folder
from posttrain.models.loading.model_folder import load_beside
from posttrain.models.loading.saving import require_loadable, save_policy, whole_folder
from posttrain.models.model_outputs import trunk as without_output_layer
from posttrain.models.native.native_layers import training_forward
from posttrain.models.policy import Policy
from posttrain.models.sharding import (
    loaded_by_first,
    parted_copy,
    shard_head,
    sharded,
    sharded_forward,
    whole_copy,
    whole_head,
)
from posttrain.models.shared_prompt.fused import gradients_in_place
from posttrain.options.algorithm import CriticOptions
from posttrain.options.model import ModelOptions
from posttrain.records import Group, Rollout
from posttrain.runs.tensor_state import Tensors, copy_into, module_tensors, refuse_mismatch, shapes, untied
from posttrain.training.optimizer import ParameterGroup
from posttrain.training.reference import require_same_tokens

CRITIC = "critic"
"""Its name as a parameter group, and as a file of a checkpoint."""
HEAD_FILE = "value_head.safetensors"


class Critic:
    """A value head and the trunk that it reads."""

    def __init__(self, policy: Policy, options: CriticOptions, *, seed: int) -> None:
        """A new critic, or the one in `options.path`.  Raises UserError if it does not fit this policy."""
        self.policy, self.options = policy, options
        found = own_trunk(policy, options)
        self.own_trunk: Policy | None = None if found is None else found.body
        """The model that the head reads; None: the policy."""
        where = f"algorithm.critic.path = {options.path}"
        if options.path and self.own_trunk is None:
            if not has_head(options.path):
                raise UserError(
                    f"{where}: {HEAD_FILE} is missing, and the head reads the policy here (critic.trunk).  Give the"
                    " folder RUN/critic of a run, or set trunk = own to use the folder's model, such as a reward model."
                )
            if (Path(options.path) / "config.json").is_file():
                raise UserError(
                    f"{where}: its head reads the model in this folder, not the policy.  Set critic.trunk = own."
                )
        dtype = torch.promote_types(policy.model.dtype, torch.float32)
        self.head = ValueHead(self.trunk.hidden_width, options.head, seed=seed, dtype=dtype).to(policy.device)
        score = None if found is None else found.score
        self.begun = score is not None or (bool(options.path) and has_head(options.path))
        """Whether the head was trained before; a new head starts from the mean reward."""
        if score is not None:
            self.head.load_score(score)
        elif self.begun:
            saved, own = load_file(Path(options.path) / HEAD_FILE), untied(self.head)
            there = {name: [*each.shape] for name, each in saved.items()}
            if there != {name: [*each.shape] for name, each in own.items()}:
                raise UserError(
                    f"{where}: its head is {there}, but critic.head = {self.head.kind} on this model has"
                    f" {own['output.weight'].shape[-1]} channels.  Use the head and the model width that it was trained"
                    " with."
                )
            self.head.load_state_dict(saved)
        shard_head(self.head, policy)

    def whole(self) -> tuple[ValueHead, Policy | None]:
        """The head and the separate trunk with whole weights, on rank 0; the other ranks must call this too."""
        with self.policy.ranks.leading("whole_critic"):
            return whole_head(self.head), None if self.own_trunk is None else whole_copy(self.own_trunk)

    @property
    def trunk(self) -> Policy:
        return self.policy if self.own_trunk is None else self.own_trunk

    def values(self, hidden: Float[Tensor, "token hidden"]) -> Float[Tensor, " token"]:
        """A value for each hidden state; the gradient stops at a shared trunk unless `through_trunk`."""
        whole = self.options.through_trunk or self.own_trunk is not None
        return cast(Tensor, self.head(hidden if whole else hidden.detach()))

    def values_of(self, micro: Batch) -> Float[Tensor, " token"]:
        with gradients_in_place():
            return self._values(micro)

    @torch.no_grad()
    def of_groups(self, groups: Sequence[Group], *, max_tokens: int) -> dict[str, Tensor]:
        """`values` before each sampled token, and `final_values` [prompt group] after the last one of each completion.

        A final value is 0 for a completion that was not cut off.
        """
        longer = [replace(group, rollouts=tuple(map(with_end, group.rollouts))) for group in groups]
        ranks = self.trunk.ranks
        split = completions_of(longer).split(max_tokens, padded=self.trunk.forward.padded, ranks=ranks)
        found = torch.cat(ranks.each([*split], Batch.num_read, lambda micro: self._values(micro).double().cpu()))
        truncated = torch.tensor([[rollout.finish.cut_off for rollout in group.rollouts] for group in groups])
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        ends = [t == each.num_sampled for each in rollouts for t in range(each.num_sampled + each.finish.cut_off)]
        is_end = torch.tensor(ends)
        final = torch.zeros(truncated.shape, dtype=torch.float64)
        final[truncated] = found[is_end]
        return {"values": found[~is_end], "final_values": final}

    def _values(self, micro: Batch) -> Float[Tensor, " token"]:
        needs = ForwardNeeds(logprobs=False, values=self.values)
        found = training_forward(self.trunk).completion_logprobs(micro, needs).values
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
        return {f"{name}.{key}": each for name, module in self.modules for key, each in module_tensors(module).items()}

    def restore(self, tensors: Tensors) -> None:
        refuse_mismatch("the critic", shapes(self.tensors()), tensors)
        copy_into(self.tensors(), tensors)


def own_trunk(policy: Policy, options: CriticOptions) -> ScoredBody | None:
    """The critic's separate model, with a reward model's score if it has one; None if the head reads the policy.

    A copy of the policy shares the frozen weights and the output layer, which a critic does not use.  A sharded policy
    is copied including these; only its 4-bit layers are shared.
    """
    size = sum(each.numel() for each in policy.model.parameters())
    if not options.has_own_trunk(size):
        return None
    if options.path and ((Path(options.path) / "config.json").is_file() or not has_head(options.path)):
        return loaded_trunk(options.path, policy)
    if stays_quantised(policy.model):
        raise UserError(
            f"algorithm.critic.trunk = {options.trunk}: cannot copy a policy with quantised weights.  Set it"
            " to shared.  Give the folder of the unquantised model as model.path to copy it."
        )
    if sharded_forward(policy) is not None:
        return ScoredBody(parted_copy(policy), None)
    trained = {id(each) for each in without_output_layer(policy.model).parameters() if each.requires_grad}
    kept = {id(each): each for each in policy.model.parameters() if id(each) not in trained}
    model, forward = copy.deepcopy((policy.model, policy.forward), kept)
    return ScoredBody(replace(policy, model=model, forward=forward), None)


def with_end(rollout: Rollout) -> Rollout:
    """The completion; if it was cut off, with one more token, so that the state after its last token has a value."""
    if not rollout.finish.cut_off:
        return rollout
    sequence = rollout.sequence
    tokens = (*sequence.tokens, sequence.tokens[-1])
    logprobs = (*sequence.logprobs, 0.0)
    longer = replace(sequence, tokens=tokens, sampled=(*sequence.sampled, True), logprobs=logprobs)
    return replace(rollout, sequence=longer)


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
    """The options for loading a saved critic, not for training it."""
    with safe_open(Path(path) / HEAD_FILE, framework="pt") as head:
        is_mlp = any(name.startswith("widening.") for name in head.keys())  # noqa: SIM118
    own_trunk = (Path(path) / "config.json").is_file()
    return CriticOptions(path=path, trunk="own" if own_trunk else "shared", head="mlp" if is_mlp else "linear")


def loaded_trunk(path: str, policy: Policy) -> ScoredBody:
    """The model in a folder, with its score if it is a reward model."""
    if is_classifier_folder(ModelOptions(path=path).folder):

        def load() -> tuple[Policy, Tensor | None]:
            found = scored_body(policy, path, option="algorithm.critic.path")
            return found.body, found.score

        body, score = loaded_by_first(policy.ranks, load)
        return ScoredBody(sharded(body), score)
    model = load_beside(policy, path, option="algorithm.critic.path", inference=False)
    require_same_tokens(policy, model, f"algorithm.critic.path = {path}")
    return ScoredBody(model, None)
