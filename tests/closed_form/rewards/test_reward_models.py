"""Reward models: what they read, which number is the score, folders that cannot score, and several as one reward."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from posttrain.config import as_recipe, load_recipe
from posttrain.models.classifiers.last_token_scores import EXACT, ROUNDED, agrees
from posttrain.options.reward import RewardOptions
from posttrain.rewards.grading.answers import Graded
from posttrain.rewards.model import RewardModel, RewardModelEnsemble, combined_scores, reward_models_in
from posttrain.rewards.reward_registry import load_reward
from posttrain.runs.named_inputs import named_files
from tests.support.model_folders import small_folder
from tests.support.refusals import refused
from tests.support.reward_models import classifier, reward_folder, reward_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_folder(tmp_path_factory.mktemp("rewards") / "two-numbers", labels=("terse", "helpful"))


@pytest.fixture(scope="module")
def reward(folder: Path) -> RewardModel:
    return RewardModel(folder, label="helpful")


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


SPOKEN = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
OPENS = "{% for m in messages %}{{ m.content }}/{% endfor %}{% if add_generation_prompt %}next{% endif %}"


@pytest.mark.parametrize(
    ("template", "read"),
    [
        ("", "[system]s<|end|>[user]q<|end|>[assistant]a<|end|>"),  # the reward model's own
        ("{% for m in messages %}{{ m.content }}/{% endfor %}", "s/q/a/"),  # one of a file takes its place
        (OPENS, "s/q/a/"),  # which opens no answer after the one that is scored
    ],
)
def test_a_conversation_goes_through_a_template(folder: Path, tmp_path: Path, template: str, read: str) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    text = RewardModel(folder, label=0, **{"chat_template": str(file)} if template else {}).text
    assert text.tokenizer.decode(text.tokens(SPOKEN, answer("a"))) == read


def test_a_plain_prompt_and_its_completion_are_one_text_with_special_tokens_once(reward: RewardModel) -> None:
    tokenizer = reward_tokenizer()
    assert reward.text.tokens("Use all of ", "them.") == tokenizer("Use all of them.")["input_ids"]
    tokenizer.bos_token, tokenizer.add_bos_token = "<|end|>", True
    once = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    tokenizer.backend_tokenizer.post_processor = once
    text = RewardModel(classifier(), tokenizer=tokenizer).text
    plain, chat = text.tokens("a", "b"), text.tokens([{"role": "user", "content": "a"}], answer("b"))
    assert (plain.count(0), plain[0]) == (1, 0)
    assert tokenizer.decode(chat) == "[user]a<|end|>[assistant]b<|end|>"  # what the template writes, and nothing else


def test_of_special_tokens_that_begin_alike_the_longest_is_spelt_out_first() -> None:
    """`<|end|>` is one, and `<|end|>>` another: broken up after its first letter, the longer is neither."""
    tokenizer = reward_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>>"]})
    read = RewardModel(classifier(), tokenizer=tokenizer).text
    assert read.as_plain("a<|end|>>b") == "a< |end|>>b"
    assert [text for text in read.special if "end" in text] == ["<|end|>>", "<|end|>"]


def test_a_conversation_without_a_template_is_refused_with_what_helps(tmp_path: Path) -> None:
    reward = RewardModel(reward_folder(tmp_path, chat=False))
    with refused("chat_template"):
        reward(prompts=[[{"role": "user", "content": "q"}]], completions=[answer("a")])


def test_the_label_is_named_or_counted(folder: Path) -> None:
    by = {label: RewardModel(folder, label=label)(prompts=["a"], completions=["b"]) for label in ("helpful", 1, 0)}
    assert by["helpful"] == by[1] != by[0]
    assert RewardModel(classifier(labels=("only",)), tokenizer=reward_tokenizer()).label == 0  # one number needs none
    with refused("tokenizer=..."):
        RewardModel(classifier())
    with refused("dtype = bfloat16"):
        RewardModel(classifier(), tokenizer=reward_tokenizer(), dtype="bfloat16")


@pytest.mark.parametrize(
    ("label", "says"),
    [
        (None, "2 numbers, 0 (terse), 1 (helpful) … label: helpful"),
        ("kind", "label = kind … 0 (terse), 1 (helpful)"),
        (2, "label = 2 … 0 (terse), 1 (helpful)"),
        (-1, "label = -1"),
    ],
)
def test_a_label_that_there_is_not_is_told_with_those_that_there_are(folder, label, says) -> None:
    with refused(says):
        RewardModel(folder, label=label)


def test_a_text_that_is_too_long_is_an_error_before_anything_is_computed(folder: Path) -> None:
    reward = RewardModel(folder, label=0, max_tokens=4)
    reward.scores = None  # type: ignore[assignment]
    with refused("6 tokens", "reads 4", "over_long: cut_left"):
        reward(prompts=["1", "123"], completions=["2", "456"])


def test_or_its_end_is_read_and_the_cut_is_told(folder: Path) -> None:
    reward = RewardModel(folder, label=0, max_tokens=4, over_long="cut_left")
    short, cut, end = reward(prompts=["1", "123", "34"], completions=["2", "456", "56"])
    assert isinstance(cut, Graded)
    assert (short.outcome, cut.outcome) == ("whole", "cut")
    assert cut.score == end.score  # type: ignore[union-attr]
    assert cut.score != short.score


def test_no_more_may_be_asked_than_the_model_was_made_for(folder: Path, tmp_path: Path) -> None:
    with refused("max_tokens = 97", "at most 96"):
        RewardModel(folder, label=0, max_tokens=97)
    assert RewardModel(reward_folder(tmp_path, "roberta")).limit == 94  # its positions count from behind padding, 1


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    small_folder(tmp_path)
    with refused("Qwen3ForCausalLM", "untrained_head"):
        RewardModel(tmp_path)
    random = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # of the caller's, which has no say in it
        random.append(RewardModel(tmp_path, untrained_head=True)(prompts=["a"], completions=["b"]))
    assert random[0] == random[1] != [0.0]


@pytest.mark.parametrize(
    ("missing", "says", "untrained"),
    [
        ("score.weight", "score.weight", True),  # a head that nobody trained
        ("layers.1", "weights of a Qwen3ForSequenceClassification are missing", False),  # a body that is not whole
    ],
)
def test_weights_that_are_missing_are_refused_unless_they_are_those_of_the_head(
    missing: str, says: str, untrained: bool, tmp_path: Path
) -> None:
    file = reward_folder(tmp_path) / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if missing not in name}, file)
    with refused(says):
        RewardModel(tmp_path, untrained_head=not untrained)
    assert not untrained or RewardModel(tmp_path, untrained_head=True).label == 0


def broken(folder: Path, how: str) -> Path:
    if how == "nothing":
        return folder / "no-such-folder"
    reward_folder(folder)
    match how:
        case "no config":
            (folder / "config.json").unlink()
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "no tokenizer":
            for file in folder.glob("*token*"):
                file.unlink()
        case "an adapter":
            (folder / "config.json").unlink()
            (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
        case "of no known kind":
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"model_type": "none-such"}))
    return folder


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("nothing", "no such folder.  Give the folder of a reward model"),
        ("no config", "config.json"),
        ("no weights", "the folder holds no weights"),
        ("no tokenizer", "the folder holds no tokenizer"),
        ("an adapter", "an adapter of peft (LORA, over an unnamed model)"),
        ("of no known kind", "transformers cannot load it as a sequence classifier"),
    ],
)
def test_each_kind_of_folder_that_cannot_score_is_told_as_what_it_is(tmp_path: Path, how: str, says: str) -> None:
    with refused(says) as raised:
        RewardModel(broken(tmp_path / "rm", how))
    assert str(raised.value).startswith("rewards: model = ")


def test_in_a_recipe_and_in_a_flag_it_is_named_by_its_folder(folder: Path) -> None:
    short = load_recipe("countdown-tiny", rewards=["countdown", f"{folder.parent}/two-numbers=0.5"])
    full = load_recipe("countdown-tiny", rewards=["countdown", {"model": str(folder), "weight": 0.5}])
    braces = load_recipe("countdown-tiny", rewards=["countdown", f"{{model: {folder}, weight: 0.5}}"])
    assert short.rewards == full.rewards == braces.rewards
    assert [each.called for each in short.rewards] == ["countdown", "two-numbers"]
    function, written = as_recipe(full).split("rewards:")[1].split("- ")[1:3]
    assert "dtype" not in function  # which is of reward models
    assert "model: " in written


def test_its_scores_have_the_name_that_is_given_or_the_folder_s(folder: Path) -> None:
    assert load_reward(RewardOptions(model=str(folder), label=1)).name == "two-numbers"
    assert load_reward(RewardOptions(model=str(folder), label=1, name="help")).name == "help"
    assert RewardOptions(model="org/judge-7b@main").called == "judge-7b"
    both = load_recipe("countdown-tiny", rewards=[{"model": str(folder), "label": at} for at in (0, 1)])
    assert [each.label for each in both.rewards] == [0, 1]  # which the grading tells apart by a number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_types_are_its_own(tmp_path: Path, dtype: torch.dtype) -> None:
    """Stored in either, held in either, and the numbers within bfloat16's rounding of each other."""
    reward_folder(tmp_path, dtype=dtype)
    held = {name: RewardModel(tmp_path, dtype=name) for name in ("float32", "bfloat16")}
    assert [each.model.dtype for each in held.values()] == [torch.float32, torch.bfloat16]
    scores = [each(prompts=["ab"], completions=["cd"])[0] for each in held.values()]
    assert scores[0] == pytest.approx(scores[1], abs=0.1)
    assert held["bfloat16"].memory_bytes * 2 == held["float32"].memory_bytes


