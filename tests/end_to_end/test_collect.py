"""Preferences collected with a tiny model: judged by rewards and by people, resumed, and refused."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.commands.collection import prompt_sampler
from posttrain.commands.collection.collection import Collection, collect
from posttrain.config import CollectConfig
from posttrain.errors import RunError
from posttrain.models.conversation_masks import Masking
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.policy import Policy, as_policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.dataset import DatasetOptions
from posttrain.options.pairs import PairOptions
from posttrain.runs.checkpoint import claim_threads
from posttrain.runs.reports import Run
from posttrain.tasks.preference_set import preference_set
from tests.support.refusals import refused
from tests.support.runs import SHAPE, records

ROWS = [{"prompt": f"{a} and ", "wanted": str(a)} for a in range(6)]


def length(completions: list[str], **columns: object) -> list[float]:
    """Longer is better; the tiny model writes noise of a few characters."""
    return [float(len(text)) for text in completions]


@pytest.fixture(scope="module")
def policy() -> Policy:
    tokenizer = new_tokenizer()
    return as_policy(new_model(SHAPE, tokenizer, seed=0), tokenizer)


def config_of(folder: Path, **sections: Mapping[str, Any]) -> CollectConfig:
    content: dict[str, Any] = {
        "task": {"name": "dataset", "held_out_share": 0.0},
        "sampling": {"max_completion_tokens": 5},
        "collect": {"num_prompts": 6, "group_size": 3, "cut_off": "keep"},
        "run": {"folder": str(folder), "threads": 1},
    }
    merged = {name: {**content.get(name, {}), **sections.get(name, {})} for name in {**content, **sections}}
    return posttrain.load_recipe(kind=CollectConfig, **merged)


@pytest.fixture(scope="module")
def judged(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A collection that is looked at and not changed."""
    return collected(policy, tmp_path_factory.mktemp("judged") / "run")


def collected(policy: Policy, folder: Path, reward: Any = length, *, rows: Any = ROWS, **how: Any) -> Run:
    """A collection judged by a reward, or by people; sections of its config and arguments of `collect`."""
    own = {name: how.pop(name) for name in ("people", "resume") if name in how}
    rewards = {} if reward is None else {"rewards": [reward]}
    return collect(config_of(folder, **how), policy=policy, rows=rows, **rewards, **own)


def test_pairs_judged_by_a_reward_are_rows_with_the_better_one_chosen(judged: Run) -> None:
    prompts, rows, ties = (records(judged.folder / f"{name}.jsonl") for name in ("completions", "preferences", "ties"))
    assert [each["prompt"] for each in prompts] != sorted(each["prompt"] for each in prompts)  # drawn in an order
    assert {each["prompt"] for each in prompts} == {row["prompt"] for row in ROWS}
    for row in rows:
        assert row["margin"] == len(row["chosen"]) - len(row["rejected"]) > 0
        of_prompt = {each["sample"]: each["text"] for each in prompts[int(row["pair"].split(":")[0])]["completions"]}
        assert of_prompt[row["chosen_sample"]] == row["chosen"]
        assert of_prompt[row["rejected_sample"]] == row["rejected"]
    assert all(len(row["chosen"]) == len(row["rejected"]) and row["tie"] for row in ties)
    told = judged.summary
    assert told == json.loads((judged.folder / "summary.json").read_text())
    assert (told["num_prompts"], told["num_completions"], told["num_open"]) == (6, 18, 0)
    assert told["num_preferences"] == len(rows) > 0
    assert told["num_ties"] == len(ties) > 0
    assert told["num_pairs"] == told["num_judged"] == len(rows) + len(ties)
    assert told["mean_chosen_tokens"] == 5.0  # none of them stopped


def test_rows_are_pairs_for_whoever_learns_from_them(judged: Run, policy: Policy) -> None:
    rows = records(judged.folder / "preferences.jsonl")
    masking = Masking(renderer=TokenizerRenderer(policy.tokenizer), stop_ids=policy.stop_ids)
    task = DatasetOptions(path=str(judged.folder / "preferences.jsonl"), held_out_share=0.0)
    found = preference_set(masking, task, PairOptions(), longest=96, seed=0)
    assert found.bad.faults == []
    decode = partial(policy.tokenizer.decode, clean_up_tokenization_spaces=False)
    for pair, row in zip(found.training, rows, strict=True):
        assert (pair.prompt.text, pair.margin) == (row["prompt"], row["margin"])
        for tokens, text in ((pair.chosen.tokens, row["chosen"]), (pair.rejected.tokens, row["rejected"])):
            assert decode(tokens[:-1]) == text
            assert tokens[-1] in policy.stop_ids


