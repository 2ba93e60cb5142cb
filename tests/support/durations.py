"""How long each kind of test takes, against its budget.

.venv/bin/python -m pytest -n 2 --junitxml=times.xml
.venv/bin/python -m tests.support.durations times.xml

What is counted is the seconds of each test with its fixtures, so all of them are about twice the wall time of two
workers, less what collecting takes.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

BUDGETS = {
    "attacks": 130,
    "closed_form": 80,
    "end_to_end": 365,
    "engine": 180,
    "laws": 230,
    "learning": 60,
    "reference": 15,
    "pages and rules": 80,
}
"""Seconds per kind; all that lies directly in tests/ is the last.  Their sum is what two workers have in ten minutes,
less the minute in which both collect and import."""


def kind_of(module: str) -> str:
    """`tests.laws.irl.test_fits` -> laws."""
    parts = module.split(".")
    return parts[1] if len(parts) > 2 else "pages and rules"


def totals(report: Path) -> tuple[Counter[str], Counter[str]]:
    """Seconds and number of tests of each kind."""
    seconds: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        kind = kind_of(case.attrib["classname"])
        seconds[kind] += float(case.attrib["time"])
        number[kind] += 1
    return seconds, number


def main(arguments: list[str]) -> int:
    """Print the table; 1 where a kind is beyond its budget or has none."""
    parser = argparse.ArgumentParser(description="how long each kind of test takes, against its budget")
    parser.add_argument("report", type=Path, help="what pytest --junitxml wrote")
    seconds, number = totals(parser.parse_args(arguments).report)
    print("| kind | tests | seconds | budget |\n| --- | ---: | ---: | ---: |")
    for kind in sorted(seconds):
        print(f"| {kind} | {number[kind]} | {seconds[kind]:.0f} | {BUDGETS.get(kind, 0)} |")
    print(f"| all | {number.total()} | {seconds.total():.0f} | {sum(BUDGETS.values())} |")
    beyond = [kind for kind in sorted(seconds) if seconds[kind] > BUDGETS.get(kind, 0)]
    if beyond:
        print(f"beyond the budget: {', '.join(beyond)}", file=sys.stderr)
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
