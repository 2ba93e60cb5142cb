"""`posttrain chat`: ask a model in the terminal and see its whole answer, tags included."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from posttrain.commands.arguments import (
    LOADING,
    TEMPLATE,
    SplitArguments,
    TrustSwitch,
    model_layer,
    section_of_run,
    split_arguments,
)
from posttrain.commands.flags import CommandSpec, given_flags
from posttrain.config.recipes import RecipeLayer
from posttrain.config.sections import require_one_turn
from posttrain.options.dataset import DatasetOptions
from posttrain.options.environment import EnvironmentOptions
from posttrain.options.model import BUNDLED, ModelOptions, is_run_folder
from posttrain.options.rollout import SamplingOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.options.task import TASK_OPTIONS
from posttrain.runs.named_inputs import run_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.models.rendering import TokenizerRenderer
    from posttrain.records import Group, Prompt

REPLYING = ("environment", "tools", "tools_at", "sandbox")

HINTS = {
    BUNDLED: "The bundled model knows only one kind of question: Use all of 11, 25, 11 to make 25.",
    "bundled-instruct": "This model adds: If you add 57 and 8, what is the result?",
    "bundled-prose": "This model continues a text: Once upon a time",
}
"""What to type, for each model of this package."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """The options of a conversation."""

    model: ModelOptions = field(default_factory=ModelOptions)
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    tools: tuple[str, ...] = ()
    tools_at: Mapping[str, str] = field(default_factory=dict)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)


@dataclass(frozen=True, kw_only=True)
class ChatSwitches(TrustSwitch):
    """How questions are asked."""

    prompt: str = ""
    """Ask this question, print the answer and exit."""
    system: str | None = None
    """System message before every question; default for a run: the one used in training."""
    prefill: str | None = None
    """Beginning of every answer, such as `<think>`; default for a run: the one used in training."""
    prompt_format: Literal["auto", "plain", "chat"] | None = None
    """How a question is formatted: as a user message in the chat template, or as plain text; auto uses the template if
    there is one.  Default for a run: as in training."""
    seed: int = 0
    """Seed of the sampled answers; the same seed repeats them."""


PROGRAM = CommandSpec(
    name="posttrain chat MODEL",
    description="Chat with a model (a folder, a run or `bundled`).  Each line is a new question; an empty line quits."
    "  A run's environment and tools reply as in training; replies are shown between « and ».",
    switches=ChatSwitches(),
    only=(*LOADING, *TEMPLATE, *REPLYING, "sampling"),
)


def main(arguments: Sequence[str]) -> int:
    model, given = split_arguments(arguments, PROGRAM).only("MODEL")
    config, switches = given.configured(ChatConfig, [*replies_of_run(model, given), model_layer(model)])
    if not config.tools and not config.environment.is_given:
        require_one_turn(config, "sampling")
    questions = [switches.prompt] if switches.prompt else typed(HINTS.get(model, ""))
    answer_all(config, questions, way_of_asking(model, switches), switches.seed)
    return 0


def replies_of_run(model: str, given: SplitArguments) -> list[RecipeLayer]:
    """A run's environment and tools as a layer that must be trusted; empty if flags name others."""
    if not is_run_folder(Path(model)) or any(flag.path.startswith(REPLYING) for flag in given_flags(given.flags)):
        return []
    recipe = given.trust(run_recipe(Path(model)))
    rollout = recipe.sections.get("rollout")
    if not any(recipe.sections.get(name) for name in ("environment", "tools")) or not isinstance(rollout, dict):
        return []
    sections = {name: recipe.sections[name] for name in REPLYING if name in recipe.sections}
    turns = {name: rollout[name] for name in ("max_turns", "multi_turn") if name in rollout}
    return [replace(recipe, sections={**sections, "sampling": turns})]


def way_of_asking(model: str, switches: ChatSwitches) -> DatasetOptions:
    names = ("system", "prefill", "prompt_format")
    given = {name: getattr(switches, name) for name in names if getattr(switches, name) is not None}
    trained = section_of_run(model, "task", ("name", *names))
    return DatasetOptions(**{**(trained if trained.get("name") in TASK_OPTIONS else {}), **given, "name": "dataset"})