def test_ties_stay_out_of_what_is_learned_and_may_be_dropped(policy: Policy, tmp_path: Path) -> None:
    def alike(completions: list[str], **columns: object) -> list[float]:
        return [1.0] * len(completions)

    kept = collected(policy, tmp_path / "kept", alike)
    assert records(kept.folder / "preferences.jsonl") == []
    assert len(records(kept.folder / "ties.jsonl")) == kept.summary["num_ties"] > 0
    dropped = collected(policy, tmp_path / "dropped", alike, collect={"ties": "drop"})
    assert records(dropped.folder / "ties.jsonl") == []
    assert dropped.summary["num_ties"] == kept.summary["num_ties"]


def test_the_number_of_threads_is_claimed_while_completions_are_sampled(policy: Policy, tmp_path: Path) -> None:
    with claim_threads(1), refused("run.threads = 2, but another session"):
        collected(policy, tmp_path / "run", run={"threads": 2})


def test_a_pair_with_an_unscored_completion_stays_open(policy: Policy, tmp_path: Path) -> None:
    def not_all(completions: list[str], **columns: object) -> list[float | None]:
        return [None if index % 2 else 1.0 + index for index, _ in enumerate(completions)]

    run = collected(policy, tmp_path / "run", not_all)
    assert run.summary["num_open"] > 0
    for row in records(run.folder / "preferences.jsonl"):
        assert None not in (row["chosen_reward"], row["rejected_reward"])


