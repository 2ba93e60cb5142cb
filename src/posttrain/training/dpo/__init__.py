"""Direct preference optimisation: pairs from rows, or sampled and judged in rounds; the loss and the loop."""
