"""TRL's `tools` and `environment_factory`: a script's functions and objects are called, and paid, as TRL does it."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import TrainerCallback

from posttrain.generation.engine import Sampling
from posttrain.generation.request import Continuation, Request, Sampled
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.rendering import token_ids
from posttrain.records import Finish
from posttrain.trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from tests.support.refusals import mentions, refused
from tests.support.runs import SHAPE, rollout_rows

TEMPLATE = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CALL = '<tool_call>{"name": "increase", "arguments": {"step": 2}}</tool_call>'
ROWS = [{"prompt": [{"role": "user", "content": f"Count to {n}."}], "goal": n} for n in (2, 4)]


class Counter:
    """An environment as TRL has them."""

    def __init__(self) -> None:
        self.value, self.goal = -1, 0

    def reset(self, goal: int, **row: object) -> str:
        self.value, self.goal = 0, goal
        return f" Now {self.value}."

    def increase(self, step: int) -> int:
        """Increase the counter.

        Args:
            step: By how much.
        """
        self.value += step
        return self.value

    def get_reward(self) -> float:
        return float(self.value == self.goal)


class Telling(Sampling):
    """Calls in as many turns as its sample's number says, and then stops."""

    def __init__(self, engine: "TellingEngine") -> None:
        self.engine, self.waiting = engine, list[Continuation]()
        self.turns: dict[tuple[int, int], int] = {}

    def put(self, continuations: Sequence[Continuation]) -> None:
        self.waiting += continuations

    def take(self, seconds: float) -> list[Sampled]:
        done = []
        for each in self.waiting:
            place = each.draw, each.sample
            turn = self.turns[place] = self.turns.get(place, 0) + 1
            text = CALL if turn <= each.sample % 3 else "done"
            ids = token_ids(self.engine.tokenizer, text, special=False)
            tokens = (*ids, self.engine.stop_ids[0])
            version = self.engine.weights_version
            done.append(
                Sampled(
                    continuation=each,
                    tokens=tokens,
                    logprobs=(-1.0,) * len(tokens),
                    finish=Finish.STOP,
                    versions=((version, len(tokens)),),
                )
            )
        self.waiting = []
        return done

    def release(self, sampled: Iterable[Sampled]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        self.waiting.clear()


class TellingEngine:
    """A model that calls tools: none of the first completion, one of the second, two of the third."""

    reproducible, logprob_gap, suppresses, patience_seconds = False, 100.0, False, 60.0

    def __init__(self, policy: Any) -> None:
        self.tokenizer, self.stop_ids, self.max_positions = policy.tokenizer, policy.stop_ids, policy.max_positions
        self.weights_version = 0

    def load(self, weights: object, version: int) -> None:
        self.weights_version = version

    def open(self, request: Request) -> Sampling:
        return Telling(self)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One with room for calls."""
    folder, tokenizer = tmp_path_factory.mktemp("roomy"), new_tokenizer()
    new_model(replace(SHAPE, max_positions=400), tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def trained(model: str, folder: str, kind: Any = GRPOTrainer, config: Any = GRPOConfig, **given: Any) -> Any:
    """A trainer after one step of two groups of three."""
    args = config(
        output_dir=folder,
        max_steps=1,
        num_generations=3,
        per_device_train_batch_size=6,
        max_completion_length=200,
        logging_steps=1,
        **given.pop("args", {}),
    )
    rows = given.pop("rows", ROWS)
    trainer = kind(model=model, args=args, train_dataset=rows, **given)
    trainer.processing_class.chat_template = TEMPLATE
    trainer.engine = TellingEngine(trainer.policy)
    trainer.train()
    return trainer


def test_an_environment_factory_is_called_and_paid(model: str, tmp_path: Any) -> None:
    seen: list[tuple[int, list[str]]] = []

    def reached(completions: list[Any], environments: list[Counter], goal: list[int], **_: object) -> list[float]:
        for each, completion in zip(environments, completions, strict=True):
            seen.append((each.value, [message["role"] for message in completion]))
        return [each.value / most for each, most in zip(environments, goal, strict=True)]

    trainer = trained(model, str(tmp_path / "run"), reward_funcs=reached, environment_factory=Counter)
    roles = ["assistant"], ["assistant", "tool", "assistant"], ["assistant", "tool", "assistant", "tool", "assistant"]
    assert sorted(seen) == sorted([(0, roles[0]), (2, roles[1]), (4, roles[2])] * 2)
    entry = trainer.state.log_history[0]
    assert entry["tools/call_frequency"] == 1.0  # 0, 1 and 2 calls
    assert entry["tools/failure_frequency"] == 0.0
    assert entry["rewards/Counter/mean"] == pytest.approx(1 / 3)  # one of each three gets to the goal
    # goals 2 and 4, counters 0, 2, 4
    assert entry["rewards/reached/mean"] == pytest.approx((0 + 1 + 2 + 0 + 0.5 + 1) / 6)
    row = max(rollout_rows(tmp_path / "run", 1), key=lambda each: len(each["turn_ends"]))
    assert "tool increase\n" in row["prompt"]
    assert " Now 0." in row["prompt"]
    assert "tool:2" in row["completion"]
    assert len(row["turn_ends"]) == 2


def test_an_environment_is_closed_behind_each_evaluation_while_the_run_goes_on(model: str, tmp_path: Any) -> None:
    made: list[Closable] = []
    num_open: list[int] = []

    class Closable(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.closed = False
            made.append(self)

        def close(self) -> None:
            self.closed = True

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, *_: object, **__: object) -> None:
            describing = next(each for each in made if each.value == -1 and not each.closed)  # it lives as the run
            deadline = time.monotonic() + 5
            while not all(each.closed for each in made if each is not describing) and time.monotonic() < deadline:
                time.sleep(0.01)
            num_open.append(sum(not each.closed for each in made if each is not describing))

    every_step = {"eval_strategy": "steps", "eval_steps": 1}
    given = {"environment_factory": Closable, "eval_dataset": ROWS, "callbacks": [Look()]}
    trained(model, str(tmp_path / "run"), args=every_step, **given)
    assert num_open == [0]
    assert len(made) > 6


def test_the_environment_s_own_reward_is_enough(model: str, tmp_path: Any) -> None:
    trainer = trained(model, str(tmp_path / "run"), RLOOTrainer, RLOOConfig, environment_factory=Counter)
    assert trainer.state.log_history[0]["reward"] == pytest.approx(1 / 3)


def test_a_factory_without_a_class_of_its_own_is_paid_too_and_no_property_is_asked(model: str, tmp_path: Any) -> None:
    class Careful(Counter):
        @property
        def secret(self) -> None:
            raise ValueError("a property was asked")

    folder = str(tmp_path / "run")
    trainer = trained(
        model, folder, reward_funcs=[lambda completions, **_: [0.0] * 6], environment_factory=lambda: Careful()
    )
    assert trainer.state.log_history[0]["rewards/Careful/mean"] == pytest.approx(1 / 3)


class Chance(Counter):
    reproducible = False


def test_tools_are_functions_and_a_mistake_is_an_answer(model: str, tmp_path: Any) -> None:
    def increase(step: str) -> str:
        """Increase something.

        Args:
            step: A text.
        """
        return step

    def calls(completions: list[Any], **_: object) -> list[float]:
        answers = [message["content"] for each in completions for message in each if message["role"] == "tool"]
        assert all("step" in answer for answer in answers)  # 2 is not a text
        return [float(len(each)) for each in completions]

    args = {"max_tool_calling_iterations": 1}
    trainer = trained(model, str(tmp_path / "run"), reward_funcs=calls, tools=[increase], args=args)
    entry = trainer.state.log_history[0]
    assert entry["tools/failure_frequency"] == 1.0
    ends = {row["finish"] for row in rollout_rows(tmp_path / "run", 1)}
    assert ends == {"stop", "turns"}  # the third completion calls a second time
    mentions(" ".join(trainer.notes), "max_completion_length", "TRL counts replies")


class Silent:
    def reset(self, **row: object) -> None:
        """Begin."""


MISTAKES = {
    "no method": ({"environment_factory": Silent}, ("Silent", "public method")),
    "by chance": ({"environment_factory": Chance}, ("get_reward", "reproducible = False", "reward_funcs")),
    "no factory": ({"environment_factory": 3}, ("environment_factory", "int")),
    "several": ({"environment_factory": {"a": Counter}}, ("environment_factory", "dict")),
    "text": ({"environment_factory": Counter, "rows": [{"prompt": "Count.", "goal": 2}]}, ("plain text", "tools")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str, model: str, tmp_path: Any) -> None:
    given, words = MISTAKES[mistake]
    with refused(*words):
        trained(model, str(tmp_path / "run"), reward_funcs=lambda completions, **_: [0.0] * len(completions), **given)