SCORES = torch.tensor([[1.0, -2.0, 3.0], [3.0, -2.0, 0.0], [2.0, -2.0, 0.0]], dtype=torch.float64)
# Means 2, -2, 1; least 1, -2, 0; population deviations √(2/3), 0, √2.


@pytest.mark.parametrize(
    ("combine", "weight", "expected"),
    [
        ("mean", 1.0, [2, -2, 1]),
        ("least", 1.0, [1, -2, 0]),
        ("mean_minus_deviation", 1.0, [2 - (2 / 3) ** 0.5, -2, 1 - 2**0.5]),
        ("mean_minus_deviation", 0.5, [2 - 0.5 * (2 / 3) ** 0.5, -2, 1 - 0.5 * 2**0.5]),
        ("mean_minus_deviation", 0.0, [2, -2, 1]),
    ],
)
def test_scores_of_several_models_become_one(combine: Any, weight: float, expected: list[float]) -> None:
    assert combined_scores(SCORES, combine, weight).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("ensemble")
    return [str(reward_folder(place / f"rm-{seed}", seed=seed)) for seed in range(3)]


TEXTS: dict[str, list[Any]] = {"prompts": ["2+2=", "2+2=", "a"], "completions": ["4", "five", "b"]}


@pytest.mark.parametrize("combine", ["mean", "least", "mean_minus_deviation"])
def test_a_recipe_names_an_ensemble_and_gets_what_its_models_say_together(folders: list[str], combine: Any) -> None:
    weight = {"deviation_weight": 0.25} if combine == "mean_minus_deviation" else {}
    options = RewardOptions(model=folders[0], ensemble=tuple(folders[1:]), combine=combine, **weight)  # type: ignore[arg-type]
    function = load_reward(options)
    assert function.name == "rm-0"
    alone = torch.tensor([RewardModel(folder)(**TEXTS) for folder in folders], dtype=torch.float64)
    found = function.call(**TEXTS)
    assert found == pytest.approx(combined_scores(alone, combine, weight.get("deviation_weight", 1.0)).tolist())
    assert [model.options.model for model in reward_models_in(function.call)] == folders


