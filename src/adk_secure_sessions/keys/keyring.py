"""Master keys: a few random keys per database, wrapped by root keys.

The index master computes the blind indexes.  Data masters wrap the data keys.  A process unwraps
all master keys once, when it opens the database.
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
        purpose: `DATA` for a data master, `INDEX` for the index master.
        root_key_id: The id of the root key that wraps the master key.
        created_at: When the key was created, in microseconds since 1970, UTC.
        wrapped: The master key, wrapped by the provider of that root key.
    """

    id: int
    purpose: str
    root_key_id: str
    created_at: int
    wrapped: bytes

    def context(self, database_id: bytes) -> bytes:
        """Return the context of `wrapped`, which unwrapping it requires."""
        parts = ("master-key", database_id, self.purpose, self.root_key_id)
        return context(parts, self.id, self.created_at)


class Keyring(KeyMaterial):
    """The unwrapped master keys of one database.

    Attributes:
        database_id: The id of the database, 16 bytes.
        index: Computes the blind indexes.
        masters: The data masters, by id.
        current_id: The id of the data master that wraps new data keys; None if no data master is
            usable (see `is_usable`).
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
        """Return the data master *key_id*.

        Raises:
            UnknownKeyError: the keyring has no data master with this id.
        """
        try:
            return self.masters[key_id]
        except KeyError:
            raise UnknownKeyError(f"the keyring holds no data master key {key_id}") from None

    def holds(self, key_id: int) -> bool:
        """Return whether the keyring has the data master *key_id*."""
        return key_id in self.masters

    @property
    def size(self) -> int:
        """The number of rows of `secure_keyring`: the data masters and the index master."""
        return len(self.masters) + 1

    def is_usable(self, key_id: int) -> bool:
        """Return whether this process may encrypt with data keys that data master *key_id* wraps.

        If a data master is stored as plaintext, an attacker who reads the database can unwrap its
        data keys.  Only a process whose writing backend is `NoOpBackend` may use such a key.
        """
        return key_id in self._usable


async def new_master(purpose: str, root: KeyProvider, database_id: bytes, now: int) -> MasterKeyRow:
    """Create a random master key, wrapped by *root*; *now* is in microseconds since 1970, UTC.

    Raises:
        KeyServiceError: the provider failed.
    """
    row = MasterKeyRow(new_key_id(), purpose, root.key_id, now, b"")
    return await wrap_master_key(row, root, database_id, secrets.token_bytes(KEY_LENGTH))


async def wrap_master_key(
    row: MasterKeyRow, root: KeyProvider, database_id: bytes, key: bytes
) -> MasterKeyRow:
    """Wrap the master key *key* with *root*, and return *row* with the result.

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
    """Unwrap *rows* and return the keyring.

    Each row names its root key, and no other root key is tried.

    New data keys are wrapped by the newest data master that the writing backend's root key wraps.
    If no data master is wrapped by that root key, the newest other data master is used.  A process
    therefore does not create a data master when its writing backend gets a new root key.  A data
    master that is stored as plaintext is usable only if the writing backend is `NoOpBackend`.

    Args:
        rows: All rows of `secure_keyring`.
        roots: The providers of all root keys that were given, by root key id.
        writer: The id of the writing backend's root key.
        database_id: The id of the database, 16 bytes.
        known: A keyring that was read earlier.  Its master keys are not unwrapped again.

    Raises:
        WrongKeyError: the root key of a row is not in *roots*, or does not unwrap the row; or the
            keyring has no index master or no data master.
        PlaintextRefusedError: the keyring is stored as plaintext, and `NoOpBackend` is not listed.
        KeyServiceError: a provider failed.
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
    else:  # one by one, so that the first rejected row ends the calls of the key service
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
    """Unwrap the master key in *row* with the root key that the row names, and return it.

    Raises:
        WrongKeyError: the root key is not in *roots*, or does not unwrap the row.
        PlaintextRefusedError: the row is stored as plaintext, and `NoOpBackend` is not listed.
        KeyServiceError: the provider failed.
    """
    root = roots.get(row.root_key_id)
    if root is None and row.root_key_id == PLAINTEXT_ROOT_KEY_ID:
        raise PlaintextRefusedError(
            "the keyring of this database was stored as plaintext by NoOpBackend: "
            "to read it anyway, list NoOpBackend() in additional_backends"
        )
    if root is None:
        given = ", ".join(map(repr, sorted(roots)))
        raise WrongKeyError(
            f"master key {row.id} is wrapped by root key {row.root_key_id!r}; this service was "
            f"given {given}: list a backend with that key"
        )
    key: bytes | None = None
    try:
        # SQLite stores any type in any column, so a modified row may not hold bytes.
        if isinstance(row.wrapped, bytes):
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
    """Await *answer*, the result of the provider *root*, and return it.

    Raises:
        SecureSessionError: the provider raised this error.
        KeyServiceError: the provider did not return bytes, or raised another exception.  The text
            of that exception may contain secrets, so the message gives only its class.
    """
    failure = "it returned something that is not bytes"
    try:
        result = await answer
        if isinstance(result, bytes):
            return result
    except SecureSessionError:
        raise
    except Exception as error:
        failure = type(error).__name__
    raise KeyServiceError(f"the provider of root key {root.key_id!r} failed: {failure}")
