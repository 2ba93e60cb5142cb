"""What policies do on the way to an answer: signs of it in their completions, as rates over training."""
