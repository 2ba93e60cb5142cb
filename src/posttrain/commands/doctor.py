"""`posttrain doctor`: what this machine has, and whether model-written programs can be run on it safely."""

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from posttrain.errors import RunError, UserError
from posttrain.rewards.sandbox.pool import Pool
from posttrain.rewards.sandbox.probes import SandboxUnavailable
from posttrain.rewards.sandbox.server import ServerLost

HELP = """usage: posttrain doctor [--help]

Show versions, devices and free memory, and try the sandbox: every probe that is not refused is named with its remedy.
Exit code 0 where the sandbox is safe to use, 1 where it is not.
"""

PACKAGES = ("posttrain", "torch", "transformers", "tokenizers", "numpy", "math-verify", "peft")
GIB = 1 << 30


def main(arguments: Sequence[str]) -> int:
    """Print the tables."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(HELP)
        return 0
    if arguments:
        raise UserError(f"doctor takes no arguments, but was given {' '.join(arguments)}")
    for name, says in (*machine(), *packages()):
        print(f"{name:12} {says}")
    print()
    return sandbox()


def machine() -> list[tuple[str, str]]:
    """Interpreter, cores, memory, devices."""
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    disk = shutil.disk_usage(".").free
    return [
        ("python", f"{platform.python_version()}, {platform.system()} {platform.release()}, {platform.machine()}"),
        ("cores", f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads"),
        ("memory", f"{free / GIB:.1f} GiB unused, disk {disk / GIB:.1f} GiB free here"),
        ("devices", ", ".join(devices) or "no CUDA device: everything runs on the CPU"),
    ]


def packages() -> list[tuple[str, str]]:
    """Versions of what matters."""
    found = []
    for name in PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            found.append((name, "not installed"))
    return found


def sandbox() -> int:
    """Try the sandbox and print what its probes found."""
    print("sandbox      sealed fork-server")
    if sys.platform != "linux":
        print(f"  not on {sys.platform}: it needs seccomp, which is Linux.")
        return 1
    with Pool() as pool:
        try:
            pool.run([])
            server = pool.opened()
        except SandboxUnavailable:
            server = None
        except (RunError, ServerLost) as error:
            print(f"  the fork-server does not start: {error}")
            return 1
        if server is not None:
            landlock = (
                f"version {server.landlock}" if server.landlock else "not in this kernel; seccomp alone refuses paths"
            )
            user = f"nobody ({server.uid})" if server.uid is not None else f"this one ({os.getuid()})"
            print(f"  layers     resource limits, Landlock ({landlock}), seccomp; programs run as {user}")
            for name, reason in server.missing.items():
                print(f"  missing    module {name}: {reason}")
        for finding in pool.found:
            print(f"  {finding.line()}")
        safe = bool(pool.found) and all(finding.passed for finding in pool.found)
    print(f"  {'safe: every probe was refused' if safe else 'NOT SAFE: no program will be run here'}")
    return 0 if safe else 1
