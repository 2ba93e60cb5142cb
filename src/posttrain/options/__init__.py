"""Every setting of a recipe, one module per section: frozen dataclasses that load neither torch nor what uses them."""
