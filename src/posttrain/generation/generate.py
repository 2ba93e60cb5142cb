"""Completions of prompts from a model in memory or in a folder, outside any run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from posttrain.binding import bind
from posttrain.environments.protocol import Own
from posttrain.environments.run_environment import RepliesOfRun, ReplySettings
from posttrain.environments.workers import ReplyWorkers
from posttrain.errors import UserError
from posttrain.generation.conversations import sample_conversations
from posttrain.generation.engine import Engine
from posttrain.generation.parity import engine_in_parity
from posttrain.generation.request import GroupRequest, StreamKey
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy, as_policy
from posttrain.options.bounds import refuse_unread
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import SamplingOptions
from posttrain.records import Group, Prompt

Messages = Sequence[Mapping[str, object]]

NO_TEXTS: Mapping[str, str] = MappingProxyType({})
MAX_ROWS = 256
"""Completions decoded together."""


def generate(
    model: Policy | nn.Module | str | Path,
    prompts: str | Sequence[str | Messages],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    group_size: int = 1,
    seed: int = 0,
    environment: Own = None,
    tools: Sequence[str | Callable[..., Any]] = (),
    tools_at: Mapping[str, str] = NO_TEXTS,
    **sampling: object,
) -> list[Group]:
    """Sample completions: a group of `group_size` for each prompt, in the order of the prompts.

        for group in posttrain.generate(policy, ["2+3=", "4+4="], group_size=4, max_completion_tokens=8):
            print([each.text for each in group.rollouts])

    Each rollout has its `text`, its `tokens` with the stop token, the `logprobs` of the tokens in nats and why it
    `finish`ed.  The model is a policy (`posttrain.as_policy`), a model object with its `tokenizer`, or the folder of a
    model.  Prompts are one or a list of them, each a text or a conversation for the chat template.  `sampling` takes
    the options of a recipe's `rollout`: `temperature` (0 is greedy), `max_completion_tokens`, `top_k`, `top_p`,
    `min_p`, `max_turns`.  The same seed gives the same completions, whatever the other prompts are.

    `environment` is a class or a factory of what replies to the turns of a completion.  `tools` are functions that it
    may call, or `calculator` and `python`; `tools_at` are the texts that ask them in plain text.
    """
    options = bind(SamplingOptions, sampling, where="generate")
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise UserError(f"model: a {type(model).__name__} needs its tokenizer.  Give tokenizer=...")
        policy = as_policy(model, tokenizer)
    elif tokenizer is not None:
        raise UserError("tokenizer: a policy and a folder have their own.  Leave it out.")
    else:
        policy = model if isinstance(model, Policy) else load_policy(ModelOptions(path=str(model)), inference=True)
    if environment is None and not tools:
        refuse_unread(
            "an environment or tools",
            {"tools_at": bool(tools_at), **{name: name in sampling for name in ("max_turns", "multi_turn")}},
        )
    settings = ReplySettings(tools=tools, tools_at=tools_at, sampling=options, own=environment)
    listed = [prompts] if isinstance(prompts, str) else list(prompts)
    if any(isinstance(each, Mapping) for each in listed):
        raise UserError("generate: a prompt is a single message.  Give a list of conversations: prompts=[[{...}]].")
    with ExitStack() as opened:
        replies = RepliesOfRun(policy, settings, {}, opened)
        rendered = [replies.renderer.render(prompt, id=f"prompts[{index}]") for index, prompt in enumerate(listed)]
        if not rendered:
            return []
        workers = replies.open(lambda: rendered).workers
        longest = max(len(prompt.tokens) for prompt in rendered) + options.max_completion_tokens
        longest = policy.max_positions if workers is not None else min(longest, policy.max_positions)
        engine = engine_in_parity(policy, max_rows=MAX_ROWS, longest=longest)
        return completions(engine, rendered, options, group_size=group_size, seed=seed, workers=workers)


def completions(
    engine: Engine,
    prompts: Sequence[Prompt],
    options: SamplingOptions,
    *,
    group_size: int,
    seed: int,
    workers: ReplyWorkers | None = None,
) -> list[Group]:
    """`generate` with an engine and rendered prompts."""
    if group_size < 1:
        raise UserError(f"generate: group_size = {group_size} must be at least 1.")
    request = GroupRequest(
        group_size=group_size,
        max_completion_tokens=options.max_completion_tokens,
        sampling=options.sampling,
        key=StreamKey(seed, "generate", 0),
    )
    return sample_conversations(engine, prompts, request, workers)
