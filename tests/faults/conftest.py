"""Runs in the test's process check no shapes and draw no pictures."""

from tests.support.pictures import blank_pictures, unchecked_shapes

__all__ = ["blank_pictures", "unchecked_shapes"]
