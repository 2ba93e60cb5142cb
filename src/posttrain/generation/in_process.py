"""The in-process sampler: many completions side by side, from the trainer's own weights.

Each prompt goes through the model once, however many completions it gets.  A row that finishes leaves the batch at
once and a waiting one takes its place.  A completion is a function of its prompt, the weights and its own
stream of uniform numbers, so neither batch-mates nor their order nor `max_rows` change it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from posttrain.generation.decoder_steps import DecoderSteps
from posttrain.generation.decoding_rows import PendingPrompt, Rows
from posttrain.generation.engine import require_room_for
from posttrain.generation.plain.model_steps import ModelSteps
from posttrain.generation.plain.recomputed_steps import RecomputedSteps
from posttrain.generation.request import Request
from posttrain.generation.static import StaticSteps
from posttrain.generation.stepping import Steps
from posttrain.models.context import num_embeddings, require_embeddings
from posttrain.models.forward import SharedPromptForward
from posttrain.models.policy import Policy
from posttrain.records import Group, Prompt, Rollout

PREFILL_TOKENS = 16384
"""Prompt tokens that go through the model at once."""
REFILL_SHARE = 4
"""Waiting rows are let in once one row in this many is free."""


class InProcessEngine:
    """Samples groups of completions from a policy in memory; an `Engine`."""

    reproducible = True

    def __init__(self, policy: Policy, *, max_rows: int = 256) -> None:
        self.policy = policy
        self.max_rows = max_rows
        self.weights_version = 0
        self._steps: Steps[Any] | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's."""
        return self.policy.tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The policy's."""
        return self.policy.stop_ids

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Note the version: the weights are the trainer's own, and every rollout reads them anew."""
        self.weights_version = version

    def room(self, prompt: Prompt) -> int:
        """Tokens that the model's context leaves for a completion of this prompt."""
        return self.policy.max_positions - len(prompt.tokens)

    def rollout(
        self,
        prompts: Sequence[Prompt],
        request: Request,
        *,
        advance: Callable[[int], None] = lambda count: None,
        before_token: Callable[[], None] = lambda: None,
    ) -> list[Group]:
        """See `Engine`."""
        self.policy.require_as_made()
        if self._steps is None:
            self._steps = steps_for(self.policy)
        steps, num_rows = self._steps, num_embeddings(self.policy.model)
        for prompt in prompts:
            require_embeddings(prompt.tokens, num_rows, self.policy.tokenizer, f"prompt {prompt.id}")
        limits = [min(request.max_completion_tokens, require_room_for(prompt, self)) for prompt in prompts]
        found: list[list[Rollout]] = [[] for _ in prompts]
        steps.refresh()
        try:
            rows = Rows(self.policy, steps, request, prompts, weights_version=self.weights_version)
            schedule = Schedule(rows, limits, self.max_rows)
            for index, rollout in schedule.completions(before_token):
                found[index].append(rollout)
                advance(1)
        finally:
            steps.release()
        return [
            Group(
                prompt=prompt,
                draw=request.key.first_draw + index,
                rollouts=tuple(sorted(rollouts, key=lambda rollout: rollout.sample)),
            )
            for index, (prompt, rollouts) in enumerate(zip(prompts, found, strict=True))
        ]


class Schedule:
    """Which completions are decoded when: as many rows at a time as there is room for, prompts in order."""

    def __init__(self, rows: Rows, limits: Sequence[int], max_rows: int) -> None:
        self.rows, self.limits, self.max_rows = rows, limits, max_rows
        self.waiting = deque(range(len(rows.prompts)))
        """Prompts that have not been through the model."""
        self.pending: deque[PendingPrompt] = deque()
        """Prompts that have, and whose group is not complete."""

    @torch.inference_mode()
    def completions(self, before_token: Callable[[], None]) -> Iterator[tuple[int, Rollout]]:
        """Finished completions as they come, each with the index of its prompt."""
        while self.waiting or self.pending or self.rows.num_rows:
            before_token()
            free = self.max_rows - self.rows.num_rows
            enough = free * REFILL_SHARE >= self.max_rows or not self.rows.num_rows
            if (self.waiting or self.pending) and enough:
                self._admit(free)
            else:
                self.rows.decode()
            yield from self.rows.take_finished()

    def _admit(self, free: int) -> None:
        """Fill free rows: first with what is left of prompts that are prefilled, then with new prompts."""
        group_size, prompts = self.rows.request.group_size, self.rows.prompts
        wanted = -(-(free - sum(group_size - item.started for item in self.pending)) // group_size)
        chosen: list[int] = []
        tokens = 0
        while self.waiting and len(chosen) < wanted and (not chosen or tokens < PREFILL_TOKENS):
            chosen.append(self.waiting.popleft())
            tokens += len(prompts[chosen[-1]].tokens)
        if chosen:
            prefilled = self.rows.steps.prefill([prompts[index].tokens for index in chosen])
            self.pending.extend(
                PendingPrompt(prefilled, row, index, self.limits[index]) for row, index in enumerate(chosen)
            )
        starting: list[tuple[PendingPrompt, int]] = []
        while self.pending and len(starting) < free:
            item = self.pending[0]
            starting.append((item, item.started))
            item.started += 1
            if item.started == group_size:
                self.pending.popleft()
        self.rows.add(starting)


def steps_for(policy: Policy) -> Steps[Any]:
    """Steps through the policy's own kind of forward pass; those of the shared-prompt one are captured on CUDA."""
    if not isinstance(policy.forward, SharedPromptForward):
        return ModelSteps(policy) if policy.cache_refusal is None else RecomputedSteps(policy)
    return StaticSteps(policy) if policy.device.type == "cuda" else DecoderSteps(policy)
