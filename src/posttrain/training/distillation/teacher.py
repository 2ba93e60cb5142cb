"""A teacher: a second policy, entered as a reference is, that may go on from another prompt than the student."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from posttrain.models.loading.tokenizer_folder import load_beside
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.teacher import TeacherOptions
from posttrain.records import Grades, Group
from posttrain.training.distillation.privileged_prompts import PrivilegedPrompts, TeacherPrompts
from posttrain.training.reference import Reference, UncopiedPolicy, reference_of, require_same_vocabulary


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
        model = load_beside(policy, options.model, option="algorithm.teacher.model")
        require_same_vocabulary(policy, model, f"algorithm.teacher.model = {options.model}")
        reference: Reference = UncopiedPolicy(model)
    else:
        model, reference = policy, reference_of(policy) if options.weights == "start" else UncopiedPolicy(policy)
    if options.sees == "prompt":
        return Teacher(reference, None)
    renderer = TokenizerRenderer(policy.tokenizer, template_options=template_options)
    return Teacher(reference, PrivilegedPrompts(options, renderer, max_positions=model.max_positions))
