"""A policy's weights for another engine, under the names that libraries use, made only when they are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from posttrain.models.adapters.in_force import trains_adapter_alone
from posttrain.models.adapters.lora import lora_layers
from posttrain.models.adapters.peft_format import adapter_settings, written_tensors
from posttrain.models.loading.folder_kinds import model_digest
from posttrain.models.loading.saving import saved_weights, saved_whole
from posttrain.models.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedAdapter:
    """A LoRA adapter as peft writes it, and its base."""

    base: str
    """Folder or hub name of the base."""
    base_digest: str
    """`model_digest` of that folder; empty if it is not a local folder."""
    settings: Mapping[str, object]
    """The content of adapter_config.json."""
    tensors: Mapping[str, Tensor]
    """The content of adapter_model.safetensors, not copied."""


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """The weights of a policy at the time of reading: `Engine.load` reads what it needs before it returns."""

    policy: Policy

    def merged(self) -> dict[str, Tensor]:
        """The tensors of the saved model's files: adapters added, 4-bit layers dequantised, tied tensors once.

        Tensors that need no change are the trainer's, not copies.
        """
        model = self.policy.model
        weights = dict(saved_weights(self.policy)[0])
        with saved_whole(model):
            single = remove_tied_weights_from_state_dict(weights, model)
            exported: dict[str, Tensor] = revert_weight_conversion(model, single)
        return {name: tensor.detach().contiguous() for name, tensor in exported.items()}

    def adapter(self) -> ExportedAdapter | None:
        """Only the adapter; None if other weights are trained too, or if it is in peft's layers."""
        model = self.policy.model
        if not lora_layers(model) or not trains_adapter_alone(model):
            return None
        base = model.name_or_path or ""
        return ExportedAdapter(
            base=base,
            base_digest=model_digest(Path(base)) if base else "",
            settings=adapter_settings(model),
            tensors=written_tensors(model),
        )
