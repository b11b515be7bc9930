"""Data keys: random keys, wrapped by a data master, that encrypt the records of one owner.

An *owner* is a user or an app.  The *writing backend* encrypts all new records of this process.  A
backend is *listed* if it is the writing backend or one of `additional_backends`.

docs/format.md, "Which data key encrypts", defines three more terms:

- A data key is *usable* if this process may encrypt new records with it: it was created for the
  writing backend, and its data master is usable (`Keyring.is_usable`).
- An owner's *current* data key is the usable data key with the highest generation.  It encrypts
  every record that this process writes for that owner.
- An owner's *newest* data key has the highest generation of all, usable or not.  It differs from
  the current data key if, for example, another service writes with another backend.
"""

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from adk_secure_sessions.crypto.key_material import KeyMaterial
from adk_secure_sessions.errors import (
    DecryptionError,
    PlaintextRefusedError,
    Reason,
    TamperedError,
    UnknownKeyError,
)
from adk_secure_sessions.formats import records
from adk_secure_sessions.formats.records import Cipher
from adk_secure_sessions.keys.keyring import Keyring, new_key_id
from adk_secure_sessions.lru import Lru

WRAP_BACKEND_ID = 1  # data keys are always wrapped with AES-256-GCM


class CipherFactory(Protocol):
    """The part of a backend that creates data keys and the ciphers for them."""

    @property
    def backend_id(self) -> int: ...
    def new_key(self) -> bytes: ...
    def cipher(self, key: bytes, /) -> Cipher: ...


class DataKeyRow(NamedTuple):
    """A row of `secure_data_keys`.

    Attributes:
        id: A random id.
        owner: The tag (blind index) of a user or an app.
        generation: 0 for the owner's first data key, 1 for the second, whatever their backends.
        backend_id: The id of the backend that encrypts with the key.
        created_at: When the key was created, in microseconds since 1970, UTC.
        wrapped: The key in a record that a data master encrypts.
    """

    id: int
    owner: bytes
    generation: int
    backend_id: int
    created_at: int
    wrapped: bytes

    def context(self, database_id: bytes) -> bytes:
        """Return the context of `wrapped`, which decrypting it requires."""
        parts = ("data-key", database_id, self.owner)
        return records.context(parts, self.id, self.generation, self.backend_id, self.created_at)


class DataKey(KeyMaterial):
    """An unwrapped data key.  Only its cipher contains the bytes of the key."""

    __slots__ = (
        "backend_id",
        "cipher",
        "created_at",
        "generation",
        "id",
        "master_id",
        "owner",
    )

    def __init__(self, row: DataKeyRow, master_id: int, cipher: Cipher) -> None:
        self.id: int = row.id
        self.owner: bytes = row.owner
        self.generation: int = row.generation
        self.backend_id: int = row.backend_id
        self.created_at: int = row.created_at
        self.master_id: int = master_id  # the id of the data master that wraps this key
        self.cipher: Cipher = cipher


class StaleKeyring(Exception):
    """A data key is wrapped by a data master that this process has not read.

    The caller must read the keyring again and then repeat the operation.
    """


class OwnerKeys(KeyMaterial):
    """All data keys of one owner.

    Attributes:
        by_id: The data keys whose backend is listed, by data key id.
        current: The owner's current data key; None if no data key is usable.
        newest_generation: The generation of the owner's newest data key, even if its backend is
            not listed; -1 if the owner has no data key.
    """

    __slots__ = ("by_id", "current", "newest_generation")

    def __init__(
        self, by_id: Mapping[int, DataKey], current: DataKey | None, newest_generation: int
    ) -> None:
        self.by_id: Mapping[int, DataKey] = by_id
        self.current: DataKey | None = current
        self.newest_generation: int = newest_generation


class DataKeys(KeyMaterial):
    """A bounded cache of unwrapped data keys.  Their rows are committed.

    Attributes:
        keyring: The master keys; replaced when the keyring is read again.
        backends: All listed backends, by backend id.
        writer: The writing backend.
        by_owner: The data keys of the most recently used owners, by the owner's tag.
        owners: The tags of the owners of the most recently used data keys, by data key id.
    """

    def __init__(
        self, keyring: Keyring, backends: Mapping[int, CipherFactory], writer_id: int, limit: int
    ) -> None:
        self.keyring = keyring
        self.backends = backends
        self.writer: CipherFactory = backends[writer_id]
        self.by_owner: Lru[bytes, OwnerKeys] = Lru(limit)
        self.owners: Lru[int, bytes] = Lru(limit)

    def knows(self, *owners: bytes) -> bool:
        """Return whether the data keys of all *owners* (tags) are cached."""
        return all(map(self.by_owner.get, owners))


