"""Master keys: a few per database, wrapped by root keys and unwrapped once per process start.

One index master key makes the blind indexes.  Data master keys wrap the data keys.
"""

import secrets
from collections.abc import Awaitable, Iterable, Mapping
from typing import NamedTuple

from adk_secure_sessions.crypto.aead import KEY_LENGTH, Aes256Gcm
from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.errors import (
    DecryptionError,
    KeyServiceError,
    PlaintextRefusedError,
    SecureSessionError,
    UnknownKeyError,
    WrongKeyError,
)
from adk_secure_sessions.formats.records import context
from adk_secure_sessions.keys.blind_index import BlindIndex
from adk_secure_sessions.keys.providers import PLAINTEXT_ROOT_KEY_ID, KeyProvider
from adk_secure_sessions.loops import at_once

DATA, INDEX = "data", "index"


def new_key_id() -> int:
    """Return a random id of 63 bits, for a master key or a data key."""
    return secrets.randbits(63)


class MasterKeyRow(NamedTuple):
    """A row of `secure_keyring`.

    Attributes:
        id: A random id.
        purpose: `DATA` or `INDEX`.
        root_key_id: Names the root key that wraps it.
        created_at: Microseconds since 1970, UTC.
        wrapped: The master key, as the provider of that root key wrapped it.
    """

    id: int
    purpose: str
    root_key_id: str
    created_at: int
    wrapped: bytes

    def context(self, database_id: bytes) -> bytes:
        """Return the context that `wrapped` is bound to."""
        parts = ("master-key", database_id, self.purpose, self.root_key_id)
        return context(parts, self.id, self.created_at)


class Keyring(KeyMaterial):
    """The unwrapped master keys of one database.

    Attributes:
        database_id: 16 bytes.
        index: Makes the blind indexes.
        masters: The data master keys by id.
        current_id: The data master key that wraps new data keys; None if it is yet to be made.
    """

    def __init__(
        self,
        database_id: bytes,
        index: BlindIndex,
        masters: Mapping[int, Aes256Gcm],
        current_id: int | None,
        usable: frozenset[int] = frozenset(),
    ) -> None:
        self.database_id = database_id
        self.index = index
        self.masters = masters
        self.current_id = current_id
        self._usable = usable

    def master(self, key_id: int) -> Aes256Gcm:
        """Return the data master key with this id.

        Raises:
            UnknownKeyError: the keyring has none.
        """
        try:
            return self.masters[key_id]
        except KeyError:
            raise UnknownKeyError(f"the keyring holds no data master key {key_id}") from None

    def holds(self, key_id: int) -> bool:
        """Whether there is a data master key with this id."""
        return key_id in self.masters

    @property
    def size(self) -> int:
        """The number of rows of `secure_keyring`, of which the index master key is one."""
        return len(self.masters) + 1

    def is_usable(self, key_id: int) -> bool:
        """Whether this process may encrypt with data keys that this data master key wraps.

        It may not if the master key is stored as plaintext, unless the writing backend is
        `NoOpBackend` itself: an attacker who reads the database has those data keys, too.
        """
        return key_id in self._usable


async def new_master(purpose: str, root: KeyProvider, database_id: bytes, now: int) -> MasterKeyRow:
    """Make a random master key and wrap it with *root*; *now* in microseconds since 1970, UTC.

    Raises:
        KeyServiceError: the provider failed.
    """
    row = MasterKeyRow(new_key_id(), purpose, root.key_id, now, b"")
    return await wrap_master_key(row, root, database_id, secrets.token_bytes(KEY_LENGTH))


async def wrap_master_key(
    row: MasterKeyRow, root: KeyProvider, database_id: bytes, key: bytes
) -> MasterKeyRow:
    """Return *row* with *key* in it, wrapped by *root*.

    Raises:
        KeyServiceError: the provider failed.
    """
    row = row._replace(root_key_id=root.key_id)
    wrapped = await _await_provider(root, root.wrap(key, row.context(database_id)))
    return row._replace(wrapped=wrapped)


