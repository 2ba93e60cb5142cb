"""Pages of the format homework and the course: their programs run, a few steps of each, and score as they say."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

import posttrain
from posttrain.binding import module_from
from posttrain.commands.arguments import split_arguments
from posttrain.commands.chat import ChatSwitches, way_of_asking
from posttrain.commands.train import PROGRAMS
from posttrain.config import Config, SftConfig
from posttrain.config.recipes import parse_yaml, read_recipe
from posttrain.course import __all__ as functions
from posttrain.models.loading.folder_kinds import bundled_folder
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_model_config, new_tokenizer
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.model import ModelOptions, NewModelOptions
from posttrain.options.task import SYSTEM, ArithmeticOptions, Demonstrator
from posttrain.options.training import CheckpointOptions, RunOptions, SftOptions
from posttrain.training.sft.sft_run import train_sft
from tests.support.pages import attribute, blocks, programs
from tests.support.refusals import refused
from tests.support.reward_rows import group, scores
from tests.support.runs import metrics_of, save_tiny_model

SHAPE = NewModelOptions(
    template="turns", hidden_size=16, mlp_size=24, num_layers=1, num_heads=2, num_kv_heads=1, max_positions=160
)
GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "format_adherence.md").read_text(encoding="utf-8")
SYSTEM_HERE = "Reply in tags."


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[posttrain.Run, posttrain.Run]:
    """A supervised run on demonstrations of the task, and one of reinforcement from what it saved."""
    folder = tmp_path_factory.mktemp("format")
    base = train_sft(
        SftConfig(
            model=SHAPE,
            task=ArithmeticOptions(held_out_size=4),
            sft=SftOptions(tokens_per_batch=256, eval_size=4, learning_rate=1e-2),
            checkpoint=CheckpointOptions(every_steps=0),
            run=RunOptions(folder=str(folder / "base"), num_steps=2, threads=1),
        )
    )
    config = posttrain.load_recipe(
        "format-adherence-tiny",
        model={"path": str(folder / "base")},
        task={"held_out_size": 4, "system": SYSTEM_HERE},
        rollout={"prompts_per_step": 8, "max_completion_tokens": 8},
        evaluation={"every_steps": 0, "samples": 2},
        run={"folder": str(folder / "run"), "num_steps": 1},
    )
    return base, posttrain.train(config)


def test_answers_are_measured_beside_the_form_sampled_and_greedy(runs: tuple[posttrain.Run, posttrain.Run]) -> None:
    _, run = runs
    for when in ("before", "after"):
        for name in ("answer_accuracy", "format_and_answer"):
            assert {f"{name}_sampled", f"{name}_greedy"} <= run.summary[when].keys()
    step = metrics_of(run.folder)[1]
    assert step["rewards/right_sum/mean"] >= 0
    assert step["reward"] == step["rewards/line_format/mean"]


def test_a_chat_with_the_run_has_its_system_message_and_template(runs: tuple[posttrain.Run, posttrain.Run]) -> None:
    base, run = runs
    assert way_of_asking(str(run.folder), ChatSwitches()).system == SYSTEM_HERE
    assert way_of_asking(str(run.folder), ChatSwitches(system="")).system == ""
    assert way_of_asking(str(base.folder), ChatSwitches()).system == SYSTEM
    policy = load_policy(ModelOptions(path=str(base.folder)))
    prompt = TokenizerRenderer(policy.tokenizer).render(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}], id="asked"
    )
    assert prompt.text == "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\n"
    # The roles, the end and the tags are tokens of their own; digits stand alone.
    assert len(policy.tokenizer("<|user|><think>57</answer><|end|>")["input_ids"]) == 6
    assert policy.tokenizer.eos_token == "<|end|>"


def test_the_bundled_instruct_model_is_that_of_its_recipe_and_answers_in_prose() -> None:
    folder = bundled_folder("bundled-instruct")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2e6
    recipe = posttrain.load_recipe("format-adherence-base", kind=SftConfig)
    assert isinstance(recipe.model, NewModelOptions)
    shape = new_model_config(recipe.model, new_tokenizer(recipe.model.template)).to_dict()
    saved = json.loads((folder / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "model_type")
    assert {name: saved[name] for name in names} == {name: shape[name] for name in names}
    config = posttrain.load_recipe("format-adherence-tiny", task={"held_out_size": 8}, evaluation={"samples": 1})
    found = posttrain.evaluate("bundled-instruct", config)
    assert found["accuracy_greedy"] <= 0.3
    assert found["answer_accuracy_greedy"] == 1


def test_the_guides_recipe_and_its_command_are_one_objective() -> None:
    (written,) = (text for language, _, text in blocks(GUIDE) if language == "yaml")
    by_recipe = posttrain.load_recipe("format-adherence-tiny", algorithm=parse_yaml(written)["algorithm"])
    (typed,) = re.findall(r"`posttrain rl format-adherence-tiny (--[^`]*)`", GUIDE)
    layers = [read_recipe("format-adherence-tiny")]
    by_command, _ = split_arguments(shlex.split(typed), PROGRAMS["rl"]).configured(Config, layers)
    assert by_command == by_recipe
    assert by_command.algorithm["kl"]["level"] == "completion"


def test_the_recipe_for_a_real_model_differs_from_the_tiny_one_in_what_the_homework_says() -> None:
    tiny, real = (posttrain.load_recipe(f"format-adherence-{name}") for name in ("tiny", "qwen2.5-0.5b"))
    assert (tiny.task, tiny.rollout, tiny.algorithm) == (real.task, real.rollout, real.algorithm)
    assert (tiny.run.num_steps, real.run.num_steps, real.update.learning_rate) == (25, 25, 2e-5)
    assert (real.model.adapter.rank, real.model.adapter.alpha, real.model.quantization) == (16, 32, "nf4")
    assert (real.rollout.prompts_per_step, real.rollout.group_size, real.task.repeats) == (32, 2, 8)
    assert (real.rollout.temperature, real.rollout.max_completion_tokens) == (0.9, 128)


def test_the_options_of_countdowns_demonstrator_are_refused() -> None:
    with refused("demonstrator is only for task.name = countdown, and task.name = arithmetic"):
        SftConfig(task=ArithmeticOptions(), demonstrator=Demonstrator(give_up=0.1))
    with refused("sft.num_epochs = 2 is only for task.name = dataset, and task.name = arithmetic"):
        SftConfig(task=ArithmeticOptions(), sft=SftOptions(num_epochs=2))


PAGE = (Path(__file__).parents[2] / "docs" / "course.md").read_text(encoding="utf-8")
NOTEBOOK, READING, LOOP = programs(blocks(PAGE))


def run(program: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(program, "docs/course.md", "exec"), names)  # noqa: S102  # a page of ours
    return names


def test_the_rewards_of_the_page_score_as_they_stand(tmp_path: Path) -> None:
    ((_, name, text),) = [block for block in blocks(PAGE) if block[1]]
    (tmp_path / name).write_text(text)
    rewards = module_from(tmp_path / name, where="rewards")
    rows = [group(["<answer>7.</answer>", "7"], columns={"nums": [3, 4], "target": 7, "answer": "7"})]
    found = {name: scores(rows, getattr(rewards, name))[0] for name in re.findall(r"^def (\w+)", text, re.MULTILINE)}
    assert found == {
        "format_reward_func": [1, 0],
        "target_reward_func": [0.5, 0.5],
        "period_count": [1, 0],
        "brief": [1, 1],
        "exact": [0, 1],
    }


def test_the_notebook_s_program_takes_two_steps_and_leaves_a_run_that_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(NOTEBOOK)
    shown = capsys.readouterr().out
    assert re.findall(r"^(\d) 0\.\d+ \d+\.\d+$", shown, re.MULTILINE) == ["1", "2"]
    assert "closed: stopped after step 2; everything is saved." in shown
    assert (tmp_path / "runs" / "notebook" / "checkpoints" / "step-000002").is_dir()
    run(READING)
    shown = capsys.readouterr().out
    assert re.findall(r"\((\d), 0\.\d+\)", shown.splitlines()[0]) == ["1", "2"]
    assert re.findall(r"^step-00000(\d)\.parquet (?:0|1)\.0 ", shown, re.MULTILINE) == ["1", "2"]


def test_the_loop_over_one_prompt_at_a_time_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_model(tmp_path / "model")
    tokenizer = new_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    train_on = run(LOOP)["train_on"]
    assert callable(train_on)
    model = train_on(folder, [("1+1?", "2")], lambda text, answer: float(len(text) % 2), num_steps=2)
    assert len(re.findall(r"^step \d: loss -?\d", capsys.readouterr().out, re.MULTILINE)) == 2
    fresh = type(model).from_pretrained(folder)
    moved = [(a - b).abs().max() for a, b in zip(model.parameters(), fresh.parameters(), strict=True)]
    assert torch.stack(moved).max() > 0


def test_the_table_names_every_function_of_the_package_and_nothing_that_is_not_there() -> None:
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./src/([\w/]+)\.py\)", PAGE)
    assert all(attribute(f"{file.replace('/', '.')}.{name}") is not None for name, file in links)
    assert set(functions) <= {name for name, _ in links}