class StagedKeys:
    """The data keys that one transaction uses.

    For an owner whose data keys the transaction has read or created, it uses only those data keys.
    For any other owner, it uses the cached data keys.

    After the commit, `publish` puts the keys that the transaction read or created into the cache.
    Before the commit, other transactions must not encrypt with these keys: if this transaction is
    rolled back, the keys that it created are lost.

    Args:
        keys: The cache.
        keyring_is_complete: If True, a data master that is missing in the keyring does not exist.
            If False, another process may have created the missing data master after the keyring
            was read, and `load` raises StaleKeyring.
        uses_cache: If False, the transaction uses no cached keys.  Maintenance passes False,
            because a data key may have been deleted after it was cached.

    Attributes:
        has_new_keys: Whether `new` has created a data key.
    """

    def __init__(
        self, keys: DataKeys, *, keyring_is_complete: bool = True, uses_cache: bool = True
    ) -> None:
        self._keys = keys
        self._uses_cache = uses_cache
        self._keyring_is_complete = keyring_is_complete
        self._by_owner: dict[bytes, OwnerKeys] = {}  # read or created by this transaction
        # Keys from the cache.  The transaction keeps them even if the cache drops or replaces them.
        self._cached: dict[bytes, OwnerKeys] = {}
        self._owners: dict[int, bytes] = {}  # by data key id
        self._rejected: dict[bytes, DecryptionError] = {}
        self.has_new_keys: bool = False

    def load(self, rows: Iterable[DataKeyRow]) -> None:
        """Unwrap *rows*, which must include all data keys of each owner in them.

        This call does not raise an error for a tampered row.  Every later use of that owner's data
        keys raises the error.  Other owners are not affected.

        Raises:
            StaleKeyring: the data master of a row is missing in the keyring, and
                *keyring_is_complete* is False.
        """
        opened: dict[bytes, list[DataKey | None]] = {}
        generations: dict[bytes, int] = {}
        for row in rows:
            try:
                key = self._unwrap(row)
                if not isinstance(row.generation, int):
                    raise TamperedError("its generation is not an integer", reason=Reason.MALFORMED)
            except DecryptionError as error:
                self._rejected[row.owner] = error.located("secure_data_keys", row.id)
                continue
            opened.setdefault(row.owner, []).append(key)
            generations[row.owner] = max(generations.get(row.owner, -1), row.generation)
        for owner, keys in opened.items():
            self._stage(owner, [key for key in keys if key is not None], generations[owner])

    def new(self, owner: bytes, not_before: int = 0) -> DataKeyRow:
        """Create a data key of the next generation for *owner*, and return the row to store.

        Args:
            owner: The owner's tag.  If the owner has data keys, `load` must have read them before.
            not_before: The earliest `created_at`, in microseconds since 1970.  A rotation passes
                its start time, because another machine with another clock may have measured it.
        """
        keyring, writer = self._keys.keyring, self._keys.writer
        master_id = keyring.current_id
        assert master_id is not None, "opening the database creates a data master"
        known = self._by_owner.get(owner) or OwnerKeys({}, None, -1)
        generation = known.newest_generation + 1
        now = max(not_before, time.time_ns() // 1000)
        row = DataKeyRow(new_key_id(), owner, generation, writer.backend_id, now, b"")
        key = writer.new_key()
        row = wrap_data_key(row, keyring, master_id, key)
        made = DataKey(row, master_id, writer.cipher(key))
        self._stage(owner, [*known.by_id.values(), made], generation)
        self.has_new_keys = True
        return row

    def keyring_guard(self) -> dict[str, object]:
        """Return the parameters for the condition in the statement INSERT_KEY.

        INSERT_KEY stores a data key only if the stored keyring is still the one that this process
        has read.  Otherwise, another process may have retired or replaced the data master that
        wraps the data key.
        """
        keyring = self._keys.keyring
        return {"master_id": keyring.current_id, "masters": keyring.size}

    def has_keys(self, owner: bytes) -> bool:
        """Return whether this transaction has read or created a data key of *owner*.

        Raises:
            DecryptionError: a data key of *owner* was rejected by `load`.
        """
        self._raise_if_rejected(owner)
        return owner in self._by_owner

    def current(self, owner: bytes) -> DataKey | None:
        """Return the owner's current data key, or None if no usable data key is known.

        Raises:
            DecryptionError: a data key of *owner* was rejected by `load`.
        """
        known = self._of(owner)
        return known.current if known else None

    def current_is_newest(self, owner: bytes) -> bool:
        """Return whether the owner's current data key is known and is also the newest.

        Raises:
            DecryptionError: a data key of *owner* was rejected by `load`.
        """
        known = self._of(owner)
        return bool(known and known.current and known.current.generation == known.newest_generation)

    def is_as_new_as(self, owner: bytes, *stored: bytes) -> bool:
        """Return whether the current data key is at least as new as the keys of *stored*.

        *stored* are records of *owner*, possibly none.  Return False also if no current data key
        is known.  After False, the caller reads the owner's data keys again: another process may
        have created a newer data key, or retired the current one.

        Raises:
            DecryptionError: a data key of *owner* was rejected by `load`, or the header of a
                record is malformed.
        """
        known = self._of(owner)
        if known is None or known.current is None:
            return False
        newest = known.current.generation
        keys = (known.by_id.get(records.unpack(one)[1]) for one in stored)
        return all(key is not None and key.generation <= newest for key in keys)

    def seal(self, owner: bytes, context: bytes, plaintext: bytes) -> bytes:
        """Encrypt *plaintext* with the owner's current data key, and return the record.

        The current data key must be known.
        """
        key = self.current(owner)
        assert key is not None
        return records.seal(key.cipher, key.backend_id, key.id, context, plaintext)

    def open(self, owner: bytes, context: bytes, stored: bytes) -> bytes:
        """Decrypt *stored*, a record of *owner*, and return the plaintext.

        Raises:
            DecryptionError: the errors of `cipher` and `records.open_record`.
        """
        return records.open_record(stored, context, self.cipher(owner, stored))

    def cipher(self, owner: bytes, stored: bytes) -> Cipher:
        """Return the cipher of the data key that the header of the record *stored* names.

        No other data key is tried.

        Raises:
            UnknownKeyError: the data key is not known, or the backend is not listed.
            TamperedError: the data key belongs to another owner or backend, or the header is
                malformed.
            PlaintextRefusedError: *stored* is not a record, or `NoOpBackend` wrote it and is not
                listed.
            DecryptionError: a data key of *owner* was rejected by `load`.
        """
        known = self._of(owner)
        backend_id, key_id = records.unpack(stored)
        if backend_id not in self._keys.backends:
            raise _not_listed(backend_id)
        key = known.by_id.get(key_id) if known else None
        if key is not None and key.backend_id == backend_id:
            return key.cipher
        key_owner = self._owners.get(key_id) or self._keys.owners.get(key_id) or owner
        if key is not None or key_owner != owner:
            raise TamperedError(
                f"data key {key_id} belongs to another owner or backend", reason=Reason.WRONG_OWNER
            )
        raise UnknownKeyError(f"its data key {key_id} is not known")

    def publish(self) -> None:
        """Put the data keys that this transaction has read or created into the cache."""
        for owner, known in self._by_owner.items():
            self._keys.by_owner.put(owner, known)
        for key_id, owner in self._owners.items():
            self._keys.owners.put(key_id, owner)

    def forget(self, owner: bytes) -> None:
        """Remove the data keys of *owner* from the cache, because the owner does not exist."""
        self._keys.by_owner.drop(owner)
        self._cached.pop(owner, None)

    def _of(self, owner: bytes) -> OwnerKeys | None:
        self._raise_if_rejected(owner)
        known = self._by_owner.get(owner) or self._cached.get(owner)
        if known is None and self._uses_cache:
            known = self._keys.by_owner.get(owner)
            if known is not None:
                self._cached[owner] = known
        return known

    def _raise_if_rejected(self, owner: bytes) -> None:
        if owner in self._rejected:
            raise self._rejected[owner]

    def _stage(self, owner: bytes, keys: list[DataKey], newest_generation: int) -> None:
        writer, keyring = self._keys.writer, self._keys.keyring
        usable = [
            key
            for key in keys
            if key.backend_id == writer.backend_id and keyring.is_usable(key.master_id)
        ]
        current = max(usable, key=lambda key: key.generation, default=None)
        self._by_owner[owner] = OwnerKeys({key.id: key for key in keys}, current, newest_generation)
        self._owners.update((key.id, owner) for key in keys)

    def _unwrap(self, row: DataKeyRow) -> DataKey | None:
        backend = self._keys.backends.get(row.backend_id)
        if backend is None:
            return None  # `cipher` raises an error that names the backend
        keyring = self._keys.keyring
        master_id = records.unpack(row.wrapped)[1]
        if not self._keyring_is_complete and not keyring.holds(master_id):
            raise StaleKeyring
        return DataKey(row, master_id, backend.cipher(unwrap_data_key(row, keyring)))


def wrap_data_key(row: DataKeyRow, keyring: Keyring, master_id: int, key: bytes) -> DataKeyRow:
    """Wrap *key* with the data master *master_id*, and return *row* with the result."""
    master, context = keyring.master(master_id), row.context(keyring.database_id)
    record = records.seal(master, WRAP_BACKEND_ID, master_id, context, key)
    return row._replace(wrapped=record)


def unwrap_data_key(row: DataKeyRow, keyring: Keyring) -> bytes:
    """Unwrap and return the data key in *row*.

    Raises:
        DecryptionError: the row was tampered with, or *keyring* lacks its data master.
    """
    backend_id, master_id = records.unpack(row.wrapped)
    if backend_id != WRAP_BACKEND_ID:
        raise TamperedError("not wrapped with AES-256-GCM", reason=Reason.MALFORMED)
    context = row.context(keyring.database_id)
    return records.open_record(row.wrapped, context, keyring.master(master_id))


def _not_listed(backend_id: int) -> DecryptionError:
    if backend_id == records.NOOP_BACKEND_ID:
        return PlaintextRefusedError("stored as plaintext by NoOpBackend, which is not listed")
    return UnknownKeyError(
        f"encrypted by backend {backend_id}, which is not listed: list it in additional_backends",
        reason=Reason.UNKNOWN_BACKEND,
    )
