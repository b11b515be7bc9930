"""Master keys: a few per database, wrapped by root keys and unwrapped once per process.

The index master is the key of the blind indexes.  Data masters wrap the data keys.
"""

import hmac
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
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
    TamperedError,
    UnknownKeyError,
    WrongKeyError,
)
from adk_secure_sessions.formats.records import context
from adk_secure_sessions.hiding import HoldsSecrets, without_frames
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.keys.providers import KEY_ID_LENGTH, PLAINTEXT_ROOT_KEY_ID, KeyProvider

logger: logging.Logger = logging.getLogger(__name__)

DATA, INDEX = "data", "index"
# The maximum number of rows of `secure_keyring`.  A rotation of master keys adds one row, and
# `retire` deletes the rows that are not used any more.
MAX_ROWS = 64
# The maximum length of a wrapped key, in bytes.  A longer value was tampered with, and is not read.
MAX_WRAPPED = 65_536
# How many data masters a process unwraps at the same time when it starts.  A process that knows a
# keyring unwraps one data master at a time.
_AT_ONCE = 8
_INTEGERS = range(2**63)


def new_key_id() -> int:
    """Return a random integer of 63 bits, the id of a new master key or data key."""
    return secrets.randbits(63)


class UnwrappedMaster(HoldsSecrets):
    """An unwrapped master key.  Comparing two master keys takes constant time.

    Only this module reads the bytes of the key.  The functions of this module do not store these
    bytes in local variables, because error reports may contain the local variables of a traceback.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key: Any = key  # a faulty provider may have returned something other than bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnwrappedMaster) and hmac.compare_digest(self._key, other._key)

    def index_master(self) -> IndexMaster:
        """Return the index master with this key."""
        return IndexMaster(self._key)

    def cipher(self) -> Aes256Gcm:
        """Return the cipher with this key, which must be a data master."""
        return Aes256Gcm(self._key)

    def is_key_of(self, cipher: Aes256Gcm) -> bool:
        """Return whether *cipher* has this key."""
        try:
            return self.cipher().decrypt(cipher.encrypt(b"", b"same key?"), b"same key?") == b""
        except TamperedError:
            return False


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
    purpose: str  # `DATA` or `INDEX`
    root_key_id: str
    created_at: int  # microseconds since 1970, UTC
    wrapped: bytes  # the master key, wrapped by the provider of the root key

    def context(self, database_id: bytes) -> bytes:
        """Return the context that `wrapped` is bound to."""
        parts = ("master-key", database_id, self.purpose, self.root_key_id)
        return context(parts, self.id, self.created_at)


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
    """The unwrapped master keys of one database.

    A row of `secure_keyring` is *pending* if its key service failed.  The keyring is then used
    without this row, until a later attempt unwraps the row.
    """

    database_id: bytes
    index_master: IndexMaster
    masters: Mapping[int, Aes256Gcm]
    # The data master that wraps new data keys; None if all data masters are stored as plaintext,
    # and this process writes encrypted records.
    wrapping_master_id: int | None
    # The data masters with whose data keys this process may encrypt.  A data master that is stored
    # as plaintext is usable only if the writing backend is `NoOpBackend`: anybody with read access
    # to the database can unwrap its data keys.
    usable_master_ids: frozenset[int] = frozenset()
    # The accepted rows by id: of `masters` and of the index master.
    rows: Mapping[int, MasterKeyRow] = field(default_factory=dict)
    rejected_rows: Sequence[MasterKeyRow] = ()
    pending_rows: Sequence[MasterKeyRow] = ()
    # Data masters that are not used any more, because their rows have changed and the changed rows
    # were rejected or are pending.  A later row with such an id must hold the same key.
    former_masters: Mapping[int, Aes256Gcm] = field(default_factory=dict)
    # The number of stored rows.  Above `MAX_ROWS`, only those that this process knew were loaded.
    row_count: int = -1
    separation: SeparationState | None = field(default=None, init=False)
    # The listed features, and whether the table `secure_audit` exists, when the keyring was read.
    features: frozenset[str] = field(default=frozenset(), init=False)
    has_audit_table: bool = field(default=False, init=False)
    # The tags of the state keys whose values this process stores in `secure_state_index`.  All
    # keyrings of the process share the set: it grows at any time, also while this is read again.
    indexed_keys: set[bytes] = field(default_factory=set, init=False)
    # When the pending rows are unwrapped again, in monotonic seconds.
    retry_at: float = field(default=math.inf, init=False)
    # Whether a task is reading the keyring again.  Other tasks use this one meanwhile.
    is_being_renewed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        stored = [*self.rows.values(), *self.rejected_rows, *self.pending_rows]
        if self.row_count < 0:
            self.row_count = len(stored)
        self._fingerprints = frozenset(
            MasterFingerprint(row.id, row.created_at, row.wrapped) for row in stored
        )

    def master(self, key_id: int) -> Aes256Gcm:
        """Return the cipher of the data master *key_id*; raise UnknownKeyError if there is none."""
        if (master := self.masters.get(key_id)) is not None:
            return master
        if any(row.id == key_id for row in self.pending_rows):
            raise UnknownKeyError(
                f"data master {key_id} is not unwrapped yet, because its key service failed: "
                "check the log and the key service"
            )
        raise UnknownKeyError(f"the keyring holds no data master {key_id}")

    def database_id_for(self, key_id: int) -> bytes:
        """Return the database id for the contexts of data keys that data master *key_id* wraps."""
        if self.separation is not None and key_id in self.separation.master_ids:
            return self.separation.old_id
        return self.database_id

    def matches(self, fingerprints: Iterable[MasterFingerprint]) -> bool:
        """Return whether *fingerprints* equal those of the rows that this keyring was read from.

        Also return False if it is time to unwrap the pending rows again (rows whose key service
        failed), or if there were more than `MAX_ROWS` rows.
        """
        if self.row_count > MAX_ROWS or (self.retry_is_due and not self.is_being_renewed):
            return False
        return frozenset(fingerprints) == self._fingerprints

    @property
    def retry_is_due(self) -> bool:
        """Whether it is time to unwrap the pending rows (whose key service failed) again."""
        return time.monotonic() >= self.retry_at


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
    answer = await _answer_of(root, root.wrap(key._key, row.context(database_id)))
    if len(answer._key) > MAX_WRAPPED:
        raise KeyServiceError(
            f"root key {root.key_id!r} wraps a master key in more than {MAX_WRAPPED} bytes"
        )
    return row._replace(wrapped=answer._key)


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
    if await unwrap_master_key(new, {root.key_id: root}, new_id) != key:
        raise SecureSessionError(f"root key {root.key_id!r} does not unwrap what it wraps")
    return new


def check_row_count(number: int) -> None:
    """Raise WrongKeyError if *number*, the rows of the keyring, is greater than `MAX_ROWS`.

    An attacker may have inserted rows, and unwrapping each row would call the key service.
    """
    if number > MAX_ROWS:
        raise WrongKeyError(
            f"secure_keyring has more than {MAX_ROWS} rows, so it was tampered with: restore it "
            "from a backup, or delete the rows that you did not create"
        )


async def open_keyring(
    rows: Iterable[MasterKeyRow],
    roots: Mapping[str, KeyProvider],
    writer_root_key_id: str,
    database_id: bytes,
    known: Keyring | None = None,
    *,
    leaves_pending: bool = False,
    row_count: int | None = None,
) -> Keyring:
    """Unwrap *rows* and return the keyring.  Each row is unwrapped only by the root key it names.

    Without *known*, a keyring that was read earlier, a row that is not valid raises an error that
    names the row.  With *known*, such a row is logged and rejected, so that an attacker cannot stop
    a running service by inserting a row.  A row that *known* has accepted is not unwrapped again,
    and one that it has rejected is neither unwrapped nor logged again.

    If *known* is given and *leaves_pending* is True, a row whose key service fails is pending until
    a call after `Keyring.retry_at`.  If there are more than `MAX_ROWS` rows (*row_count*), *rows*
    need only contain the ids that *known* has accepted, and only unchanged rows are used.

    An error is raised in any case if the keyring would have no index master or no data master.
    """
    rows = list(rows)
    row_count = len(rows) if row_count is None else row_count
    opening = _Opening(roots, database_id, known, leaves_pending)
    if known is None or not leaves_pending or row_count <= MAX_ROWS:
        check_row_count(row_count)
    else:
        rows = [row for row in rows if opening.is_known(row)]
        if not any(row.purpose == DATA for row in rows):
            check_row_count(row_count)
        if known.row_count <= MAX_ROWS:
            logger.error(
                "secure_keyring has more than %d rows, so it was tampered with: this service uses "
                "only the master keys that it knows; delete the rows that you did not create",
                MAX_ROWS,
            )
    # Rows that are the same as in the known keyring come first.  If several rows have the same id,
    # only the first row is accepted, so an inserted row cannot replace a known row.
    #
    # Rows that were pending in the known keyring, because their key service failed, come last.  An
    # attacker may have inserted such rows to delay the unwrapping of a new data master.
    rows.sort(key=opening.order)
    sound = [row for row in rows if not opening.reject_if_malformed(row)]
    index_master = await opening.index_master([row for row in sound if row.purpose == INDEX])
    masters = await opening.data_masters([row for row in sound if row.purpose == DATA])
    if not masters and opening.failure is not None:
        raise opening.failure
    if index_master is None or not masters:
        missing = "data" if index_master else "index"
        raise WrongKeyError(f"the keyring holds no {missing} master: restore secure_keyring")
    # The newest data master under the writing backend's root key wraps new data keys.  If there is
    # none, the newest one under another root key does: a process does not create master keys only
    # because its writing backend has a new root key.
    usable = [
        (row.root_key_id == writer_root_key_id, row.created_at, row.id)
        for row in opening.accepted.values()
        if row.id in masters
        and (row.root_key_id == writer_root_key_id or row.root_key_id != PLAINTEXT_ROOT_KEY_ID)
    ]
    return Keyring(
        database_id,
        index_master,
        masters,
        wrapping_master_id=max(usable)[2] if usable else None,
        usable_master_ids=frozenset(row_id for *_, row_id in usable),
        rows=opening.accepted,
        rejected_rows=opening.rejected,
        pending_rows=opening.pending,
        former_masters=opening.former(),
        row_count=row_count,
    )


class _Opening:
    """One call of `open_keyring`: the rows that it has accepted and rejected so far."""

    def __init__(
        self,
        roots: Mapping[str, KeyProvider],
        database_id: bytes,
        known: Keyring | None,
        leaves_pending: bool,
    ) -> None:
        self._roots = roots
        self._database_id = database_id
        self._is_start = known is None
        self._leaves_pending = leaves_pending and known is not None
        # What the known keyring has.
        self._rows = known.rows if known else {}
        self._index_master = known.index_master if known else None
        self._masters = {**known.former_masters, **known.masters} if known else {}
        self._were_rejected = known.rejected_rows if known else ()
        self._were_pending = known.pending_rows if known else ()
        self._is_pause = known is not None and not known.retry_is_due
        self.accepted: dict[int, MasterKeyRow] = {}
        self.rejected: list[MasterKeyRow] = []
        self.pending: list[MasterKeyRow] = []
        self.failure: SecureSessionError | None = None  # the error of the first pending row
        self._ids: set[int] = set()
        # The ids of root keys for which a call of the key service has failed temporarily.
        self._failing: set[str] = set()

    def order(self, row: MasterKeyRow) -> int:
        """Return the sort key of *row*: known rows first, rows that were pending last."""
        if self.is_known(row):
            return 0
        return 2 if row in self._were_pending else 1

    def former(self) -> dict[int, Aes256Gcm]:
        """Return the known data masters whose rows have changed and are not accepted."""
        left_out = {row.id for row in (*self.rejected, *self.pending)} - self.accepted.keys()
        return {key_id: self._masters[key_id] for key_id in left_out & self._masters.keys()}

    def is_known(self, row: MasterKeyRow) -> bool:
        """Return whether *row* has not changed since the known keyring accepted it."""
        return self._rows.get(row.id) == row

    def reject_if_malformed(self, row: MasterKeyRow) -> bool:
        """Reject *row* if it is malformed, or if an earlier row has its id."""
        fault = _fault(row)
        if fault is None and row.id in self._ids:
            fault = "another row has the same id"
        if fault is not None:
            self._reject(row, _malformed(row, fault))
            return True
        self._ids.add(row.id)
        return False

    async def index_master(self, rows: list[MasterKeyRow]) -> IndexMaster | None:
        """Accept, reject or leave pending each of *rows*, and return the index master.

        If a keyring is known, the result is its index master, and a row is accepted only if it
        holds the same key.  Otherwise, the result is the unwrapped index master, if there is a row.
        """
        if len(rows) > 1:
            ids = {row.id for row in self._rows.values() if row.purpose == INDEX}
            ours = [row for row in rows if row.id in ids]
            for row in rows:
                if [row] != ours:
                    others = ", ".join(str(other.id) for other in rows if other is not row)
                    error = WrongKeyError(
                        f"secure_keyring row {row.id} and row {others} are both index masters, so "
                        "the keyring was tampered with: restore it from a backup, or delete the "
                        "row that you did not create"
                    )
                    self._reject(row, error)
            rows = ours
        index_master = self._index_master
        for row in rows:
            if self.is_known(row):
                self.accepted[row.id] = row
            elif (key := await self._unwrapped(row)) is not None:
                unwrapped = key.index_master()
                if index_master is None or index_master.has_key_of(unwrapped):
                    index_master = index_master or unwrapped
                    self.accepted[row.id] = row
                else:
                    fault = "it is another index master than the one that this service has read"
                    self._reject(row, _malformed(row, fault))
        return index_master

    async def data_masters(self, rows: list[MasterKeyRow]) -> dict[int, Aes256Gcm]:
        """Unwrap *rows*, the data masters, and return the accepted data masters by id."""
        masters: dict[int, Aes256Gcm] = {}
        new = []
        for row in rows:
            if self.is_known(row):
                masters[row.id] = self._masters[row.id]
                self.accepted[row.id] = row
            else:
                new.append(row)
        # A running service expects at most one new row.  It unwraps rows one after another, so that
        # rows that an attacker inserted cannot cause many simultaneous calls.
        keys = await in_groups(_AT_ONCE if self._is_start else 1, self._unwrapped, new)
        for row, key in zip(new, keys, strict=True):
            before = self._masters.get(row.id)
            if key is not None and before is not None and not key.is_key_of(before):
                fault = "it holds another key than the one that this service has read"
                self._reject(row, _malformed(row, fault))
            elif key is not None:
                masters[row.id] = key.cipher()
                self.accepted[row.id] = row
        return masters

    async def _unwrapped(self, row: MasterKeyRow) -> UnwrappedMaster | None:
        """Return the master key of *row*; None if the row was rejected or left pending."""
        if row in self._were_rejected:
            self.rejected.append(row)
            return None
        if row.root_key_id in self._failing or (self._is_pause and row in self._were_pending):
            # Do not call the key service: a call with this root key has just failed, or the pause
            # after a failure has not ended.  A further call might take as long to fail.
            self.pending.append(row)
            return None
        try:
            return await unwrap_master_key(row, self._roots, self._database_id)
        except (WrongKeyError, DecryptionError) as error:
            self._reject(row, error)
        except SecureSessionError as error:
            if not self._leaves_pending:
                raise
            self.pending.append(row)
            self.failure = self.failure or without_frames(error)
            if error.retryable:
                self._failing.add(row.root_key_id)
            if row not in self._were_pending:
                logger.error(
                    "a row of secure_keyring is not used until it can be unwrapped: %s", error
                )
        return None

    def _reject(self, row: MasterKeyRow, error: SecureSessionError) -> None:
        """Reject *row* because of *error*; log *error* unless the same row was rejected before.

        If no keyring is known, the process is starting.  Then raise *error* instead.
        """
        if self._is_start:
            raise error
        self.rejected.append(row)
        if row not in self._were_rejected:
            logger.error("a row of secure_keyring is rejected, and not used: %s", error)


def _fault(row: MasterKeyRow) -> str | None:
    """Return why *row* is malformed; None if it is well-formed.

    SQLite stores any type in any column, so a modified row may contain any type.
    """
    row_id, purpose, root_key_id, created_at, wrapped = cast("tuple[object, ...]", row)
    if type(row_id) is not int or row_id not in _INTEGERS:
        return "its id is not an integer of 63 bits"
    if not isinstance(purpose, str) or purpose not in (INDEX, DATA):
        return f"its purpose is neither {INDEX!r} nor {DATA!r}"
    if not isinstance(root_key_id, str) or not 0 < len(root_key_id) <= KEY_ID_LENGTH:
        return f"its root_key_id is not a text of 1 to {KEY_ID_LENGTH} characters"
    if type(created_at) is not int or created_at not in _INTEGERS:
        return "its created_at is not an integer of 63 bits"
    if not isinstance(wrapped, bytes):
        return "its wrapped key is not bytes"
    return None


def _malformed(row: MasterKeyRow, fault: str) -> WrongKeyError:
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
        raise _malformed(row, fault)
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
        key = await _answer_of(root, root.unwrap(row.wrapped, row.context(database_id)))
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


async def _answer_of(root: KeyProvider, answer: Awaitable[bytes]) -> UnwrappedMaster:
    """Await *answer*, a call of `wrap` or `unwrap` of *root*, and return its result.

    Errors are raised without the provider's frames, because the local variables of these frames
    contain keys.  An exception of another package may have a text that contains secrets, so the
    KeyServiceError that replaces it names only its class.
    """
    try:
        result = UnwrappedMaster(await answer)
        if isinstance(result._key, bytes):
            return result
        name = "something that is not bytes"
    except Exception as error:
        if isinstance(error, SecureSessionError):
            raise without_frames(error) from None
        name = type(error).__name__
    # CancelledError must have no frames, either: `asyncio.timeout` makes it the cause of a
    # TimeoutError.
    except BaseException as error:
        raise without_frames(error) from None
    raise KeyServiceError(f"the provider of root key {root.key_id!r} failed: {name}")
