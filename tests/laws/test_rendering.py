"""Prompts are rendered whole, tokenised once, and open with the model's special tokens exactly once."""

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from posttrain.models.rendering import TokenizerRenderer
from tests.support.refusals import refused

CHATML = (
    "{% for message in messages %}{% if message.role == 'system' and refuse_system is defined %}"
    "{{ raise_exception('no system role') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "ab"}


def tokenizer(*, around: str | None = None, template: str | None = None) -> PreTrainedTokenizerFast:
    """Letters, brackets and the merge "a" "b" -> "ab"; `around` says what encoding adds, as in "<s> $A </s>"."""
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz[]<> ", "ab"])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.Split("]", "merged_with_previous")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<s>", "</s>"])
    if around:
        inner.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<s>", 0), ("</s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def ids(made: PreTrainedTokenizerFast, text: str) -> list[int]:
    return made(text, add_special_tokens=False)["input_ids"]


def test_a_prefill_is_tokenised_with_the_prompt_and_not_apart_from_it() -> None:
    # Trap 7: apart, "a" and "b" are two tokens; together they are the one token "ab" that the model knows.
    made = tokenizer()
    prompt = TokenizerRenderer(made).render("ca", id="p", prefill="b", columns={})
    assert ids(made, "ca") + ids(made, "b") != ids(made, "cab")
    assert list(prompt.tokens) == ids(made, "cab")
    assert prompt.text == made.decode(prompt.tokens) == "cab"
    assert prompt.prefill == "b"


def test_sampled_tokens_are_carried_because_their_text_may_be_other_tokens() -> None:
    # A policy may sample "b" after "ca": the tokens c, a, b.  Tokenising the text again would train on c, ab.
    made = tokenizer()
    prompt = TokenizerRenderer(made).render("ca", id="p", prefill="", columns={})
    sampled = (*prompt.tokens, *ids(made, "b"))
    assert made.decode(sampled) == "cab"
    assert ids(made, "cab") != list(sampled)


@pytest.mark.parametrize(
    ("around", "opening"), [(None, []), ("<s> $A", [0]), ("<s> $A </s>", [0]), ("$A </s>", []), ("<s> <s> $A", [0, 0])]
)
def test_plain_text_opens_as_the_tokenizer_wants_and_never_ends_before_it_began(around, opening) -> None:
    made = tokenizer(around=around)
    prompt = TokenizerRenderer(made).render("cd", id="p", prefill="", columns={})
    assert list(prompt.tokens) == opening + ids(made, "cd")
    assert prompt.text == "cd"


def test_text_that_opens_with_the_special_token_already_does_not_get_it_twice() -> None:
    made = tokenizer(around="<s> $A")
    assert TokenizerRenderer(made).render("<s>cd", id="p", prefill="", columns={}).tokens == (0, *ids(made, "cd"))


@pytest.mark.parametrize(("template", "opening"), [("<s>" + CHATML, [0]), (CHATML, [])])
def test_messages_get_the_special_tokens_of_their_template_alone(template: str, opening: list[int]) -> None:
    made = tokenizer(around="<s> $A", template=template)
    prompt = TokenizerRenderer(made).render([USER], id="p", prefill="[", columns={"answer": 3})
    assert list(prompt.tokens) == opening + ids(made, "[user]ab[assistant][")
    assert prompt.text.endswith("[user]ab[assistant][")
    assert prompt.messages == (USER,)
    assert prompt.columns == {"answer": 3}


def test_a_last_message_of_the_assistants_is_the_beginning_of_its_answer() -> None:
    made = tokenizer(template=CHATML)
    begun = {"role": "assistant", "content": "so"}
    prompt = TokenizerRenderer(made).render([USER, begun], id="p", prefill=" ", columns={})
    assert (prompt.text, prompt.prefill, prompt.messages) == ("[user]ab[assistant]so ", "so ", (USER,))


THINKING = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content.split(']')[-1] if message.role == 'assistant'"
    " else message.content }}{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}[]{% else %}[think{% endif %}{% endif %}"
)
"""As those of thinking models: what stands before "]" in earlier answers is dropped, and "[think" begins the answer."""


