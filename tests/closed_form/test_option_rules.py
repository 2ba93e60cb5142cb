"""Options: bounds of each, rules between those of a section or a config; refused by option, value and remedy."""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from math import inf, nan
from typing import Annotated, Any

import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen

import posttrain
import posttrain.options
from posttrain.config import CollectConfig, Config, DpoConfig, IrlConfig, RewardModelConfig, SftConfig
from posttrain.errors import UserError
from posttrain.options.algorithm import CriticOptions, TeacherOptions
from posttrain.options.bounds import Bounded, NonEmptyStr, PositiveFloat, PositiveInt, Share, bounds_of
from posttrain.options.collect import CollectOptions, LlmJudgeOptions, PersonJudgeOptions
from posttrain.options.dataset import (
    DatasetOptions,
    GeneratedOptions,
    GeneratorOptions,
    MixtureSourceOptions,
    RowSourceOptions,
)
from posttrain.options.irl import IcyGridOptions, SampledOptions
from posttrain.options.model import AdapterOptions, ModelOptions, NewModelOptions
from posttrain.options.pairs import RewardTrainingOptions
from posttrain.options.reward import GradingOptions, RewardOptions
from posttrain.options.rollout import RolloutOptions
from posttrain.options.sandbox import SandboxOptions
from posttrain.options.task import ArithmeticOptions, CountdownOptions, SentencesOptions
from posttrain.options.training import ReferenceOptions, RunOptions, SftOptions
from posttrain.rewards.code.code_reward import CodeReward
from posttrain.rewards.judge_reward import JudgeReward
from tests.support.refusals import refused

