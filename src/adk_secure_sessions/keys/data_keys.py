"""Data keys: random, one per user and one per app, wrapped by a data master."""

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from adk_secure_sessions import records
from adk_secure_sessions.errors import (
    DecryptionError,
    PlaintextRefusedError,
    TamperedError,
    UnknownKeyError,
)
from adk_secure_sessions.keys.keyring import Keyring, new_key_id
from adk_secure_sessions.keys.providers import Unpicklable
from adk_secure_sessions.lru import Lru
from adk_secure_sessions.records import Cipher

_WRAP_BACKEND_ID = 1  # data keys are always wrapped with AES-256-GCM
_CLEAR_BACKEND_ID = 3


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

    def place(self, database_id: bytes) -> bytes:
        """What the wrap is bound to."""
        parts = ("data-key", database_id, self.owner)
        return records.place(parts, self.id, self.generation, self.backend_id, self.created_at)


class DataKey(Unpicklable):
    """An opened data key, as the cipher it is used with."""

    __slots__ = ("backend_id", "cipher", "generation", "id", "master_id", "owner")

    def __init__(self, row: DataKeyRow, master_id: int, cipher: Cipher) -> None:
        self.id = row.id
        self.owner = row.owner
        self.generation = row.generation
        self.backend_id = row.backend_id
        self.master_id = master_id
        self.cipher = cipher


class DataKeys(Unpicklable):
    """This process's opened data keys, bounded; all come from committed rows."""

    def __init__(
        self, keyring: Keyring, backends: Mapping[int, CipherFactory], writer_id: int, limit: int
    ) -> None:
        self.keyring = keyring
        self.backends = backends
        self.writer = backends[writer_id]
        self.by_id: Lru[int, DataKey] = Lru(limit)
        self.current: Lru[bytes, DataKey] = Lru(limit)
        self.loaded: Lru[bytes, bool] = Lru(limit)

    def knows(self, *owners: bytes) -> bool:
        """Whether the keys of all *owners* were loaded before."""
        return all(map(self.loaded.get, owners))


class StagedKeys:
    """Data keys as one transaction sees them; `publish` shares them once it has committed.

    A key that was seen before its commit and then rolled back must never seal anything.
    """

    def __init__(self, keys: DataKeys) -> None:
        self._keys = keys
        self._by_id: dict[int, DataKey] = {}
        self._current: dict[bytes, DataKey] = {}
        self._generations: dict[bytes, int] = {}
        self._refused: dict[bytes, DecryptionError] = {}

    def has_any(self, owner: bytes) -> bool:
        """Whether this transaction read a key of *owner*."""
        self._check(owner)
        return owner in self._generations

    def current(self, owner: bytes) -> DataKey | None:
        """The key that seals what *owner* writes, if it is known.  Raises like `open`."""
        self._check(owner)
        return self._current.get(owner) or self._keys.current.get(owner)

    def load(self, rows: Iterable[DataKeyRow]) -> None:
        """Open *rows*.  An altered or swapped one is held against its owner, and no other."""
        for row in rows:
            try:
                key = self._open(row)
                if not isinstance(row.generation, int):
                    raise TamperedError("its generation is not a number")
            except DecryptionError as error:
                self._refused[row.owner] = type(error)(f"secure_data_keys row {row.id}: {error}")
                continue
            newest = self._generations.get(row.owner, -1)
            self._generations[row.owner] = max(newest, row.generation)
            if key is not None:
                self._stage(key)

    def new(self, owner: bytes) -> DataKeyRow:
        """Make the next generation of *owner*'s key; the caller stores the row."""
        keyring, writer = self._keys.keyring, self._keys.writer
        master_id = keyring.current_id
        assert master_id is not None, "preparing the database makes a master for the writer"
        generation = self._generations.get(owner, -1) + 1
        row = DataKeyRow(
            new_key_id(), owner, generation, writer.backend_id, time.time_ns() // 1000, b""
        )
        key = writer.new_key()
        wrapped = records.seal(
            keyring.master(master_id),
            _WRAP_BACKEND_ID,
            master_id,
            row.place(keyring.database_id),
            key,
        )
        self._generations[owner] = generation
        self._stage(DataKey(row, master_id, writer.cipher(key)))
        return row._replace(wrapped=wrapped)

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
        self._check(owner)
        backend_id, key_id = records.unpack(stored)
        if backend_id not in self._keys.backends:
            raise _unlisted(backend_id)
        key = self._by_id.get(key_id) or self._keys.by_id.get(key_id)
        if key is None:
            raise UnknownKeyError(f"no data key {key_id} is known for it")
        if key.owner != owner or key.backend_id != backend_id:
            raise TamperedError(f"data key {key_id} belongs to another owner or backend")
        return key.cipher

    def publish(self) -> None:
        """Share what this transaction learnt with the process."""
        for key_id, key in self._by_id.items():
            self._keys.by_id.put(key_id, key)
        for owner, key in self._current.items():
            self._keys.current.put(owner, key)
        for owner in self._generations:
            self._keys.loaded.put(owner, True)

    def _check(self, owner: bytes) -> None:
        if owner in self._refused:
            raise self._refused[owner]

    def _stage(self, key: DataKey) -> None:
        self._by_id[key.id] = key
        if (
            key.backend_id == self._keys.writer.backend_id
            and key.master_id == self._keys.keyring.current_id
        ):
            known = self._current.get(key.owner)
            if known is None or known.generation < key.generation:
                self._current[key.owner] = key

    def _open(self, row: DataKeyRow) -> DataKey | None:
        backend = self._keys.backends.get(row.backend_id)
        if backend is None:
            return None  # what it sealed will be refused, by name
        keyring = self._keys.keyring
        backend_id, master_id = records.unpack(row.wrapped)
        if backend_id != _WRAP_BACKEND_ID:
            raise TamperedError("not wrapped with AES-256-GCM")
        where = row.place(keyring.database_id)
        key = records.open_record(row.wrapped, where, keyring.master(master_id))
        return DataKey(row, master_id, backend.cipher(key))


def _unlisted(backend_id: int) -> DecryptionError:
    if backend_id == _CLEAR_BACKEND_ID:
        return PlaintextRefusedError("stored in clear by NoOpBackend, which is not listed")
    return UnknownKeyError(
        f"sealed by backend {backend_id}, which this service was not given: "
        "list it in additional_backends"
    )
