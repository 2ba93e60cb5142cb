"""Decoding and scoring in C: tokens of the sampler in torch, log-probs of the trainer, a library on any machine."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posttrain.cli import let_threads_sleep_soon
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.native_steps import CALL_SECONDS, MOST_STEPS, NativeSteps
from posttrain.generation.parity import engine_in_parity
from posttrain.generation.request import Continuation, Request, Sampled, StreamKey
from posttrain.models.forward import Completions, SharedPromptForward
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.native import native_layers, native_library
from posttrain.models.native.native_decoder import DrawRequest, NativeDecoder, native_decoder, native_refusal
from posttrain.models.native.native_scoring import native_logprobs
from posttrain.models.policy import Policy
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import SamplingParams
from posttrain.ranks.group import RankGroup
from tests.support.accidents import Accident
from tests.support.native_builds import BUILDS, use_build
from tests.support.refusals import mentions
from tests.support.runs import SHAPE, command, require_same, save_tiny_model, tiny_recipe
from tests.support.tiny import some_prompts, tiny_policy

KEY = StreamKey(4, "test", 2)
IN_STEP_4 = Accident(moment="os.rename rollouts/.tmp-step-000004.parquet 1")
ROUNDING = 1e-5
"""Of log-probs of tiny models in float32, in nats."""


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library as it is compiled for some CPU."""
    use_build(request.param, monkeypatch)
    return str(request.param)


def float32(family: str, **shape: object) -> Policy:
    torch.set_num_threads(1)
    return replace(tiny_policy(family, torch.float32, **shape), native_reason=None)


def bundled() -> Policy:
    torch.set_num_threads(1)
    return replace(load_policy(ModelOptions(path="bundled")), native_reason=None)


def sampled(policy: Policy, request: Request, those: Sequence[Continuation], *, native: bool = True) -> list[Sampled]:
    policy = policy if native else replace(policy, native_reason="the other way")
    engine, done = InProcessEngine(policy, max_rows=20), list[Sampled]()
    with engine.open(request) as sampling:
        assert isinstance(engine._steps, NativeSteps) == native
        sampling.put(those)
        while len(done) < len(those):
            done += sampling.take(60)
    return sorted(done, key=lambda each: (each.continuation.draw, each.continuation.sample))


def continuations(limit: int = 30) -> list[Continuation]:
    return [
        Continuation(prefix=prompt.tokens, draw=draw, sample=sample, limit=limit)
        for draw, prompt in enumerate(some_prompts((3, 15, 16, 17, 1, 30)))
        for sample in range(7)
    ]


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"sampling": SamplingParams(temperature=0.7)},
        {"sampling": SamplingParams(greedy=True)},
        {"suppressed": (3, 7, 8)},
        {"sampling": SamplingParams(top_k=5, top_p=0.9)},
        {"keep_alternatives": 3},
    ],
    ids=["as it is", "temperature", "greedy", "suppressed", "cut", "alternatives"],
)
def test_tokens_are_those_of_torch(family: str, how: dict[str, object], build: str) -> None:
    request = Request(**{"sampling": SamplingParams(), "key": KEY, **how})  # type: ignore[arg-type]
    policy = float32(family)
    ours, theirs = (sampled(policy, request, continuations(), native=native) for native in (True, False))
    assert {each.finish.value for each in theirs} >= {"length"}
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.tokens, mine.finish) == (other.tokens, other.finish)
        assert mine.logprobs == pytest.approx(other.logprobs, abs=ROUNDING)
        assert mine.cut_logprobs == pytest.approx(other.cut_logprobs, abs=ROUNDING)
        assert likeliest(mine) == pytest.approx(likeliest(other), abs=ROUNDING)


def likeliest(sampled: Sampled) -> list[float]:
    """Log-probs of the likeliest tokens at each place; which tokens they are may differ where two are as likely."""
    return [logprob for at in sampled.alternatives or () for _, logprob in at]


def test_draws_from_many_tokens_are_those_of_torch(build: str) -> None:
    policy = float32("qwen3", vocab_size=1_003)
    request = Request(sampling=SamplingParams(temperature=0.8), key=KEY, suppressed=(5, 900))
    ours, theirs = (sampled(policy, request, continuations(), native=native) for native in (True, False))
    assert [each.tokens for each in ours] == [each.tokens for each in theirs]
    assert max(token for each in ours for token in each.tokens) > 900
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=ROUNDING)


