"""A reward model in a session: frozen, apart from the policy, counted in the memory plan, in 4 bits, by its digest."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import posttrain
from posttrain.errors import RunError
from posttrain.models.adapters.adaptable import is_4_bit
from posttrain.models.classifiers.last_token_scores import classifier_bytes
from posttrain.models.memory.model_shape import recipe_shape
from posttrain.options.reward import RewardModelOptions
from posttrain.rewards.model import RewardModel
from posttrain.runs.named_inputs import named_files
from posttrain.runs.planned_memory import dpo_setup
from posttrain.runs.progress import Clock
from posttrain.training.collector import CollectedStep, discard_scores
from posttrain.training.report import planned_memory, reward_model_bytes
from posttrain.training.session import CallerObjects, inputs_of, open_session
from tests.support.model_folders import changed
from tests.support.refusals import refused
from tests.support.reward_models import classifier, reward_folder, reward_tokenizer
from tests.support.runs import save_tiny_model

SHAPES = True
GIVEN: dict[str, Any] = {"prompts": ["ab", "c"], "completions": ["de", "f"]}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reward-models")
    save_tiny_model(made / "model")
    reward_folder(made / "rm", "llama", labels=("bad", "good"))
    return made


def config(places: Path, run: Path | str = "unused", **sections: Any) -> posttrain.Config:
    return posttrain.load_recipe(
        "countdown-tiny",
        **{
            "model": {"path": str(places / "model")},
            "task": {"name": "countdown", "held_out_size": 2},
            "rollout": {"prompts_per_step": 2, "group_size": 3, "max_completion_tokens": 6},
            "update": {"tokens_per_microbatch": 256, "learning_rate": 1e-2},
            "evaluation": {"samples": 1, "every_steps": 0},
            "checkpoint": {"every_steps": 1},
            "run": {"folder": str(run), "num_steps": 2, "threads": 1},
            **sections,
        },
    )


def test_it_has_no_gradient_and_stays_in_eval_mode(places: Path) -> None:
    reward = RewardModel(places / "rm", label="good")
    assert not any(each.requires_grad for each in reward.model.parameters())
    reward.model.train()  # as somebody else's code might
    scores = reward(**GIVEN)
    assert not reward.model.training
    with torch.enable_grad():
        assert reward(**GIVEN) == scores
    assert all(each.grad is None for each in reward.model.parameters())


def test_a_step_mixes_it_with_a_function_and_does_not_move_it(places: Path) -> None:
    rewards = [{"name": "countdown"}, {"model": str(places / "rm"), "label": "good", "weight": 0.5}]
    given = config(places, rewards=rewards)
    before = RewardModel(places / "rm", label="good")(**GIVEN)
    with open_session(given) as session:
        held = session.rewards[1].call
        assert isinstance(held, RewardModel)
        first = held(**GIVEN)
        with torch.no_grad():
            for parameter in session.policy.model.parameters():
                parameter.add_(1.0)
        assert held(**GIVEN) == first
        assert first == pytest.approx(before, abs=1e-6)
        step = session.collector.collect(1, discard_scores, Clock())
    assert step.grades.names == ("countdown", "rm")
    assert step.grades.scores[1].unique().numel() > 3  # of 2 × 3 completions
    torch.testing.assert_close(step.grades.rewards, step.grades.scores[0] + 0.5 * step.grades.scores[1])
    (group, *_) = step.groups
    texts = {"prompts": [group.prompt.text] * 3, "completions": [each.text for each in group.rollouts]}
    assert step.grades.scores[1, 0].tolist() == pytest.approx(held(**texts), abs=1e-6)


def test_weights_that_are_the_policy_s_too_are_refused(places: Path) -> None:
    model = classifier("qwen3")
    policy = posttrain.as_policy(
        copy_of_body(model), reward_tokenizer()
    )  # a language model over the very body of the reward model
    own = CallerObjects(policy=policy, rewards=RewardModel(model, tokenizer=reward_tokenizer()))
    with refused("shares weights with the policy"):
        open_session(config(places), own)
    apart = CallerObjects(policy=policy, rewards=RewardModel(copy.deepcopy(model), tokenizer=reward_tokenizer()))
    with open_session(config(places), apart):
        pass


def copy_of_body(model: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = model.config.to_dict() | {"tie_word_embeddings": True}
    made = Qwen3ForCausalLM(Qwen3Config(**settings))
    made.model = model.model
    made.lm_head.weight = model.model.embed_tokens.weight
    return made.eval()


def test_in_python_a_folder_s_path_is_a_reward(places: Path) -> None:
    folder = str(places / "rm")
    own = CallerObjects(rewards=["countdown=2", f"{{model: {folder}, label: good, weight: 0.5}}"])
    with open_session(config(places), own) as session:
        assert [(each.name, each.settings.weight) for each in session.rewards] == [("countdown", 2.0), ("rm", 0.5)]
    with refused("2 numbers"):
        CallerObjects(rewards=folder)


def test_a_text_that_is_too_long_stops_the_run_at_its_row(places: Path) -> None:
    given = {"model": str(places / "rm"), "label": "good", "max_tokens": 8}
    with refused("reward 'rm'", "prompt 'train/", "sample 0", "reads 8", error=RunError):
        first_step(config(places, rewards=[given]))
    cut = first_step(config(places, rewards=[given | {"over_long": "cut_left"}]))
    assert set(sum(cut.grades.outcomes["rm"], ())) == {"cut"}


def first_step(given: posttrain.Config) -> CollectedStep:
    with open_session(given) as session:
        return session.collector.collect(1, discard_scores, Clock())


def test_a_changed_folder_is_noticed_by_a_resume(places: Path, tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "rm")
    given = config(places, rewards=[str(folder) + "/"])
    began = named_files(given)["rewards[0].model"]
    assert began.digest
    changed(folder / "config.json", note="another")
    assert named_files(given)["rewards[0].model"].differs(began)


def test_objects_and_labels_are_told_from_each_other(places: Path) -> None:
    def digest(reward: RewardModel) -> str:
        return inputs_of(config(places), CallerObjects(rewards=reward)).objects["rewards[0]"].digest

    one = [digest(RewardModel(classifier(), tokenizer=reward_tokenizer())) for _ in range(2)]
    other = digest(RewardModel(classifier(seed=1), tokenizer=reward_tokenizer()))
    assert one[0] == one[1] != other
    by_label = [digest(RewardModel(places / "rm", label=label)) for label in (0, 1, 1)]
    assert by_label[0] != by_label[1] == by_label[2]


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "bert"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_bytes_are_those_of_its_weights(tmp_path: Path, kind: str, dtype: str) -> None:
    folder = reward_folder(tmp_path, kind)
    options = RewardModelOptions(model=str(folder), dtype=dtype)  # type: ignore[arg-type]
    assert classifier_bytes(options, on_cuda=False) == RewardModel(folder, dtype=dtype).memory_bytes


def test_the_plan_counts_those_that_live_with_the_policy(places: Path) -> None:
    rewards = [{"model": str(places / "rm"), "label": 0}]
    with open_session(config(places, rewards=rewards)) as session, open_session(config(places)) as without:
        size = reward_model_bytes(session)
        assert size == session.rewards[0].call.memory_bytes > 0  # type: ignore[attr-defined]
        peaks = [re.findall(r"about ([\d.]+) of", planned_memory(each)[0]) for each in (session, without)]
        assert peaks[0] != [] != peaks[1]
    options = RewardModelOptions(model=str(places / "rm"), device="cpu")
    assert classifier_bytes(options, on_cuda=True) == 0  # beside a policy on a GPU it takes none of that


def test_a_plan_of_rounds_counts_every_member_of_an_ensemble(places: Path) -> None:
    folder = str(places / "rm")
    item = {"model": folder, "label": 0, "ensemble": [folder, folder], "combine": "least"}
    task, model = {"name": "countdown"}, {"path": str(places / "model")}
    given = posttrain.load_recipe(kind=posttrain.DpoConfig, dpo={"rounds": 1}, rewards=[item], task=task, model=model)
    setup = dpo_setup(given, recipe_shape(given.model), on_cuda=False)
    assert setup.reward_models == 3 * classifier_bytes(RewardModelOptions(model=folder), on_cuda=False)


def test_in_4_bits_its_body_is_small_and_its_head_whole(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path, "qwen3")
    whole, small = RewardModel(folder), RewardModel(folder, quantization="nf4")
    packed = [name for name, layer in small.model.named_modules() if is_4_bit(layer)]
    assert len(packed) == 2 * 7  # each layer's four of attention and three of the MLP
    assert small.model.score.weight.dtype == torch.float32
    assert small(**GIVEN) == pytest.approx(whole(**GIVEN), abs=1.0)  # 16 channels hold little against 4 bits
    assert small(**GIVEN) != whole(**GIVEN)
    options = RewardModelOptions(model=str(folder), quantization="nf4")
    assert classifier_bytes(options, on_cuda=False) == pytest.approx(small.memory_bytes, rel=0.05)


def test_a_folder_that_was_saved_in_4_bits_is_read_as_it_is(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

    folder = reward_folder(tmp_path / "whole", "llama")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["score"])
    made = AutoModelForSequenceClassification.from_pretrained(folder, quantization_config=settings)
    made.save_pretrained(tmp_path / "small")
    reward_tokenizer().save_pretrained(tmp_path / "small")
    small = RewardModel(tmp_path / "small")
    assert any(is_4_bit(layer) for layer in small.model.modules())
    assert small(**GIVEN) == pytest.approx(RewardModel(folder)(**GIVEN), abs=1.0)
