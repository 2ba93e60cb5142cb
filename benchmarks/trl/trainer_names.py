"""Writes src/posttrain/trl/trainer_names.json: the names that TRL's and transformers' trainers have.

python benchmarks/trl/trainer_names.py            writes it, and says which names are new or gone
python benchmarks/trl/trainer_names.py --check    only compares, and fails if they differ
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from _vs_trl_environment import trl_python

HERE = Path(__file__).parent
FILE = HERE.parents[1] / "src" / "posttrain" / "trl" / "trainer_names.json"


def found_names() -> dict[str, list[str]]:
    """The names by trainer, and the versions under `made by`."""
    worker = [str(trl_python()), str(HERE / "parity" / "trainer_names_worker.py")]
    answer = subprocess.run(worker, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[str]] = json.loads(answer)
    return found


def main() -> int:
    """Compare, and write the file unless `--check` is given."""
    found = found_names()
    made_by = found.pop("made by")
    stored = json.loads(FILE.read_bytes()) if FILE.is_file() else {}
    num_changed = 0
    for trainer, names in found.items():
        written = set(" ".join(stored.get(trainer, [])).split())
        for name in sorted(written ^ set(names)):
            print(f"{trainer}.{name} is {'new' if name in names else 'gone'}")
            num_changed += 1
    print(f"{sum(map(len, found.values()))} names of trainers, {num_changed} of them not as written")
    if "--check" not in sys.argv:
        lines = {trainer: textwrap.wrap(" ".join(names), width=112) for trainer, names in found.items()}
        FILE.write_text(json.dumps({"made by": made_by, **lines}, indent=1) + "\n", encoding="utf-8")
    return int(num_changed > 0 and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
