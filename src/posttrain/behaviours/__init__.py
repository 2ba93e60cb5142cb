"""Behaviours on the way to an answer: their signs in completions, as rates over training."""
