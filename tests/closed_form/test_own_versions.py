"""`posttrain course check`: courses' own versions of their functions fail it, with the number that differs."""

from pathlib import Path

import pytest

from posttrain import cli
from posttrain.course.own_version import CHECKS, check_own_version
from tests.support.refusals import refused

HEAD = "import torch\nimport torch.nn.functional as F\n\n\n"
VERSIONS = {
    # An index of -100.
    "compute_grpo_loss": (
        (
            "def compute_grpo_loss(logits, ref_logits, advantages, labels, kl_coef=0.001):\n"
            "    token = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)\n"
            "    mask = (labels != -100).float()\n"
            "    return -(token * advantages * mask).sum() / mask.sum(), {}\n"
        ),
        ("a mean over the tokens that have a label", "raises RuntimeError: index -100 is out of bounds"),
    ),
    # One column too many.
    "compute_advantages": (
        (
            "def compute_advantages(values, rewards, prefix_len):\n"
            "    q = torch.cat([values[:, prefix_len:], rewards[:, None]], dim=1)\n"
            "    return q - values[:, prefix_len - 1 : -1]\n"
        ),
        ("raises RuntimeError: The size of tensor a",),
    ),
    # Rounding over 1e-4, for three equal rewards.
    "compute_grpo_advantages": (
        "def compute_grpo_advantages(rewards):\n    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)\n",
        ("equal rewards are exactly 0", "result[0] = ", "expected 0"),
    ),
    "compute_group_advantages": (
        (
            "def compute_group_advantages(rewards, group_size):\n"
            "    rows = rewards.view(-1, group_size)\n"
            "    return ((rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)).view(-1)\n"
        ),
        ("in population deviations", "result[0] = 0.707107, expected 1"),
    ),
    # The reference is the policy: no KL.
    "grpo_sequence_loss": (
        (
            "def grpo_sequence_loss(logp_new, logp_ref, advantages, beta, epsilon):\n"
            "    ratio = (logp_new - logp_new.detach()).exp()\n"
            "    return -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages).mean()\n"
        ),
        ("the homework's value", "result = -0.075, expected -0.223347"),
    ),
    "calc_kl_penalty": (
        (
            "def calc_kl_penalty(logits, ref_logits, kl_coef=0.1):\n"
            "    with torch.no_grad():\n"
            "        p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)\n"
            "        return kl_coef * (p.exp() * (p - q)).sum(-1).mean()\n"
        ),
        ("the result has no gradient", "no_grad"),
    ),
    "compute_log_probs": (
        (
            "def compute_log_probs(model, tokenizer, prompt, response):\n"
            "    ids = tokenizer(prompt + response, return_tensors='pt').input_ids\n"
            "    start = len(tokenizer(prompt).input_ids)\n"
            "    with torch.no_grad():\n"
            "        logits = model(ids).logits[0, start - 1 : -1]\n"
            "    return F.log_softmax(logits, -1).gather(1, ids[0, start:, None]).sum()\n"
        ),
        ("it has a gradient", "under no_grad"),
    ),
    # Padding on the left is taken for a part of the prompt.
    "completion_log_probs": (
        (
            "def completion_log_probs(model, tokenizer, sequences, prompt_lengths):\n"
            "    mask = (sequences != tokenizer.pad_token_id).long()\n"
            "    logits = model(sequences, attention_mask=mask).logits[:, :-1].log_softmax(-1)\n"
            "    each = logits.gather(-1, sequences[:, 1:, None]).squeeze(-1)\n"
            "    return torch.stack([each[i, n - 1 : mask[i].sum() - 1].sum() for i, n in enumerate(prompt_lengths)])\n"
        ),
        ("rows padded on both sides", "row ", "expected"),
    ),
    "simple_math_reward_func": (
        (
            "import re\n\n\n"
            "def simple_math_reward_func(completions, target, nums, **kwargs):\n"
            "    answers = [re.search(r'<answer>(.*?)</answer>', text)[1] for text in completions]\n"
            "    used = [[int(n) for n in re.findall(r'\\d+', answer)] for answer in answers]\n"
            "    rows = zip(answers, used, target, nums)\n"
            "    return [float(all(n in k for n in u) and eval(a) == float(t)) for a, u, t, k in rows]\n"
        ),
        ("a number that is used more often", "result[0] = 1, expected 0"),
    ),
    "equation_reward_func": (
        "def equation_reward_func(completion, nums, target):\n    raise NotImplementedError('TODO')\n",
        ("raises NotImplementedError.  Write it first.",),
    ),
    "reward_fn_period_count": (
        "def reward_fn_period_count(texts):\n    return sum(text.count('.') for text in texts)\n",
        ("result has the shape [], expected [2]",),
    ),
    "initial_probabilities_from_trajectories": (
        "def initial_probabilities_from_trajectories(n_states):\n    return None\n",
        ("raises TypeError", "It is called as initial_probabilities_from_trajectories(n_states"),
    ),
}


@pytest.mark.parametrize("name", VERSIONS)
def test_a_version_with_the_course_s_mistake_is_told_the_first_number_that_differs(name: str, tmp_path: Path) -> None:
    text, says = VERSIONS[name]
    file = tmp_path / "mine.py"
    file.write_text(HEAD + text)
    with refused(name, *says):
        list(check_own_version(name, str(file)))


RIGHT = """import torch


def compute_group_advantages(rewards, group_size):
    rows = rewards.view(-1, group_size)
    spread = rows.std(1, keepdim=True, unbiased=False)
    same = rows.amax(1, keepdim=True) == rows.amin(1, keepdim=True)
    return torch.where(same, 0.0, (rows - rows.mean(1, keepdim=True)) / spread).view(-1)
"""


def test_a_right_version_passes_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(RIGHT)
    assert cli.main(["course", "check", "compute_group_advantages", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("  passes  ") == len(CHECKS["compute_group_advantages"])
    file.write_text(RIGHT.replace(", unbiased=False", ""))
    assert cli.main(["course", "check", "compute_group_advantages", str(file)]) == 1
    assert "result[0] = 0.707107, expected 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "compute_grpo_los", "mine.py"], "Did you mean `compute_grpo_loss`?"),
        (["check", "compute_grpo_loss", "nowhere.py"], "no such file"),
        (["check", "compute_grpo_loss", "mine"], "FILE = mine: give the Python file"),
        (["check", "compute_grpo_loss"], "FILE is missing"),
        (["mistake", "four"], "N = four: must be the number of a mistake"),
        (["mistake", "14"], "Choose a number from 1 to 13"),
        (["mistake"], "N is missing"),
        (["mistake", "4", "--picture", "nowhere/p.png"], "name a file in an existing folder"),
        (["mistakes"], "Did you mean `mistake`?"),
    ],
)
def test_wrong_usage_is_told(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["course", *arguments]) == 2
    assert says in capsys.readouterr().err
