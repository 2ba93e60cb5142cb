"""`posttrain sft`, `reward-model` and `dpo` on rows: what their one loop does, and what each leaves."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import posttrain
from posttrain.config import Config, RewardModelConfig, SftConfig
from posttrain.config.reading import resolved_config
from posttrain.runs.reports import StepReport
from tests.support.accidents import Accident
from tests.support.commands import printed, refusal
from tests.support.conversations import chat_model, chat_tokenizer, turns
from tests.support.fit_places import KINDS, place
from tests.support.refusals import mentions, refused
from tests.support.runs import after_training, command, metrics_of

every_kind = pytest.mark.parametrize("name", KINDS)
Finished = Callable[[str], Path]


@every_kind
def test_a_run_is_measured_before_along_and_after_and_keeps_its_best_checkpoint(name: str, finished: Finished) -> None:
    kind, run = KINDS[name], finished(name) / "run"
    lines, summary = metrics_of(run), json.loads((run / "summary.json").read_text())
    counts, size = summary["rows" if name == "sft" else "pairs"], kind.options[kind.size]
    assert counts["trained"] + counts["held_out"] == len(kind.rows)
    num_steps = 2 * -(-counts["trained"] // size)
    assert [line["step"] for line in lines] == [*range(num_steps + 1)]
    measured = {line["step"]: line for line in lines if f"eval/{kind.metric}" in line}
    assert [*measured] == sorted({0, num_steps, *range(4, num_steps, 4)})
    for when, step in (("before", 0), ("after", num_steps)):
        assert summary[when][kind.metric] == measured[step][f"eval/{kind.metric}"]
    assert summary["examples" if name == "sft" else "pairs_learned"] == 2 * counts["trained"]
    scores = {step: kind.score(line) for step, line in measured.items() if step % 4 == 0 and step}
    best = [step for step, score in scores.items() if score == max(scores.values())]
    assert any((run / "checkpoints" / f"step-{step:06d}").is_dir() for step in best)


@every_kind
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_stopped_run_is_resumed_to_the_same_bits(name: str, number: int, code: int, finished: Finished) -> None:
    whole = finished(name)
    folder = place(name, whole.parent / f"stopped-{number}")
    accident = Accident(moment="open metrics.jsonl 8", signal=number)  # in the sixth step
    ended = command(name, "recipe.yaml", folder=folder, accident=accident)
    assert ended.code == code, ended.err
    resumed = command(name, "--resume", "run", folder=folder)
    assert resumed.code == 0, resumed.err
    assert metrics_of(folder / "run") == metrics_of(whole / "run")
    last = max((whole / "run" / "checkpoints").iterdir())
    files = [whole / "run" / "model" / "model.safetensors", *last.glob("*.safetensors"), *whole.glob("run/held_out.*")]
    assert len(files) == {"sft": 3, "reward-model": 5, "dpo": 4}[name], "dpo has the log-probs of the reference too"
    for file in files:
        assert (folder / file.relative_to(whole)).read_bytes() == file.read_bytes(), file


@every_kind
def test_other_rows_are_refused_when_a_run_is_resumed(name: str, finished: Finished, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished(name), tmp_path / "changed"))
    step = int(sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())[-2][5:])
    text = (folder / "rows.jsonl").read_text()
    assert KINDS[name].changed[0] in text
    (folder / "rows.jsonl").write_text(text.replace(*KINDS[name].changed))
    refused = command(name, "--resume", "run", "--from-step", step, folder=folder)
    assert refused.code == 2
    assert "task.path = rows.jsonl has changed since the run began" in refused.err
    accepted = command(name, "--resume", "run", "--from-step", step, "--accept-changes", folder=folder)
    if name == "dpo":
        assert "dpo.reference = precomputed" in accepted.err, "what is kept is of other pairs"
    else:
        assert accepted.code == 0, accepted.err


DRY_RUNS: dict[str, tuple[list[str], list[str]]] = {
    "sft": (["--model.dtype", "bfloat16"], ["bfloat16 on cpu", "one step   5 rows, learning rate", "⟪<answer>"]),
    "reward-model": (
        ["--model.adapter.rank", "2"],
        [
            "merged into the base when it is saved",
            "loss       -log σ(r_chosen - r_rejected), centring 0.01, margins of ",
            "chosen   ⟪yes ",
        ],
    ),
    "dpo": (
        ["--dpo.loss", "ipo", "--dpo.label-smoothing", "0.1", "--dpo.nll-weight", "0.2", "--dpo.reference", "live"],
        [
            "loss       ipo, beta 0.1, 0.1 of the labels taken to be wrong, log-probs per token, 0.2 × -log π",
            "reference  the policy at the beginning, computed for each batch",
            "!<|im_end|>⟫\n",
        ],
    ),
}
"""Flags, and what the plan says of them and shows of the first rows."""


@every_kind
def test_a_dry_run_shows_the_plan_and_makes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place(name, tmp_path / "place"))
    flags, shown = DRY_RUNS[name]
    out = printed(name, "recipe.yaml", "--dry-run", *flags)
    for words in (*shown, "model      model, 0.0", "; 1", " held out\n", ": 2 epochs\n", "time       about "):
        assert words in out
    assert not Path("run").exists()
    assert "It fits" in printed("plan", "recipe.yaml")


class Ends(posttrain.Watcher):
    """After a step at which nothing is measured."""

    def on_step(self, report: StepReport) -> None:
        self.stopping = report.step == 3


@every_kind
def test_a_run_that_a_watcher_ends_is_measured_then(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first measurement along the way: what is reported is of the weights that are saved."""
    monkeypatch.chdir(place(name, tmp_path / "place"))
    kind = KINDS[name]
    config = posttrain.load_recipe("recipe.yaml", kind=kind.config)
    run = kind.train(config, watchers=[Ends()])
    assert run.summary["steps"] == 3
    (last,) = after_training(run.folder)
    assert (last["step"], last["eval/loss"]) == (3, run.summary["after"]["loss"])
    assert last["eval/loss"] != run.summary["before"]["loss"]


