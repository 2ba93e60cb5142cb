"""Supervised warm-up: a small model from nothing, on demonstrations of its task that never repeat."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch

from posttrain.config import SftConfig
from posttrain.errors import RunError, UserError
from posttrain.models.new_model import new_model, new_tokenizer
from posttrain.models.policy import Policy, as_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.countdown import CountdownOptions
from posttrain.options.demonstrator import Demonstrator
from posttrain.records import Prompt
from posttrain.runs import checkpoint
from posttrain.runs.curves import draw_curves
from posttrain.runs.files import writing
from posttrain.runs.folder import RunFolder, new_folder
from posttrain.runs.interruption import interruptible
from posttrain.runs.progress import Progress
from posttrain.runs.summary import peak_memory_bytes, versions
from posttrain.runs.tensor_state import module_tensors, optimizer_tensors, restore_module, restore_optimizer
from posttrain.tasks.countdown.countdown_task import CountdownTask
from posttrain.tasks.countdown.demonstrator import demonstrate
from posttrain.tasks.countdown.problems import held_out_problems
from posttrain.training.optimizer import apply_gradients, learning_rate, new_optimizer
from posttrain.training.supervised import Example, accumulate, mean_loss
from posttrain.training.threads import ThreadClaim, claim_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationSet:
    """Demonstrations by number: training ones without end, held-out ones on problems that are never trained on."""

    policy: Policy
    task: CountdownTask
    demonstrator: Demonstrator
    seed: int
    num_different: int
    """Training demonstrations before they repeat; 0 never repeats."""

    def example(self, index: int) -> Example:
        """The training demonstration with this number."""
        index = index % self.num_different if self.num_different else index
        problem = self.task.training_problem(index)
        rng = Random(f"demonstration {self.seed} {index}")
        return self._example(self.task.prompt(problem, f"train/{index}"), demonstrate(problem, rng, self.demonstrator))

    def batch(self, first: int, tokens: int) -> list[Example]:
        """Demonstrations from a number on, until together they have so many tokens."""
        examples: list[Example] = []
        while sum(example.num_inputs for example in examples) < tokens:
            examples.append(self.example(first + len(examples)))
        return examples

    def held_out(self, count: int) -> list[Example]:
        """Demonstrations of problems whose numbers are held out."""
        rng = Random("held-out demonstrations")
        chosen: list[Example] = []
        for problem in held_out_problems(self.task.difficulty, self.task.options.numbers, count):
            prompt = self.task.prompt(problem, f"held-out/{len(chosen)}")
            chosen.append(self._example(prompt, demonstrate(problem, rng, self.demonstrator)))
        return chosen

    def _example(self, prompt: Prompt, completion: str) -> Example:
        tokens = self.policy.tokenizer.encode(completion, add_special_tokens=False)
        return Example(prompt=prompt.tokens, completion=(*tokens, self.policy.stop_ids[0]))


@dataclass(slots=True, kw_only=True)
class SftState:
    """What a supervised run remembers between steps, besides weights."""

    step: int = 0
    next_example: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    eval_loss: float | None = None
    """Held-out loss when last measured; a finished run measures it on its final weights."""
    best_eval_loss: float | None = None

    def saw_evaluation(self, loss: float) -> None:
        """Keep a held-out loss in mind."""
        self.eval_loss = loss
        self.best_eval_loss = loss if self.best_eval_loss is None else min(loss, self.best_eval_loss)


def train(config: SftConfig, *, resume: bool = False) -> Path | None:
    """Train a new model on demonstrations and save it to RUN/model; returns that folder, or None if interrupted.

    The loss is the mean of -log π over completion tokens; prompts are read and not learned.
    """
    with claim_threads(config.run.threads) as threads:
        return train_new_model(config, threads, resume=resume)


def train_new_model(config: SftConfig, threads: ThreadClaim, *, resume: bool) -> Path | None:
    """The run, from its folder to its model."""
    if not isinstance(config.task, CountdownOptions):
        raise UserError("task: only countdown has demonstrators so far; use task.name = countdown.")
    tokenizer = new_tokenizer()
    policy = as_policy(new_model(config.model, tokenizer, seed=config.run.seed), tokenizer)
    lessons = DemonstrationSet(
        policy=policy,
        task=CountdownTask(config.task, TokenizerRenderer(tokenizer), seed=config.run.seed),
        demonstrator=config.demonstrator,
        seed=config.run.seed,
        num_different=config.sft.num_demonstrations,
    )
    if resume:
        folder = RunFolder.resume(config.run.folder)
    else:
        folder = new_folder(config)
    with folder:
        return fit(config, lessons, folder, threads, resume=resume)


def fit(
    config: SftConfig, lessons: DemonstrationSet, folder: RunFolder, threads: ThreadClaim, *, resume: bool
) -> Path | None:
    """The loop: a batch of demonstrations, its gradient, a step; measured and saved every so often."""
    policy, options, num_steps = lessons.policy, config.sft, config.run.num_steps
    optimizer = new_optimizer(policy.model.parameters(), options)
    state, notes = restored(policy, optimizer, folder, threads) if resume else (SftState(), [])
    held_out = lessons.held_out(options.eval_size)
    progress = Progress(num_steps, first_step=state.step + 1)
    with progress, interruptible() as interruption:
        progress.start([*plan(config, policy, len(held_out)), *notes])
        while state.step < num_steps and not interruption:
            began = time.monotonic()
            batch = lessons.batch(state.next_example, options.tokens_per_batch)
            loss = accumulate(policy, batch, options.tokens_per_microbatch)
            rate = learning_rate(options, state.step, num_steps)
            grad_norm = apply_gradients(optimizer, rate, options.max_grad_norm)
            if not grad_norm < float("inf"):
                raise RunError(
                    f"step {state.step + 1}: loss {loss}, gradient norm {grad_norm}; lower sft.learning_rate."
                )
            state.step += 1
            state.next_example += len(batch)
            tokens = sum(example.num_inputs for example in batch)
            state.num_tokens += tokens
            metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": rate}
            metrics["num_tokens"] = float(state.num_tokens)
            if state.step % options.eval_every == 0 or state.step == num_steps:
                metrics["eval/loss"] = mean_loss(policy, held_out, options.tokens_per_microbatch)
                state.saw_evaluation(metrics["eval/loss"])
            seconds = time.monotonic() - began
            state.seconds += seconds
            metrics |= {"step_time": seconds, "tokens_per_second": tokens / seconds}
            folder.append_metrics(state.step, metrics)
            progress.step(state.step, metrics)
            every = config.checkpoint.every_steps
            if interruption or state.step == num_steps or (every and state.step % every == 0):
                save(config, policy, optimizer, folder, state, eval_loss=metrics.get("eval/loss"))
        progress.finish(closing(config, policy, folder, state))
    return folder.path / "model" if state.step >= num_steps else None


def plan(config: SftConfig, policy: Policy, num_held_out: int) -> list[str]:
    """What the run is about to do."""
    millions = sum(parameter.numel() for parameter in policy.model.parameters()) / 1e6
    options = config.sft
    return [
        f"model      new, {millions:.2f} M parameters, {len(policy.tokenizer)} tokens of vocabulary",
        f"data       demonstrations of {config.task.name}, fresh for every batch; {num_held_out} held out",
        f"one step   {options.tokens_per_batch} tokens, learning rate {options.learning_rate:g} ({options.schedule})",
        f"steps      {config.run.num_steps}",
        f"folder     {config.run.folder}",
    ]


def save(
    config: SftConfig,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    folder: RunFolder,
    state: SftState,
    *,
    eval_loss: float | None,
) -> None:
    """Save all that the next step reads; the best checkpoint is the one whose held-out loss is lowest."""
    tensors, options = optimizer_tensors(optimizer)
    checkpoint.save(
        folder.checkpoints,
        state.step,
        {"policy": module_tensors(policy.model), "optimizer": tensors},
        {"run": asdict(state), "optimizer": options},
        score=None if eval_loss is None else -eval_loss,
    )
    keep = config.checkpoint
    checkpoint.prune(folder.checkpoints, keep_last=keep.keep_last, keep_best=int(keep.keep_best))


def restored(
    policy: Policy, optimizer: torch.optim.Optimizer, folder: RunFolder, threads: ThreadClaim
) -> tuple[SftState, list[str]]:
    """The state of the last checkpoint, with what was logged after it cut away, and what to tell of it."""
    saved = checkpoint.load_latest(folder.checkpoints)
    if saved is None:
        folder.cut_after(-1)
        return SftState(), ["No checkpoint yet: the run starts again."]
    notes = checkpoint.restore_threads(saved, threads)
    restore_module(policy.model, saved.tensors["policy"])
    restore_optimizer(optimizer, saved.tensors["optimizer"], saved.state["optimizer"])  # type: ignore[arg-type]
    folder.cut_after(saved.step)
    return SftState(**saved.state["run"]), [f"Resumed after step {saved.step}.", *notes]  # type: ignore[arg-type]


def closing(config: SftConfig, policy: Policy, folder: RunFolder, state: SftState) -> list[str]:
    """Save the model of a finished run; the last lines of the output."""
    if state.step < config.run.num_steps:
        return [f"stopped after step {state.step}; go on with   posttrain sft --resume {folder.path}"]
    with writing(folder.path / "model", folder.path):
        policy.model.save_pretrained(folder.path / "model")
        policy.tokenizer.save_pretrained(folder.path / "model")
    with writing(folder.path / "curves.png", folder.path):
        draw_curves(folder.path / "metrics.jsonl", folder.path / "curves.png", title=folder.path.name)
    folder.write_summary(
        {
            "eval_loss": state.eval_loss,
            "best_eval_loss": state.best_eval_loss,
            "seconds": state.seconds,
            "tokens": state.num_tokens,
            "examples": state.next_example,
            "peak_memory_bytes": peak_memory_bytes(),
            "versions": versions(),
        }
    )
    lowest = "" if state.eval_loss == state.best_eval_loss else f"  (at its lowest {state.best_eval_loss:.4f})"
    return [
        f"held-out loss {state.eval_loss:.4f} nats/token after {state.num_tokens / 1e6:.1f} M tokens{lowest}",
        f"model        {folder.path / 'model'}",
        f"measure it   posttrain eval {folder.path / 'model'}",
    ]
