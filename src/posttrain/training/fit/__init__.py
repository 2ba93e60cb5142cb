"""The loop of runs on rows and on pairs: `posttrain sft`, `posttrain reward-model` and `posttrain dpo`."""
