"""A function beside a reward model, groups of three, one group an update.

It is run in a folder that holds models/policy and models/scorer.
"""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

dataset = Dataset.from_list(
    [{"prompt": text} for text in ("Rain falls on", "The train to", "Bread and", "Nine of ten")]
)


def longer_than_the_mean(completions, **kwargs):
    """Length of a completion as a multiple of the mean length of all."""
    mean = sum(len(text) for text in completions) / len(completions) or 1
    return [len(text) / mean for text in completions]


training_args = GRPOConfig(
    output_dir="runs/mixed-rewards",
    learning_rate=0.1,
    per_device_train_batch_size=3,
    num_generations=3,
    max_completion_length=12,
    report_to="none",
    bf16=False,  # TRL's default is True, and stops on a CPU
    max_steps=3,
    logging_steps=1,
)
trainer = GRPOTrainer(
    model="models/policy",
    reward_funcs=[longer_than_the_mean, "models/scorer"],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
