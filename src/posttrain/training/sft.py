"""Supervised warm-up: a small model from nothing, on demonstrations of its task that never repeat."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from posttrain.config import SftConfig
from posttrain.errors import RunError, UserError
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.loading.saving import save_policy
from posttrain.models.memory.memory_plan import memory_plan
from posttrain.models.memory.model_shape import object_shape
from posttrain.models.policy import Policy, as_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.countdown import CountdownOptions
from posttrain.options.demonstrator import Demonstrator
from posttrain.options.training import SftOptions
from posttrain.records import Prompt
from posttrain.runs.checkpoint import Checkpoint
from posttrain.runs.curves import draw_curves
from posttrain.runs.files import writing
from posttrain.runs.folder import resume_command, saved_recipe, shown
from posttrain.runs.harness import Harness, HarnessOptions, require_resume
from posttrain.runs.planned_memory import machine_memory, memory_line, memory_warning, sft_setup
from posttrain.runs.reports import EvaluationReport, StepReport
from posttrain.runs.run_folder import RunFolder
from posttrain.runs.summary import peak_memory_bytes, versions
from posttrain.runs.tensor_state import (
    Tensors,
    module_tensors,
    optimizer_tensors,
    restore_module,
    restore_optimizer,
)
from posttrain.runs.threads import ThreadClaim, claim_threads
from posttrain.runs.watchers import Watcher, require_watchers
from posttrain.tasks.countdown.countdown_task import CountdownTask
from posttrain.tasks.countdown.demonstrator import demonstrate
from posttrain.tasks.countdown.problems import held_out_problems
from posttrain.training.optimizer import POLICY, apply_gradients, learning_rate, new_optimizer
from posttrain.training.supervised import Example, accumulate, mean_loss


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


class TrainedBySupervision:
    """A policy, its optimiser and the counters of its run."""

    def __init__(self, policy: Policy, options: SftOptions) -> None:
        self.policy, self.options, self.run = policy, options, SftState()
        self.optimizer = new_optimizer(policy.model.parameters(), options)

    @property
    def step(self) -> int:
        """Steps finished."""
        return self.run.step

    @property
    def seconds(self) -> float:
        """What they have taken, in all lives of the run."""
        return self.run.seconds

    def learn(self, batch: Sequence[Example], step: int, num_steps: int) -> dict[str, float]:
        """Take one optimiser step on a batch of demonstrations; returns its metrics."""
        loss = accumulate(self.policy, batch, self.options.tokens_per_microbatch)
        rate = learning_rate(self.options, step - 1, num_steps)
        grad_norm = apply_gradients(self.optimizer, rate, self.options.max_grad_norm)[POLICY]
        if not math.isfinite(grad_norm):
            raise RunError(f"loss {loss}, gradient norm {grad_norm}; lower sft.learning_rate.")
        self.run.step = step
        self.run.next_example += len(batch)
        self.run.num_tokens += sum(example.num_inputs for example in batch)
        num_tokens = float(self.run.num_tokens)
        return {"loss": loss, "grad_norm": grad_norm, "learning_rate": rate, "num_tokens": num_tokens}

    def tensors(self) -> Mapping[str, Tensors]:
        """All tensors that the next step reads."""
        return {"policy": module_tensors(self.policy.model), "optimizer": optimizer_tensors(self.optimizer)[0]}

    def state(self) -> Mapping[str, object]:
        """Whatever else it reads, as plain data."""
        return {"run": asdict(self.run), "optimizer": optimizer_tensors(self.optimizer)[1]}

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Count the time of a step."""
        self.run.seconds += sum(seconds.values())

    def restore(self, saved: Checkpoint) -> None:
        """Be as the checkpoint was."""
        optimizer, run = saved.state["optimizer"], saved.state["run"]
        assert isinstance(optimizer, Mapping)
        assert isinstance(run, Mapping)
        restore_module(self.policy.model, saved.tensors["policy"])
        restore_optimizer(self.optimizer, saved.tensors["optimizer"], optimizer)
        self.run = SftState(**run)


def train(
    config: SftConfig, *, watchers: Sequence[Watcher] = (), resume: bool = False, from_step: int | None = None
) -> Path | None:
    """Train a new model on demonstrations and save it to RUN/model; returns that folder, or None if interrupted.

    The loss is the mean of -log π over completion tokens; prompts are read and not learned.  `watchers` see each step,
    each measurement of the held-out loss, each checkpoint and the end.  With `resume` the run in `config.run.folder`
    goes on from its last checkpoint, or with `from_step` from that of an earlier step.
    """
    require_resume(from_step, resume=resume)
    options = sft_harness_options(config, require_watchers(watchers), from_step=from_step)
    with claim_threads(config.run.threads) as threads:
        return train_new_model(config, threads, options, resume=resume)


