"""Data keys: random, one per user and one per app, wrapped by a data master."""

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
    """The part of a backend that turns data keys into ciphers."""

    @property
    def backend_id(self) -> int: ...
    def new_key(self) -> bytes: ...
    def cipher(self, key: bytes, /) -> Cipher: ...


class DataKeyRow(NamedTuple):
    """A row of `secure_data_keys`; *owner* is the tag of a user or an app."""

    id: int
    owner: bytes
    generation: int
    backend_id: int
    created_at: int
    wrapped: bytes

    def context(self, database_id: bytes) -> bytes:
        """What the wrap is bound to."""
        parts = ("data-key", database_id, self.owner)
        return records.context(parts, self.id, self.generation, self.backend_id, self.created_at)


class DataKey(KeyMaterial):
    """An opened data key, as the cipher it is used with."""

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
        self.id = row.id
        self.owner = row.owner
        self.generation = row.generation
        self.backend_id = row.backend_id
        self.created_at = row.created_at
        self.master_id = master_id
        self.cipher = cipher


class StaleKeyring(Exception):
    """A data key is wrapped by a master that this process has not read; worth repeating."""


class OwnerKeys(KeyMaterial):
    """All data keys of one owner, as they were read together."""

    __slots__ = ("by_id", "current", "generation")

    def __init__(
        self, by_id: Mapping[int, DataKey], current: DataKey | None, generation: int
    ) -> None:
        self.by_id = by_id
        self.current = current  # what seals, of the writing backend; None: to be made
        self.generation = generation  # the highest, of whichever backend; -1: there is none


class DataKeys(KeyMaterial):
    """This process's opened data keys, bounded; all come from committed rows."""

    def __init__(
        self, keyring: Keyring, backends: Mapping[int, CipherFactory], writer_id: int, limit: int
    ) -> None:
        self.keyring = keyring  # replaced by one that was read later
        self.backends = backends
        self.writer = backends[writer_id]
        self.by_owner: Lru[bytes, OwnerKeys] = Lru(limit)
        self.owners: Lru[int, bytes] = Lru(limit)  # by key id

    def knows(self, *owners: bytes) -> bool:
        """Whether the keys of all *owners* were loaded before."""
        return all(map(self.by_owner.get, owners))


