"""Recipes beside each other at an equal budget: cells of variant and seed, their table and their picture."""
