"""What reward models and preference losses have in common: how pairs go through a model."""
