"""A mistake in a task, a reward, an algorithm or rows is one message that names it; before step 1 it costs nothing.

Step 1 is collected first, and once: a mistake shows before anything is measured or given up.  Rows that no model can
read are refused by their place: megabytes of text, and unknown tokens.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

import posttrain
from posttrain.algorithms.credit import Evidence
from posttrain.algorithms.table import grpo
from posttrain.errors import RunError
from posttrain.models import rendering
from posttrain.models.context import num_embeddings
from posttrain.models.rendering import TokenizerRenderer, TooLongText
from posttrain.records import Prompt
from posttrain.rewards.model import RewardModel
from tests.support.commands import refusal
from tests.support.dice import dice
from tests.support.own_objects import Counts, Sums, config, policy_of, rewarded_by_answer
from tests.support.refusals import mentions, refused
from tests.support.reward_models import classifier, reward_folder, reward_tokenizer
from tests.support.runs import SHAPE, files_of, metrics_of, records, rollout_rows, save_tiny_model


def plain(completions: Sequence[str], **columns: object) -> list[float]:
    return dice(list(completions))


def test_a_task_names_plain_functions_as_train_takes_them(model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    task = Sums(policy)
    task.reward_functions = [plain]  # type: ignore[list-item]
    run = posttrain.train(config(tmp_path / "run", 1), policy=policy, task=task)
    rows = rollout_rows(run.folder, 1)
    assert [row["score/plain"] for row in rows] == plain([row["completion"] for row in rows])


PROMPT = Prompt(id="p", text="1", tokens=(20,))


def probe(readings: object) -> Any:
    return lambda self: {"p": posttrain.Probe(readings=readings, measure=lambda groups: {})}


def gives(what: object) -> Any:
    return lambda self, *asked: what


WRONG: dict[str, tuple[str, Any, str]] = {
    "no prompts": (
        *("prompts", gives(None)),
        "prompts(1, range(0, 64)) gave None; give a list of prompts, as renderer.render makes them",
    ),
    "a generator": (
        *("prompts", lambda self, step, draws: (PROMPT for _ in draws)),
        "prompts(1, range(0, 64)) gave <generator object",
    ),
    "texts": ("prompts", lambda self, step, draws: ["1+1="] * len(draws), "gave '1+1=' (str) at 0; give prompts"),
    "one text": ("prompts", gives("1+1="), "prompts(1, range(0, 64)) gave '1+1=' (str); give a list of prompts"),
    "a prompt too few": (  # of the 3 draws of a step
        *("prompts", lambda self, step, draws: [PROMPT] * (2 if len(draws) == 3 else len(draws))),
        "prompts(1, range(0, 3)) gave 2 prompts for 3 draws; give one for each, in order",
    ),
    "a prompt too many": (
        *("prompts", lambda self, step, draws: [PROMPT] * (len(draws) + 1)),
        "prompts(1, range(0, 64)) gave 65 prompts for 64 draws; give one for each",
    ),
    "nothing held out": ("held_out", gives(None), "held_out() gave None; give a list of prompts"),
    "a held-out text": ("held_out", gives([PROMPT, "1+1="]), "held_out() gave '1+1=' (str) at 1; give prompts"),
    "no longest": ("longest_prompts", gives(3), "longest_prompts() gave 3 (int); give a list of prompts"),
    "a reward": ("reward_functions", plain, "reward_functions = <bound method plain of"),  # a function of its objects
    "a name": ("reward_functions", ("plain",), "reward_functions: reward 'str': 'plain' cannot score completions"),
    "no probes": ("probes", gives(None), "probes() gave None; give a mapping of names to probes, or {}"),
    "a number": ("probes", gives({"p": 3}), "probes() gave 3 (int) as 'p'; give a posttrain.Probe"),
    "a label": ("probes", probe({"x": "label"}), "probe 'p' has readings = {'x': 'label'} (dict); give a mapping"),
    "a list": ("probes", probe(["x"]), "probes(): probe 'p' has readings = ['x'] (list); give a mapping such as"),
}
"""What of a task is wrong, what stands there, and what is said of it."""


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_in_what_a_task_gives_is_told_by_its_name(wrong: str, model: Path, tmp_path: Path) -> None:
    name, given, says = WRONG[wrong]
    policy = policy_of(model)
    task = type("Wrong", (Sums,), {name: given})(policy)
    with refused("task sums: …" + says):
        posttrain.train(
            config(tmp_path / "run"), policy=policy, task=task, rewards=() if name == "reward_functions" else [plain]
        )
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_rewards_of_the_caller_that_are_no_list_are_told_as_one(model: Path, tmp_path: Path) -> None:
    """A function by itself is one, and so is the name of a reward."""
    policy = policy_of(model)
    for given, said in ((7, "rewards = 7 (int) should be a list of functions"), ("plain", "no reward function")):
        wrong: Any = {"rewards": given}
        with refused(said):
            posttrain.train(config(tmp_path / "run"), policy=policy, task=Sums(policy), **wrong)


@pytest.mark.parametrize(("mistaken", "says"), [(1, ()), (2, ("step 2", "step-00000"))])
def test_a_mistake_in_an_algorithm_is_told(mistaken: int, says: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    """In step 1 before anything is written."""
    policy, calls = policy_of(model), iter(range(1, 9))
    own = replace(grpo(), credit=lambda evidence: credit_until(mistaken, calls, evidence))
    objects = {"policy": policy, "task": Sums(policy), "algorithm": own, "rewards": [rewarded_by_answer]}
    with refused("algorithm grpo", "returned a tensor", *says, error=RunError):
        posttrain.train(config(tmp_path / "run", 2), **objects)
    assert (tmp_path / "run" / "checkpoints").exists() == (mistaken > 1)


def credit_until(mistaken: int, calls: Iterator[int], evidence: Evidence) -> Any:
    """GRPO's, until the call that is mistaken."""
    return evidence.rewards if next(calls) == mistaken else grpo().credit(evidence)


