"""What an algorithm makes of policies beside the one it trains: the one that a step starts from, and a teacher."""
