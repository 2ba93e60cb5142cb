"""What the engine records beside tokens, where stop texts and broken logits end it, and `posttrain.generate`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import posttrain
from posttrain.errors import RunError
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.policy import Policy
from posttrain.options.model import ModelOptions
from posttrain.options.rollout import SamplingParams
from posttrain.records import Finish, Grades, Group, Prompt
from posttrain.runs.run_folder import RunFolder
from tests.support.engines import ChangedEngine
from tests.support.refusals import refused
from tests.support.runs import SHAPE, save_tiny_model
from tests.support.tiny import (
    STOP_IDS,
    VOCAB,
    next_logprobs,
    plain_logprobs,
    request,
    some_prompts,
    tiny_policy,
    tokenizer,
)

SHAPES = True
ROUNDING = 1e-12
LENGTHS = (3, 7, 1, 12)


def tokens_of(groups: Sequence[Group]) -> list[list[tuple[int, ...]]]:
    return [[rollout.tokens for rollout in group.rollouts] for group in groups]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(top_k=3), SamplingParams(top_p=0.6, temperature=1.5), SamplingParams(min_p=0.3)]
)
def test_under_a_cut_both_log_probs_are_recorded(sampling: SamplingParams) -> None:
    policy = tiny_policy("qwen2")
    groups = sample_groups(InProcessEngine(policy), some_prompts([4, 2]), request(3, 6, sampling))
    for group in groups:
        for rollout in group.rollouts:
            for t, token in enumerate(rollout.tokens):
                full = next_logprobs(policy.model, (*group.prompt.tokens, *rollout.tokens[:t]), sampling.temperature)
                ordered = full.exp().sort(descending=True).values
                if sampling.top_k:
                    kept = ordered[:3].sum()
                elif sampling.min_p:
                    kept = ordered[ordered >= 0.3 * ordered[0]].sum()
                else:  # the fewest that hold 0.6
                    kept = ordered[: int((ordered.cumsum(0) < 0.6).sum()) + 1].sum()
                assert rollout.logprobs[t] == pytest.approx(full[token].item(), abs=ROUNDING)
                assert rollout.cut_logprobs[t] == pytest.approx((full[token] - kept.log()).item(), abs=1e-11)


def test_suppressed_tokens_never_appear() -> None:
    engine, prompts, suppressed = InProcessEngine(tiny_policy()), some_prompts([4] * 4), (0, 9, 15, *STOP_IDS)
    assert {0, 9, 15} & {
        t for g in tokens_of(sample_groups(engine, prompts, request(8))) for tokens in g for t in tokens
    }
    groups = sample_groups(engine, prompts, request(8, suppressed=suppressed))
    assert not set(suppressed) & {token for group in tokens_of(groups) for tokens in group for token in tokens}
    # The recorded log-probs are those among the other tokens.
    first = groups[0].rollouts[0]
    assert first.cut_logprobs is None, "nothing is cut"
    everything = next_logprobs(engine.policy.model, groups[0].prompt.tokens)
    rest = everything.index_fill(0, torch.tensor(suppressed), -math.inf)
    assert first.logprobs[0] == pytest.approx((rest[first.tokens[0]] - rest.logsumexp(0)).item(), abs=ROUNDING)


def test_every_rollout_says_which_weights_sampled_it() -> None:
    engine, versions = InProcessEngine(tiny_policy()), [0, 9, 12]
    seen = []
    for following in [*versions[1:], None]:
        (group,) = sample_groups(engine, some_prompts([4]), request())
        seen.append(engine.weights_version)
        assert {rollout.weights_version for rollout in group.rollouts} == {engine.weights_version}
        if following is not None:
            engine.load(engine.policy.model.state_dict(), following)
    assert seen == versions


def test_progress_is_told_of_every_completion() -> None:
    counts: list[int] = []
    sample_groups(InProcessEngine(tiny_policy(), max_rows=3), some_prompts(LENGTHS), request(2), advance=counts.append)
    assert sum(counts) == 8
    assert len(counts) > 2


PROMPTS = [Prompt(id=f"p{n}", text="", tokens=tuple(range(3, 5 + n))) for n in range(3)]
KEPT = 4


ASKED = replace(request(3, 6, SamplingParams(temperature=0.7)), keep_alternatives=KEPT)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.7), SamplingParams(top_k=2), SamplingParams(greedy=True)], ids=str
)
def test_they_are_the_policys_likeliest_tokens_before_any_cut(sampling: SamplingParams) -> None:
    policy = tiny_policy()
    asked = replace(ASKED, sampling=sampling)
    for group in sample_groups(InProcessEngine(policy, max_rows=4), PROMPTS, asked):
        for rollout in group.rollouts:
            inputs = torch.tensor([[*group.prompt.tokens, *rollout.tokens]])
            logits = policy.model(inputs).logits[0, len(group.prompt.tokens) - 1 : -1].detach()
            expected = (logits / sampling.recorded_temperature).log_softmax(dim=-1).topk(KEPT)
            assert [[token for token, _ in each] for each in rollout.alternatives] == expected.indices.tolist()
            found = torch.tensor([[logprob for _, logprob in each] for each in rollout.alternatives])
            torch.testing.assert_close(found.to(expected.values), expected.values, rtol=0, atol=1e-5)


def test_asking_for_them_changes_nothing_else() -> None:
    engine = InProcessEngine(tiny_policy(), max_rows=4)
    with_them, without = (sample_groups(engine, PROMPTS, replace(ASKED, keep_alternatives=kept)) for kept in (KEPT, 0))
    for group, other in zip(with_them, without, strict=True):
        assert tuple(replace(each, alternatives=None) for each in group.rollouts) == other.rollouts


def test_an_engine_that_leaves_them_out_is_refused() -> None:
    engine = ChangedEngine(tiny_policy(), lambda sampled: replace(sampled, alternatives=None))
    with refused("alternatives of 0 tokens", "rollout.keep_alternatives", error=RunError):
        sample_groups(engine, PROMPTS, ASKED)


def test_the_rollout_file_has_them(tmp_path: Path) -> None:
    groups = sample_groups(InProcessEngine(tiny_policy()), PROMPTS, ASKED)
    scores = torch.zeros(3, 3, dtype=torch.float64)
    grades = Grades(names=("a",), scores=scores[None], weights=torch.ones(1, dtype=torch.float64), rewards=scores)
    with RunFolder.create(tmp_path, "seed: 7\n") as run:
        table = pq.read_table(run.write_rollouts(1, groups, grades, scores)).to_pydict()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout, kept in zip(rollouts, table["alternative_tokens"], strict=True):
        assert kept == [[token for token, _ in each] for each in rollout.alternatives]
    assert [[len(each) for each in row] for row in table["alternative_logprobs"]] == [
        [KEPT] * len(each.tokens) for each in rollouts
    ]


@pytest.mark.parametrize("limit", [1, 3])
def test_logits_that_are_no_numbers_are_told_with_the_prompt_that_gave_them(limit: int) -> None:
    policy = tiny_policy("llama")  # whose embedding is not its output matrix
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[20] = math.nan
    prompts = [Prompt(id=name, text="", tokens=tokens) for name, tokens in (("good", (1, 2)), ("bad", (3, 20)))]
    # No other token than these two, so that the good one stays good.
    others = tuple(token for token in range(24) if token not in {1, 2})
    with refused("prompt bad, sample", "NaN", error=RunError):
        sample_groups(InProcessEngine(policy), prompts, request(2, limit, suppressed=(*others, *STOP_IDS)))


class CopiedLogits(TorchDispatchMode):
    """Counts rows of logits that are copied from one tensor into another."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.index_select, torch.ops.aten.cat) and out.shape[1:] == (VOCAB,):
            self.rows += len(out)
        return out


