"""The configs of sft, reward-model and dpo: what does not go together is refused, with option, value and remedy."""

from typing import Any

import pytest

import posttrain
from posttrain.config import DpoConfig, RewardModelConfig, SftConfig
from posttrain.errors import UserError

KINDS = {"sft": SftConfig, "reward_model": RewardModelConfig, "dpo": DpoConfig}
ROUNDS: dict[str, Any] = {"rounds": 2}
OF_ROWS = "is only for", "Leave it out", "max_length"


def dataset(**options: object) -> dict[str, Any]:
    return {"task": {"name": "dataset", **options}}


REFUSED: dict[str, list[tuple[dict[str, Any], tuple[str, ...]]]] = {
    "all": [
        (dataset(prefill="<think>"), ("task.prefill = <think>", *OF_ROWS)),
        (dataset(over_long="skip"), ("task.over_long = skip", *OF_ROWS)),
        (dataset(max_prompt_tokens=9), ("task.max_prompt_tokens = 9", *OF_ROWS)),
        (dataset(last_assistant_message="drop"), ("task.last_assistant_message = drop", *OF_ROWS)),
        (dataset(sources=[{"path": "a.jsonl", "weight": 2}]), ("task.sources", "weights", "Leave the weights out")),
        (dataset(name="programs"), ("task", "rows")),
        ({"run": {"num_steps": 0}}, ("run.num_steps = 0", "Use at least 1")),
        ({"run": {"token_limit": 10}}, ("run.token_limit = 10", "posttrain rl", "Leave it out")),
        ({"run": {"early_stop_evaluations": 2}}, ("run.early_stop_evaluations = 2", "posttrain rl", "Leave it out")),
        ({"tracker": {"project": "p"}}, ("tracker.project = p", "run.report_to")),
    ],
    "sft": [
        ({"sft": {"num_epochs": 1}, "run": {"num_steps": 7}}, ("run.num_steps = 7", "sft.num_epochs = 1", "null")),
        ({"run": {"time_limit_minutes": 3}}, ("run.time_limit_minutes = 3.0", "posttrain rl")),
        ({"sft": {"split_turns": True, "loss_on": "all"}}, ("split_turns = true", "loss_on = all")),
        ({"sft": {"num_demonstrations": 3}}, ("sft.num_demonstrations = 3", "Leave it out")),
        ({"sft": {"eval_size": 3}}, ("sft.eval_size = 3", "task.held_out_size")),
        ({"demonstrator": {"max_tries": 1}}, ("demonstrator", "Leave the section out")),
        ({"task": {"name": "countdown"}, "sft": {"long_rows": "cut"}}, ("sft.long_rows = cut", "Leave it out")),
        ({"task": {"name": "arithmetic"}, "demonstrator": {"max_tries": 1}}, ("demonstrator", "countdown")),
        ({"model": {"hidden_size": 8, "path": "x"}}, ("model.hidden_size: no such field",)),
        ({"model": {"hidden_size": 8, "dtype": "bfloat16"}}, ("model.dtype: no such field",)),
    ],
    "reward_model": [
        ({"run": {"num_steps": 7}}, ("run.num_steps = 7", "reward_model.num_epochs = 1", "null")),
        ({"run": {"time_limit_minutes": 1}}, ("run.time_limit_minutes = 1.0", "posttrain rl")),
        ({"task": {"name": "countdown"}}, ("task.name = countdown", "task.path")),
        (
            {"model": {"adapter": {}}, "reward_model": {"weight_decay": 0.1}},
            ("reward_model.weight_decay = 0.1", "reward_model.decay_adapter = true"),
        ),
    ],
    "dpo": [
        ({"run": {"num_steps": 7}}, ("run.num_steps = 7", "dpo.num_epochs = 1", "null")),
        ({"dpo": ROUNDS, "run": {"num_steps": 7}}, ("run.num_steps = 7", "dpo.steps_per_round = 16", "Leave it out")),
        ({"dpo": ROUNDS | {"num_epochs": 3}}, ("dpo.num_epochs = 3.0", "dpo.rounds = 0", "Leave it out")),
        ({"dpo": ROUNDS | {"eval_every": 3}}, ("dpo.eval_every = 3", "dpo.rounds = 0", "Leave it out")),
        ({"dpo": ROUNDS, "rollout": {"prompts_per_step": 8}}, ("rollout.prompts_per_step = 8", "prompts_per_round")),
        ({"dpo": ROUNDS, "rollout": {"group_size": 1}}, ("rollout.group_size = 1", "Use at least 2")),
        ({"dpo": {"prompts_per_round": 8}}, ("dpo.prompts_per_round = 8", "Leave it out")),
        ({"rewards": ["graded_format"]}, ("rewards", "dpo.rounds = 0", "Leave it out")),
        ({"rollout": {"group_size": 4}}, ("rollout", "dpo.rounds = 0", "Leave it out")),
        ({"task": {"name": "countdown"}}, ("task", "chosen and rejected", "task.path")),
        ({"dpo": {"loss": "kto"}}, ("dpo.loss",)),
    ],
}
CASES = [
    (kind, sections, names)
    for group, cases in REFUSED.items()
    for kind in (KINDS if group == "all" else [group])
    for sections, names in cases
]


@pytest.mark.parametrize(("kind", "sections", "names"), CASES)
def test_what_does_not_go_together_is_refused_by_option_value_and_remedy(
    kind: str, sections: dict[str, Any], names: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as refusal:
        posttrain.load_recipe(kind=KINDS[kind], **{**dataset(), **sections})
    for name in names:
        assert name in str(refusal.value)
