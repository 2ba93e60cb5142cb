"""DPO with an adapter, told on a command line, with pairs that are evaluated; the adapter is saved at the end.

It is run in a folder that holds models/policy.
"""

from datasets import Dataset
from shared.pairs import pairs
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

LINE = """--model_name_or_path models/policy --use_peft --lora_r 4 --lora_target_modules q_proj v_proj
    --output_dir runs/dpo-lora --max_steps 2 --per_device_train_batch_size 3 --learning_rate 1e-2 --beta 0.3
    --logging_steps 1 --eval_strategy steps --eval_steps 2 --save_strategy no --bf16 false --report_to none"""

parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config(LINE.split())
trainer = DPOTrainer(
    model=model_args.model_name_or_path,
    args=training_args,
    train_dataset=Dataset.from_list(pairs),
    eval_dataset=Dataset.from_list(pairs[:2]),
    peft_config=get_peft_config(model_args),
)
trainer.train()
trainer.save_model("runs/dpo-lora/saved")