ROWS = KINDS["sft"].rows


def test_rows_are_learned_and_transformers_loads_the_model(finished: Callable[[str], Path]) -> None:
    run = finished("sft") / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"] - 2
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert AutoTokenizer.from_pretrained(run / "model").chat_template
    assert model.config.vocab_size == len(chat_tokenizer())


def test_a_dry_run_shows_masks_and_rows_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place("sft", tmp_path / "place"))
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "=" * 60, "completion": "4"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--task.held-out-share", "0", "--task.prompt-format", "chat", "--sft.long-rows", "skip"]
    out = printed("sft", "recipe.yaml", "--dry-run", *flags, "--sft.tokens-per-batch", "199")
    mentions(out, "1 rows of", "1 too long and skipped: rows.jsonl:2", "\n           row format prompt_completion\n")
    assert "\none step   5 rows or 199 tokens, learning rate" in out  # 5 rows of at most 40 tokens may be 200
    assert "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n⟪4<|im_end|>⟫\n" in out
    Path("rows.jsonl").write_text(json.dumps({"text": "=" * 200}) + "\n")
    said = refusal("sft", "recipe.yaml", "--task.held-out-share", "0", "--sft.max-length", "500")
    assert "1 rows are longer than 160 tokens: rows.jsonl:1 (201 tokens)" in said


