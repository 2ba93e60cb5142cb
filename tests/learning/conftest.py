"""What holds for every test here: pictures are left blank, unless the file says `DRAWS = True`."""

from tests.support.pictures import blank_pictures

__all__ = ["blank_pictures"]
