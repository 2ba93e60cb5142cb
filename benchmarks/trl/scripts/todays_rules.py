"""Two rewards that are rules, LoRA and a short run, with the names that TRL has today, on a CPU.

It is run in a folder that holds models/policy.
"""

from datasets import Dataset
from shared.additions import right_sum, rows, tagged
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config

train_dataset = Dataset.from_list(rows)
test_dataset = Dataset.from_list(rows[:2])

model_config = ModelConfig(model_name_or_path="models/policy", dtype="float32", use_peft=True)
training_args = GRPOConfig(
    output_dir="runs/todays-rules",
    learning_rate=5e-7,
    lr_scheduler_type="cosine",
    logging_steps=1,
    max_steps=2,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=1,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    bf16=False,
    max_completion_length=12,
    num_generations=2,
    beta=0.001,
    report_to="none",
)
trainer = GRPOTrainer(
    model=model_config.model_name_or_path,
    reward_funcs=[tagged, right_sum],
    args=training_args,
    train_dataset=train_dataset,
    eval_dataset=test_dataset,
    peft_config=get_peft_config(model_config),
)
trainer.train()