@pytest.mark.parametrize("uniform", [0.0, 0.37, 1.0 - 2.0**-53, 1.0])
def test_a_token_without_weight_is_never_drawn(uniform: float, build: str) -> None:
    """All tokens but three have a weight of 0: the first one, one in the middle and the last ones among them."""
    decoder, possible = native_decoder(float32("qwen3", vocab_size=1_003)), {200, 201, 640}
    assert decoder is not None
    request = DrawRequest(
        given=torch.zeros(1, 1, dtype=torch.long),
        num_given=torch.zeros(1, dtype=torch.long),
        uniforms=torch.full((1, 1), uniform, dtype=torch.float64),
        limits=torch.ones(1, dtype=torch.long),
        stops=torch.zeros(0, dtype=torch.long),
        temperature=1.0,
        greedy=False,
        suppressed=torch.tensor([token for token in range(1_003) if token not in possible]),
    )
    pages = decoder.new_pages(1)
    drawn = decoder.draw(torch.tensor([3]), torch.tensor([0]), torch.tensor([pages.addresses]), request)
    expected = {0.0: 200, 1.0 - 2.0**-53: 640, 1.0: 640}  # as after rounding, with 1
    assert int(drawn.tokens) == expected.get(uniform, int(drawn.tokens))
    assert int(drawn.tokens) in possible


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = bundled()
    request, found = Request(sampling=SamplingParams(), key=KEY), list[list[Sampled]]()
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(sampled(policy, request, continuations(limit=40)))
    assert found[0] == found[1] == found[2]


def scored(policy: Policy, batch: Completions, temperature: float = 1.0) -> torch.Tensor:
    decoder = native_decoder(policy)
    assert decoder is not None
    return native_logprobs(decoder, batch, temperature)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_scores_are_those_of_the_trainer_in_float64(family: str, build: str) -> None:
    dice = torch.Generator().manual_seed(0)
    prompts = [prompt.tokens for prompt in some_prompts((1, 16, 17, 30))]
    lengths, longer = (1, 2, 15, 16, 17, 33, 105, 5), {"max_position_embeddings": 256}
    tokens = [tuple(torch.randint(0, 20, (length,), generator=dice).tolist()) for length in lengths]
    mask = torch.rand(sum(lengths), generator=dice) < 0.7
    for sampled_ones in (None, mask):
        batch = Completions(prompts, tokens, [0, 0, 1, 1, 2, 2, 3, 3], sampled=sampled_ones)
        with torch.no_grad():
            exact = tiny_policy(family, **longer).completion_logprobs(batch, temperature=0.8)
        assert scored(float32(family, **longer), batch, 0.8).tolist() == pytest.approx(exact.tolist(), abs=ROUNDING)


def test_the_kernel_is_as_near_to_float64_as_torch_is() -> None:
    """Both are float32: on a model with logits of ten and more they are some 1e-5 nats from float64, and each other."""
    policy = bundled()
    texts = ("Use all of 11, 25, 11 to make 25.\n", "<think>25+11=36,36-11=25!\n</think>\n<answer>(25+11)-11</answer>")
    prompt, completion = (tuple(policy.tokenizer(each)["input_ids"]) for each in texts)
    batch = Completions([prompt], [completion], [0])
    with torch.no_grad():
        torch_says = policy.completion_logprobs(batch).double()
        ours = scored(policy, batch)
        exact = load_policy(ModelOptions(path="bundled", dtype="float32")).model.double()
        rows = exact(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
    truth = rows.gather(1, torch.tensor(completion)[:, None])[:, 0]
    assert (ours - truth).abs().max() < max(2 * float((torch_says - truth).abs().max()), 1e-5)


def test_what_it_does_not_decode_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_refusal(float32("qwen3")) is None
    mentions(str(native_refusal(tiny_policy("qwen3"))), "engine.native is false")
    mentions(str(native_refusal(replace(tiny_policy("qwen3"), native_reason=None))), "float32")
    mentions(str(native_refusal(float32("gpt2_plain"))), "shared-prompt forward pass")
    mentions(str(native_refusal(float32("gemma2"))), "only tried with llama, qwen2, qwen3")
    mentions(str(native_refusal(float32("qwen3", head_dim=144))), "a head is 144 wide", "widths up to 128")
    two = RankGroup()
    two.size = 2
    mentions(str(native_refusal(replace(float32("qwen3"), ranks=two))), "split over ranks")
    monkeypatch.setenv("CC", "no-such-compiler")
    native_library.native_library.cache_clear()
    try:
        mentions(str(native_refusal(float32("qwen3"))), "no C compiler", "no-such-compiler")
    finally:
        monkeypatch.undo()
        native_library.native_library.cache_clear()


ASKS = """
from posttrain.models.native.native_library import native_library
print(native_library().page_tokens())
"""


@pytest.fixture(scope="module")
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """It does not optimise, and so takes half a second instead of four."""
    compiler = tmp_path_factory.mktemp("compiler") / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o700)
    return str(compiler)


