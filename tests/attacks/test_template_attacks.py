"""Chat templates and recipes that fail, loop or fill memory: each is one error that names its place."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from posttrain.config.recipes import DEEPEST, MOST_VALUES, RecipeLayer, merge, parse_yaml
from posttrain.models import chat_templates
from posttrain.models.chat_templates import LIMIT, TemplateTooSlow, bounded
from posttrain.models.loading.new_model import new_tokenizer
from posttrain.models.rendering import TokenizerRenderer
from tests.support.commands import refusal
from tests.support.refusals import mentions, refused
from tests.support.runs import save_tiny_model

USER = {"role": "user", "content": "1"}
FAILS = {
    "a file": "{% include 'x' %}",
    "a long range": "{% for i in range(1000000000) %}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a sum of what has none": "{{ messages + 1 }}",
    "a division": "{{ 1 / 0 }}",
    "an object that is not JSON": "{{ self|tojson }}",
}
SLOW = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
}


def rendered(template: str) -> str:
    tokenizer = new_tokenizer()
    tokenizer.chat_template = template
    return TokenizerRenderer(tokenizer).render([USER], id="rows.jsonl:3", prefill="", columns={}).text


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "SECONDS", 0.2)
    monkeypatch.setattr(chat_templates, "LOOK_EVERY", 0.02)


@pytest.mark.parametrize("template", FAILS.values(), ids=FAILS)
def test_whatever_a_template_fails_with_is_told_of_the_prompt(template: str) -> None:
    with refused("prompt 'rows.jsonl:3': the model's chat template", "roles: user"):
        rendered(template)


@pytest.mark.parametrize(
    "template",
    ["{{ 10**(10**8) }}", "\n{% set n = messages|length * 10 %}{{ n ** (n**8) }}", "{% if 2 ** 9 %}{% endif %}"],
)
def test_a_power_is_refused_before_anything_computes_it(template: str) -> None:
    with refused(f"raises to a power in line {template.count(chr(10)) + 1}"):
        rendered(template)


def test_two_stars_that_unpack_are_not_a_power() -> None:
    assert rendered("{{ dict(**messages[0]).content }}{{ dict(a=1, **{'b': '**'}).b }}") == "1**"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("template", SLOW.values(), ids=SLOW)
def test_a_template_that_never_ends_is_ended_and_the_next_prompt_is_rendered(template: str) -> None:
    with refused("takes more than 0.2 seconds of processor time over these messages"):
        rendered(template)
    assert rendered("{{ messages[0].content }}") == "1"


@pytest.mark.usefixtures("impatient")
def test_threads_are_ended_by_what_they_use_themselves() -> None:
    """One waits longer than the limit and uses nothing; another uses all of its time meanwhile."""
    ended: list[str] = []

    def loop() -> None:
        try:
            bounded(lambda: [None for _ in iter(int, 1)])
        except TemplateTooSlow:
            ended.append("loop")

    thread = threading.Thread(target=loop)
    thread.start()
    assert bounded(lambda: thread.join() or "waited") == "waited"
    assert ended == ["loop"]


@pytest.mark.usefixtures("impatient")
def test_nothing_looks_on_when_nothing_is_rendered() -> None:
    assert rendered("{{ messages[0].content }}") == "1"
    watcher = LIMIT.watcher
    if watcher is not None:
        watcher.join(60)
        assert not watcher.is_alive()
    assert LIMIT.ends == {}


def memory_limit() -> tuple[int, int]:
    return chat_templates.resource.getrlimit(chat_templates.resource.RLIMIT_AS)


def test_a_template_that_fills_memory_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    before = memory_limit()
    for made in ("'a' * 10000000000", "messages[0].content.ljust(10000000000)", "'%9999999999d' % 1"):
        with refused("prompt 'rows.jsonl:3': ", "roles: user"):
            rendered(f"{{{{ {made} }}}}")
    assert memory_limit() == before


def test_memory_is_bounded_while_other_threads_are_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server, and in a script that loaded a model by transformers, which leaves a thread."""
    monkeypatch.setattr(chat_templates.os, "sysconf", lambda name: 0)
    done, before = threading.Event(), memory_limit()
    others = [threading.Thread(target=done.wait) for _ in range(2)]
    for thread in others:
        thread.start()
    try:
        with refused("prompt 'rows.jsonl:3': ", "roles: user"):
            rendered("{{ 'a' * 3000000000 }}")
    finally:
        done.set()
    assert memory_limit() == before


def test_renderings_side_by_side_share_one_limit_and_the_last_takes_it_back() -> None:
    before = memory_limit()
    memory, inside, leave = chat_templates.MemoryLimit(), threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        leave.wait()

    first = threading.Thread(target=lambda: memory.within(wait))
    first.start()
    inside.wait()
    lowered = memory_limit()
    assert memory.within(memory_limit) == lowered != before
    assert memory_limit() == lowered
    leave.set()
    first.join()
    assert memory_limit() == before


