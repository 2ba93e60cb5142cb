"""What an algorithm is made of: advantages, losses, KL estimators, token weights, and the table that composes them."""
