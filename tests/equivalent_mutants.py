"""Mutants that compute the same, from data/equivalent_mutants.yaml: (file, line) and why no test can tell."""

from pathlib import Path

import yaml

BECAUSE: dict[str, dict[str, list[str]]] = yaml.safe_load(
    (Path(__file__).parent / "data" / "equivalent_mutants.yaml").read_text(encoding="utf-8")
)
"""Reason -> file -> lines as `ast.unparse` writes them."""
EQUIVALENT = {
    (file, line): reason for reason, files in BECAUSE.items() for file, lines in files.items() for line in lines
}
