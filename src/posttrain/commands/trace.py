"""`posttrain trace`: one rollout, token by token; trace_table.py describes the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Le

from posttrain.commands.arguments import LOADING, TEMPLATE, TrustSwitch, layers_for_model, picture_file, split_arguments
from posttrain.commands.flags import CommandSpec
from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.options.bounds import NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class TraceSwitches(TrustSwitch):
    """What the table shows."""

    sample: NonNegativeInt = 0
    """Number of the completion in its group, from 0."""
    state_width: PositiveInt = 28
    """Characters to show of each state, counted from its end."""
    below: Annotated[float, Le(0)] = 0.0
    """Show only tokens with at most this log-prob, in nats, such as -1; 0 shows all."""
    beside: str = ""
    """Also show the advantages of another algorithm for the same tokens: NAME, or in braces as in a recipe, or several
    in brackets, '[grpo, {name: rloo, credit: reward_to_go}]'."""
    picture: str = ""
    """File of a picture: the completion coloured by its advantages, once per algorithm."""


PROGRAM = CommandSpec(
    name="posttrain trace MODEL PROMPT [RECIPE.yaml ...]",
    description="Sample a group of completions of a prompt and show one of them token by token.  PROMPT is a text, or"
    " the number of a held-out problem of the task.  A run uses its own recipe unless you give another.",
    switches=TraceSwitches(),
    only=(
        *LOADING,
        *TEMPLATE,
        *("task", "rewards", "algorithm", "reference.path", "run.seed"),
        *("environment", "tools", "tools_at", "sandbox", "rollout.max_turns", "rollout.multi_turn"),
        *(f"rollout.{name}" for name in ("group_size", "max_completion_tokens", "max_rows", "on_reward_error")),
        *(f"rollout.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "allow_cut_sampling")),
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Print the table, and draw the picture."""
    model, given = split_arguments(arguments, PROGRAM).first("MODEL")
    text, given = given.first("PROMPT")
    config, switches = given.configured(Config, layers_for_model(model, given))
    size = config.rollout.group_size
    if switches.sample >= size:
        raise UserError(f"command line: --sample = {switches.sample}: must be less than rollout.group_size = {size}")
    picture = picture_file(switches.picture) if switches.picture else None
    from posttrain.algorithms.table import build_algorithm
    from posttrain.commands import trace_table
    from posttrain.commands.advantage_picture import draw_token_advantages
    from posttrain.generation.conversations import sample_conversations
    from posttrain.training.session import CallerObjects, open_session

    algorithm, beside = build_algorithm(config.algorithm), trace_table.algorithms_beside(switches.beside)
    reference, whitening = "", None
    run = trace_table.traced_run(model)
    if run is not None:
        reference, whitening = run.first_model, run.whitening(config)
        config, algorithm = run.with_reference(config, algorithm), run.with_critic(algorithm)
        beside = {label: run.with_critic(each) for label, each in beside.items()}
    with open_session(config, CallerObjects(algorithm=algorithm)) as session:
        if run is not None:
            run.restore(session.learner, config)
        prompt = trace_table.prompt_to_trace(session, text)
        request = session.collector.request(0, purpose="trace")
        (group,) = sample_conversations(session.engine, [prompt], request, session.environment.workers)
        trace = trace_table.traced(
            session, group, switches.sample, beside=beside, reference=reference, whitening=whitening
        )
    print("\n".join(trace_table.table(trace, width=switches.state_width, below=switches.below)))
    if picture is not None:
        title = f"{prompt.text.strip().splitlines()[-1][-90:]}\n{trace.notes[-1][:110]}"
        draw_token_advantages(trace.tokens, trace.credits, picture, title)
        print(f"picture: {picture}")
    return 0