Given = dict[str, Any]
A_B = (MixtureSourceOptions(path="a", weight=1.0), MixtureSourceOptions(path="b"))
SECTIONS: dict[type, list[tuple[Given, str]]] = {
    AdapterOptions: [
        ({"targets": ("experts",), "dropout": 0.1}, "dropout = 0.1 … Use 0"),
        ({"targets": ()}, "targets … all-linear"),
    ],
    ArithmeticOptions: [
        ({"measured_on": "training", "held_out_size": 65}, "held_out_size = 65 … num_questions = 64"),
        ({"num_questions": 800}, "num_questions = 800 … held_out_size = 32 … 810 … Use fewer"),
    ],
    CollectOptions: [({"pairs_per_prompt": 2}, "pairs_per_prompt = 2 … pairs = random … pairs = all … Leave it out")],
    LlmJudgeOptions: [
        ({"endpoint": "ftp://x"}, "endpoint = ftp://x … http"),
        ({"rubric": " "}, "rubric … Say what is judged"),
        ({"principle": "all"}, "principle = all … Set principles: FILE"),
    ],
    PersonJudgeOptions: [({"question": " "}, "question … Say what is judged")],
    CountdownOptions: [
        (
            {"variant": "course", "max_number": 9},
            "max_number = 9 … variant = default … variant = course … Leave it out",
        ),
        ({"min_number": 40}, "max_number = 30 … min_number = 40"),
        ({"min_target": 400}, "max_target = 99 … min_target = 400"),
        ({"operators": "+x"}, "operators = +x … +-*/"),
        ({"operators": ""}, "operators = '' … +-*/"),
        ({"operators": "++"}, "operators = ++ … twice"),
    ],
    CriticOptions: [({"trunk": "own", "through_trunk": False}, "through_trunk = false … trunk = own … Leave it out")],
    DatasetOptions: [
        ({"sources": A_B}, "sources … a weight"),
        ({"sources": A_B[1:], "path": "c"}, "path = c … sources"),
        ({"sources": A_B[1:], "generator": "g"}, "generator = g … sources"),
        ({"sources": A_B[1:], "held_out_split": "c"}, "held_out_split = c … Give held_out_path"),
        (
            {"prompt_format": "plain", "last_assistant_message": "prefill"},
            "last_assistant_message = prefill … Use drop",
        ),
    ],
    GeneratedOptions: [({"generator": "", "sources": A_B[1:]}, "sources … dataset")],
    GeneratorOptions: [
        ({"generator_seed": -1}, "generator_seed = -1 … 4294967295"),
        ({"generator_options": {"seed": 1}}, "generator_options … Use generator_seed"),
        ({"generator_options": {"size": 1}}, "generator_options … Use generator_size"),
    ],
    RowSourceOptions: [
        ({"path": "a", "generator": "g"}, "path = a … generator … Leave one out"),
        ({"generator_size": 3}, "generator_size = 3 … generator = '' … Leave it out"),
        ({"delimiter": "::"}, "delimiter = :: … single character"),
    ],
    MixtureSourceOptions: [({}, "path = '' … Give every source a path or a generator")],
    GradingOptions: [({"cache_entries": 0, "cache_file": "f"}, "cache_file = f … cache_entries = 0 … Leave it out")],
    IcyGridOptions: [
        ({"terrain": 6}, "terrain = 6 … size = 5"),
        ({"terrain": 1, "terrain_low": 1.0}, "terrain_low = 1.0 … at most 0"),
        ({"terrain_seed": 1}, "terrain_seed = 1 … terrain = 0 … Leave it out"),
        ({"ground": float("inf")}, "ground = inf … finite"),
        ({"starts": (-26,)}, "starts = [-26] … 5 · 5"),
        ({"rewards": ((25, 1.0),)}, "rewards = [[25, 1.0]] … 5 · 5"),
        ({"ends": (25,)}, "ends = [25] … 5 · 5 … from 0"),
        ({"rewards": ((3, float("nan")),)}, "rewards = [[3, nan]] … finite"),
        ({"starts": (24,)}, "starts = [24] … ends"),
    ],
    SampledOptions: [
        ({"steepness": 1.0}, "steepness = 1.0 … expert = course … expert = soft … Leave it out"),
        ({"expert": "greedy", "temperature": 2.0}, "temperature = 2.0 … expert = soft … expert = greedy"),
    ],
    ModelOptions: [
        ({"quantization": "nf4"}, "quantization = nf4 … model.adapter"),
        ({"frozen": ("x",), "adapter": AdapterOptions()}, "frozen = [x] … model.adapter.targets"),
        ({"weights": "bfloat16", "dtype": "float32"}, "weights = bfloat16 … dtype = float32 … Leave dtype out"),
        ({"revision": "v1"}, "revision = v1 … path = bundled … Leave it out"),
    ],
    NewModelOptions: [({"family": "gpt2", "num_kv_heads": 1}, "num_kv_heads = 1 … family = qwen3 … Leave it out")],
    RewardOptions: [
        ({}, "path = '' … name: graded_format"),
        ({"name": "a", "path": "a.py:f"}, "path = a.py:f … name = 'a'"),
        ({"path": "a.py:f", "options": {"x": 1}}, "options = {'x': 1} … path = a.py:f"),
        ({"name": "a", "ensemble": ("m",)}, "ensemble = [m] … model = ''"),
        ({"name": "a", "label": 1}, "label = 1 … model = '' … Leave it out"),
        ({"model": "m", "label": -1}, "label = -1 … from 0"),
        ({"name": "a b"}, "name = a b … FILE.py:FUNCTION"),
        ({"path": "a.py"}, "path = a.py … my_rewards.py:solved"),
        ({"name": "a", "workers": 1}, "workers = 1 … path = ''"),
        ({"name": "a", "cache": True}, "cache = true … path = ''"),
        ({"name": "a", "combine": "least"}, "combine = least … ensemble = []"),
        ({"model": "m", "ensemble": ("n",), "deviation_weight": 2.0}, "deviation_weight = 2.0 … combine = mean"),
        ({"path": "a.py:f", "seconds": 1.0, "item_seconds": 2.0}, "item_seconds = 2.0 … seconds = 1.0"),
        ({"name": "a", "clip": (1.0, 0.0)}, "clip = [1.0, 0.0] … finite bounds"),
        ({"name": "a", "over_steps": 3}, "over_steps = 3 … weight_to"),
    ],
    RewardTrainingOptions: [({"long_pairs": "cut"}, "long_pairs = cut … error or skip")],
    RolloutOptions: [
        ({"temperature": 0}, "temperature = 0 … Use a value above 0"),
        *(({name: value}, f"{name} = {value} … allow_cut_sampling") for name, value in (("top_k", 3), ("top_p", 0.5))),
        ({"min_p": 0.1}, "min_p = 0.1 … allow_cut_sampling"),
    ],
    SandboxOptions: [
        ({"image": "-x"}, "image = -x"),
        ({"kind": "remote"}, "kind = remote … url = '' … http://127.0.0.1:8080"),
        ({"url": "http://x"}, "url = http://x … kind = remote … kind = sealed … Leave it out"),
        ({"command": "podman"}, "command = podman … kind = container … Leave it out"),
        ({"kind": "none"}, "kind = none … programs_may_do_anything: true"),
        ({"programs_may_do_anything": True}, "programs_may_do_anything = true … kind = none … Leave it out"),
    ],
    SentencesOptions: [
        ({"openings": ()}, "openings = []"),
        ({"held_out_openings": (" ",)}, "held_out_openings … none of them empty"),
        ({"held_out_openings": ("I think that",)}, "held_out_openings = [I think that] … openings … Remove it"),
    ],
    TeacherOptions: [
        ({}, "sees = prompt … model"),
        ({"model": "m", "weights": "start"}, "weights = start … model = m … Leave it out"),
        ({"sees": "answer", "template": "{prompt}"}, "template = {prompt} … {shown}"),
        ({"sees": "sibling", "answer_column": "a"}, "answer_column = a … sees = answer … sees = sibling"),
        ({"sees": "answer", "correct_from": 0.5}, "correct_from = 0.5 … sees = sibling … sees = answer"),
        ({"model": "m", "template": "{prompt}{shown}"}, "template … sees = answer or sibling … sees = prompt"),
    ],
    ReferenceOptions: [({"path": "m", "refresh_every": 3}, "refresh_every = 3 … path = m … Leave one of them out")],
    RunOptions: [({"report_to": ("wandb", "wandb")}, "report_to = [wandb, wandb] … each once")],
    SftOptions: [({"split_turns": True, "loss_on": "all"}, "split_turns = true … loss_on = assistant … loss_on = all")],
}
ENGINE = "import posttrain\n\nclass Mine(posttrain.Engine):\n    def __init__(self, policy): ...\n"
CONFIGS: list[tuple[Any, Given, str]] = [
    (Config, {"engine": {"path": "mine.py:Mine"}, "rollout": {"max_rows": 9}}, "rollout.max_rows = 9 … Leave it out"),
    (
        CollectConfig,
        {"engine": {"path": "mine.py:Mine"}, "collect": {"max_rows": 9}},
        "collect.max_rows = 9 … Leave it",
    ),
    (
        DpoConfig,
        {"dpo": {"rounds": 1}, "engine": {"path": "mine.py:Mine"}, "rollout": {"max_rows": 9}},
        "rollout.max_rows = 9 … Leave it out",
    ),
    (
        Config,
        {"run": {"early_stop_evaluations": 2}, "evaluation": {"every_steps": 0}},
        "run.early_stop_evaluations = 2",
    ),
    (Config, {"update": {"minibatches_per_epoch": 40}}, "update.minibatches_per_epoch = 40 … prompts_per_step = 32"),
    (CollectConfig, {"sampling": {"temperature": 0}, "judge": "reward"}, "sampling.temperature = 0 … a value above 0"),
    (CollectConfig, {"judge": "reward", "grading": {"max_unscored_steps": 3}}, "grading.max_unscored_steps = 3 … rl"),
    (CollectConfig, {"judge": "llm"}, "judge.name = llm … judge.endpoint … judge.model"),
    (CollectConfig, {"judge": "person", "rewards": ["maths"]}, "rewards … judge.name = person … best_worst"),
    (IrlConfig, {"world": "gymnasium", "method": "course"}, "method.name = course … icy_grid … Use maxent or causal"),
    (IrlConfig, {"world": "gymnasium", "features": "tiles"}, "features.name = tiles … icy_grid … Use states"),
    (IrlConfig, {"features": {"name": "tiles", "width": 9}}, "features.width = 9 … world.size = 5"),
    (
        IrlConfig,
        {"world": "gymnasium", "demonstrations": {"expert": "course"}},
        "demonstrations.expert = course … soft",
    ),
    (
        IrlConfig,
        {"method": "maxent", "features": {"name": "file", "path": "x", "on": "next_state"}},
        "features.on = next_state … method.name = causal … method.name = maxent",
    ),
]


