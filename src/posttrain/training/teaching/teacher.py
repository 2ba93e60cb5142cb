"""A teacher: a second policy, entered as a reference is, that may go on from another prompt than the student."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from posttrain.errors import UserError
from posttrain.models.adapters.lora import without_dropout
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.model import ModelOptions
from posttrain.options.teacher import TeacherOptions
from posttrain.records import Grades, Group
from posttrain.runs.tensor_state import Tensors
from posttrain.training.reference import Reference, reference_of
from posttrain.training.teaching.privileged_prompts import PrivilegedPrompts, TeacherPrompts


class AsItIs:
    """A policy that is entered as it is then: another model, which never changes, or the one that is trained."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @contextmanager
    def entered(self) -> Iterator[Policy]:
        """The policy, without the dropout of updates; what it computes is to be taken without gradient."""
        with without_dropout(self.policy.model):
            yield self.policy

    def tensors(self) -> Tensors:
        """None: it is made of the recipe again, or of the policy's own weights."""
        return {}

    def restore(self, tensors: Tensors) -> None:
        """There is nothing to restore."""


class Teacher:
    """Whose log-probs a student learns."""

    def __init__(self, reference: Reference, prompts: PrivilegedPrompts | None) -> None:
        """Without `prompts` the teacher sees what the student sees."""
        self.reference, self._prompts = reference, prompts

    def entered(self) -> AbstractContextManager[Policy]:
        """Inside, the teacher is there as a policy."""
        return self.reference.entered()

    def prompts(self, groups: Sequence[Group], grades: Grades) -> TeacherPrompts | None:
        """What it goes on from, completion by completion; None where that is the student's prompts."""
        return None if self._prompts is None else self._prompts.of(groups, grades)


def teacher_of(policy: Policy, options: TeacherOptions, template_options: Mapping[str, object]) -> Teacher:
    """The teacher that the options describe, for this student.

    Raises UserError where another model has another vocabulary: its log-probs would be of other tokens.
    """
    if options.model:
        path = ModelOptions(path=options.model, device="cuda" if policy.device.type == "cuda" else "cpu")
        model = load_policy(path, inference=True)
        require_same_vocabulary(policy, model, options.model)
        reference: Reference = AsItIs(model)
    else:
        model, reference = policy, reference_of(policy) if options.weights == "start" else AsItIs(policy)
    if options.sees == "prompt":
        return Teacher(reference, None)
    renderer = TokenizerRenderer(policy.tokenizer, template_options=template_options)
    return Teacher(reference, PrivilegedPrompts(options, renderer, max_positions=model.max_positions))


def require_same_vocabulary(student: Policy, teacher: Policy, name: str) -> None:
    """Refuse a teacher one of whose tokens is another one of the student's, or none."""
    mine, theirs = student.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    other = sorted(text for text in mine.keys() | theirs.keys() if mine.get(text) != theirs.get(text))
    rule = "A teacher's log-probs are of its own tokens: use a model of the student's family, with its tokenizer."
    if other:
        numbers = ", ".join(
            "none" if each is None else str(each) for each in (mine.get(other[0]), theirs.get(other[0]))
        )
        raise UserError(
            f"algorithm.teacher.model = {name}: its vocabulary is not the student's: {len(other)} tokens differ,"
            f" such as {other[0]!r} (number {numbers}).  {rule}"
        )
    rows = [policy.output_layer.vocabulary for policy in (student, teacher)]
    if rows[0] != rows[1]:
        raise UserError(
            f"algorithm.teacher.model = {name}: its output layer has {rows[1]} rows, and the student's {rows[0]}."
            f"  {rule}"
        )
