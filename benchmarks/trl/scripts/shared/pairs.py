"""Pairs of answers for two of the scripts."""

pairs = [
    {"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {a + b + 1} or so"}
    for a, b in [(2, 3), (14, 5), (20, 7), (3, 3), (8, 1), (6, 11)]
]
