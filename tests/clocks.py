"""Moves the clock of this process, as an administrator, a time server or a paused machine does.

`shifted` changes `time.time` and `time.time_ns`, which all code of the package calls through the
module, and the clock of google-adk's events.  `time.monotonic`, the clock of caches, time-outs and
the speed limit, stays: operating systems never set it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from google.adk.platform import time as platform_time


@contextmanager
def shifted(days: float) -> Iterator[None]:
    """For the block, the clock is ahead by *days*; a negative number is behind."""
    real, real_ns = time.time, time.time_ns
    ahead = timedelta(days=days) // timedelta(microseconds=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + ahead / 1e6)
        patch.setattr(time, "time_ns", lambda: real_ns() + ahead * 1000)
        platform_time.set_time_provider(time.time)
        try:
            yield
        finally:
            platform_time.reset_time_provider()
