"""Direct preference optimisation: pairs of rows, or sampled and judged in rounds; the loss, the loop, its words."""
