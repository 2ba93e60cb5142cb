"""Supervised runs: rows and demonstrations, the loss, the loop and its reports."""
