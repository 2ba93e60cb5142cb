"""Options that mean nothing are refused, in a process of its own where no type checker comes first."""

import subprocess
import sys

PROGRAM = """
import numpy as np
from posttrain.errors import UserError
from posttrain.irl import GridWorld, LinearReward, MaxCausalEntIRL, MaxEntIRL
for make in (
    lambda: MaxCausalEntIRL(objective="duel"), lambda: MaxCausalEntIRL(solver="adam"),
    lambda: MaxCausalEntIRL(horizon=0), lambda: MaxCausalEntIRL(l2=-1.0), lambda: MaxCausalEntIRL(temperature=0.0),
    lambda: MaxCausalEntIRL(tolerance=0.0), lambda: MaxCausalEntIRL(discount=1.5), lambda: MaxCausalEntIRL(l2=np.nan),
    lambda: MaxEntIRL(gradient="algorithm 1"), lambda: MaxEntIRL(l2=-0.1), lambda: MaxEntIRL(tolerance=-1.0),
    lambda: LinearReward(features=np.eye(9), on="edge").bound(GridWorld(3)),
):
    try:
        make()
        print("accepted")
    except UserError as error:
        print(error)
"""


def test_each_is_refused_by_name() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert [line.split(" ", 3)[:3] for line in done.stdout.splitlines()] == [
        ["objective", "=", "duel"], ["solver", "=", "adam"], ["horizon", "=", "0"], ["l2", "=", "-1.0"],
        ["temperature", "=", "0.0"], ["tolerance", "=", "0.0"], ["discount", "=", "1.5:"], ["l2", "=", "nan"],
        ["gradient", "=", "algorithm"], ["l2", "=", "-0.1"], ["tolerance", "=", "-1.0"], ["on", "=", "'edge':"],
    ]  # fmt: skip


def test_the_package_loads_no_torch_and_no_optimiser() -> None:
    program = "import sys, posttrain.irl; print(*sorted({'torch', 'scipy.optimize', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
