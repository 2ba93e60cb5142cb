"""What is learned of a conversation is what the model would say, token by token, and nothing else.

The traps of chat templates, each by what it does to a mask: turns without a stop token, templates that tell nothing,
that drop thoughts or rewrite earlier turns, tokens that merge where the answer begins, pad = eos.
"""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, strategies as st
from tokenizers import pre_tokenizers

from posttrain.models.conversation_masks import Dialogue, Masking
from posttrain.models.rendering import TokenizerRenderer, token_ids
from posttrain.options.dataset import DatasetOptions
from posttrain.options.training import SftOptions
from posttrain.records import Example
from posttrain.tasks.row_files.rows import BadRows, DatasetRow
from posttrain.training.sft.example_maker import ExampleMaker, learned_rows
from tests.support import conversations
from tests.support.conversations import CHATML, FORGETFUL, PHI, TAGGED, THOUGHTLESS, WORDY, chat_tokenizer, turns
from tests.support.refusals import refused

TWO = turns("What?", "This, <b>.", "And?", "That", system="Be brief.")
THINKING = turns("1+1?", "<think>\none and one\n</think>\n\n2", "2+2?", "<think>\ntwo and two\n</think>\n\n4")


def masking(template: str = CHATML) -> Masking:
    tokenizer = chat_tokenizer(template)
    return Masking(renderer=TokenizerRenderer(tokenizer), stop_ids=(tokenizer.eos_token_id,))


def conversation(messages: Sequence[Mapping[str, object]], num_given: int = 0) -> Dialogue:
    return Dialogue(where="rows.jsonl:7", messages=messages, num_given=num_given)


def learned(mask: Masking, example: Example) -> list[str]:
    """The spans of learned tokens as text."""
    spans: list[list[int]] = [[]]
    for token, each in zip(example.tokens, example.sampled, strict=True):
        if each:
            spans[-1].append(token)
        elif spans[-1]:
            spans.append([])
    return [mask.tokenizer.decode(span) for span in spans if span]


def text(mask: Masking, example: Example) -> str:
    return str(mask.tokenizer.decode(example.tokens))


def test_every_turn_of_the_assistant_is_learned_with_its_stop_token_and_nothing_else_is() -> None:
    # A template that tells nothing of who speaks, as most published ones: the mask is not empty and not all.
    mask = masking()
    example = mask.every_turn(conversation(TWO))
    assert learned(mask, example) == ["This, <b>.<|im_end|>", "That<|im_end|>"]
    # Up to the last stop token; the line's end behind it is the template's.
    assert text(mask, example) == mask.renderer.templated(TWO, "", open_answer=False).removesuffix("\n")


def test_what_tools_and_users_say_is_never_learned_though_an_answer_surrounds_it() -> None:
    messages = [*turns("Look it up", "call"), {"role": "tool", "content": "found"}, *turns("", "so")[1:]]
    mask = masking()
    assert learned(mask, mask.every_turn(conversation(messages))) == ["call<|im_end|>", "so<|im_end|>"]
    assert learned(mask, mask.every_turn(conversation(messages, num_given=2))) == ["so<|im_end|>"]


