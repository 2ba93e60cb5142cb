"""Supervised runs: what there is to learn from, the loss, the loop and what it tells."""
