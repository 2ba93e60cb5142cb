"""Making model objects one at a time.

While transformers makes or loads a model it changes parts of torch for the whole process (initialisers, tied weights),
and a seed is the process's as well: two sessions that open at once in threads would get models without weights.
"""

import threading

ONE_AT_A_TIME = threading.RLock()
"""Held while a model is made or loaded."""
