"""The native kernel as it is compiled for several CPUs; tests that import this are skipped without a compiler."""

import pytest

from posttrain.models.native.native_library import FLAGS, NativeUnavailable, native_library

BUILDS = {"this CPU": "-march=native", "AVX2": "-march=x86-64-v3", "plain C": "-march=x86-64"}

try:
    native_library()
except NativeUnavailable as missing:
    pytest.skip(f"no native library: {missing}", allow_module_level=True)


def use_build(name: str, patch: pytest.MonkeyPatch) -> None:
    """Have decoder and layers call the library that is compiled for this CPU."""
    flags = tuple(BUILDS[name] if flag.startswith("-march") else flag for flag in FLAGS)
    library = native_library(flags)
    for module in ("native_decoder", "native_layers", "native_library"):
        patch.setattr(f"posttrain.models.native.{module}.native_library", lambda: library)
