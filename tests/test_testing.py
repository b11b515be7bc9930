"""The test kit for key providers: ours pass, and each faulty provider fails by its fault."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from adk_secure_sessions import (
    DecryptionError,
    KeyProvider,
    KeyServiceError,
    PassphraseKey,
    StaticKey,
    generate_key,
)
from adk_secure_sessions.keys import passphrase
from adk_secure_sessions.testing import check_key_provider

KEY, OTHER = bytes(range(32)), bytes(32)


async def test_static_key_keeps_every_rule() -> None:
    await check_key_provider(lambda: StaticKey(KEY), lambda: StaticKey(OTHER), hidden=[KEY])


async def test_passphrase_keeps_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not at its real cost, which is 0.15 s for each of some hundred derivations.
    for name, value in {"_ITERATIONS": 1, "_LANES": 1, "_MEMORY_KIB": 8}.items():
        monkeypatch.setattr(passphrase, name, value)
    await check_key_provider(
        lambda: PassphraseKey("words"), lambda: PassphraseKey("others"), hidden=["words"]
    )


class Faulty:
    """A correct provider; each subclass breaks one rule."""

    key_id = "faulty"

    def __init__(self) -> None:
        self.key = StaticKey(KEY)

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        return await self.key.wrap(key, associated_data)

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        return await self.key.unwrap(wrapped, associated_data)


class Nameless(Faulty):
    key_id = ""


class LongName(Faulty):
    key_id = "x" * 256


class Renamed(Faulty):
    number = 0

    def __init__(self) -> None:
        super().__init__()
        Renamed.number += 1
        self.key_id = str(Renamed.number)


class Unbound(Faulty):
    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        return await self.key.wrap(key, b"")

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        return await self.key.unwrap(wrapped, b"")


class HalfBound(Faulty):
    """Like a service that ignores upper and lower case."""

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        return await self.key.wrap(key, associated_data.lower())

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        return await self.key.unwrap(wrapped, associated_data.lower())


class Clear(Faulty):
    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        return key


class Repeating(Faulty):
    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        self.first = getattr(self, "first", None) or await self.key.wrap(key, associated_data)
        return self.first


class Textual(Faulty):
    async def wrap(self, key: bytes, associated_data: bytes) -> Any:
        return (await self.key.wrap(key, associated_data)).hex()


class Malleable(Faulty):
    """Ignores its first byte, like text in which some bits have no meaning."""

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        return b"?" + await self.key.wrap(key, associated_data)

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        return await self.key.unwrap(wrapped[1:], associated_data)


class Forgetful(Faulty):
    def __init__(self) -> None:
        self.key = StaticKey(generate_key())


class Careless(Faulty):
    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        try:
            return await super().unwrap(wrapped, associated_data)
        except DecryptionError:
            pass
        raise ValueError("altered")


class Stubborn(Faulty):
    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        try:
            return await super().unwrap(wrapped, associated_data)
        except DecryptionError:
            pass
        raise KeyServiceError("no", retryable=True)


class OneLoop(Faulty):
    def __init__(self) -> None:
        super().__init__()
        self.loop: object = None

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        self.loop = self.loop or asyncio.get_running_loop()
        same = self.loop is asyncio.get_running_loop()
        return await super().unwrap(wrapped, associated_data) if same else b""


class OneCall(Faulty):
    busy = False

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        if self.busy:
            return b"busy"
        self.busy = True
        await asyncio.sleep(0.001)
        self.busy = False
        return await super().wrap(key, associated_data)

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        return b"" if wrapped == b"busy" else await super().unwrap(wrapped, associated_data)


class Uncancellable(Faulty):
    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            pass
        return await super().wrap(key, associated_data)


class Talkative(Faulty):
    def __repr__(self) -> str:
        return "<Talkative needle>"


class Pickled(Faulty):
    def __init__(self) -> None:
        super().__init__()
        self.token = "needle"

    def __reduce__(self) -> Any:
        return dict, (), {"token": self.token}


FAULTS: dict[str, type[Faulty]] = {
    "1-255 characters": Nameless,
    "1-255": LongName,
    "same key_id": Renamed,
    "must reject other associated data": Unbound,
    "reject other associated": HalfBound,
    "not show the key in what it wraps": Clear,
    "wraps of one key that differ": Repeating,
    "must wrap to bytes": Textual,
    "must reject a modified wrapped key": Malleable,
    "must unwrap the key after it is created again": Forgetful,
    "TamperedError or WrongKeyError, not ValueError": Careless,
    "must not mark the rejection": Stubborn,
    "another event loop": OneLoop,
    "several calls at once": OneCall,
    "let a cancelled call end": Uncancellable,
    "repr": Talkative,
    "a pickle": Pickled,
}


@pytest.mark.parametrize(("fault", "faulty"), FAULTS.items(), ids=lambda of: str(of)[:30])
async def test_fault_is_found(fault: str, faulty: Callable[[], KeyProvider]) -> None:
    with pytest.raises(AssertionError, match=fault):
        await check_key_provider(faulty, hidden=["needle"])


async def test_key_that_unwraps_what_another_wrapped_is_found() -> None:
    with pytest.raises(AssertionError, match="a key that another root key wrapped"):
        await check_key_provider(lambda: StaticKey(KEY), lambda: StaticKey(KEY))


async def test_faultless_provider_passes() -> None:
    await check_key_provider(Faulty, hidden=["needle"])
