"""Training reward models on which of two answers was preferred."""
