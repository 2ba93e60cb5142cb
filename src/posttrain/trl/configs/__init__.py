"""TRL's configs: what becomes of each field, and the recipe of ours that a config describes."""
