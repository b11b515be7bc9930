"""Running an operation again: when others change the same rows, and when a connection is lost."""

import asyncio
import random
from collections.abc import Awaitable, Callable

from adk_secure_sessions.db.protocol import Conflict, Disconnected, T, UniqueViolation
from adk_secure_sessions.errors import SecureSessionError

_ATTEMPTS = 20
# Seconds before each new attempt after a lost connection.  A write gets more: until it is
# known whether it was stored, there is nothing true to tell its caller.
_READ_PAUSES = (0.05,)
_WRITE_PAUSES = (0.05, 0.2, 0.5, 1.0, 2.0)


async def repeated(run: Callable[[bool], Awaitable[T]], *, writes: bool = False) -> T:
    """Await *run*, which is told whether this is the first time, until it succeeds.

    Raises:
        SecureSessionError: others kept changing the same rows.
        Whatever the driver said of a connection that stays lost.
    """
    pauses = iter(_WRITE_PAUSES if writes else _READ_PAUSES)
    for attempt in range(_ATTEMPTS):
        try:
            return await run(attempt == 0)
        except (UniqueViolation, Conflict):
            await asyncio.sleep(random.uniform(0, 0.005 * attempt))  # noqa: S311 - a pause
        except Disconnected as lost:
            pause = next(pauses, None)
            if pause is None:
                raise lost.error from None
            await asyncio.sleep(pause)
    raise SecureSessionError(
        f"the same rows were changed under each of {_ATTEMPTS} attempts: try again"
    )
