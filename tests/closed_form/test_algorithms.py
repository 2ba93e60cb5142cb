"""The algorithm table: what each name stands for, what each option changes, and how mistakes are answered."""

import math
from dataclasses import replace

import pytest
import torch

from posttrain.algorithms.advantages import Overlong, group_centred, group_zscore, overlong_punishment
from posttrain.algorithms.algorithm import Resample
from posttrain.algorithms.credit import mean_of_rollouts
from posttrain.algorithms.table import ALGORITHMS, build_algorithm
from posttrain.algorithms.terms import KlTerm, TokenView
from posttrain.needs import Need
from tests.support.refusals import refused
from tests.support.sequences import doubles, evidence_of, view_of
from tests.support.tiny import advantage, gradient

REWARDS = torch.tensor([[1, 0, 0, 0], [2, 4, 2, 4]], dtype=torch.float64)
LENGTHS = torch.tensor([1, 3, 4])

ROOT3 = math.sqrt(3)
CENTRED = [[0.75, -0.25, -0.25, -0.25], [-1, 1, -1, 1]]
OFFSET = [[3 / (ROOT3 + 4), *[-1 / (ROOT3 + 4)] * 3], [-0.5, 0.5, -0.5, 0.5]]
LOO = [[1, -1 / 3, -1 / 3, -1 / 3], [-4 / 3, 4 / 3, -4 / 3, 4 / 3]]
LOO_SCALE = math.sqrt(76 / 63) + 1e-4
OVER_BATCH = [[x / math.sqrt(159 / 56) for x in row] for row in CENTRED]
ZSCORED = [[ROOT3, -1 / ROOT3, -1 / ROOT3, -1 / ROOT3], [-1, 1, -1, 1]]  # deviations √3/4 and 1


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"name": "reinforce"}, REWARDS.tolist()),
        # Mean over both groups: 13/8.
        ({"name": "reinforce", "baseline": "batch_mean"}, (REWARDS - 13 / 8).tolist()),
        ({"name": "rloo"}, LOO),
        # At most 3: the second group is 2, 3, 2, 3.
        ({"name": "rloo", "reward_range": [0, 3]}, [[1, *[-1 / 3] * 3], [-2 / 3, 2 / 3, -2 / 3, 2 / 3]]),
        # Of mean 0, with squares 4/3 + 64/9, so a sample variance of 76/63; ε = 1e-4.
        ({"name": "rloo", "normalize_advantages": True}, [[x / LOO_SCALE for x in row] for row in LOO]),
        ({"name": "grpo"}, ZSCORED),
        # The sample deviation is √(4/3) of the population's.
        ({"name": "grpo", "deviation": "sample"}, (torch.tensor(ZSCORED) * ROOT3 / 2).tolist()),
        ({"name": "grpo", "deviation": "none"}, CENTRED),
        # ε = 1 beside the deviations √3/4 and 1.
        ({"name": "grpo", "deviation_epsilon": 1.0}, OFFSET),
        ({"name": "cispo", "deviation_epsilon": 1.0}, OFFSET),
        # All eight rewards: mean 13/8, squares 41, so a sample variance of (41 - 169/8) / 7 = 159/56.
        ({"name": "grpo", "deviation": "sample", "deviation_over": "batch"}, OVER_BATCH),
        ({"name": "cispo", "deviation": "sample", "deviation_over": "batch"}, OVER_BATCH),
        ({"name": "cispo", "deviation": "none"}, CENTRED),
        ({"name": "dr_grpo"}, CENTRED),
        ({"name": "dapo"}, ZSCORED),
        ({"name": "gspo"}, ZSCORED),
        ({"name": "cispo"}, ZSCORED),
        # Means 1/4 and 3.
        ({"name": "maxrl"}, [[3, -1, -1, -1], [-1 / 3, 1 / 3, -1 / 3, 1 / 3]]),
    ],
    ids=str,
)
def test_the_advantage_of_an_algorithm(config, expected) -> None:
    advantages = advantage(build_algorithm(config), REWARDS)
    torch.testing.assert_close(advantages, torch.tensor(expected).double(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Ratios (3, .5, 1.25) with A = 1, then A = -1; gradient -ρA, or 0 where clipped.
        ({"name": "reinforce"}, ([-3, -0.5, -1.25], [3, 0.5, 1.25])),
        ({"name": "rloo"}, ([-3, -0.5, -1.25], [3, 0.5, 1.25])),
        ({"name": "grpo"}, ([0, -0.5, 0], [3, 0, 1.25])),
        ({"name": "grpo", "clip_high": 0.3}, ([0, -0.5, -1.25], [3, 0, 1.25])),
        ({"name": "grpo", "clip_low": 0.6}, ([0, -0.5, 0], [3, 0.5, 1.25])),
        ({"name": "grpo", "dual_clip": 2}, ([0, -0.5, 0], [0, 0, 1.25])),
        ({"name": "grpo", "dual_clip": 1.2}, ([0, -0.5, 0], [0, 0, 0])),
        ({"name": "dr_grpo"}, ([0, -0.5, 0], [3, 0, 1.25])),
        ({"name": "dr_grpo", "clip_high": 2.5, "clip_low": 0.6}, ([-3, -0.5, -1.25], [3, 0.5, 1.25])),
        ({"name": "dapo"}, ([0, -0.5, -1.25], [3, 0, 1.25])),  # clip-higher: .28
        ({"name": "dapo", "clip_high": 0.2, "clip_low": 0.6}, ([0, -0.5, 0], [3, 0.5, 1.25])),
        ({"name": "maxrl"}, ([0, -0.5, 0], [3, 0, 1.25])),
        ({"name": "maxrl", "clip_high": 2.5, "clip_low": 0.6}, ([-3, -0.5, -1.25], [3, 0.5, 1.25])),
        ({"name": "cispo"}, ([-3, -0.5, -1.25], [3, 0.5, 1.25])),
        ({"name": "cispo", "clip_low": 0.4, "clip_high": 1}, ([-2, -0.6, -1.25], [2, 0.6, 1.25])),
    ],
    ids=str,
)
def test_the_gradient_of_a_token_level_algorithm(config, expected) -> None:
    for sign, gradients in zip((1, -1), expected, strict=True):
        assert gradient(config, [3, 0.5, 1.25], [sign] * 3) == pytest.approx(gradients, rel=1e-12)


