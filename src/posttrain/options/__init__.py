"""Every setting of a recipe, one module per section: frozen dataclasses that do not import torch."""
