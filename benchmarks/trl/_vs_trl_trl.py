"""TRL's worker of vs_trl.py, run by the interpreter of TRL's own environment: GRPOTrainer, one step at a time.

.venv-trl/bin/python benchmarks/trl/_vs_trl_trl.py JOB.json
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _vs_trl_wire import MIB, Job, Stopwatch, Wire, hash_score
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    job, wire = Job.read(sys.argv[1]), Wire()
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    end_ids = declared_ends(model, tokenizer)
    seen = Seen(score_of(job, end_ids))
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=seen.reward,
            args=settings(job, folder),
            train_dataset=Dataset.from_list(job.rows),
            processing_class=tokenizer,
            callbacks=[StepOnCommand(job, wire, seen)],
        )
        first = sorted(row["prompt"] for row in job.rows[: job.prompts_per_step])
        wire.ready(tokenizer(text=first)["input_ids"], ["trl", "torch", "transformers", "accelerate"])
        trainer.train()


def settings(job: Job, folder: str) -> GRPOConfig:
    """The same step as ours: docs of each choice are in README.md beside this file."""
    rows = job.prompts_per_step * job.group_size
    return GRPOConfig(
        output_dir=folder,
        seed=job.seed,
        # the step
        num_generations=job.group_size,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=rows // job.micro_batch,
        max_completion_length=job.max_completion_tokens,
        max_steps=job.steps,
        num_iterations=1,
        shuffle_dataset=False,
        # sampling
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        # loss
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=0.2,
        # optimiser
        optim="adamw_torch_fused",
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        # arithmetic
        use_cpu=job.device == "cpu",
        bf16=job.dtype == "bfloat16",
        gradient_checkpointing=False,
        # nothing on the side
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        log_completions=False,
    )


class Seen:
    """Scores completions and remembers those of the step."""

    def __init__(self, score: Callable[..., list[float]]) -> None:
        self.score = score
        self.lengths: list[int] = []
        self.rewards: list[float] = []

    def reward(self, completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.lengths = [len(ids) for ids in completion_ids]
        self.rewards = self.score(completions, completion_ids, columns)
        return self.rewards


def score_of(job: Job, end_ids: Sequence[int]) -> Callable[..., list[float]]:
    """The reward: the same function of ids or text that our side calls."""

    def hashes(completions: list[str], completion_ids: list[list[int]], columns: dict[str, Any]) -> list[float]:
        return [hash_score(ids) for ids in completion_ids]

    def solved(completions: list[str], completion_ids: list[list[int]], columns: dict[str, Any]) -> list[float]:
        from posttrain.rewards.countdown import countdown  # the standard library is all that it needs

        finish = ["stop" if ids and ids[-1] in end_ids else "length" for ids in completion_ids]
        named = {name: columns[name] for name in ("numbers", "target", "rule")}
        return [graded.score for graded in countdown(completions=completions, finish_reasons=finish, **named)]

    return hashes if job.reward == "hash" else solved


def declared_ends(model: Any, tokenizer: Any) -> set[int]:
    """Every token that ends a completion."""
    named = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}


class StepOnCommand(TrainerCallback):
    """Holds each step back until it is asked for, and times it: generation is inside, fetching rows is not."""

    def __init__(self, job: Job, wire: Wire, seen: Seen) -> None:
        self.job, self.wire, self.seen = job, wire, seen
        self.watch = Stopwatch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not self.wire.wait():
            sys.exit(0)
        self.watch = Stopwatch()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.job.device == "cuda":
            torch.cuda.synchronize()
        took = self.watch.read()
        device = {"peak_device_mib": torch.cuda.max_memory_allocated() / MIB} if self.job.device == "cuda" else {}
        self.wire.report(took, self.seen.lengths, self.seen.rewards, **device)


if __name__ == "__main__":
    main()
