"""Records inside the `algorithm` section: the critic of an actor-critic, and the teacher of distillation."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from posttrain.options.bounds import Bounded, NonNegativeInt, Rule, Unused

LARGE = 100_000_000
"""From this many parameters on, `auto` gives the critic a separate trunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptions(Bounded):
    """A value head, what it reads, and how it learns."""

    trunk: Literal["auto", "shared", "own"] = "auto"
    """What the head reads: the policy's hidden states (shared), or those of a second model (own).  A second model needs
    more memory and another pass, but does not disturb the policy.  auto: shared below 100 M parameters, else own."""
    path: str = ""
    """A critic to start from: the folder RUN/critic of a run, or, for `trunk: own`, of any model with the policy's
    tokens.  The critic of a reward model reuses its body and its score head: initially its value at each token is the
    reward model's score of the text so far.  Empty: a new head and, for `trunk: own`, a copy of the untrained
    policy."""
    head: Literal["mlp", "linear"] = "mlp"
    """mlp: d → 4d → 1 with a ReLU in between, as in courses.  linear: d → 1."""
    through_trunk: bool = True
    """Whether the value loss also trains a shared trunk.  With false, only the policy's loss changes the policy's
    weights."""
    rate_scale: Annotated[float, Gt(0)] = 10.0
    """The critic's learning rate as a multiple of the policy's."""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """Largest Euclidean norm of the critic's gradient; a larger one is scaled down, separately from the policy's."""
    fit_steps: NonNegativeInt = 10
    """Maximum number of steps at the start in which only the critic learns.  The policy starts earlier if the critic
    explains some of the returns of new rollouts (explained variance above 0).  With 0 both learn from the start."""
    warm_start: str = ""
    """Folder of earlier rollouts (RUN/rollouts) of a similar policy, on which the critic is trained before the first
    step; empty: none."""

    rules = (Unused("through_trunk", {"trunk": ("auto", "shared")}),)

    def has_own_trunk(self, parameters: int) -> bool:
        return self.trunk == "own" or (self.trunk == "auto" and parameters >= LARGE)


DEFAULT_CRITIC = CriticOptions()


PLACES = ("{prompt}", "{shown}")
"""Placeholders of a template: the problem, and the text that only the teacher sees."""


@dataclass(frozen=True, kw_only=True)
class TeacherOptions(Bounded):
    """The policy whose next-token distributions the student learns, on completions that the student sampled."""

    model: str = ""
    """A folder, a run, or a name on the hub, as in `model.path`, of a model with the student's vocabulary.  Empty: the
    student itself, with more in its prompt (`sees`)."""
    weights: Literal["now", "start"] = "now"
    """If the teacher is the student: its current weights, or those at the start of training."""
    sees: Literal["prompt", "answer", "sibling"] = "prompt"
    """The teacher's prompt: the student's prompt; or with the answer in `answer_column`; or with the shortest correct
    completion of a sibling.  If that is missing or too long, the teacher sees the student's prompt."""
    answer_column: str = "answer"
    """With `sees: answer`: the column that holds a row's answer."""
    correct_from: float = 1.0
    """With `sees: sibling`: the smallest reward of a sibling that counts as correct."""
    template: str = "{prompt}\n{shown}\n\n{prompt}"
    """The teacher's prompt, or its last user message.  Each `{prompt}` is replaced by the student's prompt, and each
    `{shown}` by the answer or the sibling's completion."""

    rules = (
        Rule(
            "sees",
            lambda o: o.model or o.sees != "prompt",
            "makes the student its own teacher, with nothing to teach.  Set `model`, or sees: answer or sibling.",
        ),
        Unused("weights", {"model": ""}),
        Rule(
            "template",
            lambda o: all(each in o.template for each in PLACES),
            "needs {{prompt}} and {{shown}}.  Add both.",
        ),
        Unused("answer_column", {"sees": "answer"}),
        Unused("correct_from", {"sees": "sibling"}),
        Unused("template", {"sees": ("answer", "sibling")}),
    )
