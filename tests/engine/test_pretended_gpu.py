"""The path of a GPU, on one that is only pretended: no operator mixes devices, and the CPU seldom waits."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.generation import decoder_steps, decoding_rows
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.generation.request import Continuation, Request, Sampled, StreamKey
from posttrain.models import transfers
from posttrain.models.adapters.adaptable import add_adapter, quantize
from posttrain.models.policy import Policy, as_policy
from posttrain.options.model import AdapterOptions
from posttrain.options.rollout import SamplingParams
from posttrain.server.sampler import Sampler
from tests.engine.test_continuation import assert_same, behind, everything, of_prompts, sampled_of
from tests.laws.test_sharded_fits import of_pairs, of_rows, of_scores
from tests.support.adapted import fill
from tests.support.pretended_gpu import DeviceMismatch, PretendedGpu
from tests.support.served import TEXT, asked, served
from tests.support.stages import stages_with
from tests.support.tiny import request, some_prompts, tiny_model, tokenizer

REQUEST = Request(sampling=SamplingParams(), key=StreamKey(4, "test", 2))
ROUNDING = {"rel": 2e-4, "abs": 2e-5}
"""A captured step adds in another order than one on the CPU."""


@pytest.fixture
def gpu() -> PretendedGpu:
    torch.set_num_threads(1)
    return PretendedGpu()


def policy_on(device: str, *, family: str = "qwen3", forward: str = "auto", kind: str = "") -> Policy:
    model = tiny_model(family, torch.float32, exact=False)
    if kind == "recomputed":
        model.gradient_checkpointing_enable()
        kind = ""
    if kind == "quantised":
        quantize(model, torch.float32)
    if kind:
        add_adapter(model, AdapterOptions(rank=3, alpha=6, dropout=0.1 if kind == "dropout" else 0.0), seed=0)
        fill(model)
    return as_policy(model.to(device), tokenizer(), dtype="float32", forward=forward)


WAYS_TO_WAIT: Mapping[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x[0]),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "copy_": lambda x: torch.zeros(3, dtype=torch.long).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "written mask": lambda x: x.index_put_((x > 1,), x[:1].expand(2)),
    "where": lambda x: torch.where(x > 1),
    "slice": lambda x: x[: x[0]],
    "unique": torch.unique,
    "repeats": lambda x: x.repeat_interleave(x),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("way", WAYS_TO_WAIT)
def test_every_way_to_wait_is_counted(gpu: PretendedGpu, way: str, inference: bool) -> None:
    with gpu, torch.inference_mode(inference):
        on_cpu, on_gpu = torch.arange(1, 4), torch.arange(1, 4, device="cuda")
        WAYS_TO_WAIT[way](on_cpu)
        assert not gpu.waits
        WAYS_TO_WAIT[way](on_gpu)
    assert sum(gpu.waits.values()) >= 1
    assert {place.split()[0] for place in gpu.waits} == {"test_pretended_gpu.py:<lambda>"} or way == "unique"


MIXTURES: Mapping[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda here, there: here + there,
    "product": lambda here, there: there[:, None] @ here[None],
    "joined": lambda here, there: torch.cat([here, there]),
    "gathered": lambda here, there: there.index_select(0, here.long()),
    "index": lambda here, there: here[there.long()],
    "written": lambda here, there: there.__setitem__(slice(None), here + 0 * there),
    "summed on the CPU": lambda here, there: here.sum().add_(there.sum()),
    "numpy": lambda here, there: there.numpy(),
    "in the backward pass": lambda here, there: Mixed.apply(there.requires_grad_()).backward(),
}


class Mixed(torch.autograd.Function):
    """Leaves a tensor of its backward pass on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.ones(3)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_an_operator_with_tensors_of_two_devices_fails(gpu: PretendedGpu, mixture: str) -> None:
    with gpu, pytest.raises(DeviceMismatch, match=r"test_pretended_gpu\.py"):
        MIXTURES[mixture](torch.ones(3), torch.ones(3, device="cuda"))


