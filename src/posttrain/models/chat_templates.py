"""Bounds on what a chat template takes: it comes with a model, and may loop for ever or write more than memory holds.

Jinja's sandbox keeps a template from files and from Python, and bounds neither time nor memory.  A process apart would
bound both, at more than an honest rendering costs; counting steps would need a compiler other than transformers'.  So:

time      a thread that looks on raises an exception in the one that renders, once that has used so many seconds of
          processor time, which a busy machine does not use up.  It is there only while something is rendered.
powers    are refused before: 10**10**8 is one step, and an exception comes between steps.  So is a product, and one of
          numbers of a hundred million digits is not ended.
memory    the address space of the process may grow by 2 GiB: an allocation beyond that is a MemoryError.  The limit
          holds for the whole process, so with other Python threads alive (in `posttrain serve`, and in scripts that
          loaded a model by transformers) it is half of the machine's free memory, which no honest thread takes within
          a rendering.  With other threads and a GPU in use there is no limit: CUDA reserves addresses by the gigabyte.

Below that: which of several templates a tokenizer uses, what options it reads, and what date it writes.
"""

import ctypes
import inspect
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import date
from functools import lru_cache
from typing import Any, TypeVar

from jinja2 import Environment, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.schemas import did_you_mean

SECONDS = 10.0
"""Processor time of one rendering; those of honest templates take less than a thousandth."""
GROWTH = 2 << 30
"""Bytes by which the address space may grow in one rendering."""
LOOK_EVERY = 0.25
STEPS_TO_ARRIVE = 1000
"""Of Python, in which an exception from another thread surely arrives; it takes one."""
PAGE = resource.getpagesize()
Made = TypeVar("Made")


class TemplateTooSlow(Exception):
    """Raised within a rendering that has used up its time."""


class TimeLimit:
    """The renderings that go on in this process, by thread, and the thread that ends those which take too long."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ends: dict[int, float] = {}
        """Processor time at which each thread's rendering has used up its own."""
        self.sent: set[int] = set()
        """Threads that an exception was sent to, while their renderings go on."""
        self.watcher: threading.Thread | None = None

    def within(self, render: Callable[[], Made]) -> Made:
        """What a rendering makes.  Raises TemplateTooSlow."""
        thread = threading.get_ident()
        try:
            self.begin(thread)
            try:
                made = render()
            except TemplateTooSlow:
                raise
            except BaseException:
                self.end(thread)
                raise
            self.end(thread)
        except TemplateTooSlow:
            with self.lock:  # it may have come while one of the lines above was at it
                self.ends.pop(thread, None)
                self.sent.discard(thread)
            raise
        return made

    def begin(self, thread: int) -> None:
        """Have the rendering of a thread looked at."""
        with self.lock:
            self.ends[thread] = processor_time(thread) + SECONDS
            if self.watcher is None or not self.watcher.is_alive():
                self.watcher = threading.Thread(target=self.watch, name="chat template limit", daemon=True)
                self.watcher.start()

    def end(self, thread: int) -> None:
        """Forget a rendering that is over.  Raises TemplateTooSlow where that is on its way.

        It cannot be taken back: Python 3.11 then believes for ever that one is on its way, looks for it at each step,
        and never gets on under a profiler or debugger.
        """
        with self.lock:
            self.ends.pop(thread, None)
            sent = thread in self.sent
            self.sent.discard(thread)
        for _ in range(STEPS_TO_ARRIVE if sent else 0):
            pass

    def watch(self) -> None:
        """Look at all renderings until there are none."""
        while True:
            time.sleep(LOOK_EVERY)
            with self.lock:
                if not self.ends:
                    self.watcher = None
                    return
                for thread, end in self.ends.items():
                    if processor_time(thread) > end:
                        self.sent.add(thread)
                        raise_in(thread, TemplateTooSlow)


def processor_time(thread: int) -> float:
    """Seconds of processor time that a thread has used; of the clock where a system does not tell."""
    if sys.platform != "linux":
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def raise_in(thread: int, exception: type[BaseException]) -> None:
    """Have a thread raise an exception before its next step of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(exception))


LIMIT = TimeLimit()
"""Of this process, since a thread has one such exception on its way at most."""
os.register_at_fork(after_in_child=LIMIT.__init__)  # type: ignore[misc]  # the watcher stays with the parent


class MemoryLimit:
    """The limit on the address space of this process while templates are rendered, by one thread or several."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.renderings = 0
        self.before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    def within(self, render: Callable[[], Made]) -> Made:
        """What a rendering makes.  Raises MemoryError."""
        with self.lock:
            if self.renderings == 0:
                self.before = resource.getrlimit(resource.RLIMIT_AS)
                self.lower()
            self.renderings += 1
        try:
            return render()
        finally:
            with self.lock:
                self.renderings -= 1
                if self.renderings == 0:
                    resource.setrlimit(resource.RLIMIT_AS, self.before)

    def reset(self) -> None:
        """Forget all renderings and their limit."""
        if self.renderings:
            resource.setrlimit(resource.RLIMIT_AS, self.before)
        self.lock, self.renderings = threading.Lock(), 0

    def lower(self) -> None:
        """Set the limit for the rendering that begins."""
        growth = allowed_growth()
        if growth is not None:
            soft, hard = self.before
            most = address_space() + growth
            resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))