def typed(hint: str) -> Iterator[str]:
    """Lines from the keyboard, or from a pipe."""
    interactive = sys.stdin.isatty()
    if interactive and hint:
        print(hint)
    with suppress(EOFError):
        while (line := input("> " if interactive else "")).strip():
            yield line


def answer_all(config: ChatConfig, questions: "Sequence[str] | Iterator[str]", how: DatasetOptions, seed: int) -> None:
    """Load the model, then answer each question as it comes."""
    from posttrain.environments.run_environment import RepliesOfRun, ReplySettings
    from posttrain.generation.conversations import sample_conversations
    from posttrain.generation.parity import USUAL_TOKENS, engine_in_parity
    from posttrain.generation.request import GroupRequest, StreamKey
    from posttrain.models.loading.model_folder import load_policy

    policy = load_policy(config.model, inference=True)
    longest = min(policy.max_positions, USUAL_TOKENS + config.sampling.max_completion_tokens)
    engine = engine_in_parity(policy, max_rows=1, longest=longest)
    with ExitStack() as opened:
        settings = ReplySettings(**{name: getattr(config, name) for name in (*REPLYING, "sampling")})
        replies = RepliesOfRun(policy, settings, config.model.template_options, opened)
        workers = None
        for number, question in enumerate(questions):
            prompt = typed_prompt(question, replies.renderer, how)
            if number == 0:  # whether it is a conversation is known only now
                workers = replies.open(partial(list, [prompt])).workers
            request = GroupRequest(
                group_size=1,
                max_completion_tokens=config.sampling.max_completion_tokens,
                sampling=config.sampling.sampling,
                key=StreamKey(seed, "chat", number),
            )
            (group,) = sample_conversations(engine, [prompt], request, workers)
            print("\n".join(shown_answer_lines(group, engine.tokenizer)))
            if workers is not None:
                workers.end_of([group])


def shown_answer_lines(group: "Group", tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The answer with its replies, and a line about it."""
    from posttrain.rewards.countdown import countdown
    from posttrain.rewards.grading.grade import grade, reward_function
    from posttrain.runs.progress import visible
    from posttrain.runs.prompt_preview import said_and_given

    (rollout,) = group.rollouts
    text, verdict = group.graded_text(rollout), ""
    if rollout.turns:
        said = said_and_given(rollout, tokenizer)
        said = said[:-1] if rollout.sequence.text_tokens != rollout.tokens else said  # without the stop token
        text = group.prompt.prefill + "".join(piece for piece, _ in said)
        verdict = f", {rollout.num_turns} turns"
    if rollout.environment_reward is not None:
        verdict += f", the environment's reward {rollout.environment_reward:g}"
    if group.prompt.columns:
        outcomes = grade([group], [reward_function(countdown)]).outcomes
        verdict += ", " + ", ".join(rows[0][0] for rows in outcomes.values())
    return [visible(text), f"[{rollout.num_sampled} tokens, ended by {rollout.finish}{verdict}]\n"]


COUNTDOWN = re.compile(r"Use (all|some) of ([0-9]+(?:, [0-9]+)*) to make ([0-9]+)\.")
"""A Countdown problem in the format of the bundled model; its answers can be graded."""
AS_TYPED = DatasetOptions()
ASKED = "asked"
"""The id of a typed prompt; a task's problems have other ids."""


def typed_prompt(text: str, renderer: "TokenizerRenderer", how: DatasetOptions = AS_TYPED) -> "Prompt":
    """A typed question as a prompt, like one from a dataset row, except that `auto` means the chat template, if any.

    A one-line Countdown problem gets the format of the bundled model, unless `how` says otherwise, and the columns that
    graders read.
    """
    from posttrain.tasks.prompt_content import prompt_content

    if how == AS_TYPED and (match := COUNTDOWN.fullmatch(text.strip())):
        quantifier, numbers, target = match.groups()
        rule = "all" if quantifier == "all" else "subset"
        columns = {"numbers": tuple(map(int, numbers.split(", "))), "target": int(target), "rule": rule}
        return renderer.render(text.strip() + "\n", id=ASKED, columns=columns)
    if how.prompt_format == "auto":
        how = replace(how, prompt_format="chat" if renderer.template else "plain")
    return renderer.render(prompt_content(text, how, ASKED), id=ASKED, prefill=how.prefill)
