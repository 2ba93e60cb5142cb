"""What becomes of a family: which pass it takes, how far that is from the library, and what reads it again."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from posttrain.algorithms.table import build_algorithm
from posttrain.cli import main
from posttrain.errors import UserError
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.parity import engine_in_parity
from posttrain.models.context import fix_angles, own_context
from posttrain.models.loading.construction import is_wrapper
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.saving import save_adapter, save_policy
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import AdapterOptions, ModelOptions
from posttrain.options.rollout import SamplingParams
from posttrain.options.training import UpdateOptions
from posttrain.records import Group
from posttrain.training.update import Objective, group_logprobs, update
from tests.support.adapted import fill
from tests.support.every_family import small_model
from tests.support.families import CONTEXT
from tests.support.tiny import VOCAB, batch_of, plain_logprobs, request, some_prompts, tokenizer, weights

FAST, CACHED, RECOMPUTED, REFUSED = "fast", "plain with a cache", "plain without a cache", "refused"
FAULT = "fault"
"""A traceback where there should be a message, or a way that works."""
ROUTES = (FAST, CACHED, RECOMPUTED, REFUSED, FAULT)
PROMPTS, LIMIT, TEMPERATURE = (3, 21, 1, 12), 22, 0.8
"""Rows are on both sides of every window (8 tokens) and of the original context of `longrope` (16)."""
FOUND_OUT = " nats "
"""In the remarks that only sampling finds out."""
NOT_EAGER = {"falcon with ALiBi": ("sdpa", "transformers' `eager` attention adds its biases twice")}
"""Rows that are held against another attention of the library, and why."""


@dataclass(frozen=True, slots=True)
class Route:
    """How a family is trained and sampled, one of ROUTES, and what there is to say about it."""

    name: str
    remarks: str


@dataclass(frozen=True, slots=True)
class Distances:
    """Greatest |difference| of log-probs from the library's own, row by row, in nats; and what two updates did."""

    sampler: float
    trainer: float
    moved: bool


def route_of(policy: Policy) -> Route:
    """The way that a policy takes."""
    config, layer = policy.model.config, policy.output_layer
    said = []
    if policy.forward_reason is not None and not policy.forward_reason.startswith("its family is"):
        said.append(policy.forward_reason)
    if policy.cache_refusal is not None:
        said.append(policy.cache_refusal)
    if layer.bias is not None:
        said.append("its output layer has a bias")
    if layer.soft_cap is not None:
        said.append(f"logits are capped at {layer.soft_cap:g}")
    if layer.scale != 1:
        said.append(f"logits are multiplied by {layer.scale:.3g}")
    if own_context(config) is None:
        said.append("needs `model.context`")
    name = FAST if policy.forward_reason is None else CACHED if policy.cache_refusal is None else RECOMPUTED
    return Route(name, "; ".join(said))


def saved(label: str, folder: Path) -> Path:
    """A row's model in a folder, with a tokenizer."""
    small_model(label).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def quick_route(label: str, folder: Path) -> Route:
    """The way that a row's model takes before anything is sampled; only models of several parts go through a folder."""
    try:
        model = small_model(label)
        if is_wrapper(model.config) or model.config.is_encoder_decoder:
            return route_of(loaded(saved(label, folder)))
        return route_of(as_policy(model, tokenizer(), context=CONTEXT))
    except UserError as error:
        return refused(error, folder)


def refused(error: UserError, folder: Path) -> Route:
    """A refusal, without the folder's name."""
    return Route(REFUSED, str(error).replace(str(folder), "FOLDER"))


def probed(folder: Path, dtype: str) -> tuple[Policy | None, Route]:
    """What a run makes of a folder before its first step."""
    try:
        policy = engine_in_parity(loaded(folder, dtype=dtype), max_rows=3, longest=CONTEXT).policy
    except UserError as error:
        return None, refused(error, folder)
    return policy, route_of(policy)


def sampled(policy: Policy) -> list[Group]:
    """Rows of mixed lengths, which come and go while others are decoded."""
    asked = request(2, LIMIT, SamplingParams(temperature=TEMPERATURE))
    return sample_groups(InProcessEngine(policy, max_rows=3), some_prompts(PROMPTS), asked)


def distances(policy: Policy, label: str, folder: Path) -> Distances:
    """How far sampler and trainer are from the model that the library loads, and whether two updates move weights."""
    groups = sampled(policy)
    drawn = torch.tensor([value for group in groups for rollout in group.rollouts for value in rollout.logprobs])
    trained = group_logprobs(policy, groups, temperature=TEMPERATURE, max_tokens=100)
    own = truth(own_model(label, folder), groups, policy.compute_dtype)
    return Distances(distance(drawn, own), distance(trained, own), two_updates(policy, groups))


def own_model(label: str, folder: Path) -> PreTrainedModel:
    """The library's, attention written out, whole, and with the angles that belong to the context."""
    config = AutoConfig.from_pretrained(folder)
    attention = NOT_EAGER.get(label, ("eager", ""))[0]
    kind: Any = AutoModelForImageTextToText if is_wrapper(config) else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32).eval()
    fix_angles(model, CONTEXT)
    return model


