"""Master keys: a few per database, wrapped by root keys and unwrapped once per process.

The index master is the key of the blind indexes.  Data masters wrap the data keys.
"""

import hmac
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any, NamedTuple, cast

from adk_secure_sessions.concurrency import in_groups
from adk_secure_sessions.crypto.aead import KEY_LENGTH, Aes256Gcm
from adk_secure_sessions.errors import (
    DecryptionError,
    KeyServiceError,
    PlaintextRefusedError,
    SecureSessionError,
    UnknownKeyError,
    WrongKeyError,
)
from adk_secure_sessions.formats.records import build_context
from adk_secure_sessions.hiding import HoldsSecrets, strip_traceback
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.keys.providers import MAX_KEY_ID_LENGTH, PLAINTEXT_ROOT_KEY_ID, KeyProvider

logger: logging.Logger = logging.getLogger(__name__)

DATA_MASTER, INDEX_MASTER = "data", "index"
# The maximum number of rows of `secure_keyring`.  A rotation of master keys adds one row, and
# `retire` deletes the rows that are not used any more.
MAX_MASTERS = 64
# The maximum length of a wrapped key, in bytes.  A longer value was tampered with, and is not read.
MAX_WRAPPED = 65_536
# How many seconds after a failure of its key service a row is unwrapped again.  After a failure or
# a rejection, a running service also unwraps no other new row of the same root key for this time.
# Otherwise, an attacker who changes a row again and again could make every operation call the key
# service.
RETRY_PAUSE = 10.0
# How many data masters a process unwraps at the same time when it starts.  A process that knows a
# keyring unwraps one data master at a time.
_AT_ONCE = 8
_INT63_RANGE = range(2**63)
_PENDING = (
    "data master {} is not unwrapped yet, because its key service failed, or another row of its "
    "root key was rejected: check the log and the key service"
)


def new_key_id() -> int:
    """Return a random integer of 63 bits, the id of a new master key or data key."""
    return secrets.randbits(63)


