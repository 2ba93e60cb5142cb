"""Reward models, trained on which of two answers was preferred."""
