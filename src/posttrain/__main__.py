"""`python -m posttrain` is the `posttrain` program."""

import sys

from posttrain.cli import main

sys.exit(main())