class UnwrappedMaster(HoldsSecrets):
    """An unwrapped master key.

    Only this module reads the bytes of the key.  The functions of this module do not store these
    bytes in local variables, because error reports may contain the local variables of a traceback.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key: Any = key  # a faulty provider may have returned something other than bytes

    def index_master(self) -> IndexMaster:
        return IndexMaster(self._key)

    def cipher(self) -> Aes256Gcm:
        """Return the cipher of a data master."""
        return Aes256Gcm(self._key)

    def digest(self) -> bytes:
        """Return a value that tells whether another master key is the same, and nothing else."""
        return hmac.digest(self._key, b"same key?", "sha256")


class MasterFingerprint(NamedTuple):
    """The columns that tell a service whether a row of `secure_keyring` has changed.

    Every query for data keys also reads the fingerprints of all keyring rows.  `wrapped` is bound
    to all columns of its row, so every authentic change of a row changes `wrapped`.
    """

    id: int
    created_at: int
    wrapped: bytes


class MasterKeyRow(NamedTuple):
    """A row of `secure_keyring`."""

    id: int  # random
    purpose: str  # `DATA_MASTER` or `INDEX_MASTER`
    root_key_id: str
    created_at: int  # microseconds since 1970, UTC
    wrapped: bytes  # the master key, wrapped by the provider of the root key

    def context(self, database_id: bytes) -> bytes:
        """Return the context that `wrapped` is bound to."""
        parts = ("master-key", database_id, self.purpose, self.root_key_id)
        return build_context(parts, self.id, self.created_at)


class SeparationState(NamedTuple):
    """The state of an unfinished `separate`, which gives a copy of a database its own id and keys.

    The context of a data key contains the old id if one of the old data masters wraps the key, and
    otherwise the new id.  All old keys are older than *since*.
    """

    old_id: bytes
    since: int
    master_ids: frozenset[int]


@dataclass(eq=False, repr=False)
class Keyring(HoldsSecrets):
    """The unwrapped master keys of one database."""

    database_id: bytes
    index_master: IndexMaster
    data_masters: Mapping[int, Aes256Gcm]
    # The data master that wraps new data keys; None if all data masters are stored as plaintext,
    # and this process writes encrypted records.
    wrapping_master_id: int | None
    # The data masters with whose data keys this process may encrypt.  A data master that is stored
    # as plaintext is usable only if the writing backend is `NoOpBackend`: anybody with read access
    # to the database can unwrap its data keys.
    usable_master_ids: frozenset[int] = frozenset()
    # The accepted rows by id: of `masters` and of the index master.
    rows: Mapping[int, MasterKeyRow] = field(default_factory=dict)
    # The rows that are not used, each with the time (monotonic seconds) at which it is unwrapped
    # again: `math.inf` if it was rejected, a finite time if its key service failed.
    rejected_or_pending: Mapping[MasterKeyRow, float] = field(default_factory=dict)
    # By the id of a root key: the time before which no other new row of this root key is unwrapped.
    paused_until: Mapping[str, float] = field(default_factory=dict)
    # The digest of the key of each row that this process has unwrapped, by id, and of the index
    # master by `INDEX_MASTER`.  If such a row changes, it must still hold the same key.
    digests: Mapping[int | str, bytes] = field(default_factory=dict)
    # The number of stored rows.  Above `MAX_MASTERS`, only those that this process knew are loaded.
    row_count: int = 0
    separation: SeparationState | None = field(default=None, init=False)
    # The listed features, and whether the table `secure_audit` exists, when the keyring was read.
    features: frozenset[str] = field(default=frozenset(), init=False)
    has_audit_table: bool = field(default=False, init=False)
    # The tags of the state keys whose values this process stores in `secure_state_index`.  All
    # keyrings of one runner share the set: it grows at any time, also while this is read again.
    indexed_key_tags: set[bytes] = field(default_factory=set, init=False)
    # When to read the keyring again, to unwrap the rows whose key service failed.
    retry_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._fingerprints = frozenset(
            MasterFingerprint(row.id, row.created_at, row.wrapped)
            for row in (*self.rows.values(), *self.rejected_or_pending)
        )
        times = (at for at in self.rejected_or_pending.values() if at < math.inf)
        self.retry_at = max(times, default=math.inf)

    def data_master(self, master_id: int) -> Aes256Gcm:
        """Return the cipher of a data master; raise UnknownKeyError if there is none."""
        if (master := self.data_masters.get(master_id)) is not None:
            return master
        pending = (row.id for row, at in self.rejected_or_pending.items() if at < math.inf)
        if master_id in pending:
            error = UnknownKeyError(_PENDING.format(master_id))
            error.retryable = True
            raise error
        raise UnknownKeyError(f"the keyring holds no data master {master_id}")

    def database_id_for(self, master_id: int) -> bytes:
        """Return the database id for the contexts of data keys that this data master wraps."""
        if self.separation is not None and master_id in self.separation.master_ids:
            return self.separation.old_id
        return self.database_id

    def is_current(self, fingerprints: Iterable[MasterFingerprint]) -> bool:
        """Return whether *fingerprints* equal those of the rows that this keyring was read from.

        Also return False at `retry_at`, or if there were more than `MAX_MASTERS` rows.
        """
        if self.row_count > MAX_MASTERS or time.monotonic() >= self.retry_at:
            return False
        return frozenset(fingerprints) == self._fingerprints


async def new_master(
    purpose: str, root: KeyProvider, database_id: bytes, now: int
) -> tuple[MasterKeyRow, UnwrappedMaster]:
    """Create a random master key, wrapped by *root*, and return its row, created at *now*."""
    row = MasterKeyRow(new_key_id(), purpose, root.key_id, now, b"")
    key = UnwrappedMaster(secrets.token_bytes(KEY_LENGTH))
    return await wrap_master_key(row, root, database_id, key), key


async def wrap_master_key(
    row: MasterKeyRow, root: KeyProvider, database_id: bytes, key: UnwrappedMaster
) -> MasterKeyRow:
    """Wrap the master key *key* with *root*, and return *row* with the result."""
    row = row._replace(root_key_id=root.key_id)
    wrapped = await _call_provider(root, lambda: root.wrap(key._key, row.context(database_id)))
    if len(wrapped._key) > MAX_WRAPPED:
        raise KeyServiceError(
            f"root key {root.key_id!r} wraps a master key in more than {MAX_WRAPPED} bytes"
        )
    return row._replace(wrapped=wrapped._key)


async def rewrap_master_key(
    row: MasterKeyRow,
    roots: Mapping[str, KeyProvider],
    database_id: bytes,
    *,
    new_root: KeyProvider | None = None,
    new_database_id: bytes | None = None,
) -> MasterKeyRow:
    """Unwrap the master key in *row* and wrap it again; return *row* with the result.

    By default, the same root key wraps it, for the same database.  Also unwraps the result, to
    check that the master key can be read back.
    """
    key = await unwrap_master_key(row, roots, database_id)
    root = new_root or roots[row.root_key_id]
    new_id = new_database_id or database_id
    new = await wrap_master_key(row, root, new_id, key)
    if (await unwrap_master_key(new, {root.key_id: root}, new_id)).digest() != key.digest():
        raise SecureSessionError(f"root key {root.key_id!r} does not unwrap what it wraps")
    return new


def check_row_count(number: int) -> None:
    """Raise WrongKeyError if *number*, the rows of the keyring, is greater than `MAX_MASTERS`.

    An attacker may have inserted rows, and unwrapping each row would call the key service.
    """
    if number > MAX_MASTERS:
        raise WrongKeyError(
            f"secure_keyring has more than {MAX_MASTERS} rows, so it was tampered with: restore it "
            "from a backup, or delete the rows that you did not create"
        )


async def open_keyring(
    rows: Iterable[MasterKeyRow],
    roots: Mapping[str, KeyProvider],
    writer_root_key_id: str,
    database_id: bytes,
    known: Keyring | None = None,
    *,
    is_service: bool = False,
    row_count: int | None = None,
) -> Keyring:
    """Unwrap *rows* and return the keyring.  Each row is unwrapped only by the root key it names.

    Without *known*, a keyring that was read earlier, a row that is not valid raises an error that
    names the row.  With *known*, such a row is logged and rejected, so that an attacker cannot stop
    a running service by inserting a row.  A row that *known* has accepted is not unwrapped again,
    and one that it has rejected is neither unwrapped nor logged again.

    If *known* is given and *is_service* is True, a row whose key service fails is not used, and is
    unwrapped again by a call after `RETRY_PAUSE` seconds; so are new rows of its root key.  If
    *row_count* is above `MAX_MASTERS`, *rows* need only contain the ids that *known* has accepted,
    and only unchanged rows are used.

    An error is raised in any case if the keyring would have no index master or no data master.
    """
    rows = list(rows)
    row_count = len(rows) if row_count is None else row_count
    builder = _KeyringBuilder(roots, database_id, known, is_service)
    if row_count > MAX_MASTERS:
        rows = [row for row in rows if is_service and builder.is_known(row)]
        if not any(row.purpose == DATA_MASTER for row in rows):
            check_row_count(row_count)
        if known is not None and known.row_count <= MAX_MASTERS:
            logger.error(
                "secure_keyring has more than %d rows, so it was tampered with: this service uses "
                "only the master keys that it knows; delete the rows that you did not create",
                MAX_MASTERS,
            )
    sound = builder.sound_rows(rows)
    await in_groups(1, builder.unwrap, [row for row in sound if row.purpose == INDEX_MASTER])
    # A running service expects at most one new row.  It unwraps rows one after another, so that
    # rows that an attacker inserted cannot cause many simultaneous calls.
    number = _AT_ONCE if known is None else 1
    await in_groups(number, builder.unwrap, [row for row in sound if row.purpose == DATA_MASTER])
    index_master, masters = builder.index_master, builder.data_masters
    if not masters and builder.failure is not None:
        raise builder.failure
    if not masters:
        for row, retry_at in builder.rejected_or_pending.items():
            if row.purpose == DATA_MASTER and retry_at < math.inf:
                raise KeyServiceError(_PENDING.format(row.id), retryable=True)
        if builder.rejection:
            raise WrongKeyError(builder.rejection)
    if index_master is None or not masters:
        missing = "data" if index_master else "index"
        raise WrongKeyError(
            f"the keyring holds no {missing} master: rows of secure_keyring were removed; restore "
            "them from a backup made after the last rotation"
        )
    stored = {INDEX_MASTER, *(row.id for row in rows)}
    # The newest data master under the writing backend's root key wraps new data keys.  If there is
    # none, the newest one under another root key does: a process does not create master keys only
    # because its writing backend has a new root key.
    usable = [
        (row.root_key_id == writer_root_key_id, row.created_at, row.id)
        for row in builder.accepted.values()
        if row.id in masters
        and (row.root_key_id == writer_root_key_id or row.root_key_id != PLAINTEXT_ROOT_KEY_ID)
    ]
    return Keyring(
        database_id,
        index_master,
        masters,
        wrapping_master_id=max(usable)[2] if usable else None,
        usable_master_ids=frozenset(row_id for *_, row_id in usable),
        rows=builder.accepted,
        rejected_or_pending=builder.rejected_or_pending,
        paused_until=builder.paused_until,
        digests={name: digest for name, digest in builder.digests.items() if name in stored},
        row_count=row_count,
    )


class _KeyringBuilder:
    """One call of `open_keyring`: the rows that it has accepted so far, and those not used."""

    def __init__(
        self,
        roots: Mapping[str, KeyProvider],
        database_id: bytes,
        known: Keyring | None,
        is_service: bool,
    ) -> None:
        self.roots = roots
        self.database_id = database_id
        self.known = known
        self.is_service = is_service
        self.data_masters: dict[int, Aes256Gcm] = {}
        self.accepted: dict[int, MasterKeyRow] = {}
        self.rejected_or_pending: dict[MasterKeyRow, float] = {}
        self.failure: SecureSessionError | None = None  # the first failure of a key service
        self.rejection = ""  # why the first row was rejected
        # The ids of root keys for which a call of the key service has failed temporarily.
        self.failing: set[str] = set()
        self.index_master = known.index_master if known else None
        self.digests = dict(known.digests) if known else {}
        self.rejected_or_pending_before = known.rejected_or_pending if known else {}
        # Rows that are due now are all tried, so that an attacker's row cannot delay the others.
        self.paused_before = known.paused_until if known and is_service else {}
        self.paused_until = dict(self.paused_before)

    def is_known(self, row: MasterKeyRow) -> bool:
        """Return whether *row* has not changed since the known keyring accepted it."""
        return self.known is not None and self.known.rows.get(row.id) == row

    def sound_rows(self, rows: list[MasterKeyRow]) -> list[MasterKeyRow]:
        """Reject malformed rows and second index masters; return the others, known rows first.

        If several rows have the same id, only the first is accepted, so an inserted row cannot
        replace a known row.  Rows whose key service failed come last: an attacker may have inserted
        such rows to delay the unwrapping of a new data master.
        """
        sound: dict[int, MasterKeyRow] = {}
        before = self.rejected_or_pending_before
        for row in sorted(rows, key=lambda row: -1 if self.is_known(row) else before.get(row, 0)):
            fault = _fault(row) or ("another row has the same id" if row.id in sound else None)
            if fault is None:
                sound[row.id] = row
            else:
                self._reject(row, _malformed_error(row, fault))
        index_rows = [row for row in sound.values() if row.purpose == INDEX_MASTER]
        for row in index_rows:
            others = ", ".join(str(other.id) for other in index_rows if other is not row)
            if others and (self.known is None or row.id not in self.known.rows):
                del sound[row.id]
                error = WrongKeyError(
                    f"secure_keyring row {row.id} and row {others} are both index masters, so the "
                    "keyring was tampered with: restore it from a backup, or delete the row that "
                    "you did not create"
                )
                self._reject(row, error)
        return list(sound.values())

    async def unwrap(self, row: MasterKeyRow) -> None:
        """Unwrap and accept *row*.  Do not use it if it is not valid, or its key service fails."""
        if self.known is not None and self.is_known(row):
            if row.purpose == DATA_MASTER:
                self.data_masters[row.id] = self.known.data_masters[row.id]
            self.accepted[row.id] = row
            return
        now = time.monotonic()
        pause = self.paused_before.get(row.root_key_id, now)
        retry_at = self.rejected_or_pending_before.get(row, pause)
        if retry_at <= now and row.root_key_id in self.failing:
            retry_at = now + RETRY_PAUSE
        if retry_at > now:
            # Do not call the key service: the row was rejected, the pause of the row or its root
            # key has not ended, or a call with this root key has just failed, and a further one
            # might take as long to fail.
            self.rejected_or_pending[row] = retry_at
            return
        try:
            key = await unwrap_master_key(row, self.roots, self.database_id)
            name = INDEX_MASTER if row.purpose == INDEX_MASTER else row.id
            if self.digests.setdefault(name, key.digest()) != key.digest():
                fault = "it holds another key than the one that this service has read"
                raise _malformed_error(row, fault)
        except (WrongKeyError, DecryptionError) as error:
            if row.root_key_id in self.roots:
                self.paused_until[row.root_key_id] = time.monotonic() + RETRY_PAUSE
            self._reject(row, error)
        except SecureSessionError as error:
            if self.known is None or not self.is_service:
                raise
            retry_at = self.paused_until[row.root_key_id] = time.monotonic() + RETRY_PAUSE
            self.rejected_or_pending[row] = retry_at
            self.failure = self.failure or strip_traceback(error)
            if error.retryable:
                self.failing.add(row.root_key_id)
            if row not in self.rejected_or_pending_before:
                logger.error(
                    "a row of secure_keyring is not used until it can be unwrapped: %s", error
                )
        else:
            if row.purpose == DATA_MASTER:
                self.data_masters[row.id] = key.cipher()
            elif self.index_master is None:
                self.index_master = key.index_master()
            self.accepted[row.id] = row

    def _reject(self, row: MasterKeyRow, error: SecureSessionError) -> None:
        """Log *error* and do not use *row*; raise *error* if the process is starting."""
        if self.known is None:
            raise error
        self.rejected_or_pending[row] = math.inf
        self.rejection = self.rejection or str(error)
        if self.rejected_or_pending_before.get(row) != math.inf:
            logger.error("a row of secure_keyring is rejected, and not used: %s", error)


def _fault(row: MasterKeyRow) -> str | None:
    """Return why *row*, in which values may have any type, is malformed; None if it is not."""
    row_id, purpose, root_key_id, created_at, wrapped = cast("tuple[object, ...]", row)
    if type(row_id) is not int or row_id not in _INT63_RANGE:
        return "its id is not an integer of 63 bits"
    if not isinstance(purpose, str) or purpose not in (INDEX_MASTER, DATA_MASTER):
        return f"its purpose is neither {INDEX_MASTER!r} nor {DATA_MASTER!r}"
    if not isinstance(root_key_id, str) or not 0 < len(root_key_id) <= MAX_KEY_ID_LENGTH:
        return f"its root_key_id is not a text of 1 to {MAX_KEY_ID_LENGTH} characters"
    if type(created_at) is not int or created_at not in _INT63_RANGE:
        return "its created_at is not an integer of 63 bits"
    if not isinstance(wrapped, bytes):
        return "its wrapped key is not bytes"
    return None


def _malformed_error(row: MasterKeyRow, fault: str) -> WrongKeyError:
    return WrongKeyError(
        f"secure_keyring row {short(row.id)}: {fault}, so the row was tampered with: restore it "
        "from a backup, or delete it if you did not create it"
    )


async def unwrap_master_key(
    row: MasterKeyRow, roots: Mapping[str, KeyProvider], database_id: bytes
) -> UnwrappedMaster:
    """Unwrap the master key in *row* with the root key that the row names, and return it.

    Raises WrongKeyError if the row is malformed, or its root key is not in *roots* or does not
    unwrap it; PlaintextRefusedError if it is plaintext, and `NoOpBackend` was not given; and
    KeyServiceError.
    """
    fault = _fault(row)
    if fault is not None:
        raise _malformed_error(row, fault)
    root = roots.get(row.root_key_id)
    if root is None and row.root_key_id == PLAINTEXT_ROOT_KEY_ID:
        raise PlaintextRefusedError(
            f"master key {row.id} was stored as plaintext by NoOpBackend, or by an attacker: if "
            "you have used NoOpBackend, list NoOpBackend() in additional_backends (no-op, with "
            "--also-backend or --from-backend) to read the database anyway; otherwise restore "
            "secure_keyring from a backup"
        )
    if root is None:
        given = ", ".join(map(repr, sorted(roots)))
        raise WrongKeyError(
            f"master key {row.id} is wrapped by root key {row.root_key_id!r}; this service was "
            f"given {given}: give that root key as `backend` (--key or --from-key, in a URI key=); "
            "during a rotation, also in `additional_backends` (--also-key, in a URI also_key=)"
        )
    try:
        key = await _call_provider(root, lambda: root.unwrap(row.wrapped, row.context(database_id)))
        if len(key._key) == KEY_LENGTH:
            return key
    except DecryptionError:
        pass
    except KeyServiceError as error:
        raise KeyServiceError(
            f"secure_keyring row {row.id} cannot be unwrapped: {error}", retryable=error.retryable
        ) from None
    raise WrongKeyError(
        f"root key {root.key_id!r} does not unwrap master key {row.id}: "
        "wrong key, or the keyring was tampered with"
    )


async def _call_provider(
    root: KeyProvider, call: Callable[[], Awaitable[bytes]]
) -> UnwrappedMaster:
    """Await *call*, which calls `wrap` or `unwrap` of *root*, and return its result.

    Errors are raised without the provider's frames, because the local variables of these frames
    contain keys.  An exception of another package may have a text that contains secrets, so the
    KeyServiceError that replaces it names only its class.
    """
    try:
        result = UnwrappedMaster(await call())
        if isinstance(result._key, bytes):
            return result
        name = "something that is not bytes"
    except Exception as error:
        if isinstance(error, SecureSessionError):
            raise strip_traceback(error) from None
        name = type(error).__name__
    # CancelledError must have no frames, either: `asyncio.timeout` makes it the cause of a
    # TimeoutError.
    except BaseException as error:
        raise strip_traceback(error) from None
    raise KeyServiceError(f"the provider of root key {root.key_id!r} failed: {name}")
