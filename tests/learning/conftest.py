"""What holds for every test here: pictures are left blank, unless the file says `DRAWS = True`; shapes go unchecked."""

from tests.support.pictures import blank_pictures, unchecked_shapes

__all__ = ["blank_pictures", "unchecked_shapes"]