async def open_keyring(
    rows: Iterable[MasterKeyRow],
    roots: Mapping[str, KeyProvider],
    writer: str,
    database_id: bytes,
    known: Keyring | None = None,
) -> Keyring:
    """Unwrap *rows*, each with the provider that it names, and no other.

    New data keys are wrapped by the newest data master key under the writer's root key.  If there
    is none, they are wrapped by the newest under another root key: a process with a new root key
    listed first makes no master keys of its own.  A master key that is stored as plaintext is
    usable only if the writer is `NoOpBackend`.

    Args:
        rows: All rows of `secure_keyring`.
        roots: The providers by root key id.
        writer: The id of the writing backend's root key.
        database_id: 16 bytes.
        known: The keyring as it was read before: its master keys are not unwrapped again.

    Raises:
        WrongKeyError: a row names a root key that is not in *roots*, or is not unwrapped by it;
            or the keyring has no index master key or no data master key.
        PlaintextRefusedError: the keyring is stored as plaintext, and `NoOpBackend` is not listed.
        KeyServiceError: the provider failed.
    """
    masters: dict[int, Aes256Gcm] = {}
    candidates: list[tuple[bool, int, int]] = []
    index: BlindIndex | None = None
    rows = list(rows)
    if known is not None:
        index = known.index
        masters = {row.id: known.masters[row.id] for row in rows if known.holds(row.id)}
    new = [row for row in rows if row.id not in masters and not (known and row.purpose == INDEX)]
    if known is None:
        unwrapped = await at_once(*(unwrap_master_key(row, roots, database_id) for row in new))
    else:  # in turn: after the first that is rejected, the key service is not asked again
        unwrapped = [await unwrap_master_key(row, roots, database_id) for row in new]
    for row, key in zip(new, unwrapped, strict=True):
        if row.purpose == INDEX:
            index = BlindIndex(key)
        else:
            masters[row.id] = Aes256Gcm(key)
    for row in rows:
        if row.id in masters and (
            row.root_key_id == writer or row.root_key_id != PLAINTEXT_ROOT_KEY_ID
        ):
            candidates.append((row.root_key_id == writer, row.created_at, row.id))
    if index is None or not masters:
        missing = "data" if index else "index"
        raise WrongKeyError(f"the keyring holds no {missing} master key: restore secure_keyring")
    current_id = max(candidates)[2] if candidates else None
    usable = frozenset(row_id for *_, row_id in candidates)
    return Keyring(database_id, index, masters, current_id, usable)


async def unwrap_master_key(
    row: MasterKeyRow, roots: Mapping[str, KeyProvider], database_id: bytes
) -> bytes:
    """Return the master key in *row*, unwrapped by the root key that it names.

    Raises like `open_keyring`.
    """
    root = roots.get(row.root_key_id)
    if root is None and row.root_key_id == PLAINTEXT_ROOT_KEY_ID:
        raise PlaintextRefusedError(
            "the keyring of this database was stored as plaintext by NoOpBackend: "
            "list NoOpBackend() in additional_backends if you mean to read it"
        )
    if root is None:
        given = ", ".join(map(repr, sorted(roots)))
        raise WrongKeyError(
            f"master key {row.id} is wrapped by root key {row.root_key_id!r}; this service was "
            f"given {given}: list a backend with that key"
        )
    key: bytes | None = None
    try:
        if isinstance(row.wrapped, bytes):  # SQLite stores any type in any column
            key = await _await_provider(root, root.unwrap(row.wrapped, row.context(database_id)))
    except DecryptionError:
        pass
    if key is None or len(key) != KEY_LENGTH:
        raise WrongKeyError(
            f"root key {root.key_id!r} does not unwrap master key {row.id}: "
            "wrong key, or the keyring was tampered with"
        )
    return key


async def _await_provider(root: KeyProvider, answer: Awaitable[bytes]) -> bytes:
    """Await a provider's answer.

    Raises:
        SecureSessionError: as the provider raised it.
        KeyServiceError: instead of any other error, whose text may hold secrets.
    """
    failure = "something that is not bytes"
    try:
        result = await answer
        if isinstance(result, bytes):
            return result
    except SecureSessionError:
        raise
    except Exception as error:
        failure = type(error).__name__
    raise KeyServiceError(f"the provider of root key {root.key_id!r} failed: {failure}")