def allowed_growth() -> int | None:
    """Bytes by which the address space may grow in a rendering; None is no limit."""
    if sys.platform != "linux":
        return None
    if threading.active_count() <= 1 + (LIMIT.watcher is not None):
        return GROWTH
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        return None
    return max(GROWTH, os.sysconf("SC_AVPHYS_PAGES") * PAGE // 2)


MEMORY = MemoryLimit()
"""Of this process: a resource limit has no smaller scope."""
os.register_at_fork(after_in_child=MEMORY.reset)  # renderings of other threads stay in the parent


def address_space() -> int:
    """Bytes of address space that the process has."""
    file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(file, 64).split(b" ", 1)[0]) * PAGE
    finally:
        os.close(file)


@lru_cache
def require_no_powers(template: str) -> None:
    """Refuse a template that raises to a power: a single step of Python, which nothing ends before it is done."""
    before = ""
    try:
        for line, kind, text in Environment().lex(template):
            if kind == "operator" and text == "**" and before not in ("(", ","):  # there it unpacks arguments
                raise UserError(
                    f"the chat template raises to a power in line {line}, which could take for ever.  Mend it, or name"
                    " another file as model.chat_template."
                )
            before = before if kind == "whitespace" else text
    except TemplateSyntaxError:
        return  # which is told where the template is compiled


def bounded(render: Callable[[], Made]) -> Made:
    """What a rendering makes, within its bounds.  Raises TemplateTooSlow, and MemoryError."""
    return LIMIT.within(lambda: MEMORY.within(render))


OURS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"tools", "documents"}
"""Arguments of the call itself, which no template option may take over."""
TODAY = "strftime_now"
"""The function by which chat templates ask for the date of today."""
DATE = "2024-07-26"
"""What it is told, unless the options say another."""
DIRECTIVES = "aAbBdeGHIjmMpSuUVwWyY"
"""The letters behind % that a format may have."""
FILTER = "replace"
"""Jinja's filter that puts one text for another."""
NO_TEMPLATE = (
    " has no chat template.  Use an instruction-tuned model, name a template's file as model.chat_template, or, of"
    " a dataset, have messages written as plain text by task.prompt_format: plain"
)


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a tokenizer's chat template, of several the one named default; empty where it has none."""
    template = tokenizer.chat_template
    return template.get("default", "") if isinstance(template, dict) else template or ""


def require_template(tokenizer: PreTrainedTokenizerBase, id: str) -> None:
    """Refuse messages, those of the prompt `id`, where there is no template to write them with."""
    template = tokenizer.chat_template
    if isinstance(template, dict) and "default" not in template:
        raise UserError(
            f"the model's tokenizer has chat templates of the names {', '.join(template)} and none of the name"
            " default.  Put the one to use into a file, and name that as model.chat_template."
        )
    if not template:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise UserError(f"prompt {id!r} is a list of messages, but the model's tokenizer ({name}){NO_TEMPLATE}.")


def known_options(template: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a chat template, each of which its text must speak of: a misspelt one would change nothing."""
    words = set(re.findall(r"\w+", template))
    for name in options:
        where = f"model.template_options.{name}"
        if name in OURS:
            raise UserError(f"{where}: that is decided where the template is called; leave it out")
        if not template:
            raise UserError(f"{where}: the model's tokenizer{NO_TEMPLATE}, and leave model.template_options out.")
        if name not in words:
            near = did_you_mean(name, words)
            hint = near if near.startswith("Did") else "Look for `if` in it to see which it reads."
            raise UserError(f"{where}: the chat template reads no variable of that name.  {hint}")
    return dict(options)


def with_one_date(template: str, day: object) -> str:
    """A template that has a date written for the one of today, if it asks for that; other templates as they are.

    Prompts would else change overnight: a run that is resumed, or made again, would not be the same run.  What a
    template sees is data, so the function stands as a macro above the text, on a line that leaves nothing behind.
    """
    if TODAY not in template:
        return template
    try:
        written = date.fromisoformat(str(day))
    except ValueError:
        raise UserError(
            f"model.template_options.{TODAY} = {day!r}: the template writes a date, which is said as {DATE}"
        ) from None
    parts = {f"%{letter}": written.strftime(f"%{letter}") for letter in DIRECTIVES}
    parts |= {f"%-{letter}": parts[f"%{letter}"].lstrip("0") for letter in "dm"}
    filled = "".join(f" | {FILTER}({part!r}, {text!r})" for part, text in parts.items())
    return f"{{% macro {TODAY}(format) %}}{{{{ format{filled} }}}}{{% endmacro %}}\n{template}"
