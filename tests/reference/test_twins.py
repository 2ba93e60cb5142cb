"""Functions of tokens, of pairs and of reward models agree with slow float64 twins on random input."""

import math
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from posttrain.algorithms import advantages, kl, losses
from posttrain.algorithms.advantages import Overlong, overlong_punishment
from posttrain.algorithms.losses import ClipRange
from posttrain.algorithms.preference_losses import PREFERENCE_LOSSES, OfPairs, PairObjective
from posttrain.models.classifiers.last_token_scores import ScoreReading, batches, classifier_scores
from posttrain.models.logprobs import distribution_kl
from posttrain.rewards.model import RewardModel
from tests.support import twins
from tests.support.refusals import refused
from tests.support.reward_models import DECODERS, KINDS, classifier, reward_tokenizer, twin_scores

SEEDS = st.integers(0, 2**32 - 1)

ADVANTAGES = {
    "raw": advantages.raw,
    "batch_centred": advantages.batch_centred,
    "group_centred": advantages.group_centred,
    "leave_one_out": advantages.leave_one_out,
    "population": advantages.group_zscore,
    "over_mean": lambda rewards: advantages.over_mean(rewards.abs()),
    "sample": partial(advantages.group_zscore, deviation="sample"),
}


def assert_twin(actual: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=tolerance, atol=tolerance)


def random_rewards(seed: int) -> np.ndarray:
    """Groups of 2 to 8, some rewards equal, some missing."""
    rng = np.random.default_rng(seed)
    shape = (rng.integers(1, 5), rng.integers(2, 9))
    rewards = np.where(rng.random(shape) < 0.5, rng.normal(size=shape), rng.integers(0, 2, size=shape))
    return np.where(rng.random(shape) < 0.2, np.nan, rewards)