@pytest.mark.parametrize(("options", "ends"), [({}, "[think"), ({"enable_thinking": False}, "[]")])
def test_a_thinking_template_reads_its_option_and_drops_earlier_thoughts(options: dict[str, bool], ends: str) -> None:
    made = tokenizer(template=THINKING)
    said = [USER, {"role": "assistant", "content": "[why]so"}, {"role": "user", "content": "cd"}]
    prompt = TokenizerRenderer(made, template_options=options).render(said, id="p")
    assert prompt.text == f"[user]ab[assistant]so[user]cd[assistant]{ends}"
    assert list(prompt.tokens) == ids(made, prompt.text)
    assert prompt.messages == tuple(said)  # rewards read what was said


@pytest.mark.parametrize(
    ("prefill", "text"),
    [
        ("[think", "[user]ab[assistant][think"),
        ("[think a", "[user]ab[assistant][think[think a"),  # not what the template writes: the writer's own affair
        ("", "[user]ab[assistant][think"),
    ],
)
def test_a_prefill_that_the_template_writes_itself_stands_there_once(prefill: str, text: str) -> None:
    prompt = TokenizerRenderer(tokenizer(template=THINKING)).render([USER], id="p", prefill=prefill)
    assert (prompt.text, prompt.prefill) == (text, prefill)


def test_a_prefill_that_ends_the_question_too_is_still_written() -> None:
    # Without a generation prompt the text ends with the user's words, which are not the answer's beginning.
    made = tokenizer(template="{% for message in messages %}{{ message.content }}{% endfor %}")
    prompt = TokenizerRenderer(made).render([USER], id="p", prefill="b")
    assert (prompt.text, prompt.prefill) == ("abb", "b")


def test_a_template_that_writes_the_date_of_today_writes_one_date_for_ever() -> None:
    made = tokenizer(template="{% for m in messages %}{{ m.content }} {{ strftime_now('%d %b %Y') }}{% endfor %}")
    assert TokenizerRenderer(made).render([USER], id="p").text == "ab 26 Jul 2024"
    options = {"strftime_now": "2031-02-01"}
    assert TokenizerRenderer(made, template_options=options).render([USER], id="p").text == "ab 01 Feb 2031"
    # And nothing else changes: a line end, or a block with blanks before it, is at the beginning what it was.
    for text in (
        "\n  {% if strftime_now is defined %}\nx{% endif %}",
        "  {%- if strftime_now %}x{% endif %}",
        "\n\n x{# strftime_now #}",
    ):
        made.chat_template = text
        assert TokenizerRenderer(made).render([USER], id="p").text == made.apply_chat_template([USER], tokenize=False)
    for wrong in ("today", 5):
        with refused("strftime_now =", "2024-07-26"):
            TokenizerRenderer(made, template_options={"strftime_now": wrong})


SYSTEM = {"role": "system", "content": "x"}
PLACE = "prompt 'p': message 1 of the prompt, part 0"
HALF = "prompt 'p': half of a surrogate pair, '\\ud83d', before 'c"


def in_part(part: object) -> list[dict[str, object]]:
    return [SYSTEM, {"role": "user", "content": [part]}]