@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=2, max_size=8))
def test_the_last_learned_token_of_each_turn_is_a_stop_token(texts: list[str]) -> None:
    messages = turns(*texts[: len(texts) // 2 * 2])
    mask = masking()
    example = mask.every_turn(conversation(messages))
    places = zip(example.tokens, example.sampled, (*example.sampled[1:], False), strict=True)
    assert [token for token, here, after in places if here and not after] == [mask.stop] * (len(messages) // 2)
    answers = [f"{message['content']}<|im_end|>" for message in messages[1::2]]
    assert learned(mask, example) == answers
    assert not example.sampled[0]


@given(texts=st.lists(st.text("ab <>\n", max_size=8), min_size=2, max_size=6))
def test_masks_agree_with_those_of_a_template_that_tells_what_is_generated(texts: list[str]) -> None:
    mask = masking(TAGGED)
    messages = turns(*texts[: len(texts) // 2 * 2])
    told = mask.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    example = mask.every_turn(conversation(messages))
    length = len(example.tokens)
    assert list(example.tokens) == told["input_ids"][:length]
    assert list(map(int, example.sampled)) == told["assistant_masks"][:length]
    assert not any(told["assistant_masks"][length:])


@pytest.mark.parametrize("template", [CHATML, THOUGHTLESS, FORGETFUL])
def test_a_turn_by_itself_is_learned_behind_what_the_model_reads_when_it_is_asked(template: str) -> None:
    mask = masking(template)
    rows = mask.turn_by_turn(conversation(THINKING))
    assert rows[-1] == mask.last_turn(conversation(THINKING))
    for number, example in zip((1, 3), rows, strict=True):
        asked = mask.renderer.render(THINKING[:number], id="")
        assert example.tokens[: len(asked.tokens)] == asked.tokens
        # Where the template drops the thoughts of the answer itself, the text as it stands is learned.
        assert learned(mask, example) == [f"{THINKING[number]['content']}<|im_end|>"]


def test_thoughts_that_the_template_opens_are_not_opened_twice() -> None:
    mask = masking(conversations.OPENING)
    with refused("begins it differently"):
        mask.every_turn(conversation(THINKING[:2]))
    example = mask.last_turn(conversation(THINKING[:2]))
    assert text(mask, example).count("<think>") == 1
    assert learned(mask, example) == ["one and one\n</think>\n\n2<|im_end|>"]


def test_an_answer_begins_at_a_token_that_the_model_can_sample() -> None:
    # " th" and "e" merge over the place where the answer begins; asked, the model has read "assistant: " to its space.
    mask = masking(conversations.CLOSED)
    messages = turns("Which?", "the")
    opened = mask.renderer.templated(messages[:1], "")
    before = token_ids(mask.tokenizer, opened, special=False)
    assert token_ids(mask.tokenizer, f"{opened}the", special=False)[: len(before)] != before
    with refused("message 1: the chat template begins it differently"):
        mask.every_turn(conversation(messages))
    example = mask.last_turn(conversation(messages))
    assert list(example.tokens[: len(before)]) == before
    assert learned(mask, example) == ["the<|im_end|>"]


@pytest.mark.parametrize("way", ["every_turn", "last_turn"])
def test_a_turn_that_ends_with_no_stop_token_is_told_with_the_option_that_makes_it_one(way: str) -> None:
    tokenizer = chat_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    base = Masking(renderer=TokenizerRenderer(tokenizer), stop_ids=(0,))  # a base model: <|end|>
    with refused("message 1:", "ends the assistant's turn with", "stops at '<|end|>'", "model.stop_tokens"):
        getattr(base, way)(conversation(turns("a", "b")))
    both = Masking(renderer=base.renderer, stop_ids=(0, end))
    assert getattr(both, way)(conversation(turns("a", "b"))).tokens[-1] == end
    with refused("ends the assistant's turn with '", "</turn>'"):
        getattr(masking(WORDY), way)(conversation(turns("a", " b")))
    # A stop token within the answer is not the end of its turn.
    with refused("ends the assistant's turn with"):
        getattr(base, way)(conversation(turns("a", "b <|end|> c")))


@pytest.mark.parametrize("way", ["every_turn", "last_turn"])
def test_a_turn_ends_at_its_first_stop_token_where_the_template_ends_the_conversation_with_another(way: str) -> None:
    tokenizer = chat_tokenizer(PHI)
    tokenizer.eos_token = "<|end|>"
    stops = (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    mask = Masking(renderer=TokenizerRenderer(tokenizer), stop_ids=stops)
    whole = mask.renderer.templated(TWO, "", open_answer=False)
    assert whole.endswith("That<|im_end|>\n<|end|>")
    example = getattr(mask, way)(conversation(TWO))
    assert text(mask, example) == whole.removesuffix("\n<|end|>")
    answers = ["This, <b>.<|im_end|>", "That<|im_end|>"]
    assert learned(mask, example) == (answers if way == "every_turn" else answers[1:])


def marked_turns(**marks: object) -> list[dict[str, object]]:
    """Two answers, of which the first has these keys."""
    return [{**message, **marks} if message["content"] == "b" else message for message in turns("a", "b", "c", "d")]


@pytest.mark.parametrize("marks", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False, "weight": 0}])
def test_a_turn_that_is_marked_as_not_learned_is_read_and_not_learned(marks: dict[str, object]) -> None:
    mask = masking()
    talk = conversation(marked_turns(**marks))
    example = mask.every_turn(talk)
    assert example.tokens == mask.every_turn(conversation(turns("a", "b", "c", "d"))).tokens
    assert learned(mask, example) == ["d<|im_end|>"]
    assert mask.turn_by_turn(talk) == [mask.last_turn(talk)]
    # Of all tokens, those of the turn itself are left out.
    assert learned(mask, mask.all_tokens(talk)) == [
        "user\na<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n",
    ]


def test_turns_that_are_marked_as_learned_are_those_that_are_not_marked() -> None:
    mask = masking()
    for marks in ({"weight": 1}, {"train": True}, {"weight": None}):
        assert mask.every_turn(conversation(marked_turns(**marks))) == mask.every_turn(conversation(marked_turns()))


TURN = "rows.jsonl:7, message 1: "
EVERY = ("every_turn", "last_turn", "turn_by_turn")
REFUSED: list[tuple[str, Sequence[Mapping[str, object]], Sequence[str], str]] = [
    (CHATML, marked_turns(weight=0)[:2], ("every_turn",), "rows.jsonl:7: nothing to learn…marked as not learned"),
    (CHATML, [*turns("a", "b", "c"), marked_turns(weight=0)[1]], ("last_turn",), "its last turn is marked as not"),
    (CHATML, marked_turns(weight=0.5), ("every_turn",), TURN + "weight = 0.5 must be 0"),
    (CHATML, marked_turns(train="no"), ("every_turn",), TURN + "train = 'no' must be 0"),
    (CHATML, marked_turns(weight=1, train=False), ("every_turn",), TURN + "weight, train contradict each other"),
    (CHATML, marked_turns(train_detail=[]), ("every_turn",), TURN + "the key `train_detail`"),
    (CHATML, [{**turns("a")[0], "weight": 1}, *turns("a", "b")[1:]], ("every_turn",), "message 0: weight…user"),
    (CHATML, turns("a"), EVERY, "rows.jsonl:7: nothing to learn…roles: user"),
    (CHATML, [{"role": "assistant", "content": "b"}], EVERY, "rows.jsonl:7: begins with the assistant's answer"),
    (THOUGHTLESS, THINKING, ("every_turn",), TURN + "the chat template…once more follows…split_turns"),
    (FORGETFUL, THINKING[:2], ("every_turn",), TURN + "…leaves out a part of its text…loss_on: completion"),
]


@pytest.mark.parametrize(("template", "messages", "ways", "words"), REFUSED)
def test_a_conversation_that_cannot_be_learned_is_refused_by_row_and_turn(template, messages, ways, words) -> None:
    for way in ways:
        with refused(words):
            getattr(masking(template), way)(conversation(messages))


def test_a_conversation_that_ends_with_a_question_has_no_last_turn() -> None:
    with refused("rows.jsonl:7: ends with a message of the role user"):
        masking().last_turn(conversation(TWO[:-1]))
    mask = masking()
    assert learned(mask, mask.every_turn(conversation(TWO[:-1]))) == ["This, <b>.<|im_end|>"]


def test_a_pad_token_that_is_the_stop_token_loses_nothing() -> None:
    mask = masking()
    examples = [mask.every_turn(conversation(TWO)), mask.completion(mask.renderer.render("2+2=", id=""), "4")]
    mask.tokenizer.pad_token = mask.tokenizer.eos_token
    assert [mask.every_turn(conversation(TWO)), mask.completion(mask.renderer.render("2+2=", id=""), "4")] == examples
    assert all(example.tokens[-1] == mask.stop and example.sampled[-1] for example in examples)


@pytest.mark.parametrize("answer", ["4", " the", "4<|im_end|>"])
def test_a_plain_completion_stands_behind_the_prompt_as_it_is_asked_and_ends_with_one_stop_token(answer: str) -> None:
    mask = masking()
    prompt = mask.renderer.render("2+2= ", id="")
    example = mask.completion(prompt, answer)
    assert example.tokens[: len(prompt.tokens)] == prompt.tokens
    assert learned(mask, example) == [f"{answer.removesuffix('<|im_end|>')}<|im_end|>"]
    assert example.tokens.count(mask.stop) == 1


def test_a_text_ends_with_the_tokenizer_s_own_stop_token_where_the_model_has_several() -> None:
    mask = masking()
    several = Masking(renderer=mask.renderer, stop_ids=(0, mask.stop))
    assert several.completion(mask.renderer.render("2+2=", id=""), "4").tokens[-1] == mask.stop
    own = mask.tokenizer.eos_token
    mask.tokenizer.eos_token = None
    assert several.text(mask.renderer.render("some", id="")).tokens[-1] == 0
    mask.tokenizer.eos_token = own


def test_a_tokenizer_that_begins_every_text_with_a_space_puts_none_before_the_answer() -> None:
    mask = masking()
    mask.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    prompt = mask.renderer.render("2+2=", id="")
    example = mask.completion(prompt, "four")
    assert text(mask, example).strip() == "2+2=four<|im_end|>"
    assert example.tokens[: len(prompt.tokens)] == prompt.tokens


def test_of_a_plain_text_all_is_learned_that_something_predicts() -> None:
    mask = masking()
    example = mask.text(mask.renderer.render("some text", id=""))
    assert text(mask, example) == "some text<|im_end|>"
    assert example.sampled == (False, *[True] * (len(example.tokens) - 1))
    whole = mask.all_tokens(conversation(TWO))
    assert text(mask, whole) == mask.renderer.templated(TWO, "", open_answer=False)
    assert whole.sampled == (False, *[True] * (len(whole.tokens) - 1))


CALLING = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments }}</call>{% endfor %}",
)
TOLD = "{% for tool in tools or [] %}<|im_start|>tool {{ tool.name }}<|im_end|>\n{% endfor %}" + CALLING
CALL = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "[1, 1]"}}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]