def random_tokens(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """log π, log μ, advantages and rollouts of some completions, their tokens interleaved at random."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, size=rng.integers(1, 6))
    rollout = rng.permutation(np.repeat(np.arange(len(lengths)) * 2, lengths))  # not every number is used
    denominators = -rng.exponential(2, size=len(rollout))
    logprobs = denominators + rng.normal(0, 0.4, size=len(rollout))
    return logprobs, denominators, rng.normal(size=len(rollout)), rollout


@pytest.mark.parametrize("name", ADVANTAGES)
@given(seed=SEEDS)
def test_advantages(name: str, seed: int) -> None:
    rewards = random_rewards(seed)
    expected = twins.advantage(name, np.abs(rewards) if name == "over_mean" else rewards)
    assert_twin(ADVANTAGES[name](torch.from_numpy(rewards)), expected)


@pytest.mark.parametrize("level", ["token", "sequence_mean", "sequence_product"])
@given(seed=SEEDS, low=st.floats(0, 1), high=st.floats(0, 3))
def test_losses(level: str, seed: int, low: float, high: float) -> None:
    logprobs, denominators, gains, rollout = random_tokens(seed)
    arguments = [torch.from_numpy(column) for column in (logprobs, denominators, gains, rollout)]
    ratio = twins.ratios(logprobs, denominators, rollout, level)
    clip = ClipRange(low=low, high=high)
    assert_twin(losses.log_ratio(arguments[0], arguments[1], arguments[3], level=level).exp(), ratio)
    surrogate = losses.clipped_surrogate(*arguments, clip=clip, level=level)
    assert_twin(surrogate, twins.clipped_surrogate(ratio, gains, low, high))
    weighted = losses.weighted_policy_gradient(*arguments, clip=clip, level=level)
    assert_twin(weighted, twins.weighted_policy_gradient(logprobs, ratio, gains, low, high))


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
@given(seed=SEEDS)
def test_kl_estimators_of_tokens_and_of_whole_completions(estimator: str, seed: int) -> None:
    logprobs, reference, _, rollout = random_tokens(seed)
    arguments = [torch.from_numpy(column) for column in (logprobs, reference, rollout)]
    assert_twin(kl.ESTIMATORS[estimator](*arguments[:2]), twins.kl(estimator, logprobs, reference))
    whole = kl.of_completions(*arguments, estimator=estimator)
    assert_twin(whole, twins.completion_kl(estimator, logprobs, reference, rollout))


@given(seed=SEEDS)
def test_full_kl(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, reference = rng.normal(0, 3, size=(2, rng.integers(1, 5), rng.integers(2, 9)))
    found = distribution_kl(torch.from_numpy(logits), torch.from_numpy(reference))
    assert_twin(found, twins.full_kl(logits, reference))


@pytest.mark.parametrize("rule", ["mean_over_tokens", "mean_over_sequences", "sum_over_sequence", "constant_length"])
@settings(max_examples=40)
@given(completions=st.lists(st.tuples(st.integers(1, 400), st.booleans()), min_size=1, max_size=12))
def test_token_weights(rule: str, completions: list[tuple[int, bool]]) -> None:
    lengths, scored = [length for length, _ in completions], [keep for _, keep in completions]
    weights = getattr(losses, rule)(torch.tensor(lengths), torch.tensor(scored), max_completion_tokens=400)
    expected = [twins.token_weight(rule, lengths, scored, i, 400) for i in range(len(lengths))]
    assert_twin(weights, np.array(expected))


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=6), buffer=st.floats(0.01, 1), penalty=st.floats(0.01, 3)
)
def test_overlong_punishment(lengths: list[int], buffer: float, penalty: float) -> None:
    overlong, ones = Overlong(buffer=buffer, penalty=penalty), torch.ones(1, len(lengths), dtype=torch.float64)
    shaped = overlong_punishment(ones, torch.tensor([lengths]), max_completion_tokens=400, overlong=overlong)
    expected = [1 - twins.overlong(length, 400, buffer, penalty) for length in lengths]
    assert_twin(shaped, np.array([expected]), tolerance=1e-10)


class Rows:
    """log-probs of every token of some pairs as a padded batch holds them: chosen rows first, then rejected ones."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.count = int(rng.integers(1, 5))
        width = int(rng.integers(2, 8))
        self.mask = np.arange(width) < rng.integers(1, width + 1, size=(2 * self.count, 1))
        self.policy, self.reference = (-rng.exponential(1, size=self.mask.shape) for _ in range(2))

    def sums(self, logprobs: np.ndarray) -> OfPairs:
        return self.halves((logprobs * self.mask).sum(axis=1))

    def halves(self, column: np.ndarray) -> OfPairs:
        return OfPairs(*(torch.from_numpy(half.astype(float)) for half in np.split(column, 2)))

    def ours(self, **options: object) -> np.ndarray:
        lengths = self.halves(self.mask.sum(axis=1))
        objective = PairObjective(**options)
        return objective.losses(self.sums(self.policy), self.sums(self.reference), lengths).numpy()


def twin(rows: Rows, row: int, name: str, *, beta: float, smoothing: float, normalized: bool) -> float:
    """The loss of one pair from probabilities: no logarithm of a sigmoid, no sum of logs but that of each answer."""
    gap = 0.0
    for sign, answer in ((1, row), (-1, row + rows.count)):
        ratio = math.prod(
            math.exp(p) / math.exp(r)
            for p, r, there in zip(rows.policy[answer], rows.reference[answer], rows.mask[answer], strict=True)
            if there
        )
        gap += sign * math.log(ratio) / (rows.mask[answer].sum() if normalized else 1)

    def loss(h: float) -> float:
        if name in ("sigmoid", "robust"):
            return -math.log(math.exp(beta * h) / (math.exp(beta * h) + 1))
        return max(0.0, 1 - beta * h) if name == "hinge" else (h - 0.5 / beta) ** 2

    if name == "robust":
        return ((1 - smoothing) * loss(gap) - smoothing * loss(-gap)) / (1 - 2 * smoothing)
    return (1 - smoothing) * loss(gap) + smoothing * loss(-gap)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.15])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@settings(max_examples=20)
