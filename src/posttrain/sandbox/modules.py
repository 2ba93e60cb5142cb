"""Modules that programs find imported already: they cannot read any from disk."""

_FEW = """
bisect collections copy datetime fractions functools heapq io itertools json math operator random re statistics string
sys time typing
"""
_MORE = """
__future__ _collections_abc _strptime abc argparse array ast asyncio atexit base64 binascii builtins calendar cmath
codecs collections.abc concurrent.futures concurrent.futures.thread contextlib contextvars copyreg csv ctypes
dataclasses decimal difflib dis encodings.ascii encodings.cp1252 encodings.idna encodings.latin_1 encodings.utf_16
encodings.utf_32 encodings.utf_8_sig enum errno fnmatch gc glob graphlib hashlib hmac html importlib inspect keyword
linecache locale logging marshal numbers opcode os pathlib pickle platform pprint queue reprlib resource secrets
select selectors shlex shutil signal socket string struct subprocess tempfile textwrap threading timeit token tokenize
traceback types unicodedata unittest urllib.parse uuid warnings weakref zlib
"""

FEW = tuple(_FEW.split())
"""What short exercises import."""

MANY = tuple(sorted({*FEW, *_MORE.split()}))
"""The default: about a hundred modules of the standard library."""
