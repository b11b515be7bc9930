"""Report the progress of a command, and limit its speed."""

import asyncio
import time
from collections.abc import Callable

from adk_secure_sessions import telemetry

Progress = Callable[[int, int], None]  # called with the numbers of processed rows and of all rows


class Meter:
    """Counts processed rows, reports progress, and pauses to process at most *rate* rows a second.

    Count only rows that were read.  Do not add a number that a row contains, such as a revision: an
    attacker may have modified it, and a large number would make the command wait for ever.
    """

    def __init__(self, progress: Progress | None = None, total: int = 0, rate: float | None = None):
        self._progress = progress
        self._total = total
        self._rate = rate
        self._next_row_at = time.monotonic()  # the earliest time for the next row
        self._processed = 0

    async def advance(self, rows: int = 1) -> None:
        """Count and report *rows* more rows; pause if more than *rate* a second were counted."""
        self._processed += rows
        if self._progress is not None and rows:
            # Services keep writing, so there may be more rows than were counted at the start.
            self._total = max(self._total, self._processed)
            self._progress(self._processed, self._total)
        if self._total:
            telemetry.set_progress(min(self._processed / self._total, 1.0))
        if self._rate:
            now = time.monotonic()
            # Time in which no row was counted allows at most one second's rows to follow at once.
            self._next_row_at = max(self._next_row_at, now - 1) + rows / self._rate
            if self._next_row_at > now:
                await asyncio.sleep(self._next_row_at - now)

    def finish(self) -> None:
        """Report that all rows are processed, even if `advance` has counted fewer than *total*."""
        if self._progress is not None:
            self._progress(self._processed, self._processed)
        telemetry.set_progress(1.0)
