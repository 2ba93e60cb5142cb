"""How pairs of completions are made and judged: the sections of `posttrain collect` that no other command has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from annotated_types import Ge

from posttrain.errors import require
from posttrain.options.bounds import Bounded, NonEmptyStr, NonNegativeFloat, NonNegativeInt, PositiveInt
from posttrain.schemas import require_no_password

WhichPairs = Literal["all", "best_worst", "random"]
WhichPrinciples = Literal["draw", "all"]


OF_CALLS = ("key_env", "key_file", "at_once", "timeout_seconds", "tries", "batch_seconds", "token_budget")
"""Options of the reward `judge` that say how it is asked, and not what."""


@dataclass(frozen=True, kw_only=True)
class CollectOptions(Bounded):
    """What is sampled, and which pairs are made of a prompt's completions."""

    num_prompts: PositiveInt = 100
    """Training prompts of the task that completions are sampled for."""
    group_size: Annotated[int, Ge(2)] = 4
    """Completions of each prompt, 2 or more."""
    round: PositiveInt = 1
    """Another round takes other prompts, or rows where the round before ended, and draws other random numbers: for
    pairs of a policy that has learned from those of the round before."""
    pairs: WhichPairs = "all"
    """Which pairs are made of a prompt's completions: all of them; the one that the rewards score best with the one
    that they score worst; or so many by lot."""
    pairs_per_prompt: PositiveInt = 1
    """Pairs of a prompt where they are drawn by lot (`pairs: random`), or all where there are fewer."""
    cut_off: Literal["drop", "keep"] = "drop"
    """What becomes of completions that the token limit cut off.  Whoever learns from a pair reads a stop token behind
    each of its answers, which a completion that was cut off never had."""
    ties: Literal["keep", "drop"] = "keep"
    """What becomes of pairs of which neither is better: kept in ties.jsonl, apart from what is learned, or dropped;
    summary.json counts them either way."""
    max_rows: PositiveInt = 256
    """Completions decoded side by side: bounds memory, changes no completion."""

    def __post_init__(self) -> None:
        super().__post_init__()
        drawn = self.pairs == "random" or self.pairs_per_prompt == 1
        require(drawn, self, "pairs_per_prompt", f"is for pairs = random, and pairs = {self.pairs}; leave it out")


@dataclass(frozen=True, kw_only=True)
class RewardJudgeOptions(Bounded):
    """Pairs are judged by what the rewards say of each completion: functions, reward models or a mixture of them."""

    name: Literal["reward"] = "reward"
    """Which kind of judge this is."""
    margin: NonNegativeFloat = 0.0
    """Largest difference of two rewards that is still a tie; one is better by more than this."""


@dataclass(frozen=True, kw_only=True)
class LlmJudgeOptions:
    """Pairs are judged by a language model behind an OpenAI-compatible endpoint, each pair in both orders."""

    name: Literal["llm"] = "llm"
    """Which kind of judge this is."""
    endpoint: str = ""
    """Base of the API, such as http://127.0.0.1:8000/v1; plain http only to this machine."""
    model: str = ""
    """Name of the model there."""
    rubric: str = "Which answer is correct, complete and to the point?"
    """What is judged, in words; left out of account where there are principles."""
    principles: str = ""
    """File of the principles that answers are held to: a YAML list of texts, or text with one on each line."""
    principle: WhichPrinciples = "draw"
    """Which principles a pair is judged by: one that is drawn for it, or all, one after the other, whose verdicts are
    added up."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Other options of the reward `judge`, such as `{key_env: MY_KEY, at_once: 4, part: all}`."""

    def __post_init__(self) -> None:
        require_no_password(self.endpoint, "endpoint", "Give a key by options.key_env or options.key_file.")
        usable = self.endpoint == "" or (urlsplit(self.endpoint).scheme in ("http", "https"))
        require(usable, self, "endpoint", "is no http(s) address, such as http://127.0.0.1:8000/v1")
        require(self.rubric.strip() != "", self, "rubric", "says nothing; say what is judged")
        drawn = self.principle == "draw" or self.principles != ""
        require(drawn, self, "principle", "is for principles, and no file of them is named; give principles: FILE")


@dataclass(frozen=True, kw_only=True)
class PersonJudgeOptions:
    """Pairs are judged by people, on a page in the browser or in the terminal."""

    name: Literal["person"] = "person"
    """Which kind of judge this is."""
    question: str = "Which answer is better?"
    """What a person is asked above each pair."""

    def __post_init__(self) -> None:
        require(self.question.strip() != "", self, "question", "asks nothing; say what is judged")


JudgeOptions = RewardJudgeOptions | LlmJudgeOptions | PersonJudgeOptions

JUDGE_OPTIONS: dict[str, type[JudgeOptions]] = {
    "reward": RewardJudgeOptions,
    "llm": LlmJudgeOptions,
    "person": PersonJudgeOptions,
}
"""The option class of each kind of judge, by the name that it has in recipes."""


@dataclass(frozen=True, kw_only=True)
class CollectRunOptions(Bounded):
    """Where the pairs are kept, and the seed that all that is drawn is a function of."""

    folder: NonEmptyStr = "runs/preferences"
    """Everything that is collected goes here; a folder that holds pairs already is never written into untold."""
    overwrite: bool = False
    """Delete what `folder` holds, and start anew."""
    seed: NonNegativeInt = 0
    """Prompts, completions, pairs drawn by lot and sides are functions of it."""
    threads: NonNegativeInt = 0
    """CPU threads; 0 leaves the number to torch."""