def test_cispo_caps_the_weight_at_five_by_default() -> None:
    assert gradient({"name": "cispo"}, [6, 0.001], [1, 1]) == pytest.approx([-5, -0.001], rel=1e-12)


def test_gspo_shares_one_ratio_among_the_tokens_of_a_completion() -> None:
    # ρ = (2, .5 · 1.0003²): geometric mean 1.0003, inside 1 + 4e-4.  Each token's loss is -s, and each log π moves
    # log s by 1/2: the gradient of the two losses' sum is -s · 2 · 1/2.
    inside = [2, 0.5 * 1.0003**2]
    assert gradient({"name": "gspo"}, inside, [1, 1]) == pytest.approx([-1.0003, -1.0003], rel=1e-12)
    assert gradient({"name": "gspo"}, [2, 0.5 * 1.0005**2], [1, 1]) == [0, 0]
    assert gradient({"name": "gspo"}, [2, 0.5 * 0.9996**2], [-1, -1]) == [0, 0]  # below 1 - 3e-4
    kept = gradient({"name": "gspo"}, [2, 0.5 * 0.9998**2], [-1, -1])
    assert kept == pytest.approx([0.9998, 0.9998], rel=1e-12)


def test_gspo_can_use_the_whole_importance_weight() -> None:
    # Product 1.5; each log π moves its log by 1: the gradient of the two losses' sum is -1.5 · 2.
    config = {"name": "gspo", "sequence_ratio": "product", "clip_high": 0.6, "clip_low": 0.6}
    assert gradient(config, [3, 0.5], [1, 1]) == pytest.approx([-3, -3], rel=1e-12)
    assert gradient(config | {"clip_high": 0.4}, [3, 0.5], [1, 1]) == [0, 0]
    assert gradient(config, [0.3, 1], [-1, -1]) == [0, 0]