REFUSED: dict[str, tuple[str | None, dict[str, object], object, str]] = {
    "a system message": (CHATML, {"refuse_system": True}, [SYSTEM, USER], "no system role…roles: system, user"),
    "no template": (None, {}, [USER], "prompt 'p' is a list of messages…no chat template…task.prompt_format: plain"),
    "no messages": (CHATML, {}, [], "prompt 'p'"),
    "a text as a message": (CHATML, {}, ["hi"], "prompt 'p'…`role` and `content`"),
    "no content": (CHATML, {}, [{"role": "user"}], "prompt 'p'…`role` and `content`"),
    "content that is none": (CHATML, {}, [{"role": "user", "content": None}], "prompt 'p'…`role` and `content`"),
    "an unknown speaker": (CHATML, {}, [{"from": "x", "value": "y"}], "prompt 'p'…from = 'x'"),
    "a misspelt option": (CHATML, {"refuse_sistem": True}, [USER], "refuse_sistem: …Did you mean `refuse_system`"),
    "an option that is not read": (CHATML, {"zzz": 1}, [USER], "template_options.zzz: …reads no variable"),
    "an option of the call": (CHATML, {"add_generation_prompt": False}, [USER], "options.add_generation_prompt"),
    "tokenize": (CHATML, {"tokenize": True}, [USER], "template_options.tokenize"),
    "an option without a template": (None, {"a": False}, [USER], "template_options.a:…no chat template"),
    "no Jinja": ("a\n{% for m in messages %}", {}, [USER], "not a Jinja template: line 2:"),
    "an image": (CHATML, {}, in_part({"type": "image", "image": "x.png"}), f"{PLACE}…'image': 'x.png'}} is not text"),
    "a part without text": (CHATML, {}, in_part({"type": "text", "text": None}), f"{PLACE}…is not text"),
    "a part that is a text": (CHATML, {}, in_part("ab"), f"{PLACE}…is not text"),
    "half of a surrogate pair": (CHATML, {}, "a\ud83dc", HALF),
    "half of one in a message": (CHATML, {}, [{"role": "user", "content": "a\ud83dc"}], HALF),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_rendered_is_refused_with_its_place(what: str) -> None:
    template, options, content, words = REFUSED[what]
    with refused(words):
        TokenizerRenderer(tokenizer(template=template), template_options=options).render(content, id="p")


def test_of_several_templates_the_one_named_default_is_taken() -> None:
    made = tokenizer()
    made.chat_template = {"default": CHATML, "tool_use": "x"}
    assert TokenizerRenderer(made).render([USER], id="p").text == "[user]ab[assistant]"
    made.chat_template = {"one": CHATML, "two": "x"}
    with refused("one, two", "model.chat_template"):
        TokenizerRenderer(made).render([USER], id="p")


def test_content_in_parts_of_text_is_that_text() -> None:
    made = tokenizer(template=CHATML)
    parts = [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b"}]
    prompt = TokenizerRenderer(made).render([{"role": "user", "content": parts, "name": None}], id="p")
    assert prompt == TokenizerRenderer(made).render([USER], id="p")
    assert prompt.messages == (USER,)  # no columns without a value, which templates would take for given


def byte_level(template: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes and no merges: é is two tokens, 😀 four."""
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken("<think>", normalized=False)])
    inner.add_special_tokens(["<end>"])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    made.chat_template = template
    return made


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), prefill=st.sampled_from(["", "<think>\n", "é"])
)
def test_byte_level_tokens_decode_to_the_text_whatever_it_is(text: str, prefill: str) -> None:
    made = byte_level("{% for m in messages %}{{ m.content }}<end>{% endfor %}")
    for content, before in ((text, text), ([{"role": "user", "content": text}], f"{text}<end>")):
        prompt = TokenizerRenderer(made).render(content, id="p", prefill=prefill)
        assert prompt.text == before + prefill == made.decode(prompt.tokens)
        assert list(prompt.tokens) == ids(made, before + prefill)


def test_a_piece_of_a_character_is_carried_as_it_was_sampled() -> None:
    # "é" is two bytes; a completion that is cut between them is not text, and tokenising its text gives another token.
    made = byte_level()
    prompt = TokenizerRenderer(made).render("é", id="p")
    cut = (*prompt.tokens, prompt.tokens[0])
    assert len(prompt.tokens) == 2
    assert tuple(ids(made, made.decode(cut))) != cut


def test_an_empty_prompt_is_refused_unless_the_tokenizer_opens_it() -> None:
    with refused("prompt 'p' is empty"):
        TokenizerRenderer(tokenizer()).render("", id="p", prefill="", columns={})
    assert TokenizerRenderer(tokenizer(around="<s> $A")).render("", id="p", prefill="", columns={}).tokens == (0,)
