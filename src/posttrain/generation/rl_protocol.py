"""The JSON of the routes that vLLM 0.32 has for training by reward, and the fields that we add.

`posttrain serve --rl` answers them, and so does vLLM with `VLLM_SERVER_DEV_MODE=1` and `--enable-scale-out`.  A server
that knows our fields has the object `posttrain` in its `/weight_info`; vLLM ignores them.  Log-probs cross exactly:
JSON has the shortest decimal that reads back as the same double.

One update: `INIT`, `START`, `UPDATE`, `PAUSE` (mode=keep), `FINISH`, `RESUME`.  INIT says who the trainer is: a server
samples for one at a time.
"""

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Le, Len
from pydantic import ConfigDict, TypeAdapter

from posttrain.generation.request import StreamKey

GENERATE = "/inference/v1/generate"
INIT = "/init_weight_transfer_engine"
PAUSE, RESUME, IS_PAUSED = "/pause", "/resume", "/is_paused"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
WEIGHT_INFO, HEALTH = "/weight_info", "/health"
UPLOAD = "/weights/{sha256}"
"""Ours: PUT a safetensors file there if no folder is shared; UPDATE with an empty `path` then takes it."""
RELEASE = "/release"
"""Ours: completions that were kept and will not be continued."""
OWNER_HEADER = "Posttrain-Owner"
"""Ours: who a trainer is, percent-encoded, in every request after its INIT."""

