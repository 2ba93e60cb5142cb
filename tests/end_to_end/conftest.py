"""What holds for every test here: pictures are left blank, unless the file says `DRAWS = True`; shapes go unchecked."""

from tests.support.fit_places import finished
from tests.support.pictures import blank_pictures
from tests.support.shapes import unchecked_shapes

__all__ = ["blank_pictures", "finished", "unchecked_shapes"]
