"""One run of a program in a place that keeps no process alive between messages: earlier messages are sent again.

    python -c THIS_TEXT   (posttrain.sandbox.elsewhere writes the last line, which calls `replay_job`)

Standard input and output are the program's own, except for one that answers calls or runs tests: its standard output
carries its messages, a line of base64 for each that no earlier run delivered, and its prints go to standard error.  The
first line of standard error, under a mark that programs cannot guess, says that the limits hold; the second that the
source compiled.
"""

import binascii
import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


class Source(importlib.machinery.SourceFileLoader):
    """Our module, whose text came with the run."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, f"<{name}>")
        self.text = text

    def path_stats(self, path: object) -> "NoReturn":
        raise OSError(f"{path} is not a file")  # so that no compiled file is looked for

    def get_data(self, path: object) -> bytes:
        return self.text.encode()


class Channel:
    """Stands in for the socket to the pool: hands out what was recorded, and passes on what is new."""

    def __init__(self, incoming: list[bytes], delivered: int, mark: str, output: "int | None") -> None:
        self.incoming = b"".join(len(each).to_bytes(4, "little") + each for each in incoming)
        self.delivered, self.mark, self.output = delivered, mark, output
        self.compiled = False

    def recv(self, count: int) -> bytes:
        """The next bytes; if nothing more was recorded, the run is over."""
        if not self.incoming:
            leave(0)
        part, self.incoming = self.incoming[:count], self.incoming[count:]
        return part

    def sendall(self, frame: bytes) -> None:
        """Pass a message on; the first is the sandbox's report on compiling."""
        payload = frame[4:]
        if not self.compiled:
            if payload == b'["compiled"]':
                self.compiled = True
                say(self.mark, "compiled")
        elif self.delivered:
            self.delivered -= 1
        elif self.output is not None:
            write(self.output, binascii.b2a_base64(payload))

    def close(self) -> None:
        """A program that is only run has nothing more to say."""


def leave(status: int) -> "NoReturn":
    """End, once what was printed is out."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 120
    os._exit(status)


def say(mark: str, word: str) -> None:
    write(2, f"{mark} {word}\n".encode())


def write(descriptor: int, left: bytes) -> None:
    while left:
        left = left[os.write(descriptor, left) :]


def set_limits(limits: "dict[str, int]") -> None:
    """Resource limits, for this process and all that it starts; nothing raises them again."""
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        own = int(file.read().split()[0]) * resource.getpagesize()
    for name, soft, hard in (
        ("CPU", limits["cpu_seconds"], limits["cpu_seconds"] + 1),
        ("AS", own + limits["memory_bytes"], own + limits["memory_bytes"]),
        ("FSIZE", limits["file_bytes"], limits["file_bytes"]),
        ("CORE", 0, 0),
        ("NOFILE", limits["descriptors"], limits["descriptors"]),
        *([("NPROC", limits["processes"], limits["processes"])] if limits["processes"] else []),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        within = [value if most == resource.RLIM_INFINITY else min(value, most) for value in (soft, hard)]
        resource.setrlimit(kind, (within[0], within[1]))


def be_no_init() -> None:
    """As process 1, continue in a child: process 1 ignores signals without a handler, those of limits too."""
    if os.getpid() != 1:
        return
    child = os.fork()
    while child:
        pid, status = os.wait()  # orphans of the program's own end up here as well
        if pid == child:
            os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def replay_job(modules: "dict[str, str]", job: "dict[str, Any]") -> None:
    """Run what the job says: {kind, messages, delivered, mark, seed, limits, path, uid}."""
    be_no_init()
    seed = job["seed"]
    if seed is not None and os.environ.get("PYTHONHASHSEED") != str(seed) and os.path.isfile(sys.argv[0]):
        os.environ["PYTHONHASHSEED"] = str(seed)  # sets get the order of earlier runs: it is read when Python starts
        os.execv(sys.executable, [sys.executable, *sys.argv])
    for name, text in modules.items():
        loader = Source(name, text)
        module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, loader))
        sys.modules[name] = module
        loader.exec_module(module)
    runner = sys.modules["runner"]
    vars(runner)["SEED"] = seed
    vars(runner)["be_like_a_script"]()
    sys.path += job["path"]
    if job["uid"] is not None:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    set_limits(job["limits"])
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # they are text streams
    say(job["mark"], "ready")
    output = None
    if job["kind"] in ("calls", "tests"):
        output = os.dup(1)
        os.dup2(2, 1)
    messages = [each.encode("latin-1") for each in job["messages"]]
    channel = Channel(messages, job["delivered"], job["mark"], output)
    leave(runner.run_kind(job["kind"], channel))