def test_what_cuda_allows_passes(gpu: PretendedGpu) -> None:
    with gpu:
        there = torch.ones(3, 2, device="cuda", requires_grad=True)
        number = torch.tensor(2.0)
        moved = (there * number).cpu() + torch.ones(3, 2)
        moved.sum().backward()
        assert there.grad is not None
        assert there.grad.is_cuda
        assert (there.detach().view(-1)[torch.tensor([0, 1])].device, moved.device.type) == (there.device, "cpu")
        assert torch.zeros_like(there, device="cpu").device.type == "cpu"
    assert there.device.type == "cpu"
    assert sum(gpu.waits.values()) == 1
    assert gpu.copies == Counter(
        {"test_pretended_gpu.py:test_what_cuda_allows_passes index by a list or a CPU tensor": 1}
    )


def test_a_planted_mismatch_of_the_sampler_is_found(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_steps, "numbers_on", lambda _, numbers: torch.tensor(numbers))
    with gpu, pytest.raises(DeviceMismatch, match=r"generation/decoder_steps|models/shared_prompt"):
        sampled_on(policy_on("cuda"))


def test_a_planted_wait_of_the_sampler_is_counted_by_its_place(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = decoding_rows.sample

    def waiting(*given: Any) -> Any:
        found = drawn(*given)
        found.tokens.max().item()
        return found

    monkeypatch.setattr(decoding_rows, "sample", waiting)
    with gpu:
        steps = counted_steps(monkeypatch)
        sampled_on(policy_on("cuda"), max_rows=12)
    assert gpu.waits["generation/decoding_rows.py:_sample _local_scalar_dense"] > len(steps) > 20


# ------------------------------------------------------------------ sampling


def sampled_on(policy: Policy, *, max_rows: int = 7, **sampling: Any) -> list[Any]:
    """Two prompts, six completions each, of which seven are decoded at a time: rows end and start all the while."""
    engine = InProcessEngine(policy, max_rows=max_rows)
    groups = sample_groups(engine, some_prompts([3, 9]), request(6, 24, SamplingParams(**sampling)))
    return [rollout for group in groups for rollout in group.rollouts]


def counted_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every decoding step from now on."""
    counts: list[int] = []
    decode = decoding_rows.Rows._decode

    def counted(rows: decoding_rows.Rows) -> None:
        counts.append(rows.num_rows)
        decode(rows)

    monkeypatch.setattr(decoding_rows.Rows, "_decode", counted)
    return counts


@pytest.mark.parametrize(("forward", "sampling"), [("auto", {}), ("plain", {}), ("auto", {"top_k": 12, "top_p": 0.9})])
def test_a_gpu_samples_what_a_cpu_does_and_waits_for_a_quarter_of_the_steps(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, forward: str, sampling: Mapping[str, Any]
) -> None:
    expected = sampled_on(policy_on("cpu", forward=forward), **sampling)
    with gpu:
        policy = policy_on("cuda", forward=forward)
        gpu.waits.clear(), gpu.copies.clear()
        steps = counted_steps(monkeypatch)
        found = sampled_on(policy, **sampling)
    assert [(each.tokens, each.finish) for each in found] == [(each.tokens, each.finish) for each in expected]
    for mine, other in zip(found, expected, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, **ROUNDING)
    library = sum(count for place, count in gpu.waits.items() if "model_outputs.py:model_hidden" in place)
    assert library == (len(steps) if forward == "plain" else 0)  # transformers looks at the mask in each of its passes
    assert sampling or len({len(each.tokens) for each in expected}) > 3
    assert sum(gpu.waits.values()) - library <= len(steps) / 4
    if forward == "auto":
        assert not gpu.copies


def test_rows_that_stopped_go_on_for_seven_steps_at_most(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [len(each.tokens) for each in sampled_on(policy_on("cpu"), max_rows=12)]
    with gpu:
        policy, steps = policy_on("cuda"), counted_steps(monkeypatch)
        sampled_on(policy, max_rows=12)
    needed, most = sum(lengths) - len(lengths), decoding_rows.ASK_GPU_EVERY - 1
    assert needed < sum(steps) <= needed + most * len(lengths)


def test_completions_at_their_limit_leave_without_a_question(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [
        Continuation(prefix=prompt.tokens, draw=draw, sample=0, limit=1 + draw % 5)
        for draw, prompt in enumerate(some_prompts([3] * 30))
    ]
    expected = sampled_of(InProcessEngine(policy_on("cpu"), max_rows=6), some, REQUEST)
    with gpu:
        policy = policy_on("cuda")
        gpu.waits.clear()
        steps = counted_steps(monkeypatch)
        found = sampled_of(InProcessEngine(policy, max_rows=6), some, REQUEST)
    assert_near(found, expected)
    assert sum(gpu.waits.values()) <= max(1, len(steps) / 4) + 1  # and the last ones


def assert_near(found: list[Sampled], expected: list[Sampled]) -> None:
    assert_same([replace(each, logprobs=()) for each in found], [replace(each, logprobs=()) for each in expected])
    for mine, other in zip(found, expected, strict=True):
        assert (mine.sequence, mine.ended_by_text) == (other.sequence, other.ended_by_text)
        assert mine.logprobs == pytest.approx(other.logprobs, **ROUNDING)
        assert sum(count for _, count in mine.versions) == len(mine.tokens)


def test_a_second_turn_begins_with_the_cache_of_a_row_that_had_gone_on(gpu: PretendedGpu) -> None:
    def two_turns(policy: Policy) -> list[Sampled]:
        with InProcessEngine(policy, max_rows=5).open(replace(REQUEST, keep=True)) as sampling:
            sampling.put(of_prompts((3, 7, 1), size=2, limit=9))
            first = everything(sampling, 6)
            sampling.put([behind(each, (4, 2), 6) for each in first])
            return first + everything(sampling, 6)

    expected = two_turns(policy_on("cpu"))
    with gpu:
        found = two_turns(policy_on("cuda"))
    assert_near(found, expected)


def test_weights_are_loaded_and_rows_dropped_between_two_questions(gpu: PretendedGpu) -> None:
    """What had stopped by then was sampled by the earlier weights only; what goes on has the tokens of both."""

    def interrupted(policy: Policy) -> list[Sampled]:
        engine = InProcessEngine(policy, max_rows=8)
        with engine.open(REQUEST) as sampling:
            some = of_prompts((3, 7, 1, 5), size=2, limit=20)
            sampling.put(some)
            with torch.inference_mode():
                sampling._advance()
                for _ in range(5):
                    sampling.rows.decode()
            sampling.drop(some[:1])
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.mul_(1.02)
            engine.load(None, 1)  # type: ignore[arg-type]
            return everything(sampling, 7)

    expected = interrupted(policy_on("cpu"))
    with gpu:
        found = interrupted(policy_on("cuda"))
    assert_near(found, expected)
    assert [each.versions for each in found] == [each.versions for each in expected]


def test_a_served_model_answers_as_on_the_cpu(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stop texts, likeliest alternatives and tokens as they come."""
    body = {"prompt": "123", "max_tokens": 24, "n": 4, "seed": 1, "logprobs": 2, "stop": ["7", "9 "]}

    def answers(device: str) -> list[Any]:
        with served(policy_on(device)) as server:
            status, answer = asked(server, TEXT, body)
            assert status == 200, answer
            return [(each["text"], each["finish_reason"]) for each in answer["choices"]]

    expected = answers("cpu")
    monkeypatch.setattr(Sampler, "_run", gpu.in_thread(Sampler._run))
    with gpu:
        assert answers("cuda") == expected


# ------------------------------------------------------------------ learning


ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"name": "grpo", "kl": {"coefficient": 0.05}},
    "dapo": {"name": "dapo", "resample": None},
    "gspo": {"name": "gspo"},
    "reinforce": {"name": "reinforce"},
    "ppo": {"name": "ppo"},
    "ppo, critic apart": {"name": "ppo", "critic": {"trunk": "own"}},
}


