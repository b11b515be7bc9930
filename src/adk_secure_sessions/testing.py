"""For tests of your own key provider: what every provider must do, tried out."""

import asyncio
import base64
import pickle
import secrets
from collections.abc import Callable, Collection

from adk_secure_sessions.errors import DecryptionError, KeyServiceError, WrongKeyError
from adk_secure_sessions.keys.providers import KeyProvider

_PLACE = b"place"
_AT_ONCE = 8


async def check_key_provider(
    make: Callable[[], KeyProvider],
    other: Callable[[], KeyProvider] | None = None,
    *,
    hidden: Collection[str | bytes] = (),
    every: int = 1,
) -> None:
    """Try out a key provider, as `EncryptedSessionService` and its enemies would use it.

    It takes some hundred calls, less with `every`.

    Args:
        make: Makes a provider; called several times, always for the same root key.
        other: The same, for another root key.
        hidden: Secrets that it holds: keys, tokens, passwords.  They must not show.
        every: Alter each so-manieth byte of a wrapped key; 1 is each.

    Raises:
        AssertionError: The first rule that it breaks.
    """
    provider, key = make(), secrets.token_bytes(32)
    _check_key_id(make, provider)
    wrapped = await provider.wrap(key, _PLACE)
    _check_wrap(key, wrapped)
    _rule(await provider.wrap(key, _PLACE) != wrapped, "two wraps of one key must differ")
    for length in (0, 1, 255, 1000):
        place = secrets.token_bytes(length)
        await _check_returned(make(), await provider.wrap(key, place), place, key)
    for elsewhere in (b"", b"plac", b"placf", b"place\x00", b"\x00place", b"Place"):
        await _refused(provider, wrapped, elsewhere, "other associated data")
    await _check_altered(provider, wrapped, every)
    if other is not None:
        await _refused(other(), wrapped, _PLACE, "what another root key wrapped")
        strange = await other().wrap(key, _PLACE)
        await _refused(provider, strange, _PLACE, "what another root key wrapped")
    await _check_at_once(make())
    await _check_cancelled(provider, key)
    # The services of one process may live in several event loops, one after the other.
    again = await asyncio.to_thread(lambda: asyncio.run(_unwrap(provider, wrapped)))
    _rule(again == key, "must work in another event loop")
    _rule(await provider.unwrap(wrapped, _PLACE) == key, "must work in its first loop again")
    _check_hidden(provider, hidden)


def _rule(kept: bool, rule: str) -> None:
    if not kept:
        raise AssertionError(f"a key provider {rule}")


def _check_key_id(make: Callable[[], KeyProvider], provider: KeyProvider) -> None:
    _rule(isinstance(provider, KeyProvider), "must have key_id, wrap and unwrap")
    key_id = provider.key_id
    _rule(isinstance(key_id, str) and 0 < len(key_id) <= 255, "needs a key_id of 1-255 characters")
    _rule(make().key_id == key_id, "must have the same key_id each time it is made")


async def _check_returned(provider: KeyProvider, wrapped: bytes, place: bytes, key: bytes) -> None:
    try:
        again = await provider.unwrap(wrapped, place)
    except (DecryptionError, WrongKeyError):
        again = b""
    rule = f"must return the key, when it is made anew, with {len(place)} bytes of associated data"
    _rule(again == key, rule)


def _check_wrap(key: bytes, wrapped: bytes) -> None:
    _rule(isinstance(wrapped, bytes), "must wrap to bytes")
    for shown in (key, key.hex().encode(), base64.b64encode(key), base64.urlsafe_b64encode(key)):
        _rule(shown not in wrapped, "must not show the key in its wrap")


async def _check_altered(provider: KeyProvider, wrapped: bytes, every: int) -> None:
    altered = [wrapped[:length] for length in {0, 1, len(wrapped) // 2, len(wrapped) - 1}]
    altered += [wrapped + b"\x00", b"\x00" + wrapped, bytes(len(wrapped))]
    for position in {*range(0, len(wrapped), every), len(wrapped) - 1}:
        for bit in (0x01, 0x80):
            changed = bytearray(wrapped)
            changed[position] ^= bit
            altered.append(bytes(changed))
    for start in range(0, len(altered), _AT_ONCE):
        some = altered[start : start + _AT_ONCE]
        await asyncio.gather(*(_refused(provider, one, _PLACE, "an altered wrap") for one in some))


async def _refused(provider: KeyProvider, wrapped: bytes, place: bytes, what: str) -> None:
    try:
        await provider.unwrap(wrapped, place)
    except (DecryptionError, WrongKeyError):
        return
    except KeyServiceError as error:
        _rule(not error.retryable, f"must not have {what} asked for again")
        return
    except Exception as error:
        name = type(error).__name__
        _rule(False, f"must refuse {what} with TamperedError or WrongKeyError, not {name}")
    _rule(False, f"must refuse {what}")


async def _check_at_once(provider: KeyProvider) -> None:
    keys = [secrets.token_bytes(32) for _ in range(_AT_ONCE)]
    wraps = await asyncio.gather(*(provider.wrap(key, key[:4]) for key in keys))
    asked = (provider.unwrap(one, key[:4]) for one, key in zip(wraps, keys, strict=True))
    _rule(await asyncio.gather(*asked) == keys, "must serve several calls at once")


async def _check_cancelled(provider: KeyProvider, key: bytes) -> None:
    call = asyncio.ensure_future(provider.wrap(key, _PLACE))
    await asyncio.sleep(0)
    stopped = call.cancel()
    await asyncio.wait([call])
    _rule(call.cancelled() or not stopped, "must let a cancelled call end")


async def _unwrap(provider: KeyProvider, wrapped: bytes) -> bytes:
    return await provider.unwrap(wrapped, _PLACE)


def _check_hidden(provider: KeyProvider, hidden: Collection[str | bytes]) -> None:
    try:
        pickled = pickle.dumps(provider)
    except Exception:
        pickled = b""
    shown = f"{provider!r} {provider} {provider.key_id}".encode() + pickled
    for secret in hidden:
        raw = secret.encode() if isinstance(secret, str) else secret
        for form in (raw, raw.hex().encode(), base64.b64encode(raw), repr(raw)[2:-1].encode()):
            _rule(form not in shown, "must not show secrets in its repr, its key_id or a pickle")
