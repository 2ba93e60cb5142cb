"""1, 2 and 3 ranks take one step on rows or pairs: the gradient of a sharded policy is that of a whole one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from posttrain.config import SftConfig
from posttrain.models.classifiers.heads import new_scorer
from posttrain.models.policy import Policy
from posttrain.models.sharding import shard_head, sharded
from posttrain.options.dataset import DatasetOptions
from posttrain.options.pairs import DpoOptions, RewardTrainingOptions
from posttrain.options.training import SftOptions
from posttrain.records import Example, TokenSequence
from posttrain.tasks.preference_set import PreferenceSet
from posttrain.training.fit_session import FitSession
from posttrain.training.sft.sft_run import SftObjective
from tests.laws.test_sharding import RANKS, float64_lora, with_frozen_parts
from tests.support.pairs import SHAPES, dpo_session, reward_session, some_pairs
from tests.support.ranks import MeshRanks, gradients, mesh_of, move, require_one_gradient, run_ranks, shared_by
from tests.support.tiny import VOCAB, through_its_own_forward, tiny_policy


class Rows:
    """Rows of very different lengths, parts of which are learned."""

    def __init__(self, rows: Sequence[Example]) -> None:
        self.rows = rows

    def batch(self, first: int, options: SftOptions) -> Sequence[Example]:
        return self.rows

    def num_steps(self, options: SftOptions) -> int:
        return 2

    def described(self) -> Sequence[str]:
        return []

    def summary(self) -> Mapping[str, object]:
        return {}


def row(length: int) -> Example:
    tokens = tuple((7 * length + place) % VOCAB for place in range(length))
    return Example(TokenSequence(tokens=tokens, sampled=tuple(place > length // 3 for place in range(length))))


def of_rows(policy: Policy, tokens: int, lengths: Sequence[int] = (2, 33, 5, 21, 9, 9, 40)) -> FitSession[Any]:
    config = SftConfig(sft=SftOptions(tokens_per_microbatch=tokens), task=DatasetOptions(path="rows.jsonl"))
    return FitSession(config, "", Rows([row(each) for each in lengths]), SftObjective(config, policy, []))


def of_pairs(policy: Policy, tokens: int, shapes: Sequence[tuple[int, int, int]] = SHAPES, **options: Any) -> Any:
    pairs = some_pairs(shapes, weights=[1.0 + number for number in range(len(shapes))])
    chosen = DpoOptions(tokens_per_microbatch=tokens, pairs_per_batch=len(pairs), num_epochs=None, **options)
    return dpo_session(policy, chosen, PreferenceSet(seed=0, training=pairs, held_out=[]))


def of_scores(policy: Policy, tokens: int, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> FitSession[Any]:
    size, centring = len(shapes), 0.1
    options = RewardTrainingOptions(
        tokens_per_microbatch=tokens, pairs_per_batch=size, num_epochs=None, center_coefficient=centring
    )
    scorer = new_scorer(policy, seed=0)
    shard_head(scorer.head, policy)
    return reward_session(scorer, options, PreferenceSet(seed=0, training=some_pairs(shapes), held_out=[]))


@dataclass(frozen=True)
class Fit:
    """A step on rows or pairs that all numbers of ranks take."""

    session: Callable[..., FitSession[Any]] = of_rows
    """Of a policy and the tokens of a micro-batch."""
    policy: Callable[[], Policy] = tiny_policy
    tokens: int = 24


def plain_llama() -> Policy:
    return through_its_own_forward(tiny_policy("llama"))


FITS = {
    **{
        f"{name}{what}": Fit(session, policy, tokens)
        for name, session in (("sft", of_rows), ("dpo", of_pairs), ("reward model", of_scores))
        for what, policy, tokens in (
            ("", tiny_policy, 24),
            (", untied", lambda: tiny_policy("llama"), 24),
            (", plain pass", plain_llama, 24),
            (", LoRA", float64_lora, 24),
            (", frozen parts", with_frozen_parts, 24),
            (", a budget above the batch", tiny_policy, 10_000),
        )
    },
    "sft, empty ranks": Fit(partial(of_rows, lengths=(9,))),
    "dpo, empty ranks": Fit(partial(of_pairs, shapes=SHAPES[:1])),
    "reward model, empty ranks": Fit(partial(of_scores, shapes=SHAPES[:1])),
    "dpo, precomputed reference": Fit(partial(of_pairs, reference="precomputed", loss="ipo")),
}


def fitted(case: Fit, policy: Policy) -> dict[str, Any]:
    """The gradient of a step, and its numbers."""
    session = case.session(sharded(policy), case.tokens)
    modules = {"policy": session.objective.policy.model, **session.objective.head()}
    move(modules)
    found: dict[str, Any] = {}
    session.trained.optimizer.register_step_pre_hook(lambda *_: found.update(gradients=gradients(modules)))
    found["numbers"] = session.learn(1)[1]
    ranks = session.objective.policy.ranks
    found["micro-batches"] = ranks.num_dealt if isinstance(ranks, MeshRanks) else None
    return found


def steps_of(rank: int) -> Mapping[Any, Any]:
    meshes = {size: mesh_of(size) for size in RANKS}
    found: dict[Any, Any] = {}
    for name, case in FITS.items():
        for size, mesh in meshes.items():
            if mesh is not None:
                found[name, size] = fitted(case, shared_by(mesh, case.policy()))
        if rank == 0:
            found[name, 1] = fitted(case, case.policy())
    return found


@pytest.fixture(scope="module")
def steps() -> Mapping[Any, Any]:
    return run_ranks(max(RANKS), steps_of)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", FITS)
def test_ranks_take_one_step_on_rows_and_pairs(steps: Mapping[Any, Any], name: str, size: int) -> None:
    one, several = steps[name, 1], steps[name, size]
    require_one_gradient(one["gradients"], several["gradients"], 1e-12)
    assert several["numbers"] == pytest.approx(one["numbers"], rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", [name for name in FITS if "empty ranks" in name])
def test_a_rank_may_have_no_row_or_pair(steps: Mapping[Any, Any], name: str, size: int) -> None:
    assert steps[name, size]["micro-batches"] < size


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", [name for name in FITS if "a budget above the batch" in name])
def test_a_batch_that_fits_in_one_micro_batch_is_split_for_all_ranks(
    steps: Mapping[Any, Any], name: str, size: int
) -> None:
    assert steps[name, size]["micro-batches"] >= size
