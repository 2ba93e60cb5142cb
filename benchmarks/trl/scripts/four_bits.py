"""An adapter on a base in 4 bits (nf4), with the quantisation told to the trainer.

It is run in a folder that holds models/policy; TRL needs peft and bitsandbytes for it.
"""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config, get_quantization_config

dataset = Dataset.from_list(
    [{"prompt": text} for text in ("Rain falls on", "The train to", "Bread and", "Nine of ten")]
)


def vowels(completions, **kwargs):
    """Vowels in a completion."""
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


model_config = ModelConfig(
    model_name_or_path="models/policy",
    dtype="float32",
    use_peft=True,
    lora_r=4,
    lora_alpha=8,
    lora_target_modules=["q_proj", "v_proj"],
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    use_bnb_nested_quant=True,
)
training_args = GRPOConfig(
    output_dir="runs/four-bits",
    learning_rate=1e-2,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=12,
    report_to="none",
    bf16=False,
    max_steps=2,
    logging_steps=1,
)
trainer = GRPOTrainer(
    model=model_config.model_name_or_path,
    reward_funcs=vowels,
    args=training_args,
    train_dataset=dataset,
    quantization_config=get_quantization_config(model_config),
    peft_config=get_peft_config(model_config),
)
trainer.train()
