"""A chat template: limits on its time and memory, its options, and the date that it writes.

It comes with a model, and may loop without end or fill the memory.  Jinja's sandbox limits neither, and a separate
process would cost more than an honest rendering.  So:

time      a watching thread raises an exception in the rendering one after some seconds of its processor time, which a
          busy machine does not use up.  It only exists while something is rendered.
powers    are refused before: 10**10**8 is one step, and an exception comes between steps.  A product of numbers of a
          hundred million digits is one step too, and is not stopped.
memory    the address space of the process may grow by 2 GiB: a larger allocation is a MemoryError.  With other Python
          threads (as in `posttrain serve`) it is half of the machine's free memory, more than an honest thread takes
          meanwhile.  With other threads and a GPU in use there is no limit: CUDA reserves addresses by the gigabyte.
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
"""Processor time of one rendering; an honest one takes less than a thousandth."""
GROWTH = 2 << 30
LOOK_EVERY = 0.25
STEPS_TO_ARRIVE = 1000
"""Steps of Python within which an exception from another thread surely arrives; it takes one."""
PAGE = resource.getpagesize()
Made = TypeVar("Made")


class TemplateTooSlow(Exception):
    """Raised within a rendering that has used up its time."""


class TimeLimit:
    """The renderings in this process, by thread, and the thread that ends slow ones."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ends: dict[int, float] = {}
        """Each thread's processor time at which its rendering is ended."""
        self.sent: set[int] = set()
        """Threads that were sent an exception and are still rendering."""
        self.watcher: threading.Thread | None = None

    def within(self, render: Callable[[], Made]) -> Made:
        thread = threading.get_ident()
        try:
            with self.lock:
                self.ends[thread] = processor_time(thread) + SECONDS
                if self.watcher is None or not self.watcher.is_alive():
                    self.watcher = threading.Thread(target=self.watch, name="chat template limit", daemon=True)
                    self.watcher.start()
            try:
                made = render()
            except TemplateTooSlow:
                raise
            except BaseException:
                self.end(thread)
                raise
            self.end(thread)
        except TemplateTooSlow:
            with self.lock:  # it may have come in any of the lines above
                self.ends.pop(thread, None)
                self.sent.discard(thread)
            raise
        return made

    def end(self, thread: int) -> None:
        """Forget a finished rendering.  Raises TemplateTooSlow if that was already sent.

        It cannot be taken back: Python 3.11 would look for it at every later step, and hang under a profiler.
        """
        with self.lock:
            self.ends.pop(thread, None)
            sent = thread in self.sent
            self.sent.discard(thread)
        for _ in range(STEPS_TO_ARRIVE if sent else 0):
            pass

    def watch(self) -> None:
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
    """Seconds of processor time that a thread has used; elsewhere than on Linux, the clock's."""
    if sys.platform != "linux":
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def raise_in(thread: int, exception: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(exception))


LIMIT = TimeLimit()
os.register_at_fork(after_in_child=LIMIT.__init__)  # type: ignore[misc]  # the watcher stays with the parent