@pytest.mark.parametrize("torn", ["whole lines", "half a line"])
def test_a_killed_collection_goes_on_and_samples_nothing_twice(
    torn: str, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"max_rows": 3}  # a batch for each prompt
    whole, cut = (collected(policy, tmp_path / name, collect=small) for name in ("whole", "cut"))
    journal = cut.folder / "completions.jsonl"
    kept = b"".join(journal.read_bytes().splitlines(keepends=True)[:4])
    journal.write_bytes(kept if torn == "whole lines" else kept + b'{"draw": 4, "prompt_')
    (cut.folder / "preferences.jsonl").unlink()
    sampled: list[range] = []
    as_it_is = prompt_sampler.PromptSampler.sampled

    def noted(self: Any, draws: range, advance: Any) -> Any:
        sampled.append(draws)
        return as_it_is(self, draws, advance)

    monkeypatch.setattr(prompt_sampler.PromptSampler, "sampled", noted)
    collected(policy, tmp_path / "cut", collect=small, resume=True)
    assert sampled == [range(4, 5), range(5, 6)]
    for name in ("completions.jsonl", "preferences.jsonl", "ties.jsonl"):
        assert (cut.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_batches_change_no_completion_and_a_round_has_others(policy: Policy, tmp_path: Path) -> None:
    def texts(name: str, **options: Any) -> list[Any]:
        run = collected(policy, tmp_path / name, collect={"num_prompts": 3, **options})
        found = records(run.folder / "completions.jsonl")
        return [(each["prompt"], [one["text"] for one in each["completions"]]) for each in found]

    first = texts("one")
    assert texts("small", max_rows=3) == first
    second = texts("two", round=2)
    # Rows go on where the round before ended: three and three are all six.
    assert {prompt for prompt, _ in first} | {prompt for prompt, _ in second} == {row["prompt"] for row in ROWS}
    assert {prompt for prompt, _ in texts("three", round=3)} <= {row["prompt"] for row in ROWS}


def test_conversations_are_rows_of_messages(policy: Policy, tmp_path: Path) -> None:
    def of_messages(completions: list[Any], **columns: object) -> list[float]:
        return [float(len(completion[0]["content"])) for completion in completions]

    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    run = collected(policy, tmp_path / "run", of_messages, rows=rows, task={"prefill": "7"})
    for row in records(run.folder / "preferences.jsonl"):
        assert row["prompt"][0]["role"] == "user"
        assert [message["role"] for message in row["chosen"]] == ["assistant"]
        assert row["chosen"][0]["content"].startswith("7")
        assert row["chosen"][0]["content"] != row["rejected"][0]["content"]


BY_PEOPLE = {"judge": {"name": "person"}}


def test_people_vote_and_most_votes_win(policy: Policy, tmp_path: Path) -> None:
    def people(collection: Collection) -> None:
        anna, ben = collection.ballot("anna"), collection.ballot("ben")
        while (pair := anna.current()) is not None:
            anna.vote(pair.id, "left" if len(pair.left) >= len(pair.right) else "right")
        for _ in range(4):
            pair = ben.current()
            ben.vote(pair.id, "right" if len(pair.left) > len(pair.right) else "left")

    run = collected(policy, tmp_path / "run", None, people=people, **BY_PEOPLE)
    found = run.summary["agreement"]["anna and ben"]
    assert (found["num_common"], found["raw"] < 1) == (4, True)
    assert run.summary["num_judged"] == run.summary["num_pairs"]
    by_both = [row for row in records(run.folder / "ties.jsonl") if row["judge"] == "anna, ben"]
    assert by_both
    assert all(row["votes"] == {"chosen": 1, "rejected": 1, "tie": 0} for row in by_both)
    by_one = [row for row in records(run.folder / "preferences.jsonl") if row["judge"] == "anna"]
    assert all(len(row["chosen"]) >= len(row["rejected"]) for row in by_one)
    assert all(row["margin"] is None and row["chosen_reward"] is None for row in by_one)


def test_rewards_choose_pairs_that_people_judge(policy: Policy, tmp_path: Path) -> None:
    def people(collection: Collection) -> None:
        ballot = collection.ballot("anna")
        while (pair := ballot.current()) is not None:
            ballot.vote(pair.id, "tie")

    run = collected(policy, tmp_path / "run", people=people, collect={"pairs": "best_worst"}, **BY_PEOPLE)
    ties = records(run.folder / "ties.jsonl")
    assert len(ties) == run.summary["num_pairs"] == 6
    prompts = records(run.folder / "completions.jsonl")
    for row in ties:
        lengths = sorted({len(one["text"]) for one in prompts[int(row["pair"].split(":")[0])]["completions"]})
        assert sorted((len(row["chosen"]), len(row["rejected"]))) == [lengths[0], lengths[-1]]


def test_people_go_on_without_the_model(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(collection: Collection) -> None:
        ballot = collection.ballot("anna")
        ballot.vote(ballot.current().id, "left")  # type: ignore[union-attr]  # there are pairs left

    first = collected(policy, tmp_path / "run", None, people=once, **BY_PEOPLE)
    monkeypatch.delattr(prompt_sampler, "load_policy")
    again = collected(policy, tmp_path / "run", None, people=once, resume=True, **BY_PEOPLE)
    assert (first.summary["num_judged"], again.summary["num_judged"]) == (1, 2)


def test_other_recipes_and_folders_are_refused(policy: Policy, tmp_path: Path) -> None:
    collected(policy, tmp_path / "run")
    with refused("differs from the collection's own in collect.group_size = 2 (was 3)"):
        collected(policy, tmp_path / "run", collect={"group_size": 2}, resume=True)
    (tmp_path / "trained").mkdir()
    for name in ("config.yaml", "metrics.jsonl", ".posttrain.lock"):
        (tmp_path / "trained" / name).touch()
    with refused("contains a run of another command"):
        collected(policy, tmp_path / "trained")
    with refused("not a run folder"):
        collected(policy, tmp_path / "none", resume=True)
    with refused("collect(config, people=...)"):
        collected(policy, tmp_path / "nobody", None, **BY_PEOPLE)
    journal = tmp_path / "run" / "completions.jsonl"
    journal.write_text("".join(["[]\n", *journal.read_text().splitlines(keepends=True)]))
    with refused("completions.jsonl, line 1: list instead of an object", error=RunError):
        collected(policy, tmp_path / "run", resume=True)


def test_overwriting_gives_up_what_was_there_once_there_is_something_new(policy: Policy, tmp_path: Path) -> None:
    def fails(completions: list[str], **columns: object) -> list[float]:
        raise ValueError("the grader is down")

    folder = tmp_path / "run"
    collected(policy, folder)
    before = {file: file.read_bytes() for file in folder.iterdir() if file.suffix in (".jsonl", ".json")}
    anew = {"collect": {"num_prompts": 2}, "run": {"overwrite": True}}
    with refused("rewards: none are given"):
        collected(policy, folder, None, **anew)
    with refused("the grader is down", error=RunError):
        collected(policy, folder, fails, **anew)
    assert {file: file.read_bytes() for file in before} == before
    assert collected(policy, folder, **anew).summary["num_prompts"] == 2
