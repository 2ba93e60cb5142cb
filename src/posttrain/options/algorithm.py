"""Records inside the `algorithm` section: the critic of an actor-critic, and the teacher of distillation."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from posttrain.options.bounds import Bounded, NonNegativeInt, Rule, Unused

LARGE = 100_000_000
"""Parameters from which `auto` gives the critic a separate trunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptions(Bounded):
    """A value head, what it reads, and how it learns."""

    trunk: Literal["auto", "shared", "own"] = "auto"
    """What the head reads: the policy's hidden states (shared), or those of a second model (own), which costs
    memory and another pass and leaves the policy undisturbed.  auto: shared below 100 M parameters, else own."""
    path: str = ""
    """A critic to start from: the folder RUN/critic of a run, or, for `trunk: own`, of any model with the policy's
    tokens.  A reward model gives its body and its score: at first the critic expects at every token what the reward
    model says of the text so far.  Empty is a new head and, for `trunk: own`, a copy of the untrained policy."""
    head: Literal["mlp", "linear"] = "mlp"
    """mlp: d → 4d → 1 with a ReLU between, as courses have it.  linear: d → 1."""
    through_trunk: bool = True
    """Whether the value loss trains a shared trunk too; false leaves the policy's weights to the policy's loss."""
    rate_scale: Annotated[float, Gt(0)] = 10.0
    """The critic's learning rate as a multiple of the policy's."""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """The critic's gradient is scaled down to this Euclidean norm, apart from the policy's."""
    fit_steps: NonNegativeInt = 10
    """Most steps at the start in which only the critic learns: until it explains some of the returns of rollouts that
    it has not learned from (explained variance above 0).  With 0 the policy learns at once."""
    warm_start: str = ""
    """Folder of earlier rollouts (RUN/rollouts), from a similar policy, that the critic learns before the first step;
    empty is none."""

    rules = (Unused("through_trunk", {"trunk": ("auto", "shared")}),)

    def has_own_trunk(self, parameters: int) -> bool:
        return self.trunk == "own" or (self.trunk == "auto" and parameters >= LARGE)


DEFAULT_CRITIC = CriticOptions()


PLACES = ("{prompt}", "{shown}")
"""Placeholders of a template: for the problem, and for what only the teacher sees."""


@dataclass(frozen=True, kw_only=True)
class TeacherOptions(Bounded):
    """The policy whose next-token distributions are learned, on completions that the student sampled."""

    model: str = ""
    """A folder, a run, or a name on the hub, as in `model.path`, of a model with the student's vocabulary; empty is the
    student itself, which then `sees` more."""
    weights: Literal["now", "start"] = "now"
    """If the teacher is the student: its present weights, or those at the start of training."""
    sees: Literal["prompt", "answer", "sibling"] = "prompt"
    """The teacher's prompt: the student's; with the answer in `answer_column`; or with the shortest right completion by
    a sibling.  Without one, or without room for it, the teacher sees the prompt."""
    answer_column: str = "answer"
    """The column of a row that holds its answer; with `sees: answer`."""
    correct_from: float = 1.0
    """The least reward of a sibling that counts as right; with `sees: sibling`."""
    template: str = "{prompt}\n{shown}\n\n{prompt}"
    """The teacher's prompt, or its last message by the user: `{prompt}` stands for the student's, each time it occurs,
    and `{shown}` for the answer or the sibling's completion."""

    rules = (
        Rule(
            "sees",
            lambda o: o.model or o.sees != "prompt",
            "makes the student its teacher, with nothing to teach.  Name a `model`, or see answer or sibling.",
        ),
        Unused("weights", {"model": ""}),
        Rule(
            "template",
            lambda o: all(each in o.template for each in PLACES),
            "needs {{prompt}} and {{shown}}.  Write where they go.",
        ),
        Unused("answer_column", {"sees": "answer"}),
        Unused("correct_from", {"sees": "sibling"}),
        Unused("template", {"sees": ("answer", "sibling")}),
    )
