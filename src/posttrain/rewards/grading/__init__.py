"""How a reward function is called and its answer read: processes, deadlines, retries, cache."""
