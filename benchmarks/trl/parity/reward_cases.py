"""What trl_parity.py asks TRL's reward functions, for ours to say the same."""

from typing import Any

COMPARED = [
    # (completion, solution)
    (r"My answer is \boxed{\frac{1}{3}}", r"\frac{1}{3}"),
    (r"My answer is \boxed{\frac{1}{2}}", r"\frac{1}{3}"),
    (r"\boxed{0.5}", r"$\frac{1}{2}$"),
    (r"It is $x = 4$.", "4"),
    (r"It is 4.", "4"),
    (r"First \boxed{3}, no, \boxed{4}.", "4"),
    (r"First \boxed{3}, no, \boxed{4}.", "3"),
    (r"$5$ and then \boxed{6}", "6"),
    (r"\boxed{12 \text{ cm}}", "12"),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}"),
    (r"\boxed{(1, 2)}", r"(1, 3)"),
    (r"\boxed{x^2 + 2x + 1}", r"(x + 1)^2"),
    (r"\boxed{50\%}", r"50\%"),
    (r"\boxed{}", "4"),
    (r"\boxed{4", "4"),
    ("", "4"),
    (r"\boxed{4}", "no number here"),
    (r"<think>\boxed{1}</think> \boxed{2}", "2"),
    (r"<think>\boxed{1}</think> \boxed{2}", "1"),
    (r"<think>\boxed{2} and no end", "2"),
    (r"<think>a</think> b </think> \boxed{3}", "3"),
    (r"</think>\boxed{4}", "no number here"),
]
TEXTS = [
    "<think>\nThis is my reasoning.\n</think>\nThis is my answer.",
    "<think>\nThis is my reasoning.\nThis is my answer.",
    "<think></think>",
    " <think>a</think>b",
    "<think>a<think>b</think>c",
    "<think>a</think>b<think>c",
    "<think>a</think>b</think>c",
    "a<think>b</think>",
    "</think><think>",
    "",
]
IDS = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [1, 2, 1, 2, 1, 2], [7], [], [1] * 80, [2] * 90, [3] * 100, [4] * 101]

FACTORIES: list[tuple[str, dict[str, Any]]] = [
    ("get_repetition_penalty_reward", {}),
    ("get_repetition_penalty_reward", {"ngram_size": 2, "max_penalty": -0.5}),
    ("get_repetition_penalty_reward", {"max_penalty": 0.0}),
    ("get_soft_overlong_punishment", {"max_completion_len": 100, "soft_punish_cache": 20}),
    ("get_soft_overlong_punishment", {"max_completion_len": 100, "soft_punish_cache": 0}),
]
COSINES: list[dict[str, Any]] = [
    {"max_len": 100},
    {
        "max_len": 60,
        "min_value_wrong": -2.0,
        "max_value_wrong": -1.0,
        "min_value_correct": 0.2,
        "max_value_correct": 3.0,
    },
]


def messages(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def answers_of(rewards: Any) -> dict[str, Any]:
    """What a module of reward functions says, by question."""
    completions, solutions = messages([text for text, _ in COMPARED]), [gold for _, gold in COMPARED]
    lengths = [[0] * (7 * number) for number in range(len(COMPARED))]
    said = {
        "accuracy_reward": rewards.accuracy_reward(completions, solutions),
        "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward(completions, solutions),
        "reasoning_accuracy_reward, delimiters": rewards.reasoning_accuracy_reward(
            completions, solutions, reasoning_delimiters=["no,", "</think>"]
        ),
        "think_format_reward": rewards.think_format_reward(messages(TEXTS)),
    }
    for name, options in FACTORIES:
        said[f"{name} {options}"] = getattr(rewards, name)(**options)(completion_ids=IDS)
    for options in COSINES:
        said[f"get_cosine_scaled_reward {options}"] = rewards.get_cosine_scaled_reward(**options)(
            completions[:4], solutions[:4], lengths[:4]
        )
    return said