def truth(model: PreTrainedModel, groups: list[Group], dtype: torch.dtype) -> Tensor:
    """log-probs by the library's model, a row at a time, without cache or padding."""
    rows = [(group.prompt.tokens, rollout.tokens) for group in groups for rollout in group.rollouts]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        return torch.cat([plain_logprobs(model, *row, TEMPERATURE) for row in rows])


def distance(some: Tensor, others: Tensor) -> float:
    """Greatest |difference|; infinite where one is not a number."""
    return (some.double() - others.double()).abs().nan_to_num(nan=torch.inf).max().item()


def two_updates(policy: Policy, groups: list[Group]) -> bool:
    """Whether two optimiser steps on these groups, in several micro-batches, leave finite weights that have moved."""
    algorithm = build_algorithm({"name": "grpo"})
    batch = batch_of(groups, [[1.0, -1.0]] * len(groups), algorithm)
    before = weights(policy)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3)
    options = UpdateOptions(tokens_per_microbatch=100)
    for _ in range(2):
        update(policy, optimizer, batch, Objective(algorithm=algorithm, temperature=TEMPERATURE), options, 1e-3)
    after = weights(policy)
    return bool(after.isfinite().all()) and not torch.equal(before, after)


FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, Warning)
"""What reading may raise; UserError is a ValueError."""
TOKENS = torch.arange(60).reshape(3, 20) * 7 % (VOCAB - 4) + 2


@dataclass(frozen=True, slots=True)
class Exports:
    """Greatest |difference| of log-probs from the policy that was saved, in nats, or what was said instead."""

    model: float | str
    """RUN/model read by transformers."""
    adapter: float | str
    """RUN/adapter read by peft over the library's own model."""
    again: float | str
    """RUN/adapter read by us."""
    merged: float | str
    """RUN/model with the adapter merged into it, read by transformers."""


def exports(folder: Path, out: Path) -> Exports:
    """Save what a run saves over the model in a folder, with weights that are not those of the start, and read it."""
    whole = loaded(folder)
    save_policy(whole, out / "model")
    model = said_or(lambda: apart(whole.model, read_by_transformers(out / "model")))
    try:
        policy = loaded(folder, adapter=AdapterOptions(rank=2))
    except UserError as error:
        refusal = str(error).replace(str(folder), "FOLDER")
        return Exports(model, refusal, refusal, refusal)
    fill(policy.model, size=0.05)
    save_adapter(policy, out / "adapter")
    save_policy(policy, out / "merged")
    return Exports(
        model,
        said_or(lambda: apart(policy.model, read_by_peft(folder, out / "adapter"))),
        said_or(lambda: apart(policy.model, loaded(out / "adapter").model)),
        said_or(lambda: apart(policy.model, read_by_transformers(out / "merged"))),
    )


def loaded(folder: Path, **options: Any) -> Policy:
    """As a recipe would load it."""
    return load_policy(ModelOptions(path=str(folder), device="cpu", context=CONTEXT, **options))


def few_steps(base: Path, run: Path, *flags: str) -> int:
    """The real command: two steps of supervised training, at a learning rate that moves log-probs by tenths."""
    rows = run.parent / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "completion": "2"}\n{"prompt": "2+1", "completion": "3"}\n')
    command = ["sft", "--model.path", str(base), "--model.context", str(CONTEXT), "--task.path", str(rows)]
    command += ["--run.num-steps", "2", "--sft.rows-per-batch", "2", "--task.held-out-share", "0"]
    return main([*command, "--sft.learning-rate", ".1", "--run.threads", "1", "--run.folder", str(run), *flags])


def said_or(measure: Callable[[], float]) -> float | str:
    """A distance, or the first words of what was raised in its place."""
    try:
        return measure()
    except FAULTS as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def read_by_transformers(folder: Path) -> PreTrainedModel:
    """The model of a folder, known to have every weight in it and no other."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    others = {kind: sorted(names) for kind, names in found.items() if names}
    if others:
        raise AssertionError(f"{others}")
    return model


def read_by_peft(folder: Path, adapter: Path) -> nn.Module:
    """The library's own model of a folder, whole, under the adapter; a warning of peft is an error."""
    kind: Any = AutoModelForImageTextToText if is_wrapper(AutoConfig.from_pretrained(folder)) else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return peft.PeftModel.from_pretrained(model, adapter)


@torch.no_grad()
def apart(ours: nn.Module, theirs: nn.Module) -> float:
    """Greatest |difference| of log-probs, in nats."""
    some, others = logprobs(ours), logprobs(theirs)
    return (some - others).abs().nan_to_num(nan=torch.inf).max().item()


def logprobs(model: Any) -> Tensor:
    """log π of every token behind each of the rows."""
    model.eval()
    fix_angles(model.get_base_model() if isinstance(model, peft.PeftModel) else model, CONTEXT)
    made: Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return made.double().log_softmax(-1)
