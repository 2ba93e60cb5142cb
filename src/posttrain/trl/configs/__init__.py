"""TRL's configs: what each field does here, and the recipe that a config describes."""
