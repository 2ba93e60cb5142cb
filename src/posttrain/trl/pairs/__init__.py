"""TRL's trainers on pairs of answers, DPOTrainer and RewardTrainer, over `train_dpo` and `train_reward_model`."""