@given(seed=SEEDS)
def test_every_loss_is_that_of_its_twin(name: str, smoothing: float, normalized: bool, seed: int) -> None:
    rows = Rows(seed)
    given = {"label_smoothing": smoothing, "unbiased_smoothing": name == "robust", "length_normalized": normalized}
    found = rows.ours(loss=PREFERENCE_LOSSES[name], beta=0.4, **given)
    how = {"beta": 0.4, "smoothing": smoothing, "normalized": normalized}
    expected = [twin(rows, row, name, **how) for row in range(rows.count)]
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def trl(rows: Rows, loss_type: str, beta: float) -> torch.Tensor:
    """What TRL 1.16's `DPOTrainer` computes of such a batch, its loss types written out again."""
    policy, reference, mask = (torch.from_numpy(each) for each in (rows.policy, rows.reference, rows.mask))
    chosen, rejected = ((policy * mask).sum(1) - (reference * mask).sum(1)).chunk(2)
    chosen_length, rejected_length = mask.sum(1).clamp(min=1.0).chunk(2)
    delta = chosen - rejected
    mean_delta = chosen / chosen_length - rejected / rejected_length
    return {
        "sigmoid": -torch.nn.functional.logsigmoid(beta * delta),
        "hinge": torch.relu(1 - beta * delta),
        "ipo": (mean_delta - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": -torch.nn.functional.logsigmoid(beta * mean_delta),
    }[loss_type]


@pytest.mark.parametrize(
    ("loss_type", "options"),
    [
        ("sigmoid", {}),
        ("hinge", {"loss": PREFERENCE_LOSSES["hinge"]}),
        ("ipo", {"loss": PREFERENCE_LOSSES["ipo"], "length_normalized": True}),
        ("sigmoid_norm", {"length_normalized": True}),
    ],
)
@settings(max_examples=20)
@given(seed=SEEDS, beta=st.floats(0.05, 3))
def test_trl_s_loss_types_are_ours(loss_type: str, options: dict[str, object], seed: int, beta: float) -> None:
    rows = Rows(seed)
    np.testing.assert_allclose(rows.ours(beta=beta, **options), trl(rows, loss_type, beta).numpy(), rtol=1e-12, atol=0)


END = 0
"""The id of <|end|>, which texts may hold and end with."""
PADS = {"another token": 1, "the end token": END, "none": None}
ROWS = [[5, 6, 7], [9, END, 11, END], [4], [8, 8, END, 8, 8, 8, 8, 8, 8], [12, 1, 1]]
"""Of one token, with the end token inside and last, and with the usual pad token last."""


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_is_read_at_its_last_token_whatever_it_pads_with(kind: str, pad: str) -> None:
    model = classifier(kind, pad=PADS[pad], labels=("a", "b"))
    scores = classifier_scores(model, pad_id=PADS[pad], where="rewards")
    assert scores.reading is ScoreReading.LAST_TOKEN
    found = scores.of_rows(ROWS, tokens_per_batch=1000)
    torch.testing.assert_close(found.double(), twin_scores(model, ROWS), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in DECODERS])
def test_an_encoder_is_read_by_its_own_forward_pass(kind: str) -> None:
    model = classifier(kind)
    scores = classifier_scores(model, pad_id=1, where="rewards")
    assert scores.reading is ScoreReading.OWN_FORWARD
    rows = [row for row in ROWS if 1 not in row]  # which RoBERTa takes for padding, wherever it stands
    found = scores.of_rows(rows, tokens_per_batch=1000)
    torch.testing.assert_close(found.double(), twin_scores(model, rows), rtol=2e-5, atol=2e-5)


