"""Scores of reward models beside a twin in float64 that reads one row at a time, whatever they are padded with.

transformers' own classifiers are tried beside both: what they make of the same rows is why theirs are not used.
"""

import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.models.classifiers.last_token_scores import ScoreReading, batches, classifier_scores
from posttrain.rewards.model import RewardModel
from tests.support.refusals import refused
from tests.support.reward_models import DECODERS, KINDS, classifier, reward_tokenizer, twin_scores

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


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    budget=st.integers(1, 120),
)
def test_batches_keep_to_their_budget_hold_every_row_once_and_put_like_lengths_together(
    lengths: list[int], budget: int
) -> None:
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
