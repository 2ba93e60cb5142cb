"""Messages between the pool and a fork-server that is ready.

They are packed rather than written out: reading JSON touches memory that the server shares with its children, and every
page that is touched is copied.  The first byte says which message it is.
"""

import struct

KINDS = ("syntax", "program", "calls", "tests")

START, KILL = 1, 2
STARTED, ENDED = 1, 2

start = struct.Struct("<BQBQQ")
"""START, job, place of the kind, seconds of processor time, bytes of memory; with four descriptors."""
kill = struct.Struct("<BQ")
"""KILL, job."""
started = struct.Struct("<BQQ")
"""STARTED, job, process id."""
ended = struct.Struct("<BQidQ")
"""ENDED, job, status as `wait` gives it, seconds of processor time, bytes of the largest resident set."""
