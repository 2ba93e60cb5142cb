"""What replies in a run, from the sections of its recipe or its caller's objects; open until closed."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.environments.protocol import Own
from posttrain.models.policy import Policy
from posttrain.models.rendering import renderer_of
from posttrain.options.environment import EnvironmentOptions
from posttrain.options.rollout import SamplingOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.records import Prompt

if TYPE_CHECKING:
    from posttrain.environments.method_tools import MethodTools
    from posttrain.environments.tools import Toolbox
    from posttrain.environments.workers import ReplyWorkers


MANY_TURNS = 1_000_000
"""Above this, the plan shows no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySettings:
    """What a recipe, or a caller in Python, says about what replies."""

    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    tools: Sequence[str | Callable[..., Any]] = ()
    """Names as in a recipe, or functions."""
    tools_at: Mapping[str, str] = field(default_factory=dict)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    """Where the tool `python` runs programs."""
    own: "Own | MethodTools" = None
    """A class, a factory or Environments, in place of what the section names."""

    @property
    def anyone(self) -> bool:
        """Whether anything replies."""
        return bool(self.own is not None or self.tools or self.environment.is_given)


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """What replies to the policy of a run."""

    workers: "ReplyWorkers | None" = None
    """None if completions have one turn."""
    replies: bool = False
    """Whether anything replies, started or not."""
    rewards: bool = False
    """Whether replies may have a reward; replies of tools have no reward."""

    @property
    def notes(self) -> list[str]:
        """The environment in the plan of a run; nothing without one."""
        if self.workers is None:
            return []
        environments, options = self.workers.environments, self.workers.environments.options
        kept = "" if environments.reproducible else "; the run keeps replies for a resume"
        most = environments.max_turns
        turns = f"at most {most} turns" if most < MANY_TURNS else "any number of turns"
        limits = f"{turns}, {options.seconds:g} s a reply, {options.workers} at a time"
        return [f"replies    {environments.name}: {limits}{kept}", *(f"           {n}" for n in environments.notes)]


class RepliesOfRun:
    """Renders a run's prompts, then makes what replies; imports nothing if nothing replies."""

    def __init__(
        self, policy: Policy, settings: ReplySettings, template_options: Mapping[str, Any], opened: ExitStack
    ) -> None:
        """Everything that is started is closed with `opened`."""
        self.policy, self.settings, self.opened = policy, settings, opened
        self.toolbox: Toolbox | None = None
        self.example: object = None
        """Makes objects whose methods are tools."""
        if settings.anyone:
            from posttrain.environments.method_tools import MethodTools, method_names
            from posttrain.environments.tools import toolbox_of

            own, methods = settings.own, list[Callable[..., Any]]()
            if isinstance(own, MethodTools):
                self.example = own.example(settings.environment.seconds)
                opened.callback(own.close, self.example, settings.environment.seconds)
                methods = [getattr(self.example, name) for name in method_names(self.example)]
            self.toolbox = toolbox_of([*settings.tools, *methods], settings.sandbox)
            opened.callback(self.toolbox.close)
        in_chat = self.toolbox.descriptions if self.toolbox and not settings.tools_at else ()
        self.renderer = renderer_of(policy, template_options, in_chat)
        """Describes the tools in every conversation."""

    def unopened(self) -> RunEnvironment:
        """For a run whose replies are known: nothing is started."""
        return RunEnvironment(replies=self.toolbox is not None, rewards=self.toolbox is not None and not self.toolbox)

    def open(self, prompts: Callable[[], Sequence[Prompt]]) -> RunEnvironment:
        """Start the threads that reply, to prompts such as these."""
        if self.toolbox is None:
            return RunEnvironment()
        from posttrain.environments.making import TurnSettings, environments_of
        from posttrain.environments.method_tools import MethodTools
        from posttrain.environments.workers import ReplyWorkers

        settings, sampling = self.settings, self.settings.sampling
        turns = TurnSettings(
            options=settings.environment,
            tools_at=settings.tools_at,
            max_turns=sampling.max_turns,
            multi_turn=sampling.multi_turn,
            in_chat=any(prompt.messages is not None for prompt in prompts()),
        )
        by_methods = settings.own if isinstance(settings.own, MethodTools) else None
        own = None if isinstance(settings.own, MethodTools) else settings.own
        environments = environments_of(turns, self.toolbox, self.renderer, self.policy.stop_ids, own)
        assert environments is not None, "something replies"
        if by_methods is not None:
            environments = by_methods.environments(environments, self.example)
        workers = self.opened.enter_context(ReplyWorkers(environments))
        return RunEnvironment(workers, replies=True, rewards=not self.toolbox)
