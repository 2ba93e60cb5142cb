"""A caller's own task, engine, reward and rule of credit, and recipes of runs with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain.algorithms.credit import Credit, Evidence
from posttrain.generation.engine import Sampling
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Request
from posttrain.models.loading.saving import ExportedWeights
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.records import Prompt
from posttrain.runs.reports import CheckpointReport, EndReport, EvaluationReport, StepReport
from posttrain.runs.run_inputs import RunInputs
from posttrain.training.session import CallerObjects, inputs_of
from tests.support.dice import dice

ROWS = [{"prompt": f"{i} and {i} make ", "answer": i} for i in range(1, 7)]


def config_for(model: Path, folder: Path, **sections: Mapping[str, Any]) -> posttrain.Config:
    given: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "task": {"name": "dataset", "held_out_share": 0.0},
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_completion_tokens": 5},
        "update": {"learning_rate": 1e-2},
        "evaluation": {"every_steps": 0},
        "run": {"folder": str(folder), "num_steps": 1, "threads": 1},
    }
    for name, options in sections.items():
        given[name] = {**given.get(name, {}), **options}
    config = posttrain.load_recipe(**given)
    assert isinstance(config, posttrain.Config)
    return config


def policy_of(model: Path) -> Policy:
    """A new object each time: training changes it."""
    return posttrain.as_policy(AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model))


class Sums(posttrain.Task):
    """A task of no more than a name, prompts and held-out prompts."""

    name = "sums"

    def __init__(self, policy: Policy) -> None:
        self.renderer = TokenizerRenderer(policy.tokenizer)
        self.drawn: list[tuple[int, range]] = []

    def prompt(self, number: int, where: str) -> Prompt:
        text = f"{number}+{number}="
        return self.renderer.render(text, id=f"{where}/{number}", prefill="", columns={"answer": 2 * number})

    def prompts(self, step: int, draws: range) -> list[Prompt]:
        self.drawn.append((step, draws))
        return [self.prompt(10 * step + draw, "train") for draw in draws]

    def held_out(self) -> list[Prompt]:
        return [self.prompt(number, "held-out") for number in range(3)]


class Counts:
    """An engine elsewhere, as far as a run can tell: it inherits nothing, and notes how it is used."""

    def __init__(self, policy: Policy) -> None:
        self.inner = InProcessEngine(policy)
        self.loaded: list[tuple[int, torch.Tensor]] = []
        """Each version, and the norms' weights of it."""
        self.sampled: list[tuple[str, int, int]] = []
        """Purpose, step and version of each call."""

    tokenizer = property(lambda self: self.inner.tokenizer)
    stop_ids = property(lambda self: self.inner.stop_ids)
    max_positions = property(lambda self: self.inner.max_positions)
    weights_version = property(lambda self: self.inner.weights_version)
    reproducible, logprob_gap, suppresses, patience_seconds = True, None, True, 60.0

    def load(self, weights: ExportedWeights, version: int) -> None:
        self.loaded.append((version, weights.merged()["model.norm.weight"].clone()))
        self.inner.load(weights, version)

    def open(self, request: Request) -> Sampling:
        self.sampled.append((request.key.purpose, request.key.step, self.weights_version))
        return self.inner.open(request)

    @property
    def versions(self) -> list[int]:
        return [version for version, _ in self.loaded]


def config(folder: Path, num_steps: int = 3, **sections: Any) -> posttrain.Config:
    """Everything that is an object below is what the config would get wrong."""
    given: dict[str, Any] = {
        "task": {"name": "countdown"},
        "evaluation": {"every_steps": 0, "samples": 1},
        "run": {"folder": str(folder), "num_steps": num_steps, "threads": 1},
    }
    given = {**given, **sections}
    made = config_for(folder / "no such model", folder, **{k: v for k, v in given.items() if k != "task"})
    return replace(made, task=posttrain.load_recipe(task=given["task"]).task)


def rewarded_by_answer(completions: Sequence[str], answer: Sequence[int], **columns: object) -> list[float]:
    return [score + number for score, number in zip(dice(list(completions)), answer, strict=True)]


def upside_down(evidence: Evidence) -> Credit:
    """What is below its group's mean is made likelier, by its whole distance."""
    above = evidence.rewards - evidence.rewards.mean(dim=1, keepdim=True)
    return Credit(-above.flatten().repeat_interleave(evidence.lengths.flatten()))


def inputs(**objects: Any) -> RunInputs:
    """What a run of these objects is made of."""
    return inputs_of(posttrain.Config(), CallerObjects(**objects))


def tripled(report: StepReport) -> float:
    return 3 * report.metrics["reward"]


class Notes(posttrain.Watcher):
    """Keeps every report, and adds a metric where it is given a name for one."""

    def __init__(self, metric: str = "", of: Callable[[StepReport], float] = tripled) -> None:
        self.metric, self.of = metric, of
        self.steps: list[StepReport] = []
        self.evaluations: list[EvaluationReport] = []
        self.saves: list[tuple[int, bool]] = []
        """Steps, and whether the weights were there."""
        self.ends: list[EndReport] = []

    def on_step(self, report: StepReport) -> dict[str, float]:
        self.steps.append(report)
        return {self.metric: self.of(report)} if self.metric else {}

    def on_evaluation(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)

    def on_save(self, report: CheckpointReport) -> None:
        self.saves.append((report.step, (report.path / "policy.safetensors").is_file()))

    def on_end(self, report: EndReport) -> None:
        self.ends.append(report)


OWN_CODE = """from posttrain import Task
from posttrain.algorithms.table import grpo


class Mine(Task):
    name = "mine"
    reward_functions = ()

    def __init__(self, renderer, *, seed):
        self.renderer = renderer

    def prompts(self, step, draws):
        return [self.renderer.render("1", id="1", prefill="", columns={}) for draw in draws]

    def held_out(self):
        return self.prompts(1, range(1))


def mine():
    return grpo()


def score(completions, **columns):
    return [float(len(each)) for each in completions]
"""
"""A task, an algorithm and a reward in a file."""
