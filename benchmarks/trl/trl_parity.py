"""Writes tests/data/trl_parity.json: what TRL makes of given completions and rewards, for our tests to agree with.

python benchmarks/trl/trl_parity.py              all cases: two minutes
python benchmarks/trl/trl_parity.py CASE ...     those alone; the others stay as they are
"""

import argparse
import subprocess
import sys
from pathlib import Path

from _vs_trl_environment import trl_python

HERE = Path(__file__).parent
NUMBERS = HERE.parents[1] / "tests" / "data" / "trl_parity.json"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="by its name in parity/parity_cases.py")
    asked = parser.parse_args().cases
    worker = [str(trl_python()), str(HERE / "parity" / "parity_worker.py"), str(NUMBERS), *asked]
    sys.exit(subprocess.run(worker, check=False).returncode)
