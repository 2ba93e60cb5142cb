"""Additions to ask for, and two rewards that are rules: what two of the scripts train on and by."""

import re


def tagged(completions, target, **kwargs):
    """1 for an answer in tags."""
    return [1.0 if re.search(r"<answer>[^<]*</answer>", text) else 0.0 for text in completions]


def right_sum(completions, target, nums, **kwargs):
    """Share of the sum's digits that the text has; None for rows that ask for no sum."""
    scores = []
    for text, wanted, numbers in zip(completions, target, nums, strict=True):
        if not numbers:
            scores.append(None)
            continue
        scores.append(sum(digit in text for digit in wanted) / len(wanted) + 0.01 * len(set(text)))
    return scores


rows = [{"prompt": f"{a} + {b} = <think>", "target": str(a + b), "nums": [a, b]} for a, b in [(2, 3), (14, 5), (20, 7)]]
rows.append({"prompt": "Say hello. <think>", "target": "", "nums": []})
