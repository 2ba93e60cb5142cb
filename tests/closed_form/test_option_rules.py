"""Rules between the options of a section: what has no effect or contradicts is refused by option, value and remedy."""

from collections.abc import Iterator
from typing import Any

import pytest

import posttrain
from posttrain.config import CollectConfig, Config, DpoConfig, IrlConfig
from posttrain.options.algorithm import CriticOptions, TeacherOptions
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
        ({"principle": "all"}, "principle = all … Give principles: FILE"),
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
        ({"sources": A_B}, "sources … weights"),
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
        ({"terrain": 1, "terrain_low": 1.0}, "terrain_low = 1.0 … <= 0"),
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
        ({"temperature": 0}, "temperature = 0 … Use > 0"),
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
        ({"held_out_openings": (" ",)}, "held_out_openings … none empty"),
        ({"held_out_openings": ("I think that",)}, "held_out_openings = [I think that] … openings … Leave it out"),
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
    (CollectConfig, {"sampling": {"temperature": 0}, "judge": "reward"}, "sampling.temperature = 0 … Use > 0"),
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
def test_options_of_sections_that_do_not_go_together_are_refused(
    kind: Any, sections: Given, says: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ENGINE)
    with refused(says):
        posttrain.load_recipe(kind=kind, **sections)


def test_every_class_with_rules_has_a_row_for_each_of_them() -> None:
    for options, cases in SECTIONS.items():
        assert len(cases) >= len(vars(options).get("rules", ())), options
