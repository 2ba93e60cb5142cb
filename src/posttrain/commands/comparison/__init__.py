"""Runs of `posttrain compare` side by side: which are made, and what is reported of them."""
