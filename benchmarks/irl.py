"""Seconds, gaps and memory of inverse RL, beside the course's plain loops, qzed/irl-maxent's method and `imitation`.

    python benchmarks/irl.py [--only course exact solvers grid wide imitation overflow import]

One thread; times are the best of three, in a process for each section.  A gap is the largest difference between a
feature of the fitted policy and of the demonstrations, as undiscounted visits unless a discount is named.  The first
run of the section `imitation` makes .venv-imitation.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
os.environ.update(ONE_THREAD)

import numpy as np  # noqa: E402  after the number of threads is fixed
from _irl_loops import course_loops  # noqa: E402
from _irl_rivals import TRAINER, WORKER, in_imitation, qzed_fit, qzed_visits  # noqa: E402
from numpy import ndarray  # noqa: E402
from scipy.sparse import csr_array  # noqa: E402

from posttrain.irl.causal import MaxCausalEntIRL  # noqa: E402
from posttrain.irl.comparison import occupancy  # noqa: E402
from posttrain.irl.counting import start_shares, visit_totals  # noqa: E402
from posttrain.irl.course import expert_policy, recover_reward  # noqa: E402
from posttrain.irl.demonstrations import Demonstrations  # noqa: E402
from posttrain.irl.episode_sampling import sample_demonstrations  # noqa: E402
from posttrain.irl.feasibility import smallest_gap  # noqa: E402
from posttrain.irl.features import LinearReward  # noqa: E402
from posttrain.irl.grids import IcyGridWorld, tiles  # noqa: E402
from posttrain.irl.gymnasium_table import read_gymnasium  # noqa: E402
from posttrain.irl.maxent import MaxEntIRL  # noqa: E402
from posttrain.irl.mdp import TabularMDP  # noqa: E402
from posttrain.irl.planning import Problem, soft_finite_horizon, soft_policy_iteration, value_iteration  # noqa: E402

GOAL, SIDE_PRIZE = 24, 8
Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--here", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        SECTIONS[options.here]()
        return
    for name in options.only:
        print(f"\n{name}", flush=True)
        subprocess.run([sys.executable, __file__, "--here", name], check=True)


def best_of_three(work: Callable[[], Result]) -> tuple[float, Result]:
    """The shortest time of three, and what the last one gave."""
    seconds = np.inf
    for _ in range(3):
        begun = time.perf_counter()
        result = work()
        seconds = min(seconds, time.perf_counter() - begun)
    return float(seconds), result


def line(what: str, seconds: float, rest: str) -> None:
    print(f"  {what:<52} {seconds * 1000:>11,.1f} ms   {rest}", flush=True)


def peak_gigabytes() -> float:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def course_demonstrations() -> Demonstrations:
    """200 episodes of the course's expert on its 5 × 5 icy grid."""
    world, rewards = IcyGridWorld(5, slip=0.2, terminal=()), np.zeros(25)
    rewards[GOAL], rewards[SIDE_PRIZE] = 1.0, 0.65
    values = value_iteration(world, rewards, discount=0.9, tolerance=1e-4)
    expert = expert_policy(world.intended, values)
    ending = IcyGridWorld(5, slip=0.2, terminal=[GOAL])
    return sample_demonstrations(ending, expert, num_episodes=200, rng=np.random.default_rng(11))


