"""How tokens and completions are sampled: the `rollout` section of a recipe, and the part that one prompt needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, Lt

from posttrain.options.bounds import Bounded, NonEmptyStr, NonNegativeInt, PositiveFloat, PositiveInt, Rule, by_name
from posttrain.schemas import require_no_password


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Bounded):
    """Temperature first, then top-k, top-p and min-p; each cut works on the tokens that the previous one kept."""

    temperature: float = 1.0
    """Divides the logits, here and where the update recomputes log-probs; from 0.001 (use `greedy` for 0) to 100."""
    top_k: NonNegativeInt = 0
    """Keep this many of the likeliest tokens, the lower token id first among equals; 0 keeps all."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Keep the fewest likeliest tokens that together have this probability, in (0, 1]; 1 keeps all."""
    min_p: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Drop tokens less likely than this fraction of the likeliest one, in [0, 1); 0 keeps all."""
    greedy: bool = False
    """Take the likeliest token, the lower token id among equals, and ignore the other options."""

    rules = (
        Rule(
            "temperature", lambda o: 1e-3 <= o.temperature <= 100, "must be between 0.001 and 100.  For 0, use greedy."
        ),
    )

    @property
    def cuts(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def recorded_temperature(self) -> float:
        """The temperature behind the recorded log-probs; greedy records 1."""
        return 1.0 if self.greedy else self.temperature


CUT = (
    "samples from a cut distribution, but the update scores the full one.  Leave it out, or set"
    " rollout.allow_cut_sampling: true to train on such samples."
)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Bounded):
    """How the next token is chosen, and when a completion is cut off."""

    max_completion_tokens: PositiveInt = 400
    """Maximum tokens of a completion; a longer one is cut off (finish reason `length`)."""
    temperature: float = 1.0
    """Divides the logits when sampling *and* when the update recomputes log-probs.  0 always picks the likeliest
    token."""
    top_k: int = 0
    """Sample only from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Sample only from the likeliest tokens that together have this probability; 1: from all."""
    min_p: float = 0.0
    """Exclude tokens less likely than this fraction of the likeliest one; 0 keeps all."""
    max_turns: PositiveInt = 16
    """With an environment or tools: maximum turns of the policy in a completion (finish reason `turns`).
    `max_completion_tokens` counts the tokens of all its turns."""
    multi_turn: Literal["refuse", "append"] = "refuse"
    """With an environment or tools: what to do if the chat template changes earlier turns once others follow (it drops
    their `<think>`, say).  Reject the run, or append each turn to the unchanged tokens before it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.sampling  # which checks the four fields above

    @property
    def sampling(self) -> SamplingParams:
        if self.temperature == 0:
            return SamplingParams(greedy=True)
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(SamplingOptions):
    """What each training step samples: prompts × completions per prompt."""

    prompts_per_step: PositiveInt = 32
    """Prompts per step, P."""
    group_size: PositiveInt = 8
    """Completions per prompt, G.  Algorithms that compare the completions of a prompt need at least 2."""
    allow_cut_sampling: bool = False
    """Train on completions sampled with top-k, top-p or min-p.  The update still scores them under the full
    distribution, so its ratios do not compare with the policy that sampled."""
    on_reward_error: Literal["stop", "none"] = "stop"
    """If a reward function raises, or returns NaN or infinity: stop and name the row, or skip that score and count
    it."""
    keep_alternatives: Annotated[int, Ge(0), Le(20)] = 0
    """For each sampled token, write this many of the likeliest tokens, with log μ, to `rollouts/`.  It does not change
    completions; docs/run_folder.md gives sizes."""
    max_rows: PositiveInt = 256
    """Completions decoded at a time: limits the key/value cache and does not change completions.  Only for the engine
    `in_process`."""

    max_staleness: NonNegativeInt = 0
    """K: collect up to this many steps ahead of training.  Grading, and sampling on other machines, then overlap with
    updates.  The weights that sample a token are at most K steps old.  0: no overlap; each step is collected after the
    previous update."""

    rules = (
        Rule(
            "temperature",
            lambda o: o.temperature > 0,
            "makes all completions of a group the same.  Use a value above 0.",
        ),
        Rule("top_k", lambda o: o.allow_cut_sampling or o.top_k == 0, CUT),
        Rule("top_p", lambda o: o.allow_cut_sampling or o.top_p == 1, CUT),
        Rule("min_p", lambda o: o.allow_cut_sampling or o.min_p == 0, CUT),
    )

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.group_size