def of_row(template: str, loss_on: str = "assistant", **columns: object) -> tuple[Masking, Example]:
    mask, row = masking(template), DatasetRow("rows.jsonl:7", {"messages": CALL, **columns})
    options = SftOptions(loss_on=loss_on)
    maker = ExampleMaker(masking=mask, task=DatasetOptions(), options=options, longest=500, bad=BadRows())
    [example] = maker.examples(learned_rows([row], BadRows()))
    return mask, example.unpacked()


def test_a_call_of_a_tool_without_content_is_the_assistant_s_and_is_learned_and_what_the_tool_says_is_not() -> None:
    mask, example = of_row(CALLING)
    assert learned(mask, example) == ["<call>add [1, 1]</call><|im_end|>", "It is 2.<|im_end|>"]
    mask, example = of_row(TOLD, tools=[{"name": "add"}])
    assert text(mask, example).startswith("<|im_start|>tool add<|im_end|>\n<|im_start|>user")
    assert learned(mask, example) == ["<call>add [1, 1]</call><|im_end|>", "It is 2.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "columns", "says"),
    [
        (CHATML, {}, "rows.jsonl:7, message 1: the chat template does not write its call of add"),
        (CALLING, {"tools": [{"name": "add"}]}, "describes tools, and the chat template does not read them"),
        (TOLD, {"tools": "add"}, "rows.jsonl:7: the column `tools` must hold a list…json_columns"),
    ],
)
def test_a_template_that_leaves_out_calls_or_tools_is_told_by_row(template: str, columns: dict, says: str) -> None:
    with refused(says):
        of_row(template, **columns)