def asked(folder: Path, compiler: str, program: str = ASKS) -> "subprocess.Popen[str]":
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "CC": compiler}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def ended(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def test_a_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong in sampling, then in updates alone: torch does both, with the pass that was chosen."""
    refresh, logprobs = NativeDecoder.refresh, native_layers.native_token_logprobs

    def refresh_wrong(decoder: NativeDecoder) -> None:
        refresh(decoder)
        decoder._ready.model.eps = 0.1  # not the model's

    policy = bundled()
    assert engine_in_parity(policy, max_rows=4, longest=40).policy is policy
    for patched, wrong in (
        ((NativeDecoder, "refresh"), refresh_wrong),
        ((native_layers, "native_token_logprobs"), lambda *given: logprobs(*given) + 0.1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*patched, wrong)
            engine = engine_in_parity(policy, max_rows=4, longest=40)
            assert re.match(
                r"log-probs by the native kernel are up to [\d.]+ nats off", str(native_refusal(engine.policy))
            )
            assert isinstance(engine.policy.forward, SharedPromptForward)


class Heard(Exception):
    """A signal."""


def test_a_signal_is_heard_amid_sampling() -> None:
    def hear(number: int, frame: object) -> None:
        raise Heard

    engine, previous = InProcessEngine(bundled()), signal.signal(signal.SIGVTALRM, hear)
    prompts = [Continuation(prefix=(5, 6), draw=draw, sample=0, limit=400) for draw in range(256)]
    try:
        with engine.open(Request(sampling=SamplingParams(), key=KEY, suppressed=engine.policy.stop_ids)) as sampling:
            sampling.put(prompts)
            began = time.process_time()
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.1)  # of processor time: a busy machine changes nothing
            with pytest.raises(Heard):
                sampling.take(60)
        assert time.process_time() - began < 1.1
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def test_calls_of_large_models_have_fewer_tokens() -> None:
    steps = NativeSteps(float32("qwen3"))
    assert steps.num_steps(64) == MOST_STEPS
    steps.seconds_of_token = 1e-3
    assert 0.4 < steps.num_steps(64) * 64 * steps.seconds_of_token <= CALL_SECONDS
    assert steps.num_steps(10**6) == 1


def test_two_processes_may_compile_at_once_and_a_third_finds_the_library(tmp_path: Path, quick_compiler: str) -> None:
    both = [asked(tmp_path, quick_compiler) for _ in range(2)]
    assert [ended(each) for each in both] == ["16", "16"]
    (made,) = (tmp_path / "posttrain" / "native").iterdir()
    before = made.stat().st_mtime_ns
    assert ended(asked(tmp_path, quick_compiler)) == "16"
    assert made.stat().st_mtime_ns == before


def test_a_damaged_library_is_compiled_anew_and_one_that_others_may_write_is_not_loaded(
    tmp_path: Path, quick_compiler: str
) -> None:
    assert ended(asked(tmp_path, quick_compiler)) == "16"
    (made,) = (tmp_path / "posttrain" / "native").iterdir()
    for content, mode in ((b"damaged", 0o700), (made.read_bytes(), 0o722)):
        made.unlink()
        made.write_bytes(content)
        made.chmod(mode)
        assert ended(asked(tmp_path, quick_compiler)) == "16"
        assert not made.stat().st_mode & 0o022


def test_a_cache_that_cannot_be_written_costs_a_compilation_in_each_process(
    tmp_path: Path, quick_compiler: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    assert ended(asked(tmp_path / "file", quick_compiler)) == "16"


def test_a_full_disk_costs_a_compilation_elsewhere(tmp_path: Path, quick_compiler: str) -> None:
    compiler, cache = tmp_path / "cc", tmp_path / "cache"
    fails = f'case "$*" in *{cache}*) echo "No space left" >&2; exit 1;; esac'
    compiler.write_text(f'#!/bin/sh\n{fails}\nexec {quick_compiler} "$@"\n')
    compiler.chmod(0o700)
    assert "No space left" in asked(cache, str(compiler)).communicate(timeout=120)[1]
    full = "import shutil\nfrom types import SimpleNamespace\nshutil.disk_usage = lambda _: SimpleNamespace(free=0)\n"
    assert ended(asked(cache, str(compiler), full + ASKS)) == "16"
    assert not [*(cache / "posttrain" / "native").iterdir()]


def test_a_run_with_the_kernel_says_so_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", shape=replace(SHAPE, hidden_size=32, mlp_size=48))
    every_two = {"engine": {"name": "in_process", "native": True}, "checkpoint": {"every_steps": 2}}
    whole = command("rl", tiny_recipe(tmp_path / "whole", **every_two), folder=tmp_path)
    assert whole.code == 0, whole.err
    assert "sampled and scored by the native kernel; its updates use it too" in whole.out
    place = tmp_path / "killed"
    killed = command("rl", tiny_recipe(place, **every_two), folder=place, accident=IN_STEP_4)
    assert killed.code == -9
    resumed = command("rl", "--resume", place / "run", folder=place)
    assert resumed.code == 0, resumed.err
    require_same(place / "run", tmp_path / "whole" / "run")


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "10000"), ({"OMP_WAIT_POLICY": "passive"}, None), ({"GOMP_SPINCOUNT": "7"}, "7")]
)
def test_a_command_lets_torchs_idle_threads_sleep_soon_unless_told_otherwise(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")  # as before it is loaded; put back at the end
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "so that it is put back")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    let_threads_sleep_soon()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
