"""Writes tests/data/trl_parity.json: what TRL makes of given completions and rewards, for our tests to agree with.

python benchmarks/trl_parity.py              all cases: two minutes
python benchmarks/trl_parity.py CASE ...     those alone; the others stay as they are
"""

import subprocess
import sys
from pathlib import Path

from _vs_trl_environment import trl_python

HERE = Path(__file__).parent
NUMBERS = HERE.parent / "tests" / "data" / "trl_parity.json"

if __name__ == "__main__":
    worker = [str(trl_python()), str(HERE / "_trl_parity_trl.py"), str(NUMBERS), *sys.argv[1:]]
    sys.exit(subprocess.run(worker, check=False).returncode)
