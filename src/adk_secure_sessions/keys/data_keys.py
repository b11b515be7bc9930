"""Data keys: random keys, wrapped by a data master, that encrypt the records of one owner.

An *owner* is a user or an app.  The *writing backend* encrypts all new records of this process.  A
backend is *listed* if it is the writing backend or one of `additional_backends`.

docs/format.md, "Which data key encrypts", defines three more terms:

- A data key is *usable* if it was created for the writing backend, and its data master is usable
  (`Keyring.usable_master_ids`).
- An owner's *current* data key is the usable data key that the owner's row names.  Only this key
  encrypts new records: a data key that the row does not name may have been erased, and inserted
  again by an attacker with a copy of its row.
- An owner's *newest* data key is the one with the highest generation, usable or not.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol, runtime_checkable

from adk_secure_sessions import telemetry
from adk_secure_sessions.caches import FifoCache
from adk_secure_sessions.errors import (
    ConfigurationError,
    DecryptionError,
    PlaintextRefusedError,
    Reason,
    TamperedError,
    UnknownKeyError,
)
from adk_secure_sessions.formats import records
from adk_secure_sessions.formats.records import Cipher, FlagHandler, Packing
from adk_secure_sessions.formats.times import time_now
from adk_secure_sessions.hiding import HoldsSecrets
from adk_secure_sessions.keys.keyring import MAX_WRAPPED, Keyring, MasterFingerprint, new_key_id
from adk_secure_sessions.keys.providers import KeyProvider

# How many data keys of one owner are read for a session or a user, the oldest first: an attacker
# may have inserted any number.  A rotation adds one.  No data key is created if there are nearly as
# many, because a later one would not be read.
MAX_DATA_KEYS = 1000
_KEY_HEADROOM = 100  # which processes may create at the same time
_LAST_GENERATION = 2**62
WRAP_BACKEND_ID = 1  # data keys are always wrapped with AES-256-GCM
_CONTEXT_KIND = records.encode_part("data-key")


@runtime_checkable
class EncryptionBackend(Protocol):
    """An encryption algorithm for records, and the root key that protects its data keys.

    To write your own backend, create a class with these attributes; it need not inherit from this
    class.
    """

    @property
    def backend_id(self) -> int:
        """The id of the backend, stored in every record.  It must never change.

        The id of your own backend is a number from 0x80 to 0xFF.
        """

    @property
    def name(self) -> str:
        """A short name for error messages."""

    @property
    def root_key(self) -> KeyProvider:
        """The provider that wraps the master keys."""

    def new_key(self) -> bytes:
        """Return a new random data key that `cipher` accepts."""

    def cipher(self, key: bytes, /) -> Cipher:
        """Return the cipher for the data key `key`; several threads may use the cipher at once."""


class DataKeyRow(NamedTuple):
    """A row of `secure_data_keys`."""

    id: int  # random
    owner: bytes  # the tag (blind index) of a user or an app
    # The number of the data key: 0 for the owner's first one.  All backends share one count.
    generation: int
    backend_id: int
    created_at: int  # microseconds since 1970, UTC
    wrapped: bytes  # a record: the data key, wrapped by a data master

    def context(self, database_id: bytes) -> bytes:
        """Return the context that `wrapped` is bound to."""
        prefix = _CONTEXT_KIND + records.encode_part(database_id) + records.encode_part(self.owner)
        return records.context_with_prefix(
            prefix, self.id, self.generation, self.backend_id, self.created_at
        )


@dataclass(slots=True, eq=False, repr=False)
class DataKey(HoldsSecrets):
    """An unwrapped data key.  Only its cipher contains the bytes of the key."""

    row: DataKeyRow
    master_id: int  # the id of the data master that wraps this key
    cipher: Cipher
    keyring: Keyring  # with which `row` was unwrapped, or wrapped
    id: int = field(init=False)
    generation: int = field(init=False)
    backend_id: int = field(init=False)
    header: bytes = field(init=False)  # of the records that this key encrypts

    def __post_init__(self) -> None:
        self.id, _, self.generation, self.backend_id, *_ = self.row
        self.header = records.build_header(self.backend_id, self.id)


class StaleKeyring(Exception):
    """The stored keyring has changed since this process read it.

    The caller must read the keyring again and then repeat the operation.
    """


@dataclass(slots=True, eq=False, repr=False)
class OwnerKeys(HoldsSecrets):
    """All known data keys of one owner."""

    by_id: Mapping[int, DataKey | None]  # None for a key whose backend this process was not given
    current: DataKey | None  # None if the owner's row names no usable key, or is not decrypted yet
    newest_generation: int  # also of keys whose backend was not given; -1 if there is no key


@dataclass(eq=False, repr=False)
class DatabaseKeys(HoldsSecrets):
    """The keyring, and a cache of unwrapped data keys that were read from committed rows."""

    keyring: Keyring  # another object when the keyring is read again
    backends: Mapping[int, EncryptionBackend]
    writing_backend: EncryptionBackend
    by_owner: FifoCache[bytes, OwnerKeys]


class TransactionKeys:
    """The data keys that one transaction uses.

    If the transaction has read or created data keys of an owner, it uses only these data keys of
    that owner.  For any other owner, it uses the cached data keys.

    After the commit, `publish` puts the keys that the transaction read or created into the cache.
    Before the commit, other transactions must not encrypt with these keys: if this transaction is
    rolled back, the keys that it created are lost.

    If *keyring_was_reread* is False, `unwrap` compares the keyring of this process with the
    stored one, and raises StaleKeyring if another process has changed the stored one.  It is True
    if this operation has already read the keyring again.  If *uses_cache* is False, the transaction
    uses no cached data keys, because one may have been deleted since it was cached.
    """

    def __init__(
        self,
        database_keys: DatabaseKeys,
        *,
        keyring_was_reread: bool = True,
        uses_cache: bool = True,
        stored_key_ids: Collection[int] = (),
        packing: Packing = Packing(),
    ) -> None:
        self._database_keys = database_keys
        self.keyring_was_reread: bool = keyring_was_reread
        self.uses_cache: bool = uses_cache
        # The ids of data keys that earlier attempts of this operation have stored in a key
        # database.  The owners' rows do not name these data keys yet.
        self.stored_key_ids: Collection[int] = stored_key_ids
        self.packing: Packing = packing
        # Always the same object, although `_database_keys` may get another while a thread runs the
        # transaction: `keyring_guard` must be about the keyring whose master wraps a new key.
        self.keyring: Keyring = database_keys.keyring
        # The data keys that this transaction has read, created or taken from the cache, by owner.
        # The cache may remove or replace them meanwhile, but the transaction continues to use them.
        self._by_owner: dict[bytes, OwnerKeys] = {}
        self._fresh_owners: set[bytes] = set()  # the owners whose keys were read or created
        self._owner_tags: dict[int, bytes] | None = None  # by key id; `key_of` needs it for errors
        # The owner and the error of each rejected row of `secure_data_keys`, by the id in the row.
        self._rejected: dict[int, tuple[bytes, DecryptionError]] = {}
        self._highest_generation: dict[bytes, int] = {}  # by owner, including rejected rows
        self.new_rows: list[DataKeyRow] = []
        # Whether `unwrap` has rejected a row because its data master is not known, while the stored
        # keyring differs from the keyring of this process.
        self.lacks_master: bool = False
        self.measured_call: telemetry.MeasuredCall | None = telemetry.current_call()
        if self.measured_call is not None:
            self.measured_call.compact()

    def unwrap(self, rows: Iterable[DataKeyRow], fingerprints: Iterable[MasterFingerprint]) -> None:
        """Unwrap *rows*, which must be all rows of each owner that occurs in them.

        A tampered row raises no error here, so that it does not affect other owners.  `key_of`
        raises the error if a record names the key of the tampered row.

        If *fingerprints*, which the same query has read from `secure_keyring`, differ from the
        keyring and *keyring_was_reread* is False, raise StaleKeyring.
        """
        keyring_has_changed = not self.keyring.is_current(fingerprints)
        if keyring_has_changed and not self.keyring_was_reread:
            raise StaleKeyring
        by_owner: dict[bytes, dict[int, DataKey | None]] = {}
        newest: dict[bytes, int] = {}
        for row in rows:
            try:
                key = self._unwrap_row(row)
            except DecryptionError as error:
                located = error.located("secure_data_keys", row.id)
                self._rejected[row.id] = row.owner, located
                if keyring_has_changed and isinstance(error, UnknownKeyError):
                    self.lacks_master = True
            else:
                by_owner.setdefault(row.owner, {})[row.id] = key
                newest[row.owner] = max(newest.get(row.owner, -1), row.generation)
            # A new data key must have a higher generation than every stored row, even a rejected
            # row: the database rejects a second row with the same owner and generation.
            if isinstance(row.generation, int):
                known = self._highest_generation.get(row.owner, -1)
                self._highest_generation[row.owner] = max(known, row.generation)
        for tag, keys in by_owner.items():
            self._by_owner[tag] = OwnerKeys(keys, None, newest[tag])
            self._fresh_owners.add(tag)

    def choose_current(self, owner_tag: bytes, key_ids: Collection[int]) -> None:
        """Choose the owner's current data key: the newest usable one of *key_ids*, those that the
        owner's authentic row names.

        If none is usable, it is the newest one that this operation has created, if any.
        """
        keys = self._keys_of(owner_tag)
        if keys is None:
            return
        current = keys.current
        if current is not None and key_ids == (current.id,) and self._is_usable(current):
            return  # the usual case: an earlier call has chosen it
        usable = [key for key in keys.by_id.values() if key and self._is_usable(key)]
        named = [key for key in usable if key.id in key_ids]
        candidates = named or [key for key in usable if key.id in self.stored_key_ids]
        current = max(candidates, key=lambda key: key.generation, default=None)
        self._by_owner[owner_tag] = OwnerKeys(keys.by_id, current, keys.newest_generation)

    def ids_to_store(self, owner_tag: bytes, key_ids: Collection[int]) -> tuple[int, ...]:
        """Return the key ids to store in the next version of the owner's row.

        The result is the current data key, then those of *key_ids* that belong to other backends
        and still exist.  If the owner's data keys come from the cache, all of *key_ids* are assumed
        to exist: another process may have created a key after the keys were cached.
        """
        keys = self._keys_of(owner_tag)
        assert keys is not None
        assert keys.current is not None
        backend_id = keys.current.backend_id
        replaced = {key.id for key in keys.by_id.values() if key and key.backend_id == backend_id}
        may_exist = keys.by_id if owner_tag in self._fresh_owners else key_ids
        kept = (key_id for key_id in key_ids if key_id in may_exist and key_id not in replaced)
        return (keys.current.id, *kept)

    def create_data_key(self, owner_tag: bytes, not_before: int = 0) -> DataKeyRow:
        """Create a data key of the owner's next generation, and return the row to store.

        If the owner has data keys, they must have been loaded.  *not_before* is the earliest
        `created_at`, in microseconds since 1970.  A rotation passes the time of its start, because
        the clock of this process may be behind the clock that measured the start.
        """
        keyring, writer = self.keyring, self._database_keys.writing_backend
        master_id = keyring.wrapping_master_id
        assert master_id is not None, "opening the database creates a data master"
        keys = self._by_owner.get(owner_tag) or OwnerKeys({}, None, -1)
        if len(keys.by_id) >= MAX_DATA_KEYS - _KEY_HEADROOM:
            raise ConfigurationError(
                f"this user or app has {len(keys.by_id)} data keys, and can get no more: run "
                "`retire`, which deletes those that no record needs"
            )
        generation = max(self._highest_generation.get(owner_tag, -1), keys.newest_generation) + 1
        if generation > _LAST_GENERATION:
            raise TamperedError(
                "a data key of this owner has the highest possible generation",
                reason=Reason.MALFORMED,
                table="secure_data_keys",
            )
        now = max(not_before, time_now())
        row = DataKeyRow(new_key_id(), owner_tag, generation, writer.backend_id, now, b"")
        key = writer.new_key()
        row = wrap_data_key(row, keyring, master_id, key)
        new = DataKey(row, master_id, writer.cipher(key), keyring)
        self._by_owner[owner_tag] = OwnerKeys({**keys.by_id, new.id: new}, new, generation)
        self._fresh_owners.add(owner_tag)
        self.new_rows.append(row)
        return row

    def keyring_guard(self) -> dict[str, object]:
        """Return the parameters for the condition in the statement `INSERT_KEY`.

        It stores a data key only if the stored keyring has not changed since this process read it.
        Otherwise, another process may have retired or replaced the data master that wraps the data
        key.
        """
        keyring = self.keyring
        return {"master_id": keyring.wrapping_master_id, "master_count": keyring.row_count}

    def has_fresh_keys(self, owner_tag: bytes) -> bool:
        """Return whether this transaction has read or created an authentic key of the owner."""
        return owner_tag in self._fresh_owners

    def has_accepted(self, row: DataKeyRow) -> bool:
        """Return whether `unwrap` has read *row*, and accepted it."""
        keys = self._by_owner.get(row.owner)
        return keys is not None and row.id in keys.by_id

    def current(self, owner_tag: bytes) -> DataKey | None:
        """Return the current data key; None if the row names none, or is not decrypted yet."""
        keys = self._keys_of(owner_tag)
        return keys.current if keys else None

    def current_is_newest(self, owner_tag: bytes) -> bool:
        """Return whether the owner's current data key is known and is also the newest one."""
        keys = self._keys_of(owner_tag)
        return bool(keys and keys.current and keys.current.generation == keys.newest_generation)

    def current_is_as_new_as(self, owner_tag: bytes, *stored: bytes) -> bool:
        """Return whether the current data key is at least as new as the keys that encrypt *stored*.

        Return False if there is no current data key.  If the result is False, the caller reads the
        owner's data keys again: another process may have created a newer data key, or retired the
        current data key.
        """
        keys = self._keys_of(owner_tag)
        if keys is None or keys.current is None:
            return False
        current = keys.current
        for record in stored:
            if record[: records.HEADER_LENGTH] != current.header:  # rarely
                key = keys.by_id.get(records.parse_header(record)[1])
                if key is None or key.generation > current.generation:
                    return False
        return True

    def seal(
        self, owner_tag: bytes, context: bytes, content: bytes, *, has_flags: bool = False
    ) -> bytes:
        """Encrypt *content* with the owner's current data key, and return the record.

        The content is first compressed and padded as `packing` says.  If *has_flags* is True, it
        begins with its flags already, and is encrypted as it is.
        """
        began = perf_counter()
        plaintext = content if has_flags else records.pack(self.packing, content)
        key = self.current(owner_tag)
        assert key is not None
        record = records.seal(key.cipher, key.header, context, plaintext)
        if self.measured_call is not None:
            self.count_work("encrypt", key, len(content) - has_flags, began)
        return record

    def open(
        self, owner_tag: bytes, context: bytes, record: bytes, handler: FlagHandler = records.unpack
    ) -> bytes:
        """Decrypt *record*, a record of the owner, and return the content."""
        return self.open_with_flags(owner_tag, context, record, handler)[1:]

    def open_with_flags(
        self, owner_tag: bytes, context: bytes, record: bytes, handler: FlagHandler
    ) -> bytes:
        """Decrypt *record*, a record of the owner, as `records.open_with_flags` does."""
        key = self.key_of(owner_tag, record)
        began = perf_counter()
        plaintext = records.open_with_flags(record, context, key.cipher, handler)
        if self.measured_call is not None:
            self.count_work("decrypt", key, len(plaintext) - 1, began)
        return plaintext

    def count_work(self, direction: str, key: DataKey, size: int, began: float) -> None:
        """Count the encryption or decryption of *size* bytes with *key*, if anything is measured.

        *direction* is `encrypt` or `decrypt`; *began* is `time.perf_counter()` before it.
        """
        if self.measured_call is not None:
            seconds = perf_counter() - began
            name = self._database_keys.backends[key.backend_id].name
            self.measured_call.measurements.append(
                (telemetry.cipher_kind(name, direction), size, seconds)
            )

    def count_lookup(self, kinds: dict[bool, telemetry.WorkKind], *, hit: bool) -> None:
        """Count a lookup in a cache, if anything is measured."""
        if self.measured_call is not None:
            self.measured_call.measurements.append((kinds[hit], 1, 0.0))

    def key_of(self, owner_tag: bytes, record: bytes) -> DataKey:
        """Return the data key that the header of *record* names.  No other key is tried.

        Raises the error of the row of the data key, if `unwrap` has rejected it.
        """
        keys = self._keys_of(owner_tag)
        current = keys.current if keys else None
        if (
            current is not None
            and not self._rejected
            and type(record) is bytes
            and record[: records.HEADER_LENGTH] == current.header
        ):
            return current  # the usual case
        backend_id, key_id = records.parse_header(record)
        if backend_id not in self._database_keys.backends:
            raise _not_listed_error(backend_id)
        if key_id in self._rejected:
            raise self._rejected[key_id][1]
        key = keys.by_id.get(key_id) if keys else None
        if key is not None and key.backend_id == backend_id:
            return key
        if self._owner_tags is None:  # once: a listing may contain many modified records
            known = (*self._database_keys.by_owner.items(), *self._by_owner.items())
            self._owner_tags = {one: tag for tag, other in known for one in other.by_id}
        if key is not None or self._owner_tags.get(key_id, owner_tag) != owner_tag:
            raise TamperedError(
                f"data key {key_id} belongs to another owner or backend", reason=Reason.WRONG_OWNER
            )
        # The data key may be missing because an attacker modified the id in its row.  `unwrap` has
        # then rejected this row, so raise the error of the row.
        for rejected_owner, error in self._rejected.values():
            if rejected_owner == owner_tag:
                raise error
        raise UnknownKeyError(f"its data key {key_id} is not known")

    def publish(self) -> None:
        """Put the data keys that this transaction has read or created into the cache."""
        for tag in self._fresh_owners:
            self._database_keys.by_owner.put(tag, self._by_owner[tag])

    def evict_from_cache(self, owner_tag: bytes) -> None:
        """Remove the owner's data keys from the cache, because the owner's row is not stored."""
        self._database_keys.by_owner.drop(owner_tag)
        if owner_tag not in self._fresh_owners:
            self._by_owner.pop(owner_tag, None)

    def _keys_of(self, owner_tag: bytes) -> OwnerKeys | None:
        keys = self._by_owner.get(owner_tag)
        if keys is None and self.uses_cache:
            keys = self._database_keys.by_owner.get(owner_tag)
            if keys is not None:
                self._by_owner[owner_tag] = keys
        return keys

    def _is_usable(self, key: DataKey) -> bool:
        writer, keyring = self._database_keys.writing_backend, self.keyring
        return key.backend_id == writer.backend_id and key.master_id in keyring.usable_master_ids

    def _unwrap_row(self, row: DataKeyRow) -> DataKey | None:
        """Authenticate and unwrap *row*; return None if this process was not given its backend.

        A missing backend is no error here.  `key_of` raises an error if a record names the backend.

        If the row equals that of a cached data key, it is not unwrapped again: otherwise, the first
        operation of each user would also unwrap the app's data keys, which takes 3% of a `create`.
        """
        keys = self._database_keys.by_owner.get(row.owner)
        known = keys.by_id.get(row.id) if keys else None
        if known is not None and known.row == row and known.keyring is self.keyring:
            return known
        key = unwrap_data_key(row, self.keyring)
        backend = self._database_keys.backends.get(row.backend_id)
        if backend is None:
            return None
        try:
            cipher = backend.cipher(key)
        except Exception:  # a third party's backend may put the key into the text of its exception
            reason = Reason.MALFORMED
            raise TamperedError("its backend rejects the data key", reason=reason) from None
        _, master_id = records.parse_header(row.wrapped)
        return DataKey(row, master_id, cipher, self.keyring)