class StagedKeys:
    """Data keys as one transaction sees them; `publish` shares them once it has committed.

    A key that was seen before its commit and then rolled back must never seal anything.
    *keyring_is_complete*: a master that is not in the keyring now is not there at all.
    """

    def __init__(self, keys: DataKeys, *, keyring_is_complete: bool = True) -> None:
        self._keys = keys
        self._keyring_is_complete = keyring_is_complete
        self._by_owner: dict[bytes, OwnerKeys] = {}
        self._shared: dict[bytes, OwnerKeys] = {}  # as the process had them when first asked
        self._owners: dict[int, bytes] = {}
        self._refused: dict[bytes, DecryptionError] = {}
        self.has_new_keys = False

    def has_keys(self, owner: bytes) -> bool:
        """Whether this transaction read a key of *owner*."""
        self._check(owner)
        return owner in self._by_owner

    def current(self, owner: bytes) -> DataKey | None:
        """The key that seals what *owner* writes, if it is known.  Raises like `open`."""
        known = self._of(owner)
        return known.current if known else None

    def current_is_newest(self, owner: bytes) -> bool:
        """Whether no key of *owner*, of whichever backend, is newer than the current one."""
        known = self._of(owner)
        return bool(known and known.current and known.current.generation == known.generation)

    def is_as_new_as(self, owner: bytes, *stored: bytes) -> bool:
        """Whether the current key is known, and no older than those that sealed *stored*.

        If not, the owner's keys have to be read: others made one meanwhile, or dropped ours.
        """
        known = self._of(owner)
        if known is None or known.current is None:
            return False
        newest = known.current.generation
        before = (known.by_id.get(records.unpack(one)[1]) for one in stored)
        return all(key is not None and key.generation <= newest for key in before)

    def load(self, rows: Iterable[DataKeyRow]) -> None:
        """Open *rows*: all keys of each owner that is among them.

        An altered or swapped one is held against its owner, and no other.  Raises StaleKeyring.
        """
        opened: dict[bytes, list[DataKey | None]] = {}
        generations: dict[bytes, int] = {}
        for row in rows:
            try:
                key = self._open(row)
                if not isinstance(row.generation, int):
                    raise TamperedError("its generation is not an integer", reason=Reason.MALFORMED)
            except DecryptionError as error:
                self._refused[row.owner] = error.located("secure_data_keys", row.id)
                continue
            opened.setdefault(row.owner, []).append(key)
            generations[row.owner] = max(generations.get(row.owner, -1), row.generation)
        for owner, keys in opened.items():
            self._stage(owner, [key for key in keys if key is not None], generations[owner])

    def new(self, owner: bytes, not_before: int = 0) -> DataKeyRow:
        """Make the next generation of *owner*'s key; the caller stores the row.

        *not_before*: microseconds since 1970, for where clocks differ.
        """
        keyring, writer = self._keys.keyring, self._keys.writer
        master_id = keyring.current_id
        assert master_id is not None, "preparing the database makes a master for the writer"
        known = self._by_owner.get(owner) or OwnerKeys({}, None, -1)
        now = max(not_before, time.time_ns() // 1000)
        row = DataKeyRow(new_key_id(), owner, known.generation + 1, writer.backend_id, now, b"")
        key = writer.new_key()
        row = wrap_data_key(row, keyring, master_id, key)
        fresh = DataKey(row, master_id, writer.cipher(key))
        self._stage(owner, [*known.by_id.values(), fresh], row.generation)
        self.has_new_keys = True
        return row

    def keyring_guard(self) -> dict[str, object]:
        """What storing a new key asks of the keyring: that it is as this process knows it."""
        keyring = self._keys.keyring
        return {"master_id": keyring.current_id, "masters": keyring.size}

    def seal(self, owner: bytes, where: bytes, plaintext: bytes) -> bytes:
        """Make a record under *owner*'s current key, which must be known."""
        key = self.current(owner)
        assert key is not None
        return records.seal(key.cipher, key.backend_id, key.id, where, plaintext)

    def open(self, owner: bytes, where: bytes, stored: bytes) -> bytes:
        """Open a record of *owner* at its place.  Raises like `cipher` and `open_record`."""
        return records.open_record(stored, where, self.cipher(owner, stored))

    def cipher(self, owner: bytes, stored: bytes) -> Cipher:
        """What opens records with the header of *stored*: a key of *owner*, looked up exactly.

        Raises:
            UnknownKeyError: no such key is known yet, or its backend is not listed.
            TamperedError, PlaintextRefusedError: see there.
        """
        known = self._of(owner)
        backend_id, key_id = records.unpack(stored)
        if backend_id not in self._keys.backends:
            raise _unlisted(backend_id)
        key = known.by_id.get(key_id) if known else None
        if key is not None and key.backend_id == backend_id:
            return key.cipher
        whose = self._owners.get(key_id) or self._keys.owners.get(key_id) or owner
        if key is not None or whose != owner:
            raise TamperedError(
                f"data key {key_id} belongs to another owner or backend", reason=Reason.WRONG_OWNER
            )
        raise UnknownKeyError(f"no data key {key_id} is known for it")

    def publish(self) -> None:
        """Share what this transaction learnt with the process."""
        for owner, known in self._by_owner.items():
            self._keys.by_owner.put(owner, known)
        for key_id, owner in self._owners.items():
            self._keys.owners.put(key_id, owner)

    def forget(self, owner: bytes) -> None:
        """Drop the keys of an owner that is gone from the process."""
        self._keys.by_owner.drop(owner)
        self._shared.pop(owner, None)

    def _of(self, owner: bytes) -> OwnerKeys | None:
        self._check(owner)
        known = self._by_owner.get(owner) or self._shared.get(owner)
        if known is None and (known := self._keys.by_owner.get(owner)) is not None:
            self._shared[owner] = known  # the process may forget, or renew them meanwhile
        return known

    def _check(self, owner: bytes) -> None:
        if owner in self._refused:
            raise self._refused[owner]

    def _stage(self, owner: bytes, keys: list[DataKey], generation: int) -> None:
        writer, keyring = self._keys.writer, self._keys.keyring
        fit = [
            key
            for key in keys
            if key.backend_id == writer.backend_id and keyring.is_fit(key.master_id)
        ]
        current = max(fit, key=lambda key: key.generation, default=None)
        self._by_owner[owner] = OwnerKeys({key.id: key for key in keys}, current, generation)
        self._owners.update((key.id, owner) for key in keys)

    def _open(self, row: DataKeyRow) -> DataKey | None:
        backend = self._keys.backends.get(row.backend_id)
        if backend is None:
            return None  # what it sealed will be refused, by name
        keyring = self._keys.keyring
        master_id = records.unpack(row.wrapped)[1]
        if not self._keyring_is_complete and not keyring.holds(master_id):
            raise StaleKeyring
        return DataKey(row, master_id, backend.cipher(unwrap_data_key(row, keyring)))


def wrap_data_key(row: DataKeyRow, keyring: Keyring, master_id: int, key: bytes) -> DataKeyRow:
    """*row* as it is with *key* wrapped by that data master."""
    master, where = keyring.master(master_id), row.context(keyring.database_id)
    record = records.seal(master, WRAP_BACKEND_ID, master_id, where, key)
    return row._replace(wrapped=record)


def unwrap_data_key(row: DataKeyRow, keyring: Keyring) -> bytes:
    """The data key of *row*.  Raises DecryptionError."""
    backend_id, master_id = records.unpack(row.wrapped)
    if backend_id != WRAP_BACKEND_ID:
        raise TamperedError("not wrapped with AES-256-GCM", reason=Reason.MALFORMED)
    where = row.context(keyring.database_id)
    return records.open_record(row.wrapped, where, keyring.master(master_id))


def _unlisted(backend_id: int) -> DecryptionError:
    if backend_id == records.NOOP_BACKEND_ID:
        return PlaintextRefusedError("stored as plaintext by NoOpBackend, which is not listed")
    return UnknownKeyError(
        f"encrypted by backend {backend_id}, which is not listed: list it in additional_backends",
        reason=Reason.UNKNOWN_BACKEND,
    )