def course() -> None:
    """The course's demonstrations, fitted in every way."""
    demonstrations, world = course_demonstrations(), IcyGridWorld(5, slip=0.2, terminal=())
    seen, start, goal = visit_totals(demonstrations, 25), start_shares(demonstrations, 25), np.array([GOAL])
    table = world.transitions.toarray().reshape(25, 4, 25)

    def top(weights: ndarray) -> str:
        return "{" + ", ".join(str(state) for state in np.argsort(weights)[::-1][:2]) + "}"

    slow, (weights, visits, steps) = best_of_three(lambda: course_loops(table, [GOAL], start, seen))
    line("course, plain loops", slow, f"gap {np.abs(visits - seen).max():.5f}  top {top(weights)}  {steps} iterations")
    fast, found = best_of_three(lambda: recover_reward(world, np.eye(25), goal, demonstrations))
    apart = np.abs(found.weights - weights).max()
    line("course, vectorised", fast, f"gap {found.gap:.5f}  top {top(found.weights)}  {slow / fast:.0f} × faster, "
         f"weights within {apart:.0e}")  # fmt: skip
    swapped = table.transpose(0, 2, 1).copy()
    seconds, (weights, visits) = best_of_three(lambda: qzed_fit(swapped, [GOAL], start, seen))
    line("qzed/irl-maxent's method", seconds, f"gap {np.abs(visits - seen).max():.5f}  top {top(weights)}")
    ending, reward = IcyGridWorld(5, slip=0.2, terminal=[GOAL]), LinearReward(features=np.eye(25))
    for gradient in ("tilted", "algorithm1"):
        seconds, paths = best_of_three(lambda g=gradient: MaxEntIRL(gradient=g).fit(ending, reward, demonstrations))
        line(
            f"MaxEntIRL {gradient}", seconds, f"gap {paths.gap:.5f} of its own paths, {paths.executed_gap:.5f} executed"
        )
    for name, irl in {
        "MaxCausalEntIRL dual, Newton": MaxCausalEntIRL(),
        "MaxCausalEntIRL dual, L-BFGS": MaxCausalEntIRL(solver="lbfgs"),
        "MaxCausalEntIRL likelihood, discount .9": MaxCausalEntIRL(objective="likelihood", discount=0.9),
        "MaxCausalEntIRL dual, discount .9": MaxCausalEntIRL(discount=0.9),
    }.items():
        seconds, fit = best_of_three(lambda irl=irl: irl.fit(ending, reward, demonstrations))
        gap = np.abs(occupancy(ending, fit.policy, discount=1.0) - seen).max()
        line(name, seconds, f"gap {gap:.5f}  top {top(fit.weights)}  log-likelihood {fit.log_likelihood:.3f} a step")
    seconds, bound = best_of_three(lambda: smallest_gap(MaxCausalEntIRL().setting(reward.bound(ending), start), seen))
    line("least gap of any policy, linear program", seconds, f"gap {bound:.5f}")


def exact() -> None:
    """Moments of a soft-optimal policy, to be matched without penalty."""
    import gymnasium

    for name, options in (("FrozenLake", {"map_name": "8x8"}), ("CliffWalking", {}), ("Taxi", {})):
        known = max(env for env in gymnasium.registry if env.startswith(f"{name}-v"))
        mdp, rng = read_gymnasium(gymnasium.make(known, **options)), np.random.default_rng(0)
        if name == "Taxi":
            features = np.stack([mdp.rewards == worth for worth in (-1, -10, 20)], axis=2).astype(float)
            reward, weights = LinearReward(features=features, on="state_action"), np.array([-2.0, -2.0, 4.0])
        else:
            reward, weights = LinearReward(features=np.eye(mdp.num_states)), -2 + 0.3 * rng.normal(size=mdp.num_states)
        for discount in (0.99, 1.0):
            irl = MaxCausalEntIRL(discount=discount, l2=0.0)
            setting = irl.setting(reward.bound(mdp), mdp.start)
            plan = setting.plan(weights)
            moments = setting.totals(plan, plan.visits(mdp.start))
            seconds, fit = best_of_three(lambda irl=irl, mdp=mdp, r=reward, m=moments: irl.fit_moments(mdp, r, m))
            line(
                f"{known}, {mdp.num_states} states, discount {discount}",
                seconds,
                f"gap {fit.gap:.0e} ± {fit.gap_error:.0e}",
            )


def solvers() -> None:
    """Newton and L-BFGS with a weight for each state: where one becomes quicker than the other."""
    for discount in (0.9, 1.0):
        for size in (10, 15, 20, 24, 30):
            world, rng = IcyGridWorld(size, slip=0.2), np.random.default_rng(0)
            problem = Problem(mdp=world, reward=-2 + 0.3 * rng.normal(size=size**2), discount=discount)
            policy = soft_policy_iteration(problem).policy
            shown = sample_demonstrations(world, policy, num_episodes=200, rng=np.random.default_rng(0))
            reward = LinearReward(features=np.eye(size**2))
            for solver in ("newton", "lbfgs"):
                irl = MaxCausalEntIRL(discount=discount, solver=solver)
                begun = time.perf_counter()
                fit = irl.fit(world, reward, shown)
                line(
                    f"{size**2} weights, discount {discount}, {solver}",
                    time.perf_counter() - begun,
                    f"{fit.num_iterations} iterations, gradient {fit.history[-1][1]:.0e}",
                )