def test_the_command_names_the_row_at_which_a_template_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    Path("template.jinja").write_text("{{ messages[0].content + (1 if messages|length > 1 else '') }}")
    rows = [{"prompt": [USER]} for _ in range(20)] + [{"prompt": [USER, {"role": "assistant", "content": "2"}, USER]}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = ["--task.path", "rows.jsonl", "--task.held-out-share", "0", "--rewards", "strict_format"]
    flags = ["--model.path", "model", "--model.chat-template", "template.jinja", "--run.folder", "run"]
    said = refusal("rl", *task, *flags)
    mentions(said, "rows.jsonl:21", "the model's chat template fails with TypeError")


ENDED = """
import sys, threading
from posttrain.models import chat_templates
from posttrain.models.chat_templates import LIMIT, TemplateTooSlow, bounded, raise_in

chat_templates.SECONDS = chat_templates.LOOK_EVERY = 0.02

def end():
    LIMIT.sent.add(threading.get_ident())
    raise_in(threading.get_ident(), TemplateTooSlow)

for render in (lambda: [None for _ in iter(int, 1)], lambda: end(), lambda: end() or 1 / 0):
    try:
        bounded(render)
    except TemplateTooSlow:
        print("ended", end=" ")
    assert not LIMIT.sent and not LIMIT.ends
sys.setprofile(lambda *event: None)
bounded(int)
sys.setprofile(None)
print("profiled")
"""


def test_an_ended_rendering_leaves_the_interpreter_as_it_was() -> None:
    """An exception that is taken back before it arrives has CPython 3.11 hang under a profiler or a debugger."""
    ran = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.split() == ["ended", "ended", "ended", "profiled"]


LISTS = "\n".join(f"  l{n}: &l{n} [{', '.join([f'*l{n - 1}' if n else 'x'] * 10)}]" for n in range(11))
MAPPINGS = "\n".join(f"  l{n}: &l{n} {{{', '.join(f'k{k}: *l{n - 1}' for k in range(10))}}}" for n in range(1, 11))
RECIPES = {
    "lists of lists": (f"algorithm:\n{LISTS}\n", f"more than {MOST_VALUES} values"),
    "mappings of mappings": (f"algorithm:\n  l0: &l0 x\n{MAPPINGS}\n", f"more than {MOST_VALUES} values"),
    "a list within itself": ("rewards: &r [*r]\n", "*r contains itself"),
    "a mapping within itself": ("model: &m {template_options: *m}\n", "*m contains itself"),
    "brackets": (f"rewards: {'[' * 5000}{']' * 5000}\n", f"more than {DEEPEST} deep"),
    "braces": (f"rewards: {'{a: ' * 5000}{'}' * 5000}\n", f"more than {DEEPEST} deep"),
    "a long integer": (f"run:\n  seed: {'9' * 10_000}\n", "an integer of 10000 digits"),
    "many keys": ("run:\n" + "".join(f"  k{n}: 1\n" for n in range(30_000)), f"more than {MOST_VALUES} values"),
    "much text": (f"model: {'x' * 2_000_000}\n", "a recipe has at most 1000000"),
}


@pytest.mark.parametrize("named", RECIPES)
def test_a_recipe_that_would_never_end_is_one_error(named: str, tmp_path: Path) -> None:
    text, says = RECIPES[named]
    (tmp_path / "recipe.yaml").write_text(text)
    said = refusal("config", tmp_path / "recipe.yaml")
    assert said.startswith(f"posttrain: {tmp_path}/recipe.yaml:")
    assert len(said.splitlines()) == 1
    with refused(says, error=yaml.YAMLError):
        parse_yaml(text)


def test_of_many_mistakes_the_first_are_told(tmp_path: Path) -> None:
    keys = "".join(f"k{n}: 1\n" for n in range(1_500))
    (tmp_path / "recipe.yaml").write_text(f"{keys}run: {{{keys.strip().replace(chr(10), ', ')}}}\n")
    assert len(refusal("config", tmp_path / "recipe.yaml").splitlines()) <= 40


def test_an_honest_recipe_may_repeat_itself_by_aliases() -> None:
    assert parse_yaml("a: &a {b: [1, 2]}\nc: *a\nd: {<<: *a, e: 3}\n") == {
        "a": {"b": [1, 2]},
        "c": {"b": [1, 2]},
        "d": {"b": [1, 2], "e": 3},
    }


def test_what_a_section_said_before_it_was_renamed_is_forgotten() -> None:
    said = {"one": {"name": "dapo", "clip_high": 0.3}, "two": {"name": "grpo"}}
    merged = merge([RecipeLayer(where=where, sections={"algorithm": each}) for where, each in said.items()])
    assert merged.sections == {"algorithm": {"name": "grpo"}}
    assert merged.origins == {"algorithm": "two", "algorithm.name": "two"}
