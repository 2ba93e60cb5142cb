"""Preferences: pairs of a policy's completions, and who decides which of two is better."""
