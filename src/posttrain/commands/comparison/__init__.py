"""Recipes side by side at an equal budget: cells of variant and seed, their table and their picture."""
