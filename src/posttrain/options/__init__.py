"""Every setting of a recipe: one module per section, plain frozen dataclasses that load neither torch nor anything above them."""
