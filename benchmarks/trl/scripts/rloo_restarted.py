"""RLOO by a rule, read from a command line, in a job that was stopped and goes on from its last checkpoint.

It is run in a folder that holds models/policy.
"""

from pathlib import Path

from datasets import Dataset
from shared.additions import right_sum, rows
from transformers.trainer_utils import get_last_checkpoint
from trl import RLOOConfig, RLOOTrainer, TrlParser

LINE = """--output_dir runs/rloo --per_device_train_batch_size 4 --num_generations 2 --max_completion_length 12
    --learning_rate 1e-2 --beta 0.05 --logging_steps 1 --save_steps 1 --bf16 false --report_to none"""


def job(max_steps):
    """What a queue starts again and again."""
    (args,) = TrlParser(RLOOConfig).parse_args_and_config([*LINE.split(), "--max_steps", str(max_steps)])
    made = RLOOTrainer(model="models/policy", reward_funcs=right_sum, args=args, train_dataset=Dataset.from_list(rows))
    made.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
    return made


Path("runs/rloo").mkdir(parents=True, exist_ok=True)  # which get_last_checkpoint reads
job(1)
trainer = job(2)
