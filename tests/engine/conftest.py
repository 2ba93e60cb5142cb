"""What holds for every test here: no picture is drawn and no shape checked, but by files that say `DRAWS`, `SHAPES`."""

from tests.support.pictures import blank_pictures, unchecked_shapes

__all__ = ["blank_pictures", "unchecked_shapes"]