Token = Annotated[int, Ge(0), Le(2**31 - 1)]
Count = Annotated[int, Ge(0), Le(2**31 - 1)]
Digest = Annotated[str, Len(64, 64)]
STRICT: Any = ConfigDict(extra="forbid")
OPEN: Any = ConfigDict(extra="ignore", ser_json_inf_nan="constants")
"""Answers may have further fields: vLLM's do.  The log-prob of a suppressed token is -Infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """`sampling_params` of a request to generate."""

    __pydantic_config__ = STRICT
    max_tokens: Annotated[int, Ge(1)]
    n: Annotated[int, Ge(1), Le(1024)] = 1
    """Completions of the prompt; the one with index i has the sample number `sample + i`."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: Count = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logprobs: Annotated[int, Ge(0), Le(20)] | None = None
    """0 gives the log-probs of the sampled tokens, k those of the k likeliest too."""
    stop_token_ids: tuple[Token, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """For a request without a stream key."""
    detokenize: bool = False
    """vLLM needs it for `stop`."""
    ignore_eos: bool = False
    """vLLM: end at `stop_token_ids` only, not at those of its own configuration."""
    prompt_logprobs: Annotated[int, Ge(0), Le(20)] | None = None
    """vLLM: 0 gives the log-probs of the prompt's tokens, at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A stream of uniform numbers: `StreamKey`, draw and sample."""

    __pydantic_config__ = STRICT
    seed: int
    purpose: str
    step: int
    draw: Count
    sample: Count

    @property
    def key(self) -> StreamKey:
        return StreamKey(self.seed, self.purpose, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFields(Stream):
    """What vLLM does not know: the stream that tokens are drawn with, and more of `Request`."""

    __pydantic_config__ = STRICT
    first_position: Count = 0
    suppressed: tuple[Token, ...] = ()
    keep: bool = False
    """Whether the completions may be continued: see `Request.keep`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """The body of GENERATE."""

    __pydantic_config__ = STRICT
    token_ids: Annotated[tuple[Token, ...], Len(1)]
    sampling_params: SamplingFields
    request_id: str = ""
    model: str | None = None
    stream: Literal[False] | None = None
    posttrain: OwnFields | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token with its log-prob; rank 1 is the likeliest one."""

    __pydantic_config__ = OPEN
    token_id: int
    logprob: float
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLogprob(TokenLogprob):
    """The sampled token, and the likeliest ones where `logprobs` was above 0."""

    __pydantic_config__ = OPEN
    top_logprobs: tuple[TokenLogprob, ...] = ()

    def likeliest(self, count: int) -> tuple[tuple[int, float], ...]:
        """The `count` likeliest tokens, likeliest first.  vLLM lists the sampled token first, whatever its rank."""
        ranked = sorted((each for each in self.top_logprobs if each.rank is not None), key=lambda each: each.rank or 0)
        return tuple((each.token_id, each.logprob) for each in ranked[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprob:
    """A token of the prompt."""

    __pydantic_config__ = OPEN
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """`logprobs` of a choice, one entry for each sampled token."""

    __pydantic_config__ = OPEN
    content: tuple[SampledLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens `start` to `end - 1` were sampled by the weights that FINISH called `version`."""

    __pydantic_config__ = OPEN
    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A completion."""

    __pydantic_config__ = OPEN
    index: int
    token_ids: tuple[int, ...]
    """The stop token included."""
    logprobs: Logprobs | None = None
    """After temperature and before any cut; of vLLM only with `--logprobs-mode processed_logprobs`."""
    finish_reason: str | None = "stop"
    """stop, length or abort."""
    stop_reason: int | str | None = None
    """The stop text, or the stop token other than the model's first one."""
    weight_versions: tuple[VersionSpan, ...] | None = None
    cut_logprobs: tuple[float, ...] | None = None
    """Ours: log-probs under the cut distribution; null where nothing was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResponse:
    """The answer to GENERATE."""

    __pydantic_config__ = OPEN
    request_id: str
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[dict[str, PromptLogprob] | None, ...] | None = None
    """vLLM, if requested: for each token of the prompt, by its id; none for the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFields:
    """Ours: the file has a LoRA adapter in peft's format and nothing else."""

    __pydantic_config__ = STRICT
    base_digest: str
    """`ExportedAdapter.base_digest`, which must be that of the served model."""
    settings: dict[str, Any]
    """The content of adapter_config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateInfo:
    """`update_info` of UPDATE: a safetensors file with all weights by the names of the saved model, tied ones once."""

    __pydantic_config__ = STRICT
    sha256: Digest
    path: str = ""
    """A file in the server's transfer folder, absolute or relative to it; empty for the uploaded file of the digest."""
    adapter: AdapterFields | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequest:
    """The body of UPDATE."""

    __pydantic_config__ = STRICT
    update_info: UpdateInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerInfo:
    """Ours, `init_info` of INIT: the trainer that a server samples for from now on."""

    __pydantic_config__ = STRICT
    owner: str = ""
    lease_seconds: Annotated[float, Ge(0), Le(3600)] = 0.0
    """How long it keeps the server after its last call; 0 gives the server back."""
    renews: bool = False
    """Only a trainer that has the server may keep it or give it back: its weights are still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedInfo:
    """The answer to IS_PAUSED."""

    __pydantic_config__ = OPEN
    is_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRequest:
    """The body of INIT."""

    __pydantic_config__ = STRICT
    init_info: OwnerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequest:
    """The body of FINISH."""

    __pydantic_config__ = STRICT
    weight_version: str
    """The number of optimiser updates of the weights, in decimal digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequest:
    """The body of RELEASE."""

    __pydantic_config__ = STRICT
    streams: tuple[Stream, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a server."""

    ours: ClassVar[bool]
    """Whether it draws tokens with our uniform numbers."""
    kind: ClassVar[str]
    max_rows: int
    """Completions that are decoded side by side."""
    max_positions: int
    dtype: str
    """Type of the weights, such as float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFacts(Facts):
    """What our server says about itself, for its clients to check."""

    __pydantic_config__ = OPEN
    ours: ClassVar[bool] = True
    kind: ClassVar[str] = "posttrain serve"
    model_digest: str
    """`model_digest` of the folder that the base is from; empty if it is not a local folder, or was overwritten."""
    vocabulary: int
    """Logits of the model."""
    tokenizer_digest: str
    """See `tokenizer_digest` in posttrain.models.rendering."""
    transfer_folder: str
    """Where files of weights may be; absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightInfo:
    """The answer to WEIGHT_INFO."""

    __pydantic_config__ = OPEN
    weight_version: str
    posttrain: OwnFacts | None = None
    """None if the server is not ours."""


Record = TypeVar("Record")


def read(record: type[Record], body: bytes | str) -> Record:
    """A record from JSON.  Raises pydantic's ValidationError, a ValueError."""
    hashable: Any = record
    found: Record = reader(hashable).validate_json(body, strict=True)
    return found


def written(record: object) -> bytes:
    """A record as JSON in UTF-8, 20 times as fast as `json` does it."""
    hashable: Any = type(record)
    return reader(hashable).dump_json(record)


@cache
def reader(record: Any) -> TypeAdapter[Any]:
    """Made when a record is first read or written: all of them take a tenth of a second."""
    return TypeAdapter(record)
