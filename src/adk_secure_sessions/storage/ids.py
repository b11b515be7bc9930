"""Integer row keys, made before the row so that its seals can bind them."""

import secrets
import time
from threading import Lock

_RANDOM_BITS = 21
_lock = Lock()
_last = 0


def new_row_key() -> int:
    """63 bits, never reused: 42 of milliseconds UTC, so that rows stay in order, 21 random.

    Ascending within a process; a collision between processes is a unique violation, and retried.
    """
    global _last
    fresh = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    with _lock:
        _last = max(fresh, _last + 1)
        return _last
