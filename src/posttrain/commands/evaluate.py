"""`posttrain eval`: evaluate a model on held-out problems."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.commands.arguments import LOADING, TEMPLATE, TrustSwitch, layers_for_model, split_arguments
from posttrain.commands.flags import CommandSpec
from posttrain.config import Config
from posttrain.errors import UserError
from posttrain.runs.files import write_atomically


@dataclass(frozen=True, kw_only=True)
class EvaluateSwitches(TrustSwitch):
    """Where results go."""

    output: str = ""
    """Also write the results to this file, as JSON."""


PROGRAM = CommandSpec(
    name="posttrain eval MODEL [RECIPE.yaml ...]",
    description="Evaluate a model (a folder, a run or `bundled`) on held-out problems, sampled at temperature 1 and"
    " greedily, with 95% intervals over problems.  A run uses its own recipe unless you give another.",
    switches=EvaluateSwitches(),
    only=(
        *LOADING,
        *TEMPLATE,
        *("task", "rewards", "engine", "rollout.max_completion_tokens", "rollout.max_rows"),
        *("evaluation.samples", "evaluation.pass_at_8_problems", "evaluation.probe_problems"),
        *("run.seed", "run.threads"),
        *("environment", "tools", "tools_at", "sandbox", "rollout.max_turns", "rollout.multi_turn"),
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Print the results, and write them."""
    model, given = split_arguments(arguments, PROGRAM).first("MODEL")
    config, switches = given.configured(Config, layers_for_model(model, given))
    output = Path(switches.output)
    if switches.output and (output.is_dir() or not output.parent.is_dir()):
        raise UserError(f"--output {output}: name a file in an existing folder.")
    from posttrain.runs.interruption import NOTHING_KEPT, stopped_with_a_word
    from posttrain.runs.progress import Progress
    from posttrain.training.held_out import evaluate

    with stopped_with_a_word(lambda: NOTHING_KEPT), Progress() as progress:
        results = evaluate(config.model.path, config, progress=progress)
    print("\n".join(result_lines(results)))
    if switches.output:
        content = f"{json.dumps(results, indent=2)}\n".encode()
        if output.is_file() or not output.exists():
            write_atomically(output, content)
        else:  # a pipe, or a terminal
            output.write_bytes(content)
    return 0


def result_lines(results: Mapping[str, Any]) -> list[str]:
    """Each result on its line, with its interval if it has one."""
    from posttrain.runs.reports import problems_suffix

    lines = []
    for name, value in results.items():
        interval = results.get(f"{name}_interval")
        if name.endswith("_interval") or name == "measured_on" or value is None:
            continue
        if isinstance(value, Mapping):
            lines += [f"{name}: {key:24} {share:.3f}" for key, share in value.items()]
        elif isinstance(value, float):
            spread = f"  [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
            lines.append(f"{name.replace('_', ' ') + problems_suffix(results, name):34} {value:.3f}{spread}")
        else:
            lines.append(f"{name.replace('_', ' '):34} {value}")
    return lines
