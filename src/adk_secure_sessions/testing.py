"""A test helper for authors of key providers: `check_key_provider`."""

import asyncio
import base64
import pickle
import secrets
from collections.abc import Callable, Collection

from adk_secure_sessions.errors import (
    ConfigurationError,
    DecryptionError,
    KeyServiceError,
    WrongKeyError,
)
from adk_secure_sessions.keys.providers import KeyProvider, StaticKey, check_key_id

_CONTEXT = b"context"
_AT_ONCE = 8  # how many calls of a provider run at the same time


async def check_key_provider(
    make: Callable[[], KeyProvider],
    other: Callable[[], KeyProvider] | None = None,
    *,
    hidden: Collection[str | bytes] = (),
    every: int = 1,
) -> None:
    """Check that a key provider follows the rules of `KeyProvider`.

    The check wraps and unwraps keys as `EncryptedSessionService` does, and tests that the provider
    rejects modified wrapped keys.  By default, the check modifies each byte of a wrapped key in two
    ways, so it makes a few hundred calls.

    Args:
        make: Returns a new provider in each call, always for the same root key.
        other: Returns a new provider in each call, for another root key.  If given, the check also
            tests that neither provider unwraps the keys of the other.
        hidden: Secrets that the provider holds, such as keys, tokens and passwords.  The check
            tests that no secret appears in the `repr`, the `str`, the `key_id` or a pickle of the
            provider.
        every: Modify only every *every*-th byte.  A larger number makes fewer calls.

    Raises:
        AssertionError: The provider breaks a rule.  The message states the first such rule.
        Exception: A call that must succeed has failed.  The provider's error is raised unchanged.
    """
    provider, key = make(), secrets.token_bytes(32)
    _check_key_id(make, provider)
    wrapped = await provider.wrap(key, _CONTEXT)
    _rule(isinstance(wrapped, bytes), "must wrap to bytes")
    for shown in (key, key.hex().encode(), base64.b64encode(key), base64.urlsafe_b64encode(key)):
        _rule(shown not in wrapped, "must not show the key in what it wraps")
    _rule(await provider.wrap(key, _CONTEXT) != wrapped, "must return wraps of one key that differ")
    for length in (0, 1, 255, 1000):
        context = secrets.token_bytes(length)
        await _check_returned(make(), await provider.wrap(key, context), context, key)
    for another in (b"", b"contex", b"contexu", b"context\x00", b"\x00context", b"Context"):
        await _check_rejected(provider, wrapped, another, "other associated data")
    await _check_modified(provider, wrapped, every)
    if other is not None:
        await _check_rejected(other(), wrapped, _CONTEXT, "a key that another root key wrapped")
        theirs = await other().wrap(key, _CONTEXT)
        await _check_rejected(provider, theirs, _CONTEXT, "a key that another root key wrapped")
    await _check_at_once(make())
    await _check_cancelled(provider, key)
    # The services of one process may run in several event loops, one after another.

    async def unwrap() -> bytes:
        return await provider.unwrap(wrapped, _CONTEXT)

    again = await asyncio.to_thread(asyncio.run, unwrap())
    _rule(again == key, "must work in another event loop")
    _rule(await provider.unwrap(wrapped, _CONTEXT) == key, "must work in its first loop again")
    _check_hidden(provider, hidden)


def _rule(kept: bool, rule: str) -> None:
    """Raise AssertionError with the text *rule*, unless *kept* is True."""
    if not kept:
        raise AssertionError(f"a key provider {rule}")


def _check_key_id(make: Callable[[], KeyProvider], provider: KeyProvider) -> None:
    _rule(isinstance(provider, KeyProvider), "must have key_id, wrap and unwrap")
    key_id = provider.key_id
    _rule(isinstance(key_id, str) and 0 < len(key_id) <= 255, "needs a key_id of 1-255 characters")
    try:
        if not isinstance(provider, StaticKey):
            check_key_id(key_id)
    except ConfigurationError as error:
        _rule(False, f"must not have this key_id: {error}")
    _rule(make().key_id == key_id, "must have the same key_id each time it is created")


async def _check_returned(
    provider: KeyProvider, wrapped: bytes, context: bytes, key: bytes
) -> None:
    try:
        again = await provider.unwrap(wrapped, context)
    except (DecryptionError, WrongKeyError):
        again = b""
    size = len(context)
    rule = f"must unwrap the key after it is created again, with {size} bytes of associated data"
    _rule(again == key, rule)


async def _check_modified(provider: KeyProvider, wrapped: bytes, every: int) -> None:
    modified = [wrapped[:length] for length in {0, 1, len(wrapped) // 2, len(wrapped) - 1}]
    modified += [wrapped + b"\x00", b"\x00" + wrapped, bytes(len(wrapped))]
    for position in {*range(0, len(wrapped), every), len(wrapped) - 1}:
        for bit in (0x01, 0x80):
            changed = bytearray(wrapped)
            changed[position] ^= bit
            modified.append(bytes(changed))
    for start in range(0, len(modified), _AT_ONCE):
        checks = (
            _check_rejected(provider, one, _CONTEXT, "a modified wrapped key")
            for one in modified[start : start + _AT_ONCE]
        )
        await asyncio.gather(*checks)


async def _check_rejected(provider: KeyProvider, wrapped: bytes, context: bytes, what: str) -> None:
    try:
        await provider.unwrap(wrapped, context)
    except (DecryptionError, WrongKeyError):
        return
    except KeyServiceError as error:
        _rule(not error.retryable, f"must not mark the rejection of {what} as retryable")
        return
    except Exception as error:
        name = type(error).__name__
        _rule(False, f"must reject {what} with TamperedError or WrongKeyError, not {name}")
    _rule(False, f"must reject {what}")


async def _check_at_once(provider: KeyProvider) -> None:
    keys = [secrets.token_bytes(32) for _ in range(_AT_ONCE)]
    wraps = await asyncio.gather(*(provider.wrap(key, key[:4]) for key in keys))
    asked = (provider.unwrap(one, key[:4]) for one, key in zip(wraps, keys, strict=True))
    _rule(await asyncio.gather(*asked) == keys, "must serve several calls at once")


async def _check_cancelled(provider: KeyProvider, key: bytes) -> None:
    call = asyncio.ensure_future(provider.wrap(key, _CONTEXT))
    await asyncio.sleep(0)
    stopped = call.cancel()
    await asyncio.wait([call])
    _rule(call.cancelled() or not stopped, "must let a cancelled call end")


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
