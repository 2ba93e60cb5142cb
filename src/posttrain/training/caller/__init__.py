"""What a caller in Python brings in place of what a config describes, and what a run keeps of it."""
