"""Phases one after another, each a run of its own that goes on from what earlier ones made, and one report of all."""