def of_sections() -> Iterator[tuple[type, Given, str]]:
    yield from ((options, given, says) for options, cases in SECTIONS.items() for given, says in cases)


@pytest.mark.parametrize(("options", "given", "says"), of_sections())
def test_options_of_a_section_that_do_not_go_together_are_refused(options: Any, given: Given, says: str) -> None:
    with refused(says):
        options(**given)


@pytest.mark.parametrize(("kind", "sections", "says"), CONFIGS)
def test_options_of_sections_that_do_not_go_together_are_refused(kind, sections, says, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ENGINE)
    with refused(says):
        posttrain.load_recipe(kind=kind, **sections)


def test_every_class_with_rules_has_a_row_for_each_of_them() -> None:
    for options, cases in SECTIONS.items():
        assert len(cases) >= len(vars(options).get("rules", ())), options


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
        ({"run": {"num_steps": 0}}, ("run.num_steps = 0", "must be at least 1")),
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
OF_KINDS = [
    (kind, sections, names)
    for group, cases in REFUSED.items()
    for kind in (KINDS if group == "all" else [group])
    for sections, names in cases
]


@pytest.mark.parametrize(("kind", "sections", "names"), OF_KINDS)
def test_what_does_not_go_together_is_refused_by_option_value_and_remedy(kind, sections, names) -> None:
    with pytest.raises(UserError) as refusal:
        posttrain.load_recipe(kind=KINDS[kind], **{**dataset(), **sections})
    for name in names:
        assert name in str(refusal.value)


