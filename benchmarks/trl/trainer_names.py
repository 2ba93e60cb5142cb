"""Writes src/posttrain/trl/surface/trainer_names.py: the names that TRL's and transformers' trainers have.

python benchmarks/trl/trainer_names.py            writes it, and says which names are new or gone
python benchmarks/trl/trainer_names.py --check    compares alone, and fails where they differ
"""

import json
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from _vs_trl_environment import trl_python

HERE = Path(__file__).parent
MODULE = HERE.parents[1] / "src" / "posttrain" / "trl" / "surface" / "trainer_names.py"
HEAD = '''"""Methods and attributes of the trainers of TRL {trl} over transformers {transformers}; "Trainer" is for all.

Generated: `python benchmarks/trl/trainer_names.py` writes this file, and `make trl-parity` compares it.
"""

from collections.abc import Mapping

TEXTS = {{
'''
TAIL = """}

NAMES: Mapping[str, frozenset[str]] = {trainer: frozenset(text.split()) for trainer, text in TEXTS.items()}
"""


def found_names() -> dict[str, list[str]]:
    """The names by trainer, and the versions under `made by`."""
    worker = [str(trl_python()), str(HERE / "parity" / "trainer_names_worker.py")]
    answer = subprocess.run(worker, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[str]] = json.loads(answer)
    return found


def module_text(found: Mapping[str, Sequence[str]], made_by: Mapping[str, str]) -> str:
    """The file."""
    parts = [HEAD.format(**made_by)]
    for trainer, names in found.items():
        lines = textwrap.wrap(" ".join(names), width=112, initial_indent=" " * 4, subsequent_indent=" " * 4)
        parts.append("\n".join([f'    "{trainer}": """', *lines, '    """,\n']))
    return "".join(parts) + TAIL


def main() -> int:
    """Compare, and write unless it is only asked."""
    found = found_names()
    made_by: Mapping[str, str] = found.pop("made by")  # type: ignore[assignment]
    apart, there = 0, runpy.run_path(str(MODULE)).get("NAMES", {}) if MODULE.is_file() else {}
    for trainer, names in found.items():
        written = there.get(trainer, frozenset())
        for name in sorted(written ^ set(names)):
            print(f"{trainer}.{name} is {'new' if name in names else 'gone'}")
            apart += 1
    print(f"{sum(map(len, found.values()))} names of trainers, {apart} of them not as written")
    if "--check" not in sys.argv:
        MODULE.write_text(module_text(found, made_by), encoding="utf-8")
    return int(apart > 0 and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