def mistaken(completions: Sequence[str], **columns: object) -> list[float]:
    raise ZeroDivisionError("no divisor")


class Run:
    """A run whose objects can be looked at."""

    def __init__(self, model: Path, folder: Path, **sections: Any) -> None:
        self.policy = policy_of(model)
        self.engine = Counts(self.policy)
        self.config = config(folder, 2, **sections)

    def train(self, *rewards: Any, task: type[Sums] = Sums, **how: Any) -> posttrain.Run:
        objects = {"policy": self.policy, "task": task(self.policy), "engine": self.engine}
        return posttrain.train(self.config, **objects, rewards=rewards, **how)


def test_a_mistake_in_a_reward_shows_before_the_first_measurement(model: Path, tmp_path: Path) -> None:
    run = Run(model, tmp_path / "deep" / "run")
    with refused("reward 'mistaken'", "raised ZeroDivisionError: no divisor"):
        run.train(mistaken)
    assert run.engine.sampled == [("rollout", 1, 0)]
    assert not (tmp_path / "deep" / "run").exists()


def test_a_mistake_does_not_cost_the_run_that_is_overwritten(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    anew = {"folder": str(folder), "num_steps": 2, "overwrite": True}
    Run(model, folder).train(dice)
    earlier = files_of(folder)
    assert {"summary.json", "scores.jsonl", "model/model.safetensors"} <= earlier.keys()
    with refused("no divisor"):
        Run(model, folder, run=anew).train(mistaken)
    assert files_of(folder) == earlier
    with refused("probe 'mine' returned lenght"):  # in the first evaluation
        Run(model, folder, run=anew).train(dice, task=Misnamed)
    assert files_of(folder) == earlier
    # And it can still go on.
    longer = Run(model, folder, run={"folder": str(folder), "num_steps": 3, "threads": 1})
    assert longer.train(dice, resume=True).summary["after"]
    assert [line["step"] for line in metrics_of(folder)] == [0, 1, 2, 3]


class Misnamed(Sums):
    """Its probe measures what is not among its readings."""

    def probes(self) -> Mapping[str, posttrain.Probe]:
        readings = {"length": posttrain.Reading("length")}
        return {"mine": posttrain.Probe(readings=readings, measure=lambda groups: {"lenght": 1.0})}


class Mended(Sums):
    def probes(self) -> Mapping[str, posttrain.Probe]:
        readings = {"length": posttrain.Reading("length")}
        return {"mine": posttrain.Probe(readings=readings, measure=lambda groups: {"length": 1.0})}


def test_a_mistake_in_the_first_evaluation_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    calls: list[int] = []

    def counted(completions: Sequence[str], **columns: object) -> list[float]:
        calls.append(len(completions))
        return dice(list(completions))

    with refused("probe 'mine' returned lenght, but its readings are length"):
        Run(model, folder).train(counted, task=Misnamed)
    assert calls[0] == 12, "step 1 comes first"
    assert not folder.exists()
    Run(model, folder).train(counted, task=Mended)
    journal = records(folder / "scores.jsonl")
    assert [line["step"] for line in journal] == [1, 1, 1, 2, 2, 2]
    assert [line["step"] for line in metrics_of(folder)] == [0, 1, 2]


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_every_completion_is_scored_once_and_step_1_comes_first(algorithm: str, model: Path, tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(completions: Sequence[str], **columns: object) -> list[float]:
        calls.append(len(completions))
        return dice(list(completions))

    uncached = {"algorithm": {"name": algorithm}, "grading": {"cache_entries": 0}}
    run = Run(model, tmp_path / "run", **uncached).train(dice, counted)  # the first one judges held-out problems too
    tables = [parquet.read_table(file).to_pylist() for file in sorted((run.folder / "rollouts").iterdir())]
    held_out = 2 * 3  # sampled completions of the evaluations before and after, whose reward is measured
    assert sum(calls) == sum(len(table) for table in tables) + held_out
    journal = records(run.folder / "scores.jsonl")
    of_first = [line for line in journal if line["step"] == 1]
    assert of_first == journal[: len(of_first)]
    by_name = {line["prompt_id"]: line["scores"]["counted"] for line in of_first}
    rows = {row["prompt_id"]: row for row in tables[0]}
    assert by_name.keys() == rows.keys()
    for row in tables[0]:
        assert by_name[row["prompt_id"]][row["sample"]] == row["score/counted"]
    if algorithm == "grpo":
        assert calls == [12, 3, 12, 3], "one call for each of the two steps and of the two evaluations"
    else:
        assert sum(calls) > 30, "of no use: no group was replaced"


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
LONG = "1 + 2 " * 500_000
TOO_LONG: dict[str, dict[str, str]] = {
    "rl": {"prompt": LONG},
    "sft": {"prompt": "1", "completion": LONG},
    "dpo": {"prompt": "1", "chosen": "2", "rejected": LONG},
    "reward-model": {"prompt": LONG, "chosen": "2", "rejected": "3"},
}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of all that is made tokens."""
    found: list[int] = []
    make = rendering.token_ids

    def token_ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
        found.append(len(text))
        return make(tokenizer, text, special=special)

    monkeypatch.setattr(rendering, "token_ids", token_ids)
    return found


@pytest.mark.parametrize("command", TOO_LONG)
def test_a_text_of_megabytes_is_refused_before_it_is_made_tokens(command: str, sizes: list[int], model: Path) -> None:
    Path("dice.py").write_text("def dice(completions, **columns):\n    return [0.0] * len(completions)\n")
    row = TOO_LONG[command]
    short = {name: value[:6] if value is LONG else value for name, value in row.items()}
    lines = [{**short, next(iter(row)): f"{number}"} for number in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*lines, row]))
    recipe: dict[str, Any] = {"model": {"path": str(model)}, "run": {"folder": "run", "threads": 1}}
    recipe["task"] = {"name": "dataset", "path": "rows.jsonl", "held_out_share": 0.2}
    recipe |= {"rewards": [{"path": "dice.py:dice"}]} if command == "rl" else {}
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    said = refusal(command, "recipe.yaml")
    mentions(said, "rows.jsonl:21", f"more than {SHAPE.max_positions} tokens")
    assert max(sizes) < 50 * SHAPE.max_positions


def test_a_text_is_refused_by_its_tokens_and_not_by_its_size() -> None:
    # A tokenizer to which a word that it does not know is one token, whatever its length, and white space none.
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    for fits in ("x" * 100_000, " " * 100_000 + "a", "a" + " " * 100_000 + "a"):
        TokenizerRenderer(words, most_tokens=4).tokens(fits, "a row")
    with refused("a row: its 100000 characters are more than 4 tokens", error=TooLongText):
        TokenizerRenderer(words, most_tokens=4).tokens("a " * 50_000, "a row")


SAYS = "has no row in the model's embedding, which has 24"


def smaller(folder: Path, kind: Any) -> Path:
    """A model of 24 rows under a tokenizer that knows more."""
    made = kind.from_pretrained(folder)
    made.resize_token_embeddings(24)
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ignorant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smaller(save_tiny_model(tmp_path_factory.mktemp("unknown") / "model"), AutoModelForCausalLM)


@pytest.mark.parametrize(
    ("command", "row"),
    [
        ("sft", '{"prompt": "1", "completion": "Q"}'),
        ("sft", '{"text": "Q"}'),
        ("sft", '{"input_ids": [1, 50]}'),
        ("dpo", '{"prompt": "1", "chosen": "2", "rejected": "Q"}'),
        ("reward-model", '{"prompt": "Q", "chosen": "2", "rejected": "3"}'),
    ],
)
def test_rows_with_unknown_tokens_are_refused_before_a_run(command: str, row: str, ignorant: Path) -> None:
    Path("rows.jsonl").write_text(row + "\n")
    flags = ["--model.path", ignorant, "--task.path", "rows.jsonl", "--task.held-out-share", 0, "--run.folder", "run"]
    for more in [], ["--dry-run"]:
        said = refusal(command, *flags, "--run.threads", 1, *more)
        assert "rows.jsonl:1: the tokenizer's token" in said
        assert SAYS in said
    assert not Path("run").exists()


def test_demonstrations_are_refused_before_a_run(ignorant: Path) -> None:
    flags = ["--model.path", ignorant, "--run.threads", 1, "--run.folder", "run", "--task.name", "countdown"]
    assert SAYS in refusal("sft", *flags, "--run.num-steps", 1)
    assert not Path("run").exists()


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_reward_model_without_rows_for_its_tokenizer_is_refused_before_a_run(kind: str, model: Path) -> None:
    folder = smaller(reward_folder(Path("rm").absolute(), kind), AutoModelForSequenceClassification)
    flags = ["--model.path", model, "--run.threads", 1, "--run.num-steps", 1, "--run.folder", "run"]
    said = refusal("rl", *flags, "--task.name", "countdown", "--rewards", f"[{{model: {folder}}}]")
    assert f"rewards: model = {folder}: the tokenizer's token" in said
    assert SAYS in said
    assert not Path("run").exists()


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_special_tokens_beyond_the_embedding_are_refused_where_a_text_has_one(kind: str) -> None:
    """A pad token that was added without a row is common, and pads: whatever is masked, a row is looked up."""
    tokenizer, body = reward_tokenizer(), classifier(kind)
    body.resize_token_embeddings(len(tokenizer))
    reward = RewardModel(body, tokenizer=tokenizer)
    texts = {"prompts": ["ab", "abc"], "completions": ["d", "efg"]}
    expected = reward(**texts)
    tokenizer.add_special_tokens({"pad_token": "<|new|>"})
    assert tokenizer.pad_token_id >= num_embeddings(reward.model)
    added = RewardModel(reward.model, tokenizer=tokenizer)
    assert added(**texts) == pytest.approx(expected, abs=1e-5)
    with refused("has no row in the model's embedding"):
        added(prompts=["a<|new|>"], completions=["b"])