def test_the_logits_of_prompts_are_copied_once_for_their_rows() -> None:
    engine, prompts = InProcessEngine(tiny_policy("llama")), some_prompts((3, 5))
    with CopiedLogits() as copied:
        sample_groups(engine, prompts, request(4, 1))
    assert copied.rows == 8


def of_pieces(pieces: Sequence[str], decoder: object) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are these pieces."""
    known = ["<|end|>", "<|pad|>", *pieces][:VOCAB]
    made = Tokenizer(WordLevel({piece: number for number, piece in enumerate(known)}, unk_token="<|pad|>"))
    made.decoder = decoder
    made.add_special_tokens(["<|end|>", "<|pad|>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<|pad|>")


SPACES = of_pieces([*"▁abcdefghijklmnopqrstu"], decoders.Metaspace())
"""A piece is a space; what is decoded loses the space that it begins with."""
MARKS = of_pieces(["a", *(f"##{each}" for each in "bcdefghijklmnopqrstuv")], decoders.WordPiece("##", cleanup=False))
"""Letters that go on a word show their mark only where a text begins with one."""


def up_to_a_text(made: PreTrainedTokenizerBase, tokens: tuple[int, ...], texts: tuple[str, ...]) -> tuple[int, ...]:
    """The tokens up to the one that completes a text, by the definition."""
    for length in range(1, len(tokens) + 1):
        whole = made.decode(tokens[:length], skip_special_tokens=False)
        if any(text in whole for text in texts):
            return tokens[:length]
    return tokens


def letters(texts: list[str], size: int) -> str:
    """That many tokens of a letter each that some completion has in its middle."""
    runs = [text[at : at + size] for text in texts for at in range(2, len(text) - size)]
    return next(run for run in runs if "<" not in run and ">" not in run)


def many(said: list[str]) -> tuple[str, ...]:
    """Pairs of letters, pairs behind a space, what is never written, and a special token, also behind a letter."""
    pairs = {text[at : at + 2] for text in said for at in range(1, len(text) - 1) if "<" not in text[at : at + 2]}
    spaced = sorted(pair for pair in pairs if pair[0] == " " and pair[1] != " ")[:3]
    return (*sorted(pairs)[3:6], *spaced, "never written", f"{said[0][2:3]}<|pad|>", "<|pad|>")


STOPS: dict[str, tuple[PreTrainedTokenizerBase, Callable[[list[str]], tuple[str, ...]]]] = {
    "letters": (tokenizer(), many),
    "spaces as pieces": (SPACES, many),
    "six tokens": (tokenizer(), lambda said: (letters(said, 6),)),
    "six beside one": (tokenizer(), lambda said: (letters(said, 6), "\x00")),  # as far back as the longest goes
    # Decoded alone, the tokens of " x" lose their space: one more is looked at.
    "a space": (SPACES, lambda said: (next(f" {text[text.index(' ', 1) + 1]}" for text in said if " " in text[1:]),)),
    # The last tokens, decoded alone, begin with a mark that is not in the whole.
    "a mark": (MARKS, lambda said: ("##d", "##m")),
}


@pytest.mark.parametrize("stop", STOPS)
def test_a_completion_ends_behind_the_token_that_completes_a_stop_text(stop: str) -> None:
    made, chosen = STOPS[stop]
    engine = InProcessEngine(replace(tiny_policy(), tokenizer=made))
    prompts, asked = some_prompts((3, 7, 1, 12, 5, 4)), request(8, 20)
    whole = [rollout for group in sample_groups(engine, prompts, asked) for rollout in group.rollouts]
    texts = chosen([made.decode(rollout.tokens, skip_special_tokens=False) for rollout in whole])
    again = [r for group in sample_groups(engine, prompts, replace(asked, stop_texts=texts)) for r in group.rollouts]
    assert [rollout.tokens for rollout in again] == [up_to_a_text(made, each.tokens, texts) for each in whole]
    shorter = [(now, before) for now, before in zip(again, whole, strict=True) if now.tokens != before.tokens]
    assert shorter
    assert {now.finish for now, _ in shorter} <= {Finish.LENGTH}
    for now, before in shorter:
        assert now.logprobs == pytest.approx(before.logprobs[: len(now.tokens)], abs=1e-12)


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
QUESTIONS = ["12+30=", "7*8 is "]


@pytest.fixture(scope="module")
def policy() -> Policy:
    tokenizer = new_tokenizer()
    return posttrain.as_policy(new_model(SHAPE, tokenizer, seed=0), tokenizer)


def test_tokens_log_probs_and_texts_are_the_models_own(policy: Policy) -> None:
    groups = posttrain.generate(policy, QUESTIONS, group_size=3, max_completion_tokens=6, temperature=0.8)
    assert [group.prompt.text for group in groups] == QUESTIONS
    assert [len(group.rollouts) for group in groups] == [3, 3]
    for group in groups:
        for rollout in group.rollouts:
            own = plain_logprobs(policy.model, group.prompt.tokens, rollout.tokens, temperature=0.8)
            assert rollout.logprobs == pytest.approx(own.tolist(), abs=1e-5)
            ended = rollout.tokens[-1] in policy.stop_ids
            assert rollout.finish == (Finish.STOP if ended else Finish.LENGTH)
            kept = rollout.tokens[: len(rollout.tokens) - ended]
            assert rollout.text == policy.tokenizer.decode(kept)


def test_a_folder_a_model_object_and_conversations_are_taken(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    spoken = new_tokenizer()
    spoken.chat_template = TEMPLATE
    spoken.save_pretrained(folder)
    talk = [{"role": "user", "content": "12+30?"}, {"role": "assistant", "content": "It is"}]
    (of_folder,) = posttrain.generate(folder, [talk], max_completion_tokens=4)
    assert of_folder.prompt.text == "user: 12+30?\nassistant: It is"
    assert of_folder.prompt.prefill == "It is"

    loaded = load_policy(ModelOptions(path=str(folder)))
    (of_object,) = posttrain.generate(loaded.model, [talk], tokenizer=loaded.tokenizer, max_completion_tokens=4)
    assert of_object.rollouts == of_folder.rollouts


def test_mistakes_are_told_in_words(policy: Policy) -> None:
    message = {"role": "user", "content": "12+30?"}
    for arguments, options, says in (
        ((policy.model, "1"), {}, "needs its tokenizer"),
        ((policy, "1"), {"tokenizer": policy.tokenizer}, "a policy and a folder have their own"),
        ((policy, "1"), {"group_size": 0}, "group_size = 0"),
        ((policy, [message]), {}, "a prompt is a single message"),
        ((policy, "1"), {"temprature": 1.0}, "Did you mean `temperature`"),
        ((policy, "1"), {"max_completion_tokens": 0}, "generate: max_completion_tokens = 0"),
    ):
        with refused(says):
            posttrain.generate(*arguments, **options)  # type: ignore[arg-type]
    assert posttrain.generate(policy, []) == []
