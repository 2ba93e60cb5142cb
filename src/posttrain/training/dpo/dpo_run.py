"""Direct preference optimisation on pairs of rows, or on pairs sampled in rounds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from posttrain.config import DpoConfig
from posttrain.config.reading import resolved_config
from posttrain.errors import UserError
from posttrain.models.adapters.in_force import trains_adapter
from posttrain.models.policy import Policy
from posttrain.records import Preference
from posttrain.runs.named_inputs import policy_input
from posttrain.runs.reports import Run
from posttrain.runs.run_inputs import RunInputs
from posttrain.runs.watchers import Watcher
from posttrain.tasks.base import Task
from posttrain.tasks.row_files.rows import GivenRows
from posttrain.training.caller_objects import (
    NOTHING_BROUGHT,
    CallerObjects,
    Rewards,
    Rows,
    StartOptions,
    inputs_of,
)
from posttrain.training.dpo.dpo_objective import DpoObjective
from posttrain.training.dpo.round_pairs import RoundPairs
from posttrain.training.fit import run_fit, show_plan
from posttrain.training.fit_session import FitSession, pairs_of_rows
from posttrain.training.optimizer import OwnOptimizer, require_all_trained
from posttrain.training.reference import Reference, UncopiedPolicy
from posttrain.training.session import open_session, require_prompts_and_rows
from posttrain.training.trained import policy_of_run


def train_dpo(
    config: DpoConfig,
    *,
    policy: Policy | None = None,
    task: Task | None = None,
    rewards: Rewards = (),
    rows: Rows | None = None,
    held_out_rows: Rows | None = None,
    reference: Policy | Reference | None = None,
    optimizer: OwnOptimizer | None = None,
    watchers: Sequence[Watcher] = (),
    resume: bool = False,
    from_step: int | None = None,
    accept_changes: bool = False,
) -> Run:
    """Train a policy to prefer the chosen answers of pairs to the rejected ones, and save it to RUN/model.

    The pairs are rows with `chosen` and `rejected`, or, with `dpo.rounds`, the best and worst of the policy's
    completions by rewards.  The objects are those of `posttrain.train`; `rows` have two answers each.  `reference`
    replaces the policy before training, `optimizer` AdamW.  `resume` continues the run in `config.run.folder` from its
    last checkpoint, within a round too, to the same bits as an uninterrupted run.
    """
    start = StartOptions(watchers=watchers, resume=resume, from_step=from_step, accept_changes=accept_changes)
    caller = CallerObjects(
        policy=policy, task=task, rewards=rewards, rows=rows, held_out_rows=held_out_rows, optimizer=optimizer
    )
    compared = given_reference(reference, config)
    config = resolved_config(config, adapter=None if policy is None else trains_adapter(policy.model))
    inputs = inputs_of_dpo(config, caller, reference)
    return run_fit(config, inputs, start, partial(open_dpo, config, caller, compared))


def show_dpo_plan(config: DpoConfig) -> None:
    config = resolved_config(config)
    show_plan(config, partial(open_dpo, config))


@contextmanager
def open_dpo(
    config: DpoConfig, caller: CallerObjects = NOTHING_BROUGHT, reference: Reference | None = None
) -> Iterator[FitSession[Preference]]:
    """Load the model, and read all pairs or open the session that samples and scores them."""
    if config.dpo.rounds:
        with open_session(config.sampling_half(), caller) as session:
            require_prompts_and_rows(session)
            rounds = RoundPairs(config, session, reference)
            yield FitSession(
                config=config,
                model_name=session.model_name,
                source=rounds,
                objective=rounds,
                own_optimizer=caller.optimizer,
            )
        return
    policy, name = policy_of_run(config.model, caller.policy, seed=config.run.seed)
    pairs = pairs_of_rows(config, config.dpo, policy, GivenRows(rows=caller.rows, held_out=caller.held_out_rows))
    objective = DpoObjective(config, policy, pairs, model_name=name, reference=reference)
    fitted = FitSession(
        config=config, model_name=name, source=pairs, objective=objective, own_optimizer=caller.optimizer
    )
    require_all_trained(fitted.trained.optimizer, policy.model)
    yield fitted


def given_reference(given: Policy | Reference | None, config: DpoConfig) -> Reference | None:
    if given is not None and config.dpo.refresh_reference:
        raise UserError("reference: is given, and dpo.refresh_reference takes one in each round.  Leave one out.")
    return UncopiedPolicy(given) if isinstance(given, Policy) else given


def inputs_of_dpo(config: DpoConfig, caller: CallerObjects, reference: Policy | Reference | None) -> RunInputs:
    inputs = inputs_of(config.sampling_half(), caller)
    given = {"policy": caller.policy, "reference": reference if isinstance(reference, Policy) else None}
    weighed = [policy_input(each, name=name, weighed=True) for name, each in given.items()]
    return replace(inputs, objects={**inputs.objects, **weighed[0], **weighed[1]})
