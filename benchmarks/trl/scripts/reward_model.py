"""A reward model over a sequence classifier, trained on preferences with margins, measured and saved.

It is run in a folder that holds models/scorer.
"""

from datasets import Dataset
from shared.pairs import pairs
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

model = AutoModelForSequenceClassification.from_pretrained("models/scorer", num_labels=1)
trainer = RewardTrainer(
    model=model,
    args=RewardConfig(
        output_dir="runs/reward-model",
        max_steps=2,
        per_device_train_batch_size=3,
        learning_rate=1e-3,
        center_rewards_coefficient=0.01,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        bf16=False,
        report_to="none",
    ),
    train_dataset=Dataset.from_list([{**row, "margin": 0.5} for row in pairs]),
    eval_dataset=Dataset.from_list([{**row, "margin": 0.5} for row in pairs[:2]]),
    processing_class=AutoTokenizer.from_pretrained("models/scorer"),
)
trainer.train()
trainer.save_model("runs/reward-model/saved")
trainer.save_metrics("eval", trainer.evaluate())
