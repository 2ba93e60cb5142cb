"""The fields of TRL's configs, and what becomes of each."""
