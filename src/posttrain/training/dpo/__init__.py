"""Direct preference optimisation: pairs, or rounds of pairs sampled and judged, their losses, the loop and its words."""