def bounded_classes() -> Iterator[Any]:
    for module in pkgutil.iter_modules(posttrain.options.__path__, "posttrain.options."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.name:
                yield value
    yield from (CodeReward, JudgeReward)


def beyond(bounds: tuple[object, ...]) -> list[object]:
    """Values just outside of each bound, and NaN where they are of numbers."""
    outside: list[object] = []
    for bound in bounds:
        match bound:
            case Ge(ge=least):
                outside += [least - 1, nan]
            case Gt(gt=above):
                outside += [above, nan]
            case Le(le=most):
                outside.append(most + 1)
            case Lt(lt=below):
                outside.append(below)
            case MinLen():
                outside.append("")
    return outside


CASES = [
    pytest.param(options, name, value, id=f"{options.__name__}.{name}={value}")
    for options in bounded_classes()
    for name, (bounds, _) in bounds_of(options).items()
    for value in beyond(bounds)
]


@pytest.mark.parametrize(("options", "name", "value"), CASES)
def test_what_is_out_of_bounds_is_refused_by_name_and_value(options: Any, name: str, value: object) -> None:
    given = {each.name: "" for each in fields(options) if each.default is MISSING and each.default_factory is MISSING}
    given |= {each: "x" for each, (bounds, _) in bounds_of(options).items() if MinLen(1) in bounds}
    with pytest.raises(UserError) as refused:
        options(**{**given, name: value})
    assert str(refused.value).startswith(f"{name} = {value!r}: must be "), refused.value


@dataclass(frozen=True, kw_only=True)
class Example(Bounded):
    rank: PositiveInt = 1
    limit: PositiveInt | None = None
    rate: PositiveFloat = 1.0
    share: Share = 0.5
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    folder: NonEmptyStr = "runs/example"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rank": 0}, "rank = 0: must be at least 1"),
        ({"limit": 0}, "limit = 0: must be at least 1, or null"),
        ({"rate": inf}, "rate = inf: must be a finite number greater than 0"),
        ({"share": 1.5}, "share = 1.5: must be at least 0 and at most 1"),
        ({"dropout": 1.0}, "dropout = 1.0: must be at least 0 and less than 1"),
        ({"folder": ""}, "folder = '': must be non-empty"),
    ],
)
def test_the_rule_is_in_plain_words(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        Example(**given)
    assert str(refused.value) == says


def test_what_is_at_a_bound_is_taken() -> None:
    assert Example(rank=1, limit=None, share=1, dropout=0).share == 1


def test_every_class_with_bounds_checks_them() -> None:
    assert [options for options in bounded_classes() if bounds_of(options) and not issubclass(options, Bounded)] == []
