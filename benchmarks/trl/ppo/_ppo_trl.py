"""TRL's worker of vs_trl_ppo.py, run by the interpreter of TRL's environment: PPOTrainer, one step at a time."""

import sys
import tempfile
from typing import Any

import torch
from _ppo_job import PpoJob
from _vs_trl_wire import Stopwatch, Wire
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer


def main() -> None:
    job, wire = PpoJob.read(sys.argv[1]), Wire()
    torch.set_num_threads(job.threads)
    tokenizer = AutoTokenizer.from_pretrained(job.policy, padding_side="left")
    tokens = [tokenizer(row["prompt"])["input_ids"] for row in job.rows]
    first = sorted(range(job.prompts_per_step), key=lambda index: job.rows[index]["prompt"])
    seen = Seen(tokenizer.eos_token_id if job.stops else None)
    classifier = AutoModelForSequenceClassification
    rows = Dataset.from_list([{"input_ids": each} for each in tokens])
    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(
            args=settings(job, folder),
            processing_class=tokenizer,
            model=AutoModelForCausalLM.from_pretrained(job.policy, dtype=torch.float32),
            ref_model=None,  # it copies the policy
            reward_model=classifier.from_pretrained(job.reward_model, num_labels=1, dtype=torch.float32),
            value_model=classifier.from_pretrained(job.policy, num_labels=1, dtype=torch.float32),
            train_dataset=rows,
            eval_dataset=rows,  # never read
            callbacks=[StepOnCommand(wire, seen)],
        )
        trainer.dataloader = in_order(trainer, rows, job.prompts_per_step)
        wire.ready([tokens[index] for index in first], ["trl", "torch", "transformers", "accelerate"])
        trainer.train()


def settings(job: PpoJob, folder: str) -> PPOConfig:
    """The same step as ours: docs of each choice are in benchmarks/README.md."""
    return PPOConfig(
        output_dir=folder,
        seed=job.seed,
        # the step
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=job.prompts_per_step // job.micro_batch,
        local_rollout_forward_batch_size=job.rollout_batch,
        num_ppo_epochs=job.epochs,
        num_mini_batches=1,
        total_episodes=job.steps * job.prompts_per_step,
        # sampling
        response_length=job.completion_tokens,
        stop_token="eos" if job.stops else None,
        temperature=1.0,
        # credit and loss
        gamma=1.0,
        lam=job.lambda_,
        kl_coef=job.kl_coefficient,
        kl_estimator="k1",
        vf_coef=job.value_coefficient,
        cliprange=0.2,
        cliprange_value=0.2,
        whiten_rewards=False,
        # optimiser
        optim="adamw_torch_fused",
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        # arithmetic
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        # nothing on the side
        num_sample_generations=0,
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def in_order(trainer: PPOTrainer, rows: Dataset, size: int) -> Any:
    """Its data loader without the shuffling, so that both sides see each step's prompts in that step."""
    loader = DataLoader(rows, batch_size=size, shuffle=False, collate_fn=trainer.data_collator, drop_last=True)
    return trainer.accelerator.prepare(loader)


class Seen:
    """Remembers what was sampled in the step, for its lengths; nothing is computed inside the step."""

    def __init__(self, end: int | None) -> None:
        self.end = end
        self.completions = torch.zeros(0, 0, dtype=torch.long)
        original = ppo_trainer.batch_generation

        def remembering(model: Any, queries: Any, *others: Any) -> Any:
            sampled, logits = original(model, queries, *others)
            self.completions = sampled[:, queries.shape[1] :]
            return sampled, logits

        ppo_trainer.batch_generation = remembering

    def lengths(self) -> list[int]:
        """Tokens of each completion, the end token included."""
        width = self.completions.shape[1]
        if self.end is None:
            return [width] * len(self.completions)
        ended = self.completions == self.end
        first = ended.int().argmax(dim=1) + 1
        return [int(each) for each in torch.where(ended.any(dim=1), first, width)]


class StepOnCommand(TrainerCallback):
    """Holds each step back until it is asked for, and times it: all but fetching rows and what follows its end."""

    def __init__(self, wire: Wire, seen: Seen) -> None:
        self.wire, self.seen = wire, seen
        self.watch = Stopwatch()

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.hold()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        took = self.watch.read()
        self.wire.report(took, self.seen.lengths(), [state.log_history[-1]["objective/scores"]])
        self.hold()

    def hold(self) -> None:
        if not self.wire.wait():
            sys.exit(0)
        self.watch = Stopwatch()


if __name__ == "__main__":
    main()
