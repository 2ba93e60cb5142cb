"""What scripts see of a trainer besides training: methods to override, processes, cards, checkpoints."""
