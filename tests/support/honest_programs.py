"""Honest programs by families: every way of reading the input with every way of ending, and every kind of result.

All of the first add two numbers; `{a}` and `{b}` are theirs once they are read.
"""

READINGS = {
    "input": "a, b = map(int, input().split())",
    "readline": "import sys\na, b = map(int, sys.stdin.readline().split())",
    "readlines": "import sys\na, b = map(int, sys.stdin.readlines()[0].split())",
    "read": "import sys\na, b = map(int, sys.stdin.read().split())",
    "loop": "import sys\nfor line in sys.stdin: a, b = map(int, line.split())",
    "bytes": "import sys\na, b = map(int, sys.stdin.buffer.read().split())",
    "open_by_number": "a, b = map(int, open(0).read().split())",
    "open_as_bytes": "a, b = map(int, open(0, 'rb').read().split())",
    "os_read": "import os\na, b = map(int, os.read(0, 100).split())",
    "size_first": "import os\na, b = map(int, os.read(0, max(os.fstat(0).st_size, 8192)).split())",
    "fast_reader": "import os, io\nread = io.BytesIO(os.read(0, max(os.fstat(0).st_size, 8192))).readline\n"
    "a, b = map(int, read().split())",
    "redirected": "import sys\nif len(sys.argv) > 1: sys.stdin = open(sys.argv[1])\na, b = map(int, input().split())",
    "replaced": "import sys\ninput = sys.stdin.readline\na, b = map(int, input().split())",
    "arguments": "import argparse\nargparse.ArgumentParser().parse_args()\na, b = map(int, input().split())",
}
ENDINGS = {
    "print": "print(a + b)",
    "write": "import sys\nsys.stdout.write(str(a + b) + '\\n')",
    "bytes": "import sys\nsys.stdout.buffer.write(b'%d' % (a + b))",
    "os_write": "import os\nos.write(1, str(a + b).encode())",
    "exit": "print(a + b)\nexit()",
    "exit_0": "print(a + b)\nexit(0)",
    "quit": "print(a + b)\nquit()",
    "sys_exit": "import sys\nprint(a + b)\nsys.exit()",
    "system_exit": "print(a + b)\nraise SystemExit",
    "os_exit": "import os\nprint(a + b, flush=True)\nos._exit(0)",
    "thread": "import threading\nt = threading.Thread(target=lambda: print(a + b))\nt.start()\nt.join()",
    "deep_thread": "import sys, threading\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(1 << 26)\n"
    "t = threading.Thread(target=lambda: print(a + b))\nt.start()",
    "atexit": "import atexit\natexit.register(lambda: print(a + b))",
    "guarded": "if __name__ == '__main__' and __file__: print(a + b)",
    "coroutine": "import asyncio\nasync def main(): print(a + b)\nasyncio.run(main())",
}

RESULTS = {
    "counter": ("from collections import Counter\ndef f(): return Counter('aab')", {"a": 2, "b": 1}),
    "defaultdict": ("from collections import defaultdict\ndef f(): return defaultdict(list, {'a': [1]})", {"a": [1]}),
    "ordered": ("from collections import OrderedDict\ndef f(): return OrderedDict(a=1)", {"a": 1}),
    "named_tuple": ("from collections import namedtuple\ndef f(): return namedtuple('P', 'x y')(1, 2)", [1, 2]),
    "deque": ("from collections import deque\ndef f(): return deque([1, 2])", [1, 2]),
    "int_enum": ("import enum\nclass E(enum.IntEnum):\n    A = 3\ndef f(): return [E.A]", [3]),
    "text": ("class S(str): pass\ndef f(): return {S('a'): S('b')}", {"a": "b"}),
    "list": ("class L(list): pass\ndef f(): return L([1, L([2])])", [1, [2]]),
    "truth": ("def f(): return [True, None, 0.5, -3]", [True, None, 0.5, -3]),
    "tuple": ("def f(): return (1, (2, 'x'))", [1, [2, "x"]]),
    "method": ("class Solution:\n    def f(self): return 7", 7),
    "after_leaving": ("def f(): return 7\nprint(f())\nexit()", 7),
    "own_exception": ("class E(ValueError): pass\ndef f():\n    try: raise E\n    except ValueError: return 7", 7),
}
"""A function of no arguments, and what it returns as JSON has it."""
STATEMENTS = {
    "complex": ("def f(): return 1 + 2j", "assert f() == 1 + 2j"),
    "fraction": ("from fractions import Fraction\ndef f(): return Fraction(1, 3)", "assert f() * 3 == 1"),
    "range": ("def f(): return range(3)", "assert list(f()) == [0, 1, 2]"),
    "counter": ("from collections import Counter\ndef f(): return Counter('aab')", "assert f()['a'] == 2"),
    "set": ("class S(set): pass\ndef f(): return S([1])", "assert f() == {1}"),
    "derived_error": (
        "class Mine(ValueError): pass\ndef f(): raise Mine('no')",
        "try: f()\nexcept ValueError as e: assert str(e) == 'no'\nelse: assert False",
    ),
    "plain_error": ("def f(): return [][1]", "try: f()\nexcept IndexError: pass\nelse: assert False"),
}
"""A function, and a statement about it."""
