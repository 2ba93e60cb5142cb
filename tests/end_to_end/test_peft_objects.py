"""A `PeftModel` from Python: trained, saved in peft's format or merged, resumed, and compared with its base."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain.models.policy import Policy
from posttrain.training.reference import EarlierAdapter, FrozenCopy
from tests.support.refusals import refused
from tests.support.runs import metrics_of, save_tiny_model

ROWS = [{"prompt": f"{i} and {i} make ", "completion": f"{2 * i}.", "answer": i} for i in range(1, 7)]
HELD_OUT = [{"prompt": f"{i} and {i} are ", "answer": i} for i in range(1, 4)]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # transformers to peft


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("peft") / "base")


def brought(base: Path, **options: Any) -> tuple[nn.Module, Policy]:
    """A PeftModel of a folder, its B zero unless told otherwise, and the policy of it."""
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "down_proj"], **options})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    return model, posttrain.as_policy(model, AutoTokenizer.from_pretrained(base))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(1, 9)[None]).logits


def digits(completions: list[str], **columns: object) -> list[float]:
    return [float(sum(each.isdigit() for each in text)) for text in completions]


def by_reward(folder: Path, policy: Policy, steps: int = 2, *, resume: bool = False, **sections: Any) -> posttrain.Run:
    given: dict[str, Mapping[str, Any]] = {
        "task": {"name": "dataset", "held_out_share": 0.0},
        "algorithm": {"name": "grpo", "kl": {"coefficient": 0.1}},
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_completion_tokens": 5},
        "update": {"learning_rate": 0.05},
        "evaluation": {"every_steps": 0},
        "checkpoint": {"every_steps": 1},
        "run": {"folder": str(folder), "num_steps": steps, "threads": 1},
        **sections,
    }
    config = posttrain.load_recipe(**given)
    assert isinstance(config, posttrain.Config)
    return posttrain.train(config, policy=policy, rows=ROWS, rewards=[digits], resume=resume)


def supervised(folder: Path, policy: Policy, steps: int = 2, *, resume: bool = False, **sections: Any) -> posttrain.Run:
    given: dict[str, Mapping[str, Any]] = {
        "task": {"name": "dataset", "held_out_share": 0.0},
        "sft": {"learning_rate": 0.05, "rows_per_batch": 3},
        "checkpoint": {"every_steps": 1},
        "run": {"folder": str(folder), "num_steps": steps, "threads": 1},
        **sections,
    }
    config = posttrain.load_recipe(kind=posttrain.SftConfig, **given)
    assert isinstance(config, posttrain.SftConfig)
    return posttrain.train_sft(config, policy=policy, rows=ROWS, resume=resume)


each_kind = pytest.mark.parametrize("train", [by_reward, supervised])
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "dropout": {"lora_dropout": 0.5},
    "dora": {"use_dora": True},
    "saved whole": {"modules_to_save": ["norm"]},
}


@pytest.mark.parametrize(("train", "kind"), [(by_reward, "plain"), *((supervised, kind) for kind in KINDS)])
def test_what_was_trained_is_saved_as_peft_reads_it(
    train: Any, kind: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, policy = brought(base, **KINDS[kind])
    before = logits(model)
    run = train(tmp_path / "run", policy)
    assert run.model_folder == tmp_path / "run" / "adapter"
    assert not (tmp_path / "run" / "model").exists()
    assert train is by_reward or f"model        {run.model_folder}\n" in capsys.readouterr().out
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run.model_folder)
    assert torch.equal(logits(again), logits(model))
    assert (logits(again) - before).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(run.model_folder).get_vocab() == policy.tokenizer.get_vocab()
    if kind == "plain":
        asked = {"rows": ROWS, "held_out_rows": HELD_OUT, "rewards": [digits]}
        found = posttrain.evaluate(run.folder, config_of_counting(), **asked)
        here = posttrain.evaluate(None, config_of_counting(), policy=policy, **asked)
        assert found == here


@pytest.mark.parametrize(
    ("train", "section", "expected"),
    [(by_reward, "update", 1e-5), (supervised, "sft", 1e-4)],  # ten times what suits a whole model
)
def test_it_gets_the_default_rate_of_an_adapter_and_a_given_one_stays(
    train: Any, section: str, expected: float, base: Path, tmp_path: Path
) -> None:
    more = {"rows_per_batch": 3} if section == "sft" else {}
    made = train(tmp_path / "run", brought(base)[1], 1, **{section: more}).folder
    assert metrics_of(made)[1]["learning_rate"] == pytest.approx(expected)
    # The folder's own recipe says it, and goes on with it.
    assert yaml.safe_load((made / "config.yaml").read_text())[section]["learning_rate"] == pytest.approx(expected)
    train(made, brought(base)[1], 2, resume=True, **{section: more})
    assert metrics_of(made)[2]["learning_rate"] == pytest.approx(expected)
    given = {**more, "learning_rate": expected / 10}  # what would be the default without an adapter
    run = train(tmp_path / "given", brought(base)[1], 1, **{section: given})
    assert metrics_of(run.folder)[1]["learning_rate"] == pytest.approx(expected / 10)


def test_a_whole_model_keeps_its_rate_whatever_the_recipe_says_of_adapters(base: Path, tmp_path: Path) -> None:
    policy = posttrain.as_policy(AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base))
    run = by_reward(tmp_path / "run", policy, 1, update={}, model={"adapter": {"rank": 2}})
    assert metrics_of(run.folder)[1]["learning_rate"] == pytest.approx(1e-6)


def config_of_counting() -> posttrain.Config:
    config = posttrain.load_recipe(
        task={"name": "dataset"}, rollout={"max_completion_tokens": 5}, evaluation={"samples": 2}, run={"threads": 1}
    )
    assert isinstance(config, posttrain.Config)
    return config


def test_it_is_merged_where_the_recipe_says_so(base: Path, tmp_path: Path) -> None:
    model, policy = brought(base)
    run = supervised(tmp_path / "run", policy, model={"path": str(base), "adapter": {"save": "both"}})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)
    assert (logits(merged) - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-3
    assert (run.folder / "adapter" / "adapter_config.json").is_file()


def test_more_than_plain_matrices_is_not_merged_and_peft_is_named(base: Path, tmp_path: Path) -> None:
    _, policy = brought(base, use_dora=True)
    with refused("q_proj has an adapter that is more than plain LoRA", "merge_and_unload"):
        supervised(tmp_path / "run", policy, 1, model={"path": str(base), "adapter": {"save": "merged"}})


@each_kind
def test_a_checkpoint_holds_what_is_trained_and_resumes_to_the_bit(train: Any, base: Path, tmp_path: Path) -> None:
    train(tmp_path / "whole", brought(base)[1], 3)
    train(tmp_path / "parts", brought(base)[1], 1)
    held = load_file(tmp_path / "parts" / "checkpoints" / "step-000001" / "policy.safetensors")
    assert len(held) == 2 * 2
    assert all(".lora_" in name for name in held)
    train(tmp_path / "parts", brought(base)[1], 3, resume=True)
    name = "adapter_model.safetensors"
    ours, theirs = (load_file(tmp_path / each / "adapter" / name) for each in ("whole", "parts"))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    assert metrics_of(tmp_path / "whole")[1:] == metrics_of(tmp_path / "parts")[1:]


@pytest.mark.parametrize("start", [True, False], ids=["from the base", "from an adapter that is there"])
def test_its_reference_is_no_second_copy_and_its_kl_is_that_to_one(
    start: bool, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for kind in (None, FrozenCopy):
        if kind is not None:
            monkeypatch.setattr("posttrain.training.learner.reference_of", kind)
        _, policy = brought(base, init_lora_weights=start)
        by_reward(tmp_path / str(kind), policy, 3)
        losses.append([(line["loss"], line["kl"], line["grad_norm"]) for line in metrics_of(tmp_path / str(kind))[1:]])
    assert losses[0] == losses[1]
    assert losses[0][-1][1] > 1e-5


@pytest.mark.parametrize("forward", ["auto", "plain"])
def test_with_the_reference_entered_the_model_is_its_base_to_the_bit_and_then_itself(forward: str, base: Path) -> None:
    model, _ = brought(base)
    policy = posttrain.as_policy(model, AutoTokenizer.from_pretrained(base), forward=forward)
    reference, frozen = EarlierAdapter(policy), [each.requires_grad for each in model.parameters()]
    next(each for name, each in model.named_parameters() if "lora_B" in name).data.fill_(0.3)
    now = logits(model)
    with reference.entered() as entered:
        assert entered.model is policy.model
        assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(base)))
    assert torch.equal(logits(model), now)
    assert [each.requires_grad for each in model.parameters()] == frozen
    later = EarlierAdapter(policy)
    next(each for name, each in model.named_parameters() if "lora_B" in name).data.fill_(0.7)
    with later.entered():
        assert torch.equal(logits(model), now)
    assert not torch.equal(logits(model), now)


def train_norm(model: nn.Module) -> None:
    model.get_base_model().model.norm.weight.requires_grad_(True)


def merge(model: Any) -> None:
    model.merge_adapter()


def freeze_adapter(model: nn.Module) -> None:
    model.requires_grad_(False)
    train_norm(model)


UNSAVEABLE = {
    "beside it": (train_norm, "norm.weight…adapter default…modules_to_save"),
    "none of it": (freeze_adapter, "norm.weight…files of its adapter"),
    "merged": (merge, "is merged into its weights…unmerge_adapter"),
}


@pytest.mark.parametrize(("train", "what"), [(by_reward, "merged"), *((supervised, what) for what in UNSAVEABLE)])
def test_what_the_files_of_an_adapter_would_not_hold_is_refused_before_anything_is_trained(
    train: Any, what: str, base: Path, tmp_path: Path
) -> None:
    change, says = UNSAVEABLE[what]
    model, _ = brought(base)
    change(model)
    with refused(says):
        train(tmp_path / "run", posttrain.as_policy(model, AutoTokenizer.from_pretrained(base)))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
