"""`posttrain.generate`: what it gives is what the engine samples and the model says, from whatever holds a model."""

from pathlib import Path

import pytest
import torch

import posttrain
from posttrain.models.loading.model_folder import load_policy
from posttrain.models.loading.new_model import new_model, new_tokenizer
from posttrain.models.policy import Policy
from posttrain.options.model import ModelOptions
from posttrain.records import Finish
from tests.support.refusals import refused
from tests.support.runs import SHAPE, save_tiny_model
from tests.support.tiny import plain_logprobs

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
PROMPTS = ["12+30=", "7*8 is "]


@pytest.fixture(scope="module")
def policy() -> Policy:
    tokenizer = new_tokenizer()
    return posttrain.as_policy(new_model(SHAPE, tokenizer, seed=0), tokenizer)


def test_tokens_log_probs_and_texts_are_the_models_own(policy: Policy) -> None:
    groups = posttrain.generate(policy, PROMPTS, group_size=3, max_completion_tokens=6, temperature=0.8)
    assert [group.prompt.text for group in groups] == PROMPTS
    assert [len(group.rollouts) for group in groups] == [3, 3]
    for group in groups:
        for rollout in group.rollouts:
            own = plain_logprobs(policy.model, group.prompt.tokens, rollout.tokens, temperature=0.8)
            assert rollout.logprobs == pytest.approx(own.tolist(), abs=1e-5)
            ended = rollout.tokens[-1] in policy.stop_ids
            assert rollout.finish == (Finish.STOP if ended else Finish.LENGTH)
            kept = rollout.tokens[: len(rollout.tokens) - ended]
            assert rollout.text == policy.tokenizer.decode(kept)


def test_a_seed_gives_the_same_completions_alone_or_beside_others_and_another_seed_others(
    policy: Policy,
) -> None:
    def texts(prompts: object, seed: int) -> list[str]:
        groups = posttrain.generate(policy, prompts, group_size=4, seed=seed, max_completion_tokens=6)  # type: ignore[arg-type]
        return [rollout.text for rollout in groups[0].rollouts]

    assert texts(PROMPTS[0], 3) == texts(PROMPTS[:1], 3) == texts(PROMPTS, 3)
    assert texts(PROMPTS, 4) != texts(PROMPTS, 3)


def test_a_temperature_of_0_takes_the_likeliest_token(policy: Policy) -> None:
    (group,) = posttrain.generate(policy, PROMPTS[0], max_completion_tokens=1, temperature=0)
    logits = policy.model(input_ids=torch.tensor([group.prompt.tokens])).logits[0, -1]
    assert group.rollouts[0].tokens == (int(logits.argmax()),)


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
