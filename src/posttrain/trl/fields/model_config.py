"""ModelConfig and what scripts make of it: an adapter's config, a quantisation's."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.errors import UserError
from posttrain.trl.fields.field_rules import (
    CheckedFields,
    Rules,
    lines_about,
    refused,
    require_numbers,
    supported,
    translated,
)
from posttrain.trl.fields.number_rules import above, between, whole

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig


@dataclass
class ModelConfig(CheckedFields):
    """Which model a script loads and how; what becomes of each field is up to what the script does with it."""

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = "float32"
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None | str = None  # noqa: RUF036  # in the order that HfArgumentParser can read
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None
    # A name that this class had once, and scripts still use.
    torch_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.torch_dtype is not None:
            self.dtype = str(self.torch_dtype).removeprefix("torch.")
        if self.load_in_8bit and self.load_in_4bit:
            raise UserError("ModelConfig: load_in_8bit and load_in_4bit: weights are held in one of them; use 4 bits.")
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # "all-linear" on a command line
        require_numbers(self, MODEL_RULES)
        for line in lines_about(self, MODEL_RULES):
            print(f"posttrain.trl: {line}", flush=True)


MODEL_RULES: Rules = {
    "model_name_or_path": supported("model.path", "given to a trainer"),
    "model_revision": supported("model.revision", "in model_init_kwargs"),
    "dtype": supported("model.weights, model.dtype", "in model_init_kwargs"),
    "attn_implementation": supported("model.attn_implementation", "in model_init_kwargs; of the plain forward pass"),
    "use_peft": supported("model.adapter", "by get_peft_config"),
    "lora_r": supported("model.adapter.rank", numbers=whole(1)),
    "lora_alpha": supported("model.adapter.alpha", numbers=above(0)),
    "lora_dropout": supported("model.adapter.dropout", numbers=between(0, 1, below=True)),
    "lora_target_modules": supported("model.adapter.targets", "those of peft for the model's family by default"),
    "lora_target_parameters": refused("adapters are over linear layers; name those in lora_target_modules."),
    "lora_modules_to_save": supported("", "by peft's own layers"),
    "lora_task_type": supported("", "CAUSAL_LM"),
    "use_rslora": supported("model.adapter.rslora"),
    "use_dora": supported("", "by peft's own layers"),
    "load_in_8bit": refused("weights are held in 4 bits or whole; use load_in_4bit=True."),
    "load_in_4bit": supported("model.quantization", "by get_quantization_config"),
    "bnb_4bit_quant_type": refused("4 bits are NF4 here; leave it out."),
    "use_bnb_nested_quant": supported("model.quantization", "scales are always quantised too"),
    "bnb_4bit_quant_storage": refused("4-bit weights are stored as bytes; leave it out."),
    "torch_dtype": translated("model.dtype", "is read as dtype."),
}


def get_peft_config(model_args: ModelConfig) -> "LoraConfig | None":
    """The LoraConfig of peft that these arguments describe; None without use_peft."""
    if not model_args.use_peft:
        return None
    if model_args.load_in_4bit:
        print(
            "posttrain.trl: load_in_4bit = True is for get_quantization_config: weights are in 4 bits where a trainer"
            " is given what that makes, as quantization_config.",
            flush=True,
        )
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as error:
        raise UserError(
            "ModelConfig: use_peft = True, and peft is not installed.  Install it: `pip install peft`."
        ) from error
    config: Any = LoraConfig
    made: LoraConfig = config(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        target_modules=model_args.lora_target_modules,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        bias="none",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
    )
    return made


def get_quantization_config(model_args: ModelConfig) -> "BitsAndBytesConfig | None":
    """The BitsAndBytesConfig of transformers that these arguments describe; None where nothing is quantised."""
    if not model_args.load_in_4bit:
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """Where the layers of a quantised model go: to the GPU, if there is one."""
    import torch

    return {"": 0} if torch.cuda.is_available() else None
