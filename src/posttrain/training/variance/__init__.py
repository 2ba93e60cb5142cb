"""How noisy what is learned from is: gradients of one policy beside each other, and groups of several sizes."""