def step_metrics(algorithm: Mapping[str, Any], policy: Policy, gpu: PretendedGpu | None = None) -> dict[str, float]:
    """The metrics of a step; on a GPU the waits of the updates of the next one are counted too."""
    stages = stages_with(algorithm, policy=policy, tokens_per_microbatch=48, epochs_per_step=1, minibatches_per_epoch=1)
    metrics = stages.learn(stages.credited())
    if gpu is not None:
        credited = stages.credited(2)
        gpu.waits.clear(), gpu.copies.clear()
        again = stages.learn(credited)
        assert again["num_micro_batches"] > again["num_updates"]
        assert not gpu.copies
        assert sum(gpu.waits.values()) <= 2 * again["num_updates"], gpu.waits
        assert len(gpu.waits) == 2, "one copy of all metrics, and one of the gradients' norms"
    return metrics


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_update_waits_twice_however_many_micro_batches_it_has(gpu: PretendedGpu, name: str) -> None:
    expected = step_metrics(ALGORITHMS[name], policy_on("cpu"))
    with gpu:
        found = step_metrics(ALGORITHMS[name], policy_on("cuda"), gpu)
    assert found == pytest.approx(expected, **ROUNDING)


@pytest.mark.parametrize(
    "how", [{"kind": "dropout"}, {"kind": "quantised"}, {"kind": "recomputed"}, {"forward": "plain"}], ids=str
)
def test_every_kind_of_model_samples_and_learns_without_a_mismatch(gpu: PretendedGpu, how: dict[str, str]) -> None:
    expected = step_metrics(ALGORITHMS["grpo"], policy_on("cpu", **how))
    with gpu:
        found = step_metrics(ALGORITHMS["grpo"], policy_on("cuda", **how))
    assert found == pytest.approx(expected, **ROUNDING)


