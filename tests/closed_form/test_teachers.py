"""What a teacher is shown, whom it may teach, and what is said of options that make no sense."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from posttrain import load_recipe
from posttrain.algorithms.table import build_algorithm
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.memory.memory_parts import MemorySetup
from posttrain.models.memory.memory_plan import MemoryPlan
from posttrain.models.memory.model_shape import recipe_shape
from posttrain.models.policy import as_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.algorithm import TeacherOptions
from posttrain.options.model import ModelOptions
from posttrain.records import Finish, Grades, Group, Prompt, Rollout, TokenSequence
from posttrain.runs.named_inputs import named_files
from posttrain.runs.planned_memory import rl_setup
from posttrain.training.reference import (
    FrozenCopy,
    PrivilegedPrompts,
    TeacherPrompts,
    UncopiedPolicy,
    filled,
    require_same_vocabulary,
    teacher_of,
)
from tests.support.model_folders import plain_tokenizer
from tests.support.refusals import refused
from tests.support.runs import save_tiny_model
from tests.support.tiny import tiny_model, tiny_policy, tokenizer

SIBLING = TeacherOptions(sees="sibling", template="{shown}|{prompt}")


def group_of(*texts: str, prompt: str = "1+1=", prefill: str = "", answer: str | None = None) -> Group:
    columns = {} if answer is None else {"solution": answer}
    rendered = TokenizerRenderer(tokenizer()).render(prompt, id="p", prefill=prefill, columns=columns)
    rollouts = [
        Rollout(
            sample=i,
            sequence=TokenSequence.one_turn(
                tuple(tokenizer()(text)["input_ids"]), logprobs=(0.0,) * len(text), finish=Finish.STOP
            ),
            text=text,
        )
        for i, text in enumerate(texts)
    ]
    return Group(prompt=rendered, draw=0, rollouts=tuple(rollouts))


def graded(rewards: Sequence[Sequence[float]]) -> Grades:
    scores = torch.tensor(rewards, dtype=torch.float64)
    return Grades(names=("r",), scores=scores[None], weights=torch.ones(1, dtype=torch.float64), rewards=scores)


def seen(options: TeacherOptions, group: Group, rewards: Sequence[float], *, room: int = 64) -> list[str]:
    """What the teacher of each completion goes on from, as text."""
    made = written(options, group, rewards, room=room)
    return [tokenizer().decode(tokens) for tokens in made.tokens[0]]


def written(options: TeacherOptions, group: Group, rewards: Sequence[float], *, room: int = 64) -> TeacherPrompts:
    prompts = PrivilegedPrompts(options, TokenizerRenderer(tokenizer()), max_positions=room)
    return prompts.of([group], graded([rewards]))


def test_each_completion_is_shown_the_shortest_right_sibling_and_never_itself() -> None:
    group = group_of("abcd", "ab", "abc", "x")
    assert seen(SIBLING, group, [1, 1, 1, 0]) == ["ab|1+1=", "abc|1+1=", "ab|1+1=", "ab|1+1="]


def test_where_no_sibling_is_right_the_teacher_sees_the_prompt() -> None:
    group = group_of("abcd", "ab", "x")
    assert seen(SIBLING, group, [0, 1, math.nan]) == ["ab|1+1=", "1+1=", "ab|1+1="]
    assert seen(SIBLING, group, [0, 0.5, math.nan]) == ["1+1="] * 3
    assert seen(replace(SIBLING, correct_from=0.5), group, [0, 0.5, math.nan]) == ["ab|1+1=", "1+1=", "ab|1+1="]
    assert written(SIBLING, group, [0, 1, math.nan]).shown_share == 2 / 3


def test_where_there_is_no_room_the_teacher_sees_the_prompt() -> None:
    # ab|1+1= has 7 tokens, and the completions 4, 2 and 1.
    group = group_of("abcd", "ab", "x")
    assert seen(SIBLING, group, [0, 1, 0], room=11) == ["ab|1+1=", "1+1=", "ab|1+1="]
    assert seen(SIBLING, group, [0, 1, 0], room=10) == ["1+1=", "1+1=", "ab|1+1="]


def test_an_answer_comes_from_its_column_and_the_prefill_stays_behind() -> None:
    options = TeacherOptions(sees="answer", answer_column="solution", template="{prompt}({shown}) {prompt}")
    group = group_of("a", "b", prefill="so ", answer="2")
    assert seen(options, group, [0, 0]) == ["1+1=(2) 1+1=so "] * 2
    with refused("answer_column = answer: prompt p has no such column (it has solution)"):
        seen(TeacherOptions(sees="answer"), group, [0, 0])


def test_a_prefill_is_part_of_what_a_sibling_said() -> None:
    assert seen(SIBLING, group_of("ab", "c", prefill="so "), [0, 1]) == ["so c|1+1=so ", "1+1=so "]


def test_in_a_conversation_it_is_the_last_message_by_the_user_that_says_more() -> None:
    chat = plain_tokenizer(eos_token="<|end|>")
    chat.chat_template = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}[a]"
    renderer = TokenizerRenderer(chat)
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "why"},
    ]
    prompt = renderer.render(messages, id="p", columns={"answer": "so"})
    options = TeacherOptions(sees="answer", template="{prompt}/{shown}")
    tokens = PrivilegedPrompts(options, renderer, max_positions=99).written(prompt, "so")
    assert chat.decode(tokens) == "[s]be[u]first[a]ok[u]why/so[a]"
    assert prompt.text == "[s]be[u]first[a]ok[u]why[a]"


def test_a_text_that_looks_like_a_place_is_a_text() -> None:
    assert filled("{prompt}-{shown}-{prompt}", "{shown}", "{prompt}") == "{shown}-{prompt}-{shown}"


def test_the_student_itself_teaches_as_it_is_now_or_as_it_began() -> None:
    policy = tiny_policy()
    now = teacher_of(policy, SIBLING, {})
    with now.entered() as entered:
        assert entered is policy
    began = teacher_of(policy, replace(SIBLING, weights="start"), {})
    assert isinstance(began.reference, FrozenCopy)


def test_a_model_of_the_same_vocabulary_teaches(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "teacher")
    policy = as_policy(tiny_model("qwen3", torch.float32, exact=False), tokenizer())
    with refused("algorithm.teacher.model = ", "policy's 24"):
        teacher_of(policy, TeacherOptions(model=str(folder)), {})
    student = teacher_of(tiny_policy(), SIBLING, {}).reference
    assert isinstance(student, UncopiedPolicy)


def test_a_teacher_that_sees_the_prompt_goes_on_from_the_students(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "same")
    student = load_policy(ModelOptions(path=str(folder)))
    group = group_of("2", "3")
    grades = Grades(
        names=("a",),
        scores=torch.tensor([[[1.0, 0.0]]]).double(),
        weights=torch.ones(1).double(),
        rewards=torch.tensor([[1.0, 0.0]]).double(),
    )
    same = teacher_of(student, TeacherOptions(model=str(folder)), {})
    assert same.prompts([group], grades) is None
    shown = teacher_of(student, replace(SIBLING, model=str(folder)), {})
    assert shown.prompts([group], grades) is not None


def test_a_model_of_another_vocabulary_is_refused_by_the_first_token_that_differs() -> None:
    other = plain_tokenizer(eos_token="<|end|>")
    other.add_tokens(["zebra"])
    teacher = replace(tiny_policy(seed=1), tokenizer=other)
    with refused("zoo: its vocabulary is not the policy's: 1 tokens differ, such as 'zebra'"):
        require_same_vocabulary(tiny_policy(), teacher, "zoo")
    require_same_vocabulary(tiny_policy(), tiny_policy(seed=1), "zoo")


def test_a_teacher_that_makes_no_sense_is_refused_in_its_algorithm() -> None:
    with refused("algorithm.teacher", "nothing to teach"):
        build_algorithm({"name": "distill", "teacher": {"weights": "start"}})


def test_groups_of_one_are_enough_where_nobody_is_compared() -> None:
    def least(**options: object) -> int:
        return build_algorithm({"name": "distill", **options}).least_group_size

    assert least() == 2  # a sibling is shown
    assert least(teacher={"sees": "answer"}) == 1
    assert least(teacher={"model": "big"}) == 1
    assert least(teacher={"model": "big"}, reward_weight=1.0) == 2


def test_a_conversation_without_a_user_has_no_place_for_more() -> None:
    prompt = Prompt(id="p", text="be", tokens=(1,), messages=({"role": "system", "content": "be"},))
    with refused("prompt p: no message of the user's"):
        PrivilegedPrompts(SIBLING, TokenizerRenderer(tokenizer()), max_positions=9).written(prompt, "x")


def test_the_plan_of_memory_holds_another_model_that_teaches_and_the_start_of_the_student() -> None:
    def setup(teacher: dict[str, object]) -> MemorySetup:
        config = load_recipe(algorithm={"name": "distill", "teacher": teacher})
        shape = recipe_shape(config.model)
        assert named_files(config) == {}  # what comes with the package is its own
        made = rl_setup(config, shape, build_algorithm(config.algorithm), prompt_tokens=9, on_cuda=False)
        assert MemoryPlan(shape, made).parts["always"]["teacher"] == made.teacher
        return made

    other, itself, began = (
        setup(each) for each in ({"model": "bundled"}, {"sees": "answer"}, {"sees": "answer", "weights": "start"})
    )
    assert other.teacher == 4 * recipe_shape(load_recipe().model).parameters
    assert (itself.teacher, began.teacher) == (0, 0)
    assert [each.reference for each in (other, itself, began)] == [False, False, True]
