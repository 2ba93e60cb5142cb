"""Prompts are rendered whole, tokenised once, and open with the model's special tokens exactly once."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from posttrain.errors import UserError
from posttrain.models.rendering import TokenizerRenderer

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
def test_plain_text_opens_as_the_tokenizer_wants_and_never_ends_before_it_began(
    around: str | None, opening: list[int]
) -> None:
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


def test_options_reach_the_template_and_its_refusal_is_one_clear_message() -> None:
    renderer = TokenizerRenderer(tokenizer(template=CHATML), template_options={"refuse_system": True})
    system = {"role": "system", "content": "x"}
    with pytest.raises(
        UserError, match=r"prompt 'rows:3': .* refuses these messages: no system role \(roles: system, u"
    ):
        renderer.render([system, USER], id="rows:3", prefill="", columns={})


def test_messages_for_a_model_without_a_chat_template_say_what_to_do() -> None:
    with pytest.raises(UserError, match=r"prompt 'p' is a list of messages, .* no chat template .* instruction-tuned"):
        TokenizerRenderer(tokenizer()).render([USER], id="p", prefill="", columns={})


@pytest.mark.parametrize(
    "messages", [[], ["hi"], [{"role": "user"}], [{"role": "user", "content": None}], [{"from": "x", "value": "y"}]]
)
def test_messages_that_are_none_are_refused(messages: list[object]) -> None:
    with pytest.raises(UserError, match="prompt 'p'"):
        TokenizerRenderer(tokenizer(template=CHATML)).render(messages, id="p", prefill="", columns={})


def test_an_empty_prompt_is_refused_unless_the_tokenizer_opens_it() -> None:
    with pytest.raises(UserError, match="prompt 'p' is empty"):
        TokenizerRenderer(tokenizer()).render("", id="p", prefill="", columns={})
    assert TokenizerRenderer(tokenizer(around="<s> $A")).render("", id="p", prefill="", columns={}).tokens == (0,)