@dataclass(frozen=True, kw_only=True)
class InProcessOptions(Bounded):
    """Completions are sampled in this process, with the trainer's own weights."""

    name: Literal["in_process"] = "in_process"

    native: bool = False
    """Use a C kernel for sampling, reference log-probs and updates, if there is a C compiler on Linux (x86-64, glibc)
    and the model is supported: Llama, Qwen2 or Qwen3 in float32 on a CPU, without an adapter.  The first lines of a
    run say whether it is used."""


@dataclass(frozen=True, kw_only=True)
class HttpSeconds(Bounded):
    """Timeouts of calls to an inference server; a server that exceeds one is skipped until the next update."""

    connect: PositiveFloat = 5.0
    """To connect."""
    sample: PositiveFloat = 600.0
    """To complete one request, from sending it to the last byte of the answer."""
    update: PositiveFloat = 120.0
    """To give one server new weights, all calls together."""


@dataclass(frozen=True, kw_only=True)
class HttpOptions(Bounded):
    """Completions are sampled by inference servers: `posttrain serve MODEL --rl`, or vLLM."""

    name: Literal["http"] = "http"
    urls: tuple[NonEmptyStr, ...] = ()
    """Addresses of servers, such as http://127.0.0.1:8000; completions are distributed over them."""
    seconds: HttpSeconds = field(default_factory=HttpSeconds)
    transport: Literal["auto", "folder", "put"] = "auto"
    """How servers get weights.  `folder`: they read a file in a folder shared with the trainer.  `put`: the trainer
    sends them the file; only `posttrain serve` supports this.  `auto`: a folder if they can read it, else put."""
    transfer_folder: str = ""
    """Folder for files of weights, the same path here and on the servers; empty: `weights/` in the run folder.
    Commands without a run folder, such as `evaluate`, use a temporary folder that only their own user can read."""
    evaluation: str = ""
    """Address of one more server that only samples for evaluations; empty: the other servers do it."""
    key_env: str = "POSTTRAIN_SERVE_TOKEN"
    """Environment variable with the servers' API key (`Authorization: Bearer ...`); if it is unset, no key is sent."""

    rules = (
        Rule("urls", lambda o: o.urls, "is empty.  Name a server, such as [http://127.0.0.1:8000]."),
        Rule(
            "urls",
            lambda o: all(map(is_http, o.urls)),
            "has an entry that is not an http(s) address.  Use addresses such as http://127.0.0.1:8000.",
        ),
        Rule(
            "urls",
            lambda o: len({each.rstrip("/") for each in (*o.urls, o.evaluation)}) == len(o.urls) + 1,
            "names a server twice.  Name each once.",
        ),
        Rule(
            "evaluation",
            lambda o: not o.evaluation or is_http(o.evaluation),
            "is not an http(s) address.  Use one such as http://127.0.0.1:8001.",
        ),
        Rule(
            "transfer_folder",
            lambda o: not o.transfer_folder or o.transport != "put",
            "is not used with transport: put.",
        ),
    )

    @property
    def way(self) -> str:
        """How servers get weights, in words."""
        folder = f"as files in {self.transfer_folder or 'the run folder'}"
        return {"put": "by PUT", "folder": folder, "auto": f"{folder} or by PUT"}[self.transport]

    def __post_init__(self) -> None:
        for each in (*self.urls, self.evaluation):
            require_no_password(each, "urls", "Give a key with key_env.")
        super().__post_init__()


def is_http(address: str) -> bool:
    parts = urlsplit(address)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


EngineOptions = InProcessOptions | HttpOptions | Mapping[str, object]
"""For your own class, a mapping with its path and options."""

ENGINE_OPTIONS = by_name(InProcessOptions | HttpOptions)
"""The option class of each engine, by the name it has in recipes."""
