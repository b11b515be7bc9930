"""A key service under test, whatever its kind."""

import asyncio
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass

import pytest

from adk_secure_sessions import KeyProvider, KeyServiceError

MASTER = bytes(range(32))
PLACE = b"place"


@dataclass
class Service:
    """A running key service, and the providers that ask it."""

    make: Callable[[], KeyProvider]
    other: Callable[[], KeyProvider]  # of another key
    hidden: list[str | bytes]  # what no provider of it may show
    calls: Callable[[], int]  # how often it was asked to encrypt or decrypt
    stop: Callable[[], None]  # it can be reached no more
    every: int = 1  # for check_key_provider


async def failure(key: KeyProvider) -> KeyServiceError:
    """What wrapping with *key* fails with; nothing of what the service says is in it."""
    with pytest.raises(KeyServiceError) as info:
        await key.wrap(MASTER, PLACE)
    error: BaseException | None = info.value
    while error is not None:
        assert "needle" not in str(error)
        error = error.__cause__ or error.__context__
    assert repr(key.key_id) in str(info.value)
    return info.value


async def cancel_while_asked(key: KeyProvider, asked: Sized) -> None:
    """Cancel a call once the service has been *asked*: it ends at once, and is not repeated."""
    call = asyncio.ensure_future(key.wrap(MASTER, PLACE))
    while not asked:
        await asyncio.sleep(0.01)
    began = time.perf_counter()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert time.perf_counter() - began < 0.8
    assert len(asked) == 1
