"""A tiny model that talks in turns learns the form of an answer from 50 rows, and nothing that it only reads."""

import random
from pathlib import Path

import pytest
import torch

import posttrain
from posttrain.config import SftConfig
from posttrain.generation.engine import sample_groups
from posttrain.generation.in_process import InProcessEngine
from posttrain.models.policy import Policy
from posttrain.models.rendering import TokenizerRenderer
from posttrain.options.rollout import SamplingParams
from posttrain.records import Example, TokenSequence
from posttrain.training.sft.sft_run import held_out_loss
from tests.support.conversations import chat_model, chat_tokenizer, turns
from tests.support.tiny import request

DRAW = random.Random(4)
QUESTIONS = ["".join(DRAW.choices("bcdfghjk", k=6)) for _ in range(60)]
ROWS = [{"messages": turns(question, f"<answer>{question[0]}</answer>")} for question in QUESTIONS[:50]]


def trained(folder: Path, **sft: object) -> tuple[Policy, posttrain.Run]:
    tokenizer = chat_tokenizer()
    policy = posttrain.as_policy(chat_model(tokenizer), tokenizer)
    config = posttrain.load_recipe(
        kind=SftConfig,
        task={"name": "dataset", "held_out_share": 0.1},
        sft={"learning_rate": 1e-2, "warmup_steps": 5, "rows_per_batch": 10, "num_epochs": 10, "eval_every": 25, **sft},
        run={"folder": str(folder), "threads": 1},
    )
    return policy, posttrain.train_sft(config, rows=ROWS, policy=policy)


def loss_of_questions(policy: Policy) -> float:
    """What is not to be learned, in nats a token: the letters of the questions that were trained on."""
    examples = []
    for question in QUESTIONS[:50]:
        tokens = tuple(policy.tokenizer(f"<|im_start|>user\n{question}")["input_ids"])
        letters = tuple(place >= len(tokens) - 5 for place in range(len(tokens)))
        examples.append(Example(TokenSequence(tokens=tokens, sampled=letters)))
    return held_out_loss(policy, examples, 4096)["loss"]


@torch.no_grad()
def answers(policy: Policy) -> list[str]:
    renderer = TokenizerRenderer(policy.tokenizer)
    prompts = [renderer.render(turns(question), id=question) for question in QUESTIONS[50:]]
    groups = sample_groups(InProcessEngine(policy), prompts, request(1, 12, SamplingParams(greedy=True)))
    return [group.rollouts[0].text for group in groups]


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, posttrain.Run]:
    return trained(tmp_path_factory.mktemp("sft") / "run")


def test_a_form_is_learned_from_fifty_rows_and_asked_of_new_questions(learner: tuple[Policy, posttrain.Run]) -> None:
    policy, run = learner
    before, after = run.summary["before"], run.summary["after"]
    # A guess among 386 tokens is 6 nats.  Three tokens of four are form; of the letter, one of 8, ln 8 remains.
    assert before["loss"] > 5
    assert after["loss"] < 0.6
    assert after["loss_interval"][1] < before["loss_interval"][0]
    assert after["mean_token_accuracy"] >= 0.75
    said = answers(policy)
    assert all(text.startswith("<answer>") and text.endswith("</answer>") for text in said), said


def test_what_is_read_and_not_learned_is_not_learned(learner: tuple[Policy, posttrain.Run], tmp_path: Path) -> None:
    # The control: of eight letters none can be told from the others, which would be 2.1 nats; with every token learned
    # the same run gets there, and with the mask it stays as far off as an untrained model.
    masked = loss_of_questions(learner[0])
    assert masked > 4
    everything, _ = trained(tmp_path / "all", loss_on="all")
    assert loss_of_questions(everything) < 3
