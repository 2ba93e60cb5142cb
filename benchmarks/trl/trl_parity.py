"""Writes tests/data/trl_parity.json: what TRL makes of given completions and rewards, for our tests to agree with.

python benchmarks/trl/trl_parity.py              all cases: two minutes
python benchmarks/trl/trl_parity.py CASE ...     those alone; the others stay as they are
python benchmarks/trl/trl_parity.py pairs        pairs and reward functions: trl_pair_parity.json, trl_rewards.json
"""

import argparse
import subprocess
import sys
from pathlib import Path

from _vs_trl_environment import python_with_peft

HERE = Path(__file__).parent
NUMBERS = HERE.parents[1] / "tests" / "data" / "trl_parity.json"
PAIRS, REWARDS = NUMBERS.with_name("trl_pair_parity.json"), NUMBERS.with_name("trl_rewards.json")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="by its name in parity/parity_cases.py")
    asked = parser.parse_args().cases
    workers = []
    if asked != ["pairs"]:
        workers.append([str(HERE / "parity" / "parity_worker.py"), str(NUMBERS), *asked])
    if not asked or asked == ["pairs"]:
        workers.append([str(HERE / "parity" / "pair_worker.py"), str(PAIRS)])
        workers.append([str(HERE / "parity" / "reward_worker.py"), str(REWARDS)])
    python = python_with_peft()
    codes = [subprocess.run([str(python), *worker], check=False).returncode for worker in workers]
    sys.exit(max(codes))
