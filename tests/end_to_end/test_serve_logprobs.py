"""The log-probs that `posttrain serve` gives are the model's, and those that it does not know are refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from posttrain.commands.serving.completion_service import added_texts
from posttrain.commands.serving.http_server import HttpServer
from posttrain.models.loading.model_folder import load_policy
from posttrain.options.model import ModelOptions
from tests.support.served import QUESTION, asked, served_bundled_model

CHAT = {"messages": [{"role": "user", "content": QUESTION}]}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with served_bundled_model() as made:
        yield made


def test_log_probs_are_those_of_the_sampled_tokens(server: HttpServer) -> None:
    policy = load_policy(ModelOptions())
    body = {"prompt": QUESTION + "\n", "max_tokens": 30, "seed": 5, "logprobs": 0}
    (choice,) = asked(server, "/v1/completions", body)[1]["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    shown = zip(found["text_offset"], found["tokens"], strict=True)
    assert [choice["text"][at : at + len(token)] for at, token in shown] == found["tokens"]
    ids = policy.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
    start = policy.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
    assert found["tokens"] == [policy.tokenizer.decode([each]) for each in ids]  # the bundled model's text is ASCII
    with torch.no_grad():
        logits = policy.model(torch.tensor([start + ids])).logits[0, len(start) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert found["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)

    cut = asked(server, "/v1/completions", {**body, "stop": "="})[1]["choices"][0]
    shown = len(cut["logprobs"]["tokens"])
    assert "".join(cut["logprobs"]["tokens"]) == cut["text"]
    assert cut["logprobs"]["token_logprobs"] == found["token_logprobs"][:shown]

    chat = {**CHAT, "max_tokens": 30, "seed": 5, "logprobs": True}
    content = asked(server, "/v1/chat/completions", chat)[1]["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == found["tokens"]
    assert [each["logprob"] for each in content] == found["token_logprobs"]
    assert [bytes(each["bytes"]).decode() for each in content] == found["tokens"]


@pytest.mark.parametrize(
    ("path", "field", "says"),
    [
        ("/v1/completions", {"logprobs": 3}, "logprobs = 3: only"),
        ("/v1/completions", {"logprobs": True}, "logprobs = True: must be a whole number"),
        ("/v1/chat/completions", {"logprobs": 1}, "logprobs = 1: must be true or false"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}, "top_logprobs = 2: only"),
    ],
)
def test_log_probs_of_other_tokens_are_refused(server: HttpServer, path: str, field: dict[str, Any], says: str) -> None:
    body = {"prompt": QUESTION} if path == "/v1/completions" else CHAT
    code, answer = asked(server, path, {**body, **field})
    assert (code, answer["error"]["message"].startswith(says)) == (400, True)


def test_a_character_of_several_tokens_comes_with_its_last() -> None:
    tokenizer = load_policy(ModelOptions()).tokenizer  # bytes: é is two tokens, 😀 four
    ids = tokenizer("a é😀b", add_special_tokens=False)["input_ids"]
    texts = added_texts(tokenizer, ids)
    assert "".join(texts) == "a é😀b"
    assert sum(text == "" for text in texts) == len(ids) - len("a é😀b")
    assert "".join(added_texts(tokenizer, ids[:-2])) == tokenizer.decode(ids[:-2])  # ends inside of 😀
