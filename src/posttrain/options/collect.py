"""How pairs of completions are made and judged: the sections that only `posttrain collect` reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from annotated_types import Ge

from posttrain.options.bounds import Bounded, NonEmptyStr, NonNegativeFloat, NonNegativeInt, PositiveInt, Rule, Unused
from posttrain.schemas import require_no_password

WhichPairs = Literal["all", "best_worst", "random"]
WhichPrinciples = Literal["draw", "all"]
OF_CALLS = ("key_env", "key_file", "at_once", "timeout_seconds", "tries", "batch_seconds", "token_budget")
"""Options of the reward `judge` that decide how it is called but do not change its answers."""


@dataclass(frozen=True, kw_only=True)
class CollectOptions(Bounded):
    """What is sampled, and which pairs are made from a prompt's completions."""

    num_prompts: PositiveInt = 100
    """Training prompts of the task that completions are sampled for."""
    group_size: Annotated[int, Ge(2)] = 4
    """Completions of each prompt."""
    round: PositiveInt = 1
    """Each round uses new prompts (rows continue where the last round ended) and new random numbers.  Use it for a
    policy that has learned the previous round's pairs."""
    pairs: WhichPairs = "all"
    """Which pairs of a prompt's completions are made: all; the best and the worst by reward; or `pairs_per_prompt` at
    random."""
    pairs_per_prompt: PositiveInt = 1
    """With `pairs: random`: pairs per prompt, or all if there are fewer."""
    cut_off: Literal["drop", "keep"] = "drop"
    """What to do with completions that the token limit cut off.  Training adds a stop token after each answer of a
    pair, but such a completion never had one."""
    ties: Literal["keep", "drop"] = "keep"
    """What to do with ties: keep them in ties.jsonl, which is not trained on, or drop them.  summary.json counts them
    either way."""
    max_rows: PositiveInt = 256
    """Completions decoded at a time: limits memory and does not change completions.  Only for the engine
    `in_process`."""

    rules = (Unused("pairs_per_prompt", {"pairs": "random"}),)


@dataclass(frozen=True, kw_only=True)
class RewardJudgeOptions(Bounded):
    """Pairs are judged by the rewards of their completions: functions, reward models or a mixture of them."""

    name: Literal["reward"] = "reward"
    margin: NonNegativeFloat = 0.0
    """Two rewards that differ by at most this are a tie."""


@dataclass(frozen=True, kw_only=True)
class LlmJudgeOptions(Bounded):
    """Pairs are judged by a language model behind an OpenAI-compatible endpoint, each pair in both orders."""

    name: Literal["llm"] = "llm"
    endpoint: str = ""
    """Base address of the API, such as http://127.0.0.1:8000/v1; plain http only works for this machine."""
    model: str = ""
    """Name of the model at that endpoint."""
    rubric: str = "Which answer is correct, complete and to the point?"
    """The question that the judge answers; principles replace it."""
    principles: str = ""
    """File of principles that answers should follow: a YAML list, or plain text with one principle per line."""
    principle: WhichPrinciples = "draw"
    """Which principles judge a pair: a random one, or all of them, with their verdicts added up."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Other options of the reward `judge`, such as `{key_env: MY_KEY, at_once: 4, part: all}`."""

    def __post_init__(self) -> None:
        require_no_password(self.endpoint, "endpoint", "Set options.key_env or options.key_file instead.")
        super().__post_init__()

    rules = (
        Rule(
            "endpoint",
            lambda o: o.endpoint == "" or urlsplit(o.endpoint).scheme in ("http", "https"),
            "is not an http(s) address.  Use one such as http://127.0.0.1:8000/v1.",
        ),
        Rule("rubric", lambda o: o.rubric.strip(), "is empty.  Say what is judged."),
        Rule("principle", lambda o: o.principle == "draw" or o.principles, "needs a file.  Set principles: FILE."),
    )


@dataclass(frozen=True, kw_only=True)
class PersonJudgeOptions(Bounded):
    """Pairs are judged by people, on a page in the browser or in the terminal."""

    name: Literal["person"] = "person"
    question: str = "Which answer is better?"
    """The question above each pair."""

    rules = (Rule("question", lambda o: o.question.strip(), "is empty.  Say what is judged."),)


JudgeOptions = RewardJudgeOptions | LlmJudgeOptions | PersonJudgeOptions


@dataclass(frozen=True, kw_only=True)
class CollectRunOptions(Bounded):
    """Where the pairs are saved, and the seed of all random numbers."""

    folder: NonEmptyStr = "runs/preferences"
    """Everything that is collected goes here; existing pairs are never overwritten unless `overwrite` is set."""
    overwrite: bool = False
    """Delete what `folder` holds and start again."""
    seed: NonNegativeInt = 0
    """Seed of prompts, completions, random pairs and sides."""
    threads: NonNegativeInt = 0
    """CPU threads; 0: torch decides."""
