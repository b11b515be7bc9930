"""Master keys: a few per database, wrapped by the root key, opened once per process start."""

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
    """A random id of 63 bits, for master keys and data keys."""
    return secrets.randbits(63)


class MasterKeyRow(NamedTuple):
    """A row of `secure_keyring`; *created_at* is in microseconds UTC."""

    id: int
    purpose: str
    root_key_id: str
    created_at: int
    wrapped: bytes

    def context(self, database_id: bytes) -> bytes:
        """What the wrap is bound to."""
        parts = ("master-key", database_id, self.purpose, self.root_key_id)
        return context(parts, self.id, self.created_at)


class Keyring(KeyMaterial):
    """The opened master keys of one database.

    *fit* are the data masters whose data keys may seal; *current_id* is the one that wraps new
    data keys, None where it has to be made first.
    """

    def __init__(
        self,
        database_id: bytes,
        index: BlindIndex,
        masters: Mapping[int, Aes256Gcm],
        current_id: int | None,
        fit: frozenset[int] = frozenset(),
    ) -> None:
        self.database_id = database_id
        self.index = index
        self.masters = masters
        self.current_id = current_id
        self._fit = fit

    def master(self, key_id: int) -> Aes256Gcm:
        """The data master with exactly this id."""
        try:
            return self.masters[key_id]
        except KeyError:
            raise UnknownKeyError(f"the keyring holds no data master {key_id}") from None

    def holds(self, key_id: int) -> bool:
        """Whether there is a data master of this id."""
        return key_id in self.masters

    @property
    def size(self) -> int:
        """Rows of `secure_keyring`: the index master is one."""
        return len(self.masters) + 1

    def is_fit(self, key_id: int) -> bool:
        """Whether data keys that this master wraps may seal."""
        return key_id in self._fit


async def new_master(purpose: str, root: KeyProvider, database_id: bytes, now: int) -> MasterKeyRow:
    """Make a random master key and wrap it with *root*; *now* in microseconds UTC."""
    row = MasterKeyRow(new_key_id(), purpose, root.key_id, now, b"")
    return await wrap_master_key(row, root, database_id, secrets.token_bytes(KEY_LENGTH))


async def wrap_master_key(
    row: MasterKeyRow, root: KeyProvider, database_id: bytes, key: bytes
) -> MasterKeyRow:
    """*row* as it is with *key* wrapped by *root*.  Raises KeyServiceError."""
    row = row._replace(root_key_id=root.key_id)
    wrapped = await _ask(root, root.wrap(key, row.context(database_id)))
    return row._replace(wrapped=wrapped)


async def open_keyring(
    rows: Iterable[MasterKeyRow],
    roots: Mapping[str, KeyProvider],
    writer: str,
    database_id: bytes,
    known: Keyring | None = None,
) -> Keyring:
    """Unwrap *rows*, each with the provider in *roots* that it names, and no other.

    *writer* is the key id of the writing backend's root key.  New data keys are wrapped by the
    newest data master under it; where there is none, by the newest under another root key, so
    that a process with a new root key listed first starts no keys of its own.  One in clear
    serves only a writer in clear.  What *known* holds is not unwrapped again.

    Raises:
        WrongKeyError: a row names a root key that is not in *roots*, or does not open.
        PlaintextRefusedError: the keyring is in clear and no NoOpBackend was listed.
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
    else:  # one by one, so that the first that is refused is the last that is asked for
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
        raise WrongKeyError(f"the keyring holds no {missing} master: restore secure_keyring")
    current_id = max(candidates)[2] if candidates else None
    fit = frozenset(row_id for *_, row_id in candidates)
    return Keyring(database_id, index, masters, current_id, fit)


async def unwrap_master_key(
    row: MasterKeyRow, roots: Mapping[str, KeyProvider], database_id: bytes
) -> bytes:
    """The master key of one row, by the root key that it names.  Raises like `open_keyring`."""
    root = roots.get(row.root_key_id)
    if root is None and row.root_key_id == PLAINTEXT_ROOT_KEY_ID:
        raise PlaintextRefusedError(
            "the keyring of this database was written in clear by NoOpBackend: "
            "list NoOpBackend() in additional_backends if that is what you mean to read"
        )
    if root is None:
        raise WrongKeyError(
            f"master key {row.id} is wrapped by root key {row.root_key_id!r}; this service was "
            f"given {', '.join(map(repr, sorted(roots)))}: list a backend with that key"
        )
    key: bytes | None = None
    try:
        if isinstance(row.wrapped, bytes):  # SQLite keeps any type in any column
            key = await _ask(root, root.unwrap(row.wrapped, row.context(database_id)))
    except DecryptionError:
        pass
    if key is None or len(key) != KEY_LENGTH:
        raise WrongKeyError(
            f"root key {root.key_id!r} does not open master key {row.id}: "
            "wrong key, or the keyring was altered"
        )
    return key


async def _ask(root: KeyProvider, answer: Awaitable[bytes]) -> bytes:
    """Await a provider; whatever is not an error of ours may carry secrets in its text."""
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