def test_a_ratio_of_the_completion_is_an_option_of_grpo_and_of_cispo() -> None:
    # ρ = (2, .5 · 1.21): geometric mean 1.1, inside 1.2; -ρ · 2 · 1/2 for each token of the surrogate.
    config = {"name": "grpo", "ratio_level": "sequence_mean"}
    assert gradient(config, [2, 0.5 * 1.21], [1, 1]) == pytest.approx([-1.1, -1.1], rel=1e-12)
    assert gradient(config, [2, 0.5 * 1.69], [1, 1]) == [0, 0]  # 1.3
    # The product is 1.21; cispo weighs each token's own slope with it, without a slope of its own.
    product = {"name": "cispo", "ratio_level": "sequence_product"}
    assert gradient(product, [2, 0.5 * 1.21], [1, 1]) == pytest.approx([-1.21, -1.21], rel=1e-12)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"name": "reinforce"}, "sum_over_sequence"),
        ({"name": "rloo"}, "sum_over_sequence"),
        ({"name": "rloo", "token_weights": "mean_over_tokens"}, "mean_over_tokens"),
        ({"name": "reinforce", "token_weights": "constant_length"}, "constant_length"),
        ({"name": "grpo"}, "mean_over_sequences"),
        ({"name": "grpo", "token_weights": "mean_over_tokens"}, "mean_over_tokens"),
        ({"name": "grpo", "token_weights": "sum_over_sequence"}, "sum_over_sequence"),
        ({"name": "dr_grpo"}, "constant_length"),
        ({"name": "dapo"}, "mean_over_tokens"),
        ({"name": "gspo"}, "mean_over_sequences"),
        ({"name": "cispo"}, "mean_over_tokens"),
        ({"name": "maxrl"}, "sum_over_sequence"),
        ({"name": "maxrl", "token_weights": "mean_over_tokens"}, "mean_over_tokens"),
        ({"name": "distill"}, "mean_over_tokens"),
        ({"name": "distill", "token_weights": "constant_length"}, "constant_length"),
    ],
    ids=str,
)
def test_the_token_weights_of_an_algorithm(config, expected) -> None:
    # Lengths 1, 3, 4 under a limit of 10; see test_advantages.py.
    by_hand = {
        "mean_over_tokens": [1 / 8] * 3,
        "mean_over_sequences": [1 / 3, 1 / 9, 1 / 12],
        "sum_over_sequence": [1 / 3] * 3,
        "constant_length": [1 / 30] * 3,
    }
    scored = torch.ones(3, dtype=torch.bool)
    weights = build_algorithm(config).token_weights(LENGTHS, scored, max_completion_tokens=10)
    assert weights.tolist() == pytest.approx(by_hand[expected], rel=1e-14)


def tokens_seen(ratios: list[float], advantages: list[float], reference: list[float] | None = None) -> TokenView:
    """Tokens of one completion, at these ratios to behaviour log-probs of 0."""
    columns = {"advantages": doubles(*advantages), "reference_logprobs": reference and doubles(*reference)}
    return view_of(doubles(*ratios).log(), torch.zeros(len(ratios), dtype=torch.int64), **columns)


def test_clipped_tokens_are_those_of_the_algorithms_own_range_and_level() -> None:
    def clipped(name: str) -> list[bool]:
        (policy,) = build_algorithm({"name": name}).terms
        return policy.clipped(tokens_seen([1.25, 0.7], [1, -1])).tolist()

    assert clipped("grpo") == [True, True]
    assert clipped("dapo") == [False, True]
    # √(1.25 · .7) = .935: below 1 - 3e-4, which the second token favours and the first does not.
    assert clipped("gspo") == [False, True]
    assert clipped("rloo") == [False, False]


