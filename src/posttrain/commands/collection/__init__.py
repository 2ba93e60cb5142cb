"""Preferences: a policy's completions, made into pairs, and who says which of two is better."""