def test_from_python_the_policy_and_rows_are_objects_and_frozen_parts_stay(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    policy = posttrain.as_policy(chat_model(tokenizer, family="gpt2"), tokenizer)
    frozen = policy.model.get_input_embeddings().weight
    frozen.requires_grad_(False)
    before, moved = frozen.detach().clone(), policy.model.get_parameter("transformer.h.0.ln_1.weight")
    start = moved.detach().clone()
    config = posttrain.load_recipe(
        kind=SftConfig,
        task={"name": "dataset", "held_out_share": 0},
        sft={"rows_per_batch": 8},
        run={"folder": str(tmp_path / "run"), "num_steps": 2, "threads": 1},
    )
    run = posttrain.train_sft(config, rows=ROWS, policy=policy)
    assert torch.equal(frozen, before)
    assert not torch.equal(moved, start)
    assert run.summary["eval_loss"] is None, "nothing is held out"
    assert not any("eval/loss" in line for line in metrics_of(run.folder))
    with refused("resume", "policy = GPT2LMHeadModel"):
        posttrain.train_sft(config, resume=True)
    with refused("39 rows", "40 rows"):
        posttrain.train_sft(config, rows=ROWS[1:], policy=policy, resume=True)
    with refused("rows", "countdown"):
        posttrain.train_sft(SftConfig(), rows=ROWS)


def test_a_base_model_learns_to_stop_at_the_token_that_ends_turns(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.eos_token = "<|end|>"
    policy = posttrain.as_policy(chat_model(tokenizer), tokenizer)
    options: dict[str, Any] = {
        "task": {"name": "dataset", "held_out_share": 0},
        "run": {"folder": str(tmp_path / "run"), "num_steps": 1, "threads": 1},
    }
    with refused("rows:1, message 1", "'<|end|>'"):
        posttrain.train_sft(posttrain.load_recipe(kind=SftConfig, **options), rows=ROWS, policy=policy)
    policy = posttrain.as_policy(chat_model(tokenizer), tokenizer, stop_tokens=["<|im_end|>"])
    run = posttrain.train_sft(posttrain.load_recipe(kind=SftConfig, **options), rows=ROWS, policy=policy)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    folder = run.model_folder
    saved = posttrain.as_policy(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    assert saved.stop_ids == (0, end)


PAIRS = KINDS["reward-model"].rows


@pytest.fixture
def whole(finished: Callable[[str], Path]) -> Path:
    return finished("reward-model")


def test_a_run_leaves_a_classifier_that_is_right_and_its_scores_of_held_out_pairs(whole: Path) -> None:
    summary = json.loads((whole / "run" / "summary.json").read_text())
    after, apart = summary["after"], summary["pairs"]["held_out"]
    assert after["accuracy"] == 1.0
    assert after["accuracy_interval"] == [pytest.approx(0.78, abs=0.05), 1.0], "few prompts, all right: no point"
    assert sum(each["num_pairs"] for each in after["calibration"]) == apart
    assert summary["before"]["loss"] > after["loss"]
    told = [json.loads(line) for line in (whole / "run" / "held_out.jsonl").read_text().splitlines()]
    assert len(told) == apart
    assert all(each["chosen"] > each["rejected"] and each["where"].startswith("rows.jsonl:") for each in told)
    margins = [each["chosen"] - each["rejected"] for each in told]
    assert after["margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-6)
    assert (whole / "run" / "model" / "README.md").read_text().startswith("# Reward model")


def test_transformers_and_the_reward_read_the_held_out_scores_from_the_folder(whole: Path) -> None:
    folder = whole / "run" / "model"
    told = [json.loads(line) for line in (whole / "run" / "held_out.jsonl").read_text().splitlines()]
    rows = [PAIRS[int(each["where"].rpartition(":")[2]) - 1] for each in told]
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(row["chosen"], tokenize=False) for row in rows]
    with torch.no_grad():
        scores = model(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0]
    expected = torch.tensor([each["chosen"] for each in told])
    assert (scores - expected).abs().max() <= 1e-5
    reward = posttrain.RewardModel(folder)
    found = reward(
        prompts=[turns(row["rejected"][0]["content"]) for row in rows],
        completions=[row["rejected"][1:] for row in rows],
    )
    assert (torch.tensor(found) - torch.tensor([each["rejected"] for each in told])).abs().max() <= 1e-5


def test_rates_are_those_of_what_is_trained_and_an_adapter_is_merged() -> None:
    whole_model = posttrain.load_recipe(kind=RewardModelConfig, task="dataset")
    assert resolved_config(whole_model).reward_model.learning_rate == 1e-5
    adapter = posttrain.load_recipe(kind=RewardModelConfig, task="dataset", model={"adapter": {"rank": 4}})
    assert resolved_config(adapter).reward_model.learning_rate == 1e-4
    assert adapter.model.adapter is not None
    assert adapter.model.adapter.save == "merged"
    again = posttrain.as_recipe(adapter)
    assert posttrain.load_recipe(kind=RewardModelConfig, **yaml.safe_load(again)) == resolved_config(adapter)


def test_from_python_a_policy_and_rows_are_given_and_rl_goes_on_by_what_was_learned(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **look: None)
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    policy = posttrain.as_policy(posttrain_model(whole / "model"), tokenizer)
    config = posttrain.load_recipe(
        kind=RewardModelConfig,
        task={"name": "dataset", "held_out_share": 0},
        reward_model={"num_epochs": None, "center_coefficient": 0, "margin_scale": 0, "head_rate_scale": 3.0},
        run={"folder": "rm", "num_steps": 2, "threads": 1},
    )
    run = posttrain.train_reward_model(config, policy=policy, rows=PAIRS[:8])
    assert run.summary["steps"] == 2
    assert run.summary["after"] == {}
    assert [path.name for path in run.folder.glob("*.png")] == ["curves.png"]
    rl = posttrain.load_recipe(
        kind=Config,
        model={"path": str(whole / "model")},
        task={"name": "dataset", "held_out_share": 0},
        rewards=[{"model": str(run.model_folder), "ensemble": [str(whole / "run" / "model")], "combine": "least"}],
        rollout={"prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 4},
        run={"folder": "rl", "num_steps": 1, "threads": 1},
    )
    found = posttrain.train(rl, rows=[{"prompt": turns("2?")}, {"prompt": turns("3?")}])
    (line,) = [line for line in metrics_of(found.folder) if "rewards/model/mean" in line]
    assert line["logged/model/deviation"] > 0


def posttrain_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)