def train_new_model(config: SftConfig, threads: ThreadClaim, options: HarnessOptions, *, resume: bool) -> Path | None:
    """The run, from its folder to its model."""
    if not isinstance(config.task, CountdownOptions):
        raise UserError("task: only countdown has demonstrators so far; use task.name = countdown.")
    tokenizer = new_tokenizer()
    policy = as_policy(new_model(config.model, tokenizer, seed=config.run.seed), tokenizer)
    demonstrations = DemonstrationSet(
        policy=policy,
        task=CountdownTask(config.task, TokenizerRenderer(tokenizer), seed=config.run.seed),
        demonstrator=config.demonstrator,
        seed=config.run.seed,
        num_different=config.sft.num_demonstrations,
    )
    folder = (
        RunFolder.resume(config.run.folder)
        if resume
        else RunFolder.create(config.run.folder, saved_recipe(config), overwrite=config.run.overwrite)
    )
    return fit(config, demonstrations, folder, threads, options, resume=resume)


def fit(
    config: SftConfig,
    demonstrations: DemonstrationSet,
    folder: RunFolder,
    threads: ThreadClaim,
    harness_options: HarnessOptions,
    *,
    resume: bool,
) -> Path | None:
    """The loop: a batch of demonstrations, its gradient, a step; measured and saved every so often."""
    policy, options, num_steps = demonstrations.policy, config.sft, config.run.num_steps
    trained = TrainedBySupervision(policy, options)
    held_out = demonstrations.held_out(options.eval_size)
    with Harness(folder, trained, harness_options) as harness:
        notes = harness.resume(threads) if resume else []
        harness.start([*sft_plan_lines(config, policy, len(held_out)), *notes])
        with harness.naming_the_step():
            for step in harness.steps():
                with harness.clock("update"):
                    batch = demonstrations.batch(trained.run.next_example, options.tokens_per_batch)
                    metrics = trained.learn(batch, step, num_steps)
                if step % options.eval_every == 0 or step == num_steps:
                    with harness.clock("evaluate"):
                        metrics["eval/loss"] = mean_loss(policy, held_out, options.tokens_per_microbatch)
                        harness.evaluated(EvaluationReport(step=step, results={"eval/loss": metrics["eval/loss"]}))
                    trained.run.saw_evaluation(metrics["eval/loss"])
                tokens = sum(example.num_inputs for example in batch)
                harness.record(StepReport(step=step, metrics=metrics, num_tokens=tokens))
        finished = trained.step >= num_steps
        if finished:
            write_model(policy, folder.path)
        harness.end(
            summary_of(trained.run) if finished else {}, last_lines(folder.path, trained.run, finished=finished)
        )
    return folder.path / "model" if finished else None


def sft_harness_options(
    config: SftConfig, watchers: Sequence[Watcher] = (), *, from_step: int | None = None
) -> HarnessOptions:
    """What holds a supervised run together."""
    return HarnessOptions(
        run=config.run,
        checkpoint=config.checkpoint,
        time_by_stage=False,
        watchers=watchers,
        score=lower_loss,
        config=config,
        from_step=from_step,
        kept_from={"metrics.jsonl": 1},
    )


def lower_loss(metrics: Mapping[str, float]) -> float | None:
    """The best checkpoint is the one whose held-out loss is lowest."""
    loss = metrics.get("eval/loss")
    return None if loss is None else -loss


def sft_plan_lines(config: SftConfig, policy: Policy, num_held_out: int) -> list[str]:
    """What the run is about to do."""
    millions = sum(parameter.numel() for parameter in policy.model.parameters()) / 1e6
    options, shape = config.sft, object_shape(policy.model)
    memory, machine = memory_plan(shape, sft_setup(config, shape)), machine_memory(on_cuda=False)
    return [
        f"model      new, {millions:.2f} M parameters, {len(policy.tokenizer)} tokens of vocabulary",
        f"data       demonstrations of {config.task.name}, fresh for every batch; {num_held_out} held out",
        f"one step   {options.tokens_per_batch} tokens, learning rate {options.largest_rate:g} ({options.schedule})",
        f"steps      {config.run.num_steps}",
        memory_line(memory, machine),
        *memory_warning(memory, machine),
        f"folder     {config.run.folder}",
    ]


def write_model(policy: Policy, folder: Path) -> None:
    """Save the model and curves of a finished run."""
    with writing(folder / "model", folder):
        save_policy(policy, folder / "model")
    with writing(folder / "curves.png", folder):
        draw_curves(folder / "metrics.jsonl", folder / "curves.png", title=folder.name)


def summary_of(state: SftState) -> dict[str, object]:
    """The content of summary.json."""
    return {
        "eval_loss": state.eval_loss,
        "best_eval_loss": state.best_eval_loss,
        "seconds": state.seconds,
        "tokens": state.num_tokens,
        "examples": state.next_example,
        "peak_memory_bytes": peak_memory_bytes(),
        "versions": versions(),
    }


def last_lines(folder: Path, state: SftState, *, finished: bool) -> list[str]:
    """The end of the output."""
    folder = shown(folder)
    if not finished:
        return [f"stopped after step {state.step}; go on with   {resume_command(folder, 'sft')}"]
    lowest = "" if state.eval_loss == state.best_eval_loss else f"  (at its lowest {state.best_eval_loss:.4f})"
    return [
        f"held-out loss {state.eval_loss:.4f} nats/token after {state.num_tokens / 1e6:.1f} M tokens{lowest}",
        f"model        {folder / 'model'}",
        f"measure it   posttrain eval {folder}",
    ]
