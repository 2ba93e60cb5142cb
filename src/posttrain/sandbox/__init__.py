"""Running programs that a model wrote, in processes that can do nothing but compute."""