def grid() -> None:
    """99,856 states."""
    seconds, world = best_of_three(lambda: IcyGridWorld(316, slip=0.2, start=np.full(316**2, 1 / 316**2)))
    line(f"building {world.num_states:,} states", seconds, f"{world.transitions.nnz:,} transitions")
    rng = np.random.default_rng(0)
    reward = LinearReward(features=tiles(316, 32))
    weights = np.concatenate([[-0.5], 0.3 * rng.normal(size=100)])
    problem = Problem(mdp=world, reward=reward.bound(world).rewards(weights), discount=0.99)
    values = rng.normal(size=world.num_states)
    seconds = min(best_of_three(lambda: problem.sweep(values))[0] for _ in range(5))
    line("soft sweep", seconds, "")
    irl = MaxCausalEntIRL(discount=0.99, l2=0.0)
    setting = irl.setting(reward.bound(world), world.start)
    plan = setting.plan(weights)
    moments = setting.totals(plan, plan.visits(world.start))
    seconds, fit = best_of_three(lambda: irl.fit_moments(world, reward, moments))
    line("fit of 101 tile features, from a uniform start", seconds, f"gap {fit.gap:.0e} ± {fit.gap_error:.0e}  "
         f"{fit.num_iterations} iterations  {peak_gigabytes():.2f} GB")  # fmt: skip


