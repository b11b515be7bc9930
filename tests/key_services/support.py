"""What the tests of all key services share."""

import asyncio
import threading
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass

import pytest

from adk_secure_sessions import KeyProvider, KeyServiceError

MASTER = bytes(range(32))
CONTEXT = b"context"


@dataclass
class Service:
    """A running key service, and the providers that ask it."""

    make: Callable[[], KeyProvider]
    other: Callable[[], KeyProvider]  # for another key
    hidden: list[str | bytes]  # secrets that no provider may show
    calls: Callable[[], int]  # how many calls it got
    stop: Callable[[], None]  # from then on it cannot be reached
    every: int = 1  # for check_key_provider


async def failure(key: KeyProvider) -> KeyServiceError:
    """Return the error of wrapping with *key*, which repeats nothing that the service said."""
    with pytest.raises(KeyServiceError) as info:
        await key.wrap(MASTER, CONTEXT)
    error: BaseException | None = info.value
    while error is not None:
        assert "needle" not in str(error)
        error = error.__cause__ or error.__context__
    assert repr(key.key_id) in str(info.value)
    return info.value


def join_threads() -> None:
    """Wait for the threads of calls, which must end."""
    for thread in threading.enumerate():
        if thread.name == "key service":
            thread.join(10)
            assert not thread.is_alive()


async def cancel_while_asked(key: KeyProvider, asked: Sized) -> None:
    """Cancel a call that the service has *asked*: it ends at once, and is not repeated."""
    call = asyncio.ensure_future(key.wrap(MASTER, CONTEXT))
    while not asked:
        await asyncio.sleep(0.01)
    began = time.perf_counter()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert time.perf_counter() - began < 0.8
    assert len(asked) == 1