class MemoryLimit:
    """The limit on the address space of this process while templates are rendered, by one thread or several."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.renderings = 0
        self.before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    def within(self, render: Callable[[], Made]) -> Made:
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
        if self.renderings:
            resource.setrlimit(resource.RLIMIT_AS, self.before)
        self.lock, self.renderings = threading.Lock(), 0

    def lower(self) -> None:
        """Set the limit, unless this is not Linux, or other threads may use a GPU."""
        alone = threading.active_count() <= 1 + (LIMIT.watcher is not None)
        torch = sys.modules.get("torch")
        if sys.platform != "linux" or not (alone or torch is None or not torch.cuda.is_initialized()):
            return
        growth = GROWTH if alone else max(GROWTH, os.sysconf("SC_AVPHYS_PAGES") * PAGE // 2)
        with open("/proc/self/statm", "rb") as pages:
            most = int(pages.read().split()[0]) * PAGE + growth
        soft, hard = self.before
        resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))


MEMORY = MemoryLimit()
os.register_at_fork(after_in_child=MEMORY.reset)  # renderings of other threads stay in the parent


@lru_cache
def require_no_powers(template: str) -> None:
    """Refuse a template that raises to a power: a single step of Python, which cannot be interrupted."""
    before = ""
    try:
        for line, kind, text in Environment().lex(template):
            if kind == "operator" and text == "**" and before not in ("(", ","):  # there it unpacks arguments
                fault = f"raises to a power in line {line}, which may never end"
                raise UserError(f"the chat template {fault}.  {OTHER_TEMPLATE}")
            before = before if kind == "whitespace" else text
    except TemplateSyntaxError:
        return  # which is reported when the template is compiled


def bounded(render: Callable[[], Made]) -> Made:
    """Run a rendering within its limits.  Raises TemplateTooSlow or MemoryError."""
    return LIMIT.within(lambda: MEMORY.within(render))


RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"tools", "documents"}
"""Arguments of the call itself, which template options cannot set."""
TODAY = "strftime_now"
"""The function by which chat templates get today's date."""
DATE = "2024-07-26"
"""The date that it returns, unless the options set another."""
DIRECTIVES = "aAbBdeGHIjmMpSuUVwWyY"
"""The letters after % that a format may have."""
NO_TEMPLATE = (
    " has no chat template.  Use an instruction-tuned model, or set model.chat_template to a template's file, or"
    " task.prompt_format: plain for a dataset"
)
OTHER_TEMPLATE = "Correct it, or set model.chat_template to another file."


def require_template(tokenizer: PreTrainedTokenizerBase, id: str) -> None:
    """Reject messages of the prompt `id` if there is no template for them."""
    template = tokenizer.chat_template
    if isinstance(template, dict) and "default" not in template:
        fault = f"the model's tokenizer has chat templates named {', '.join(template)}, and none named default"
        raise UserError(f"{fault}.  Write one of them into a file, and set model.chat_template to it.")
    if not template:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise UserError(f"prompt {id!r} is a list of messages, but the model's tokenizer ({name}){NO_TEMPLATE}.")


def read_template(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A tokenizer's chat template, of several the one named default and empty without one, and its other options.

    It must read each option: a misspelt one would change nothing.  It writes a fixed date instead of today's: otherwise
    prompts would change overnight, and a resumed or repeated run would differ.  A template's arguments are data, so the
    function is a macro above the text, on a line that writes nothing.
    """
    template = tokenizer.chat_template
    template = template.get("default", "") if isinstance(template, dict) else template or ""
    words = set(re.findall(r"\w+", template))
    for name in options:
        where = f"model.template_options.{name}"
        if name in RESERVED:
            raise UserError(f"{where}: the call itself sets it.  Remove it.")
        if not template:
            raise UserError(f"{where}: the model's tokenizer{NO_TEMPLATE}, and remove model.template_options.")
        if name not in words:
            near = did_you_mean(name, words)
            hint = near if near.startswith("Did") else "Look for `if` in it to see which it reads."
            raise UserError(f"{where}: the chat template reads no variable of that name.  {hint}")
    others = {name: value for name, value in options.items() if name != TODAY}
    if TODAY not in template:
        return template, others
    day = options.get(TODAY, DATE)
    try:
        written = date.fromisoformat(str(day))
    except ValueError:
        raise UserError(f"model.template_options.{TODAY} = {day!r}: not a date.  Write it as {DATE}.") from None
    parts = {f"%{letter}": written.strftime(f"%{letter}") for letter in DIRECTIVES}
    parts |= {f"%-{letter}": parts[f"%{letter}"].lstrip("0") for letter in "dm"}
    filled = "".join(f" | replace({part!r}, {text!r})" for part, text in parts.items())
    return f"{{% macro {TODAY}(format) %}}{{{{ format{filled} }}}}{{% endmacro %}}\n{template}", others