@pytest.mark.parametrize(
    ("fit", "forward"), [(of_rows, "auto"), (of_rows, "plain"), (of_pairs, "auto"), (of_scores, "auto")]
)
def test_rows_pairs_and_scores_are_learned_with_two_waits_a_step(
    gpu: PretendedGpu, fit: Callable[..., Any], forward: str
) -> None:
    """A third wait is for the log-probs of DPO's reference."""
    expected = fit(policy_on("cpu", forward=forward), 40).learn(1)[1]
    with gpu:
        session = fit(policy_on("cuda", forward=forward), 40)
        found = session.learn(1)[1]
        gpu.waits.clear(), gpu.copies.clear()
        session.learn(2)
    assert found == pytest.approx(expected, **ROUNDING)
    library = sum(count for place, count in gpu.waits.items() if "model_outputs.py:model_hidden" in place)
    assert sum(gpu.waits.values()) - library == (3 if fit is of_pairs else 2), gpu.waits
    assert forward == "plain" or not gpu.copies


def test_tensors_that_come_together_are_the_tensors(gpu: PretendedGpu) -> None:
    some = [
        torch.tensor(1.5),
        torch.tensor([True, False, True]),
        torch.arange(5),
        torch.zeros(0, 3),
        torch.ones(2, 3).T,
    ]
    some.append(torch.tensor([1.25, -2.0], dtype=torch.bfloat16))
    with gpu:
        there = [each.to("cuda") for each in some]
        found = transfers.on_cpu([*there[:3], some[3], *there[4:]])
        assert all(each.device.type == "cpu" for each in found)
    assert sum(gpu.waits.values()) == 1
    for mine, other in zip(found, some, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert torch.equal(mine, other)