def test_their_disagreement_is_logged(folders: list[str]) -> None:
    told: dict[str, Any] = {}
    ensemble = RewardModelEnsemble([RewardModel(folder) for folder in folders])
    ensemble(**TEXTS, log_metric=told.__setitem__, log_extra=lambda name, values: told.update({f"{name}s": values}))
    alone = torch.tensor([model(**TEXTS) for model in ensemble.models], dtype=torch.float64)
    spread = alone.std(dim=0, correction=0)
    assert told["deviations"] == pytest.approx(spread.tolist())
    assert told["deviation"] == pytest.approx(spread.mean().item())


def test_a_text_that_one_of_them_reads_cut_is_told_so(folders: list[str]) -> None:
    short = RewardModel(folders[0], max_tokens=3, over_long="cut_left")
    ensemble = RewardModelEnsemble([short, RewardModel(folders[1])])
    found = ensemble(prompts=["a", "2+2+2="], completions=["b", "6"])
    assert [each.outcome for each in found if isinstance(each, Graded)] == ["whole", "cut"]


def test_options_of_one_reward_model_hold_for_all_of_them(folders: list[str]) -> None:
    function = load_reward(RewardOptions(model=folders[0], ensemble=(folders[1],), tokens_per_batch=7, name="both"))
    assert function.name == "both"
    assert [model.options.tokens_per_batch for model in reward_models_in(function.call)] == [7, 7]


def test_one_model_is_no_ensemble(folders: list[str]) -> None:
    with refused("ensemble of 1"):
        RewardModelEnsemble([RewardModel(folders[0])])


def test_a_saved_recipe_says_an_ensemble_and_says_nothing_of_it_where_there_is_none(folders: list[str]) -> None:
    plain, several = (
        load_recipe(rewards=[{"model": folders[0]} | more])
        for more in ({}, {"ensemble": folders[1:], "combine": "least"})
    )
    assert "ensemble:" not in as_recipe(plain)
    assert "combine: least" in as_recipe(several)
    assert {name for name in named_files(several) if name.startswith("rewards")} == {
        "rewards[0].model",
        "rewards[0].ensemble[0]",
        "rewards[0].ensemble[1]",
    }


ALONE = torch.tensor([[9.0], [0.0], [-3.0]], dtype=torch.float64)
SIZES = torch.tensor([[10.0], [1.0], [4.0]], dtype=torch.float64)
"""1 + |score|"""


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, EXACT), (torch.bfloat16, ROUNDED)], ids=str)
def test_a_score_may_be_apart_by_rounding_in_proportion_to_its_size(row: int, dtype: torch.dtype, bound: float) -> None:
    model = classifier().to(dtype)
    for share, same in ((0.9, True), (-0.9, True), (1.1, False), (-1.1, False)):
        apart = torch.zeros_like(ALONE)
        apart[row] = share * bound * SIZES[row]
        assert agrees(ALONE + apart, ALONE, model) is same