def own_forward(model: torch.nn.Module, rows: list[list[int]], pad: int) -> torch.Tensor:
    """What transformers' class says of a batch, padded on the right as its tokenizers do."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits.double()


def test_transformers_itself_reads_texts_that_end_in_the_pad_token_too_early_and_refuses_batches_without_one() -> None:
    model = classifier("llama", pad=END)
    theirs, truth = own_forward(model, ROWS, END), twin_scores(model, ROWS)
    early = twin_scores(model, [row[:-1] if row[-1] == END else row for row in ROWS])
    torch.testing.assert_close(theirs, early, rtol=2e-5, atol=2e-5)  # [9, END, 11] in place of [9, END, 11, END]
    assert (theirs - truth).abs().max() > 0.01
    with refused("no padding token", error=ValueError):
        own_forward(classifier("llama", pad=None), ROWS, END)


class MeanOfTokens(torch.nn.Module):
    """A head that is not a linear layer: what it does of a batch is not known."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden.mean(dim=1, keepdim=True).expand_as(hidden))


def test_a_model_that_no_batch_agrees_with_is_read_row_by_row_and_says_so() -> None:
    model = classifier("llama")
    model.score = MeanOfTokens(model.score)  # of padding too
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reward = RewardModel(model, tokenizer=reward_tokenizer())
    assert reward.scores.reading is ScoreReading.ONE_BY_ONE
    assert any("one by one, which is slow" in str(each.message) for each in said)
    together = reward(prompts=["a", "bcd"], completions=["e", "fghijk"])
    apart = [reward(prompts=[p], completions=[c])[0] for p, c in (("a", "e"), ("bcd", "fghijk"))]
    assert together == apart


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), budget=st.integers(1, 120))
def test_batches_keep_to_their_budget_hold_every_row_once_and_put_like_lengths_together(lengths, budget) -> None:
    rows = [(place,) * length for place, length in enumerate(sorted(lengths))]
    made = list(batches(rows, budget))
    assert [row for batch in made for row in batch] == rows
    for batch, behind in zip(made, [*made[1:], []], strict=True):
        assert len(batch) == 1 or len(batch) * len(batch[-1]) <= budget
        if behind:  # the next one did not fit
            assert (len(batch) + 1) * len(behind[0]) > budget


@pytest.mark.parametrize("budget", [1, 12, 1000])
def test_no_budget_and_no_order_changes_a_score(budget: int) -> None:
    model = classifier("qwen3")
    scores = classifier_scores(model, pad_id=1, where="rewards")
    whole = scores.of_rows(ROWS, tokens_per_batch=1000)
    other = scores.of_rows([*ROWS[::-1], ROWS[0]], tokens_per_batch=budget)
    torch.testing.assert_close(other, torch.cat([whole.flip(0), whole[:1]]), rtol=1e-5, atol=1e-6)


def test_equal_rows_go_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier("qwen3")
    scores, seen = classifier_scores(model, pad_id=1, where="rewards"), []
    forward = model.base_model.forward
    monkeypatch.setattr(
        model.base_model, "forward", lambda **given: (seen.append(len(given["input_ids"])), forward(**given))[1]
    )
    assert len(scores.of_rows([ROWS[0]] * 5 + [ROWS[1]], tokens_per_batch=1000)) == 6
    assert seen == [2]


def test_a_folder_is_read_as_the_object_that_was_saved(tmp_path: Path) -> None:
    model = classifier("gpt2", labels=("bad", "good"))
    model.save_pretrained(tmp_path)
    reward_tokenizer().save_pretrained(tmp_path)
    of_folder = RewardModel(tmp_path, label="good")
    of_object = RewardModel(model, tokenizer=reward_tokenizer(), label=1)
    given = {"prompts": ["a", "bc"], "completions": ["d", ""]}
    assert of_folder(**given) == of_object(**given)
    rows = [of_folder.text.tokens("a", "d"), of_folder.text.tokens("bc", "")]
    expected = twin_scores(model, rows)[:, 1]
    torch.testing.assert_close(torch.tensor(of_folder(**given)).double(), expected, rtol=2e-5, atol=2e-5)
