"""A second policy: whom a teacher may teach and what it is shown, and importance weights by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain import load_recipe
from posttrain.algorithms.correction import Correction, corrected, correction_weights
from posttrain.algorithms.table import build_algorithm
from posttrain.algorithms.terms import LossTerm
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.memory.memory_parts import MemorySetup
from posttrain.models.memory.memory_plan import MemoryPlan
from posttrain.models.memory.model_shape import recipe_shape
from posttrain.models.policy import as_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.needs import Need
from posttrain.options.algorithm import TeacherOptions
from posttrain.options.model import ModelOptions
from posttrain.records import Group, Prompt
from posttrain.runs.named_inputs import named_files
from posttrain.runs.planned_memory import rl_setup
from posttrain.training.reference import (
    FrozenCopy,
    PrivilegedPrompts,
    TeacherPrompts,
    UncopiedPolicy,
    filled_template,
    require_same_vocabulary,
    teacher_of,
)
from tests.support.model_folders import plain_tokenizer
from tests.support.refusals import refused
from tests.support.runs import save_tiny_model
from tests.support.sequences import doubles, grades_of, spoken, view_of
from tests.support.tiny import tiny_model, tiny_policy, token_loss, tokenizer

SIBLING = TeacherOptions(sees="sibling", template="{shown}|{prompt}")
NAN = math.nan


def asked(*texts: str, prefill: str = "", **columns: str) -> Group:
    """Completions of 1+1=."""
    rendered = TokenizerRenderer(tokenizer()).render("1+1=", id="p", prefill=prefill, columns=columns)
    said = [spoken(text, sample=i, tokens=tuple(tokenizer()(text)["input_ids"])) for i, text in enumerate(texts)]
    return Group(prompt=rendered, draw=0, rollouts=tuple(said))


def written(options: TeacherOptions, group: Group, rewards: Sequence[float], *, room: int = 64) -> TeacherPrompts:
    prompts = PrivilegedPrompts(options, TokenizerRenderer(tokenizer()), max_positions=room)
    return prompts.of([group], grades_of([rewards]))


@pytest.mark.parametrize(
    ("texts", "rewards", "options", "room", "seen"),
    [
        # Each completion is shown the shortest right sibling, and never itself.
        (("abcd", "ab", "abc", "x"), [1, 1, 1, 0], {}, 64, ["ab|1+1=", "abc|1+1=", "ab|1+1=", "ab|1+1="]),
        # Where no sibling is right, the prompt.
        (("abcd", "ab", "x"), [0, 1, NAN], {}, 64, ["ab|1+1=", "1+1=", "ab|1+1="]),
        (("abcd", "ab", "x"), [0, 0.5, NAN], {}, 64, ["1+1="] * 3),
        (("abcd", "ab", "x"), [0, 0.5, NAN], {"correct_from": 0.5}, 64, ["ab|1+1=", "1+1=", "ab|1+1="]),
        # Where there is no room, the prompt: ab|1+1= has 7 tokens, and the completions 4, 2 and 1.
        (("abcd", "ab", "x"), [0, 1, 0], {}, 11, ["ab|1+1=", "1+1=", "ab|1+1="]),
        (("abcd", "ab", "x"), [0, 1, 0], {}, 10, ["1+1=", "1+1=", "ab|1+1="]),
    ],
)
def test_what_the_teacher_of_each_completion_goes_on_from(texts, rewards, options, room, seen) -> None:
    made = written(replace(SIBLING, **options), asked(*texts), rewards, room=room)
    assert [tokenizer().decode(tokens) for tokens in made.tokens[0]] == seen
    assert made.shown_share == sum("|" in each for each in seen) / len(seen)


def test_an_answer_comes_from_its_column_and_the_prefill_stays_behind() -> None:
    options = TeacherOptions(sees="answer", answer_column="solution", template="{prompt}({shown}) {prompt}")
    group = asked("a", "b", prefill="so ", solution="2")
    made = written(options, group, [0, 0])
    assert [tokenizer().decode(tokens) for tokens in made.tokens[0]] == ["1+1=(2) 1+1=so "] * 2
    with refused("answer_column = answer: prompt p does not have it (it has solution)"):
        written(TeacherOptions(sees="answer"), group, [0, 0])
    # It is part of what a sibling said.
    made = written(SIBLING, asked("ab", "c", prefill="so "), [0, 1])
    assert [tokenizer().decode(tokens) for tokens in made.tokens[0]] == ["so c|1+1=so ", "1+1=so "]


def test_in_a_conversation_it_is_the_last_message_by_the_user_that_says_more() -> None:
    chat = plain_tokenizer(eos_token="<|end|>")
    chat.chat_template = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}[a]"
    renderer = TokenizerRenderer(chat)
    said = (("system", "be"), ("user", "first"), ("assistant", "ok"), ("user", "why"))
    messages = [{"role": role, "content": content} for role, content in said]
    prompt = renderer.render(messages, id="p", columns={"answer": "so"})
    options = TeacherOptions(sees="answer", template="{prompt}/{shown}")
    tokens = PrivilegedPrompts(options, renderer, max_positions=99).written(prompt, "so")
    assert chat.decode(tokens) == "[s]be[u]first[a]ok[u]why/so[a]"
    assert prompt.text == "[s]be[u]first[a]ok[u]why[a]"
    lonely = Prompt(id="p", text="be", tokens=(1,), messages=({"role": "system", "content": "be"},))
    with refused("prompt p: there is no user message"):
        PrivilegedPrompts(SIBLING, TokenizerRenderer(tokenizer()), max_positions=9).written(lonely, "x")


def test_a_text_that_looks_like_a_place_is_a_text() -> None:
    assert filled_template("{prompt}-{shown}-{prompt}", "{shown}", "{prompt}") == "{shown}-{prompt}-{shown}"


def test_the_student_itself_teaches_as_it_is_now_or_as_it_began() -> None:
    policy = tiny_policy()
    now = teacher_of(policy, SIBLING, {})
    assert isinstance(now.reference, UncopiedPolicy)
    with now.entered() as entered:
        assert entered is policy
    assert isinstance(teacher_of(policy, replace(SIBLING, weights="start"), {}).reference, FrozenCopy)


def test_a_model_of_the_same_vocabulary_teaches_and_goes_on_from_the_prompt_unless_it_sees_more(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path / "teacher"))
    with refused("algorithm.teacher.model = ", "policy's has 24"):
        smaller = as_policy(tiny_model("qwen3", torch.float32, exact=False), tokenizer())
        teacher_of(smaller, TeacherOptions(model=folder), {})
    student, given = load_policy(ModelOptions(path=folder)), ([asked("2", "3")], grades_of([[1.0, 0.0]]))
    assert teacher_of(student, TeacherOptions(model=folder), {}).prompts(*given) is None
    assert teacher_of(student, replace(SIBLING, model=folder), {}).prompts(*given) is not None


def test_a_model_of_another_vocabulary_is_refused_by_the_first_token_that_differs() -> None:
    other = plain_tokenizer(eos_token="<|end|>")
    other.add_tokens(["zebra"])
    with refused("zoo: its vocabulary differs from the policy's: 1 tokens differ, such as 'zebra'"):
        require_same_vocabulary(tiny_policy(), replace(tiny_policy(seed=1), tokenizer=other), "zoo")
    require_same_vocabulary(tiny_policy(), tiny_policy(seed=1), "zoo")


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 2),  # a sibling is shown
        ({"teacher": {"sees": "answer"}}, 1),
        ({"teacher": {"model": "big"}}, 1),
        ({"teacher": {"model": "big"}, "reward_weight": 1.0}, 2),
    ],
)
def test_groups_of_one_are_enough_where_nobody_is_compared(options, least) -> None:
    assert build_algorithm({"name": "distill", **options}).least_group_size == least
    with refused("algorithm.teacher", "nothing to teach"):
        build_algorithm({"name": "distill", "teacher": {"weights": "start"}})


def test_the_plan_of_memory_holds_another_model_that_teaches_and_the_start_of_the_student() -> None:
    def setup(**teacher: object) -> MemorySetup:
        config = load_recipe(algorithm={"name": "distill", "teacher": teacher})
        shape = recipe_shape(config.model)
        assert named_files(config) == {}  # what comes with the package is its own
        made = rl_setup(config, shape, build_algorithm(config.algorithm), prompt_tokens=9, on_cuda=False)
        assert MemoryPlan(shape, made).parts["always"]["teacher"] == made.teacher
        return made

    other, itself, began = setup(model="bundled"), setup(sees="answer"), setup(sees="answer", weights="start")
    assert other.teacher == 4 * recipe_shape(load_recipe().model).parameters
    assert (itself.teacher, began.teacher) == (0, 0)
    assert [each.reference for each in (other, itself, began)] == [False, False, True]


RATIOS = [4.0, 0.25, 1.21, 1.44, 3.0]
"""π_prox/μ of five tokens, the first two of one completion, the next two of another, the last one alone."""
TIGHT = {"mask_low": 0.9, "mask_high": 1.1}
NO, YES = [False] * 5, [True, False, False, False, True]


@pytest.mark.parametrize(
    ("options", "weights", "truncated", "masked"),
    [
        ({}, [2, 0.25, 1.21, 1.44, 2], YES, NO),  # min(ρ, 2)
        ({"truncate": None}, RATIOS, NO, NO),
        ({"truncate": 1.0}, [1, 0.25, 1, 1, 1], [True, False, True, True, True], NO),
        # √(4 · .25) = 1, √(1.21 · 1.44) = 1.32
        ({"level": "sequence_mean"}, [1, 1, 1.32, 1.32, 2], [False] * 4 + [True], NO),
        # 1.21 · 1.44 = 1.7424
        ({"level": "sequence_product"}, [1, 1, 1.7424, 1.7424, 2], [False] * 4 + [True], NO),
        ({"level": "sequence_product", "truncate": 1.5}, [1, 1, 1.5, 1.5, 1.5], [False, False, True, True, True], NO),
        # Tokens outside [.5, 3.5] weigh nothing, and the others their whole ratio.
        (
            {"truncate": None, "mask_level": "token", "mask_low": 0.5, "mask_high": 3.5},
            [0, 0, 1.21, 1.44, 3],
            NO,
            [True, True, False, False, False],
        ),
        # Completions by their mean, 1, 1.32 and 3.
        ({"mask_high": 1.4}, [2, 0.25, 1.21, 1.44, 0], [True] + [False] * 4, [False] * 4 + [True]),
        (TIGHT, [2, 0.25, 0, 0, 0], [True] + [False] * 4, [False, False, True, True, True]),
        ({**TIGHT, "level": None}, [1, 1, 0, 0, 0], NO, [False, False, True, True, True]),
        ({"level": None, "mask_low": 0.9}, [1] * 5, NO, NO),
        # By their product, 1, 1.7424 and 3.
        (
            {"mask_high": 1.75, "mask_level": "sequence_product", "level": None},
            [1, 1, 1, 1, 0],
            NO,
            [False] * 4 + [True],
        ),
        (
            {"mask_high": 1.7, "mask_level": "sequence_product", "level": None},
            [1, 1, 0, 0, 0],
            NO,
            [False, False, True, True, True],
        ),
        (
            {"level": "sequence_mean", "mask_low": 0.3, "mask_level": "token"},
            [1, 0, 1.32, 1.32, 2],
            [False] * 4 + [True],
            [False, True, False, False, False],
        ),
        # A ratio at a bound is within it.
        ({"truncate": None, "mask_level": "token", "mask_low": 0.25, "mask_high": 4.0}, RATIOS, NO, NO),
    ],
    ids=str,
)
def test_the_weights_of_a_correction(options, weights, truncated, masked) -> None:
    behaviour = doubles(0, 0, 0, 0, 0) if options.get("mask_low") == 0.25 else doubles(-1, -2, -3, -0.5, -4)
    rollout = torch.tensor([0, 0, 1, 1, 2])
    given = ((behaviour + doubles(*RATIOS).log()).requires_grad_(), behaviour, rollout)
    made = correction_weights(*given, correction=Correction(**options))
    assert made.weights.tolist() == pytest.approx(weights, rel=1e-12)
    assert (made.truncated.tolist(), made.masked.tolist()) == (truncated, masked)
    assert not made.weights.requires_grad


def test_the_ratio_of_a_corrected_surrogate_is_to_where_the_step_began() -> None:
    # π/μ = 3 with A = 1 would be clipped; π/π_prox = 1.1 is not, and is weighed by min(π_prox/μ, 2) = 2: -2 · 1.1.
    logprobs = doubles(3).log().requires_grad_()
    algorithm = build_algorithm({"name": "grpo", "correction": {}})
    given = (logprobs, doubles(0), doubles(1), torch.zeros(1, dtype=torch.int64))
    token_loss(algorithm, *given, proximal=doubles(3 / 1.1).log()).sum().backward()
    assert logprobs.grad.item() == pytest.approx(-2.2, rel=1e-12)
    (policy,) = algorithm.terms
    columns = {"advantages": doubles(1, 1), "proximal_logprobs": doubles(2.7, 2.0).log()}
    view = view_of(doubles(3, 3).log(), **columns)
    assert policy.clipped(view).tolist() == [False, True]  # 1.11 and 1.5 of a range up to 1.2
    assert policy.measures(view)["correction/truncated"].tolist() == [1, 0]


@pytest.mark.parametrize("name", ["reinforce", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "maxrl", "ppo"])
def test_every_row_with_a_ratio_takes_a_correction_and_needs_no_pass_without(name: str) -> None:
    assert Need.PROXIMAL_LOGPROBS not in build_algorithm({"name": name}).needs
    made = build_algorithm({"name": name, "correction": {"truncate": 3.0, "mask_high": 5.0}})
    policy, *value = made.terms
    assert policy.needs == {Need.PROXIMAL_LOGPROBS}
    assert [term.needs for term in value] == ([{Need.VALUES}] if name == "ppo" else [])
    assert name == "ppo" or not made.keeps_zero_advantages


def test_a_corrected_term_reports_what_it_reported_without() -> None:
    term = LossTerm(
        name="mine", per_token=lambda view: view.logprobs, measures=lambda view: {"own/half": view.logprobs / 2}
    )
    columns = {"behaviour_logprobs": doubles(-1, -1), "proximal_logprobs": doubles(-1, -2)}
    view = view_of(doubles(-1, -4), torch.tensor([0, 0]), advantages=doubles(1, 1), **columns)
    found = corrected(term, Correction(level="token")).measures(view)
    assert found["own/half"].tolist() == [-0.5, -2]
    assert found["correction/weight"].tolist() == pytest.approx([1, math.exp(-1)])