def credit(config: dict[str, object], rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The advantage of each completion, [prompt group], under a limit of 100 tokens."""
    found = build_algorithm(config).credit(evidence_of(rewards, lengths, limit=100))
    return mean_of_rollouts(found.advantages, lengths)


def test_overlong_completions_lose_reward_over_the_last_stretch() -> None:
    # Limit 100, buffer .2: from 80 tokens on, 1/20 per token, and no more beyond 100; penalty 2 doubles it.
    rewards = doubles([1, 1, 1, 1], [0, math.nan, 0, 0])
    lengths = torch.tensor([[10, 80, 85, 120], [90, 95, 100, 100]])
    expected = doubles([1, 1, 0.75, 0], [-0.5, math.nan, -1, -1])
    for overlong, factor in ((Overlong(), 1), (Overlong(buffer=0.2, penalty=2.0), 2)):
        shaped = overlong_punishment(rewards, lengths, max_completion_tokens=100, overlong=overlong)
        taken = factor * (expected - rewards)
        torch.testing.assert_close(shaped - rewards, taken, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert shaped.dtype == rewards.dtype


def test_dapo_standardises_the_rewards_that_its_punishment_leaves() -> None:
    # Limit 100, buffer .2: 85 tokens cost 1/4, 90 cost 1/2, 100 cost 1.
    rewards, left = doubles([2, 1, 1], [0, math.nan, 0.5]), doubles([2, 1, 0.75], [-0.5, math.nan, -0.5])
    lengths = torch.tensor([[10, 80, 85], [90, 95, 100]])
    torch.testing.assert_close(credit({"name": "dapo"}, rewards, lengths), group_zscore(left), rtol=1e-12, atol=1e-12)
    # Buffer .5: at 75 tokens, half of it.  Of 1, .5 and 0 the deviation is √(1/6).
    config = {"name": "dapo", "overlong": {"buffer": 0.5}}
    advantages = credit(config, doubles([1, 1, 0]), torch.tensor([[50, 75, 50]]))
    assert advantages[0].tolist() == pytest.approx([math.sqrt(1.5), 0, -math.sqrt(1.5)], abs=1e-12)


def test_only_dapo_resamples_and_shapes_and_can_be_told_not_to() -> None:
    def shapes(config: dict[str, object]) -> bool:
        short, long = (credit(config, doubles([1, 0, 0]), torch.tensor([[10, 10, last]])) for last in (10, 100))
        return not torch.equal(short, long)

    for name in ALGORITHMS:
        algorithm = build_algorithm({"name": name})
        assert algorithm.name == name
        assert (algorithm.resample == Resample(max_rounds=3)) == (name == "dapo")
        assert name == "ppo" or shapes({"name": name}) == (name == "dapo")  # with a critic credit hangs on tokens
    assert build_algorithm({"name": "dapo", "resample": None}).resample is None
    assert not shapes({"name": "dapo", "overlong": None})
    for rounds in (1, 7):
        made = build_algorithm({"name": "dapo", "resample": {"max_rounds": rounds}})
        assert made.resample == Resample(max_rounds=rounds)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_reference_is_kept_only_for_a_kl_term_or_a_ratio_to_it(name) -> None:
    plain = build_algorithm({"name": name})
    assert not plain.uses_reference
    assert plain.kl_penalty is None
    assert build_algorithm({"name": name, "kl": {"coefficient": 0.1}}).uses_reference
    if name in ("maxrl", "distill"):  # rewards below 0; a signal that is no reward
        with refused("place = reward"):
            build_algorithm({"name": name, "kl": {"coefficient": 0.1, "place": "reward"}})
        return
    with_kl = build_algorithm({"name": name, "kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}})
    assert with_kl.uses_reference
    assert with_kl.kl_penalty == KlTerm(coefficient=0.1, estimator="k1", place="reward")
    assert len(with_kl.terms) == (2 if name == "ppo" else 1)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "maxrl"])
def test_the_ratio_is_to_the_behaviour_policy_unless_the_recipe_says_reference(name) -> None:
    # Ratio 1.0002 to the behaviour and 1.0003 to the reference, inside every clip range: the slope is -ρ.
    for choice, ratio in (({}, 1.0002), ({"ratio_to": "behaviour"}, 1.0002), ({"ratio_to": "reference"}, 1.0003)):
        algorithm = build_algorithm({"name": name, **choice})
        assert algorithm.uses_reference == (choice == {"ratio_to": "reference"})
        logprobs = doubles(1.0002).log().requires_grad_()
        seen = tokens_seen([1.0002], [1], reference=[math.log(1.0002) - math.log(1.0003)])
        algorithm.loss(replace(seen, logprobs=logprobs)).sum().backward()
        assert logprobs.grad.item() == pytest.approx(-ratio, rel=1e-12)


def test_an_algorithm_of_ones_own_is_what_its_function_returns(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from posttrain.algorithms.table import grpo\n\ndef mine(): return grpo()\n\ndef five(): return 5\n"
    )
    assert build_algorithm({"path": f"{file}:mine"}).name == "grpo"
    with refused("mine.py:five", "5 (int)"):
        build_algorithm({"path": f"{file}:five"})


def test_the_same_options_build_the_same_function_as_calling_it() -> None:
    built, called = build_algorithm({"name": "dr_grpo", "clip_low": 0.1}), ALGORITHMS["dr_grpo"](clip_low=0.1)
    assert (built.name, built.resample, built.kl_penalty) == (called.name, called.resample, called.kl_penalty)
    assert built.token_weights is called.token_weights
    seen = tokens_seen([0.85, 1.1], [-1, -1])  # the first is below 1 - .1, and not below 1 - .2
    assert built.loss(seen).tolist() == called.loss(seen).tolist() == pytest.approx([0.9, 1.1])
    assert torch.equal(advantage(built, REWARDS), group_centred(REWARDS))


@pytest.mark.parametrize(
    ("asked", "at_log_2"),
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", math.log(2) - 0.5), (None, math.log(2) - 0.5)],
)
def test_every_one_token_estimator_can_stand_in_either_place_and_k3_is_the_default(asked, at_log_2) -> None:
    kl = {"coefficient": 1} | ({"estimator": asked} if asked else {})
    in_reward = build_algorithm({"name": "rloo", "kl": {**kl, "place": "reward"}})
    assert in_reward.kl_penalty == KlTerm(coefficient=1.0, estimator=asked or "k3", place="reward")
    assert [term.name for term in in_reward.terms] == ["policy"]
    for place in ({"place": "loss"}, {}):
        in_loss = build_algorithm({"name": "rloo", "kl": {**kl, **place}})
        assert in_loss.kl_penalty is None
        _, term = in_loss.terms
        assert (term.name, term.coefficient) == ("kl", 1.0)
        assert term.per_token(tokens_seen([2], [1], reference=[0])).item() == pytest.approx(at_log_2, rel=1e-12)


def test_the_full_divergence_can_stand_in_the_loss() -> None:
    algorithm = build_algorithm({"name": "rloo", "kl": {"coefficient": 1, "estimator": "full"}})
    assert algorithm.kl_penalty is None
    assert algorithm.terms[1].needs == algorithm.needs == {Need.FULL_KL}
    whole = doubles(0.125)
    assert algorithm.terms[1].per_token(replace(tokens_seen([2], [1]), known={"full_kl": whole})) is whole


def test_rloo_can_clip_the_whole_importance_weight() -> None:
    # Product 1.5; without clip_high the bounds are 1 - clip_low and 1 + clip_low.
    config = {"name": "rloo", "token_weights": "mean_over_sequences", "clip_low": 0.6}
    assert gradient(config, [3, 0.5], [1, 1]) == pytest.approx([-3, -3], rel=1e-12)
    assert gradient(config | {"clip_low": 0.4}, [3, 0.5], [1, 1]) == [0, 0]
    assert gradient(config | {"clip_low": 0.4, "clip_high": 0.6}, [3, 0.5], [1, 1]) == pytest.approx([-3, -3])
    assert gradient(config | {"clip_high": 0.1}, [0.3, 1], [-1, -1]) == [0, 0]
    assert gradient(config | {"clip_high": 0.1}, [0.5, 1], [-1, -1]) == pytest.approx([1, 1], rel=1e-12)


@pytest.mark.parametrize(("mask", "expected"), [(True, 0.25), (False, -0.25)])
def test_a_truncated_completion_of_rloo_earns_no_token_rewards_where_it_is_masked(mask, expected) -> None:
    # Rewards 1 and 1, penalties of .5 for a cut completion and .25 for a whole one: 1 against .75, or .5 against .75.
    evidence = evidence_of([[1, 1]], truncated=torch.tensor([[True, False]]), token_rewards=doubles(-0.5, -0.25))
    algorithm = build_algorithm({"name": "rloo", "mask_truncated": mask})
    assert algorithm.masks_truncated == mask
    assert algorithm.credit(evidence).advantages.tolist() == [expected, -expected]
