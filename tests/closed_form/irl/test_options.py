"""Options that mean nothing are refused; some in a process of its own, where no type checker comes first."""

import subprocess
import sys

import numpy as np
import pytest

from posttrain.irl.causal import MaxCausalEntIRL
from posttrain.irl.maxent import MaxEntIRL
from posttrain.neural_irl import NeuralIRL
from tests.support.refusals import refused

PROGRAM = """
import numpy as np
from posttrain.errors import UserError
from posttrain.irl import GridWorld, LinearReward, MaxCausalEntIRL, MaxEntIRL
for make in (
    lambda: MaxCausalEntIRL(objective="duel"), lambda: MaxCausalEntIRL(solver="adam"),
    lambda: MaxCausalEntIRL(l2=np.nan), lambda: MaxEntIRL(gradient="algorithm 1"),
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
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == [
        "objective = 'duel'", "solver = 'adam'", "l2 = nan", "gradient = 'algorithm 1'", "on = 'edge'",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fitter", "name", "value"),
    [
        (MaxCausalEntIRL, "horizon", 0),
        (MaxCausalEntIRL, "l2", -1e-9),
        (MaxCausalEntIRL, "l2", np.inf),
        (MaxCausalEntIRL, "temperature", 0.0),
        (MaxCausalEntIRL, "temperature", np.inf),
        (MaxCausalEntIRL, "tolerance", 0.0),
        (MaxCausalEntIRL, "discount", 1.01),
        (MaxCausalEntIRL, "discount", -0.01),
        (MaxEntIRL, "l2", -1e-9),
        (MaxEntIRL, "l2", np.inf),
        (MaxEntIRL, "tolerance", 0.0),
        (NeuralIRL, "learning_rate", 0.0),
        (NeuralIRL, "weight_decay", -1e-9),
        (NeuralIRL, "num_steps", 0),
    ],
)
def test_a_number_that_means_nothing_is_refused(fitter, name, value) -> None:
    with refused(f"{name} = {value}"):
        fitter(**{name: value})


@pytest.mark.parametrize(
    ("fitter", "least"),
    [
        (MaxCausalEntIRL, {"horizon": 1, "l2": 0.0, "discount": 0.0}),
        (MaxEntIRL, {"l2": 0.0}),
        (NeuralIRL, {"weight_decay": 0.0, "num_steps": 1}),
    ],
)
def test_the_least_that_means_something_is_taken_as_it_is(fitter, least) -> None:
    made = fitter(**least)
    assert {name: getattr(made, name) for name in least} == least


def test_the_package_loads_no_torch_and_no_optimiser() -> None:
    program = "import sys, posttrain.irl; print(*sorted({'torch', 'scipy.optimize', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
