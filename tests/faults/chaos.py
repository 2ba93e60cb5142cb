"""Random faults over whole runs: processes are killed or stopped and networks cut until enough has happened.

    python -m tests.faults.chaos --faults 200 --seed 0

Each run samples from two servers.  At a random moment a server is killed and started anew, or stopped for a while, or
its network is cut, or the driver is killed.  A run that was killed, or that ended with an error which names a server,
is resumed.  Every run must end in time, with the bits of an undisturbed one.  The same seed chooses the same victims;
the moments depend on the machine.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.servers import Server, http_section, servers
from tests.support.faulty_proxy import FaultyProxy
from tests.support.runs import Command, command, require_same, save_tiny_model, start, tiny_recipe

STEPS = 24
MOMENT_SECONDS = (0.1, 1.2)
"""Between two faults."""
RUN_SECONDS = 240.0
"""A run that takes longer hangs."""
PAUSE_SECONDS = 0.8
"""How long a server is stopped, or its network cut."""
MOST_LIVES = 60


@dataclass
class Chaos:
    """Faults of some runs, counted."""

    place: Path
    dice: random.Random
    faults: int
    """How many are to come."""
    counts: Counter[str] = field(default_factory=Counter)

    def disturbed(self, seed: int, started: list[Server], proxies: list[FaultyProxy]) -> None:
        """One run with faults.  Raises AssertionError if it hangs, fails, or differs from the undisturbed one."""
        sections = {
            "run": {"num_steps": STEPS, "seed": seed},
            "evaluation": {"every_steps": 6, "samples": 1, "brief_problems": 2},
        }
        whole, folder = self.place / f"whole-{seed}", self.place / f"chaos-{seed}"
        ended = command("rl", tiny_recipe(whole, **sections), folder=whole)
        assert ended.code == 0, ended.err
        recipe = tiny_recipe(folder, engine=http_section(proxies), **sections)
        self.until_done(recipe, folder, started, proxies)
        require_same(folder / "run", whole / "run")
        self.counts["runs"] += 1

    def until_done(self, recipe: Path, folder: Path, started: list[Server], proxies: list[FaultyProxy]) -> None:
        until, running = time.monotonic() + RUN_SECONDS, start("rl", recipe, folder=folder)
        for _ in range(MOST_LIVES):
            while running.process.is_alive():
                assert time.monotonic() < until, f"the run hangs: {running.log.read_text()}"
                time.sleep(self.dice.uniform(*MOMENT_SECONDS))
                if self.faults > 0 and running.process.is_alive():
                    self.one_fault(running, started, proxies)
            ended = running.ended()
            if ended.code == 0:
                return
            if ended.code != -signal.SIGKILL:  # both servers were away, or one was when the run connected
                assert any(each.url in ended.err for each in proxies), ended.err
                self.counts["ended with an error"] += 1
            self.counts["resumed"] += 1
            begun = (folder / "run" / "config.yaml").exists()
            running = start("rl", *(["--resume", folder / "run"] if begun else [recipe]), folder=folder)
        raise AssertionError(f"not done after {MOST_LIVES} lives")

    def one_fault(self, running: Command, started: list[Server], proxies: list[FaultyProxy]) -> None:
        index = self.dice.randrange(len(started))
        server, proxy = started[index], proxies[index]

        def kill_server() -> None:
            server.kill()
            server.restart()

        def stop_server() -> None:
            server.send(signal.SIGSTOP)
            time.sleep(PAUSE_SECONDS)
            server.send(signal.SIGCONT)

        def cut_network() -> None:
            proxy.cut_off()
            time.sleep(PAUSE_SECONDS)
            proxy.join()

        faults: dict[str, Callable[[], None]] = {
            "server killed": kill_server,
            "server stopped": stop_server,
            "network cut": cut_network,
            "driver killed": lambda: running.signal(signal.SIGKILL),
        }
        name = self.dice.choice(sorted(faults))
        faults[name]()
        self.counts[name] += 1
        self.faults -= 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        place = Path(folder)
        save_tiny_model(place / "model")
        chaos = Chaos(place, random.Random(given.seed), given.faults)
        with servers(place / "model", place, 2) as (started, proxies):
            for seed in range(1, 10_000):
                chaos.disturbed(seed, started, proxies)
                print(f"run {seed}: the same to the bit; {dict(chaos.counts)}", flush=True)
                if chaos.faults <= 0:
                    break
    seconds = time.monotonic() - began
    print(f"{given.faults} faults in {chaos.counts['runs']} runs, {seconds:.0f} s: no hang, no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
