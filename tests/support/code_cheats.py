"""One problem in the three kinds of tests, a program that solves it, and programs that only seem to."""

STDIO = {
    "kind": "stdio",
    "cases": [{"input": f"{a} {b}\n", "output": f"{a + b}\n"} for a, b in ((1, 2), (30, 4), (-7, 7))],
}
CALLS = {
    "kind": "calls",
    "entry": "add",
    "cases": [{"args": [a, b], "expected": a + b} for a, b in ((1, 2), (30, 4), (-7, 7))],
}
ASSERTS = {
    "kind": "asserts",
    "entry": "add",
    "tests": ["assert add(1, 2) == 3", "assert add(30, 4) == 34", "x = add(-7, 7)\nassert x == 0 and type(x) is int"],
}
ALL = {"stdio": STDIO, "calls": CALLS, "asserts": ASSERTS}
RIGHT = """
def add(a, b):
    return a + b
if __name__ == "__main__":
    try:
        print(add(*map(int, input().split())))
    except EOFError:
        pass
"""

CHEATS = {
    "nothing": "",
    "always_three": "def add(a, b): return 3\nprint(3)",
    "equals_everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
    def __str__(self): return "3"
def add(a, b): return Any()
print(Any())
""",
    "text_that_equals_everything": """
class Text(str):
    def __eq__(self, other): return True
def add(a, b): return Text("3")
print(Text("3"))
""",
    "leaves_with_success": "import os, sys\nsys.stdout.flush()\nos._exit(0)",
    "leaves_when_called": "import os\ndef add(a, b): os._exit(0)",
    "raises_system_exit": "import sys\ndef add(a, b): sys.exit(0)\nsys.exit(0)",
    "patches_the_comparison": """
import builtins, json, operator
def all_true(*a, **k): return True
builtins.all = builtins.isinstance = all_true
operator.eq = all_true
def add(a, b): return None
""",
    "silences_assert": "import builtins\nbuiltins.AssertionError = ValueError\nraise ValueError",
    "walks_the_frames": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for name, value in {**frame.f_globals, **frame.f_locals}.items():
            if "expect" in name.lower() or "cases" in name.lower() or "tests" in name.lower():
                return value
        frame = frame.f_back
""",
    "searches_memory": """
import gc
def add(a, b):
    for thing in gc.get_objects():
        if isinstance(thing, dict) and "expected" in thing:
            return thing["expected"]
""",
    "forges_a_message": """
import json, os
def add(a, b):
    payload = json.dumps(["results", [["value", "null"]] * 3]).encode()
    for descriptor in range(3, 20):
        try: os.write(descriptor, len(payload).to_bytes(4, "little") + payload)
        except OSError: pass
""",
    "forges_a_passed_test": """
import json, os
payload = json.dumps(["value", '["i","0x3"]']).encode()
for descriptor in range(3, 20):
    for _ in range(9):
        try: os.write(descriptor, len(payload).to_bytes(4, "little") + payload)
        except OSError: pass
def add(a, b): raise SystemExit
""",
    "breaks_the_framing": "import os\ndef add(a, b): os.write(3, b'\\xff' * 100)",
    "deep_result": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "endless_result": "def add(a, b): return [0] * 10 ** 7",
    "result_that_holds_itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "huge_integer": "def add(a, b): return 1 << 10 ** 7",
    "true_for_one": "def add(a, b): return True\nprint(True)",
    "prints_all_answers": "print('3\\n34\\n0')",
    "closes_the_channel": "import os\ndef add(a, b): os.close(3)",
    "runs_out_of_time": "def add(a, b):\n    while True: pass\nwhile True: pass",
    "replaces_exit": "import os\nos._exit = lambda status: None\ndef add(a, b): return None",
    "patches_the_server": """
import sys
for name in ("running", "frames", "plain"):
    module = sys.modules.get(name)
    if module:
        for key in list(vars(module)):
            if callable(getattr(module, key)): setattr(module, key, lambda *a, **k: b'["value", "null"]')
def add(a, b): return 3
""",
    "warns_of_success": "print('PASSED')\nimport sys\nsys.stderr.write('ok')\ndef add(a, b): return 'PASSED'",
    "syntax_error": "def add(a, b:",
    "null_byte": "x = 1\0",
    "deep_parentheses": "(" * 10_000 + ")" * 10_000,
    "deep_minus": "-" * 90_000 + "1",
    "huge_constant": "x = 9 ** 9 ** 9",
}