def wrap_data_key(row: DataKeyRow, keyring: Keyring, master_id: int, key: bytes) -> DataKeyRow:
    """Wrap the data key *key* with data master *master_id*, and return *row* with the result."""
    master = keyring.data_master(master_id)
    context = row.context(keyring.database_id_for(master_id))
    header = records.build_header(WRAP_BACKEND_ID, master_id)
    record = records.seal(master, header, context, records.NO_FLAGS + key)
    if len(record) > MAX_WRAPPED:
        raise ConfigurationError(
            f"backend {row.backend_id} makes keys that take more than {MAX_WRAPPED} bytes"
        )
    return DataKeyRow(*row[:-1], record)


def unwrap_data_key(row: DataKeyRow, keyring: Keyring) -> bytes:
    """Unwrap the data key in *row*, and return its bytes."""
    backend_id, master_id = records.parse_header(row.wrapped)
    if backend_id != WRAP_BACKEND_ID:
        raise TamperedError("not wrapped with AES-256-GCM", reason=Reason.MALFORMED)
    context = row.context(keyring.database_id_for(master_id))
    master = keyring.data_master(master_id)
    return records.open_with_flags(row.wrapped, context, master, records.reject_flags)[1:]


def _not_listed_error(backend_id: int) -> DecryptionError:
    if backend_id == records.NOOP_BACKEND_ID:
        return PlaintextRefusedError("stored as plaintext by NoOpBackend, which is not listed")
    name = records.BACKEND_NAMES.get(backend_id, backend_id)
    return UnknownKeyError(
        f"encrypted by backend {name}, which is not listed: list it in additional_backends "
        "(--also-backend or --from-backend)",
        reason=Reason.UNKNOWN_BACKEND,
    )