def wide() -> None:
    """Some 10⁵ states that are not flat, so that their linear systems are iterated; and fewer, by factors too."""
    for how in ("iterated", "by factors, once"):
        world = anywhere(6000)
        vars(world)["wide"] = how == "iterated"
        problem = Problem(mdp=world, reward=np.random.default_rng(0).normal(size=6000) - 1, discount=0.99)
        begun = time.perf_counter()
        soft_policy_iteration(problem)
        line(f"6,000 states that lead anywhere: soft planning, {how}", time.perf_counter() - begun, "")
    for name, world in (("a cube of 46³ states", cube(46)), ("100,000 states that lead anywhere", anywhere(100_000))):
        size, rng = world.num_states, np.random.default_rng(0)
        features = np.zeros((size, 21))
        features[:, 0] = 1
        features[np.arange(size), 1 + np.arange(size) * 20 // size] = 1
        reward = LinearReward(features=features)
        irl, weights = MaxCausalEntIRL(discount=0.99, l2=0.0), np.concatenate([[-0.5], 0.3 * rng.normal(size=20)])
        setting = irl.setting(reward.bound(world), world.start)
        seconds, plan = best_of_three(lambda setting=setting, weights=weights: setting.plan(weights))
        line(f"{name}: soft planning", seconds, f"{world.transitions.nnz:,} transitions")
        moments = setting.totals(plan, plan.visits(world.start))
        begun = time.perf_counter()
        fit = irl.fit_moments(world, reward, moments)
        line(f"{name}: fit of 21 features, once", time.perf_counter() - begun, f"gap {fit.gap:.0e} ± "
             f"{fit.gap_error:.0e}  {fit.num_iterations} iterations  {peak_gigabytes():.2f} GB")  # fmt: skip


def cube(side: int, slip: float = 0.2) -> TabularMDP:
    """The icy grid in three dimensions, from a uniform start; the last corner ends an episode."""
    size, moves = side**3, 6
    places = np.array(np.unravel_index(np.arange(size), (side,) * 3))
    beside = []
    for axis in range(3):
        for step in (1, -1):
            moved = places.copy()
            moved[axis] = np.clip(moved[axis] + step, 0, side - 1)
            beside.append(np.ravel_multi_index(tuple(moved), (side,) * 3))
    chances = np.full((moves, moves), slip / moves) + (1 - slip) * np.eye(moves)
    rows = np.repeat(np.arange(size * moves), moves)
    columns = np.repeat(np.stack(beside, axis=1)[:, None], moves, axis=1).ravel()
    table = csr_array((np.tile(chances.ravel(), size), (rows, columns)), shape=(size * moves, size))
    return TabularMDP.from_sparse(table, num_actions=moves, start=np.full(size, 1 / size), terminal=[size - 1])


def anywhere(size: int) -> TabularMDP:
    """Four actions, each of which leads to four states that lie anywhere, with random probabilities."""
    rng, rows = np.random.default_rng(0), size * 4
    shares = rng.dirichlet(np.ones(4), rows).ravel()
    places = (np.repeat(np.arange(rows), 4), rng.integers(0, size, rows * 4))
    table = csr_array((shares, places), shape=(rows, size))
    return TabularMDP.from_sparse(table, num_actions=4, start=np.full(size, 1 / size), terminal=[size - 1])


def imitation() -> None:
    """One finite-horizon step, and the course's demonstrations padded to one length."""
    for size in (5, 32, 100):
        world, horizon = IcyGridWorld(size, slip=0.2, terminal=()), 100
        reward = np.random.default_rng(0).normal(size=size * size)
        problem = Problem(mdp=world, reward=reward, discount=1.0)

        def ours(problem: Problem = problem, horizon: int = horizon, world: IcyGridWorld = world):
            plan = soft_finite_horizon(problem, horizon=horizon)
            return plan, plan.visits(np.vstack([world.start, np.zeros((horizon, world.num_states))]))

        seconds, (plan, visits) = best_of_three(ours)
        theirs = in_imitation(WORKER, arrays(world, horizon) | {"reward": reward, "repeats": 3})
        apart = max(np.abs(plan.policy - theirs["policy"]).max(), np.abs(visits - theirs["visits"]).max())
        slow = float(theirs["seconds"])
        line(f"{size} × {size}, H = {horizon}: imitation", slow, "")
        line(f"{size} × {size}, H = {horizon}: ours", seconds, f"{slow / seconds:.0f} × faster, equal to {apart:.0e}")
    demonstrations, world = course_demonstrations(), IcyGridWorld(5, slip=0.2, terminal=[GOAL])
    seen, horizon = visit_totals(demonstrations, 25), 50
    padded = seen.copy()
    padded[GOAL] = horizon + 1 - (seen.sum() - seen[GOAL])  # they stay at the goal until the horizon
    table = arrays(world, horizon)
    stay = [GOAL * 4 + action for action in range(4)]
    table["rows"], table["columns"] = np.append(table["rows"], stay), np.append(table["columns"], [GOAL] * 4)
    table["chances"] = np.append(table["chances"], np.ones(4))
    found = in_imitation(TRAINER, table | {"demonstrated": padded})
    visits = np.where(np.arange(25) == GOAL, seen, found["visits"])
    line(
        "course's demonstrations, padded: imitation", float(found["seconds"]), f"gap {np.abs(visits - seen).max():.5f}"
    )


def arrays(world: TabularMDP, horizon: int) -> dict[str, object]:
    table = world.transitions.tocoo()
    return {"rows": table.coords[0], "columns": table.coords[1], "chances": table.data, "start": world.start,
            "num_actions": world.num_actions, "horizon": horizon}  # fmt: skip


def importing() -> None:
    """What `import posttrain.irl` takes, interpreter aside."""
    program = "import time; t = time.perf_counter(); import posttrain.irl; print(time.perf_counter() - t)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    runs = [
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment)
        for _ in range(3)
    ]
    line("import posttrain.irl", min(float(run.stdout) for run in runs), "")


def overflow() -> None:
    """Where the linear-space partition of qzed/irl-maxent stops being a number, and what log space says there."""
    for size in (12, 13, 40):
        num_states = size * size
        world = IcyGridWorld(size, slip=0.2, terminal=())
        table = world.transitions.toarray().reshape(num_states, 4, num_states).transpose(0, 2, 1).copy()
        with np.errstate(all="ignore"):
            visits = qzed_visits(table, [num_states - 1], world.start, np.ones(num_states))
        plan = soft_policy_iteration(Problem(mdp=IcyGridWorld(size), reward=np.ones(num_states), discount=0.99))
        print(f"  {size} × {size}, reward 1: qzed's visits add up to {visits.sum():.4g}; "
              f"soft values here reach {plan.values.max():.4g}", flush=True)  # fmt: skip


SECTIONS = {
    "course": course,
    "exact": exact,
    "solvers": solvers,
    "grid": grid,
    "wide": wide,
    "imitation": imitation,
    "overflow": overflow,
    "import": importing,
}

if __name__ == "__main__":
    main()
