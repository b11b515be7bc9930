"""The audit trail: audit records in the table `secure_audit` (docs/format.md, "The audit trail").

The records form chains: each record contains a hash of the record before it.  So that writers need
not wait for each other, each transaction uses a chain alone: it takes one that is free, or begins a
new one, and returns it after its end.  If it is not known whether a transaction was committed, its
chain is not used again: the last record could otherwise be written twice.

Removing the last records of a chain leaves a valid chain.  Only the *heads* show it: the numbers
and links of last records, which the logger `adk_secure_sessions.audit` writes now and then.
"""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from sqlalchemy import insert

from adk_secure_sessions import audit
from adk_secure_sessions.audit import AccessAuditing, Audit, AuditEntry
from adk_secure_sessions.concurrency import call_later
from adk_secure_sessions.db.protocol import (
    Apply,
    Change,
    Conflict,
    Executor,
    Steps,
    Transaction,
    with_retries,
)
from adk_secure_sessions.errors import DatabaseError
from adk_secure_sessions.formats.audit_records import (
    NO_AUDIT_LINK,
    link_of,
    record_context,
    seal_entry,
)
from adk_secure_sessions.formats.times import time_now
from adk_secure_sessions.hiding import HoldsSecrets
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.storage.feature_list import Feature
from adk_secure_sessions.storage.operation_runner import OperationRunner, try_apply
from adk_secure_sessions.storage.schema import audit_records
from adk_secure_sessions.storage.survey import FeatureName

T = TypeVar("T")

# After this number of seconds, no transaction uses a chain any more, so it can be purged whole.
_MAX_AGE = 24 * 60 * 60
# The head of a chain is logged after this number of records, or after this number of seconds.
_HEAD_RECORDS = 100
_HEAD_SECONDS = 60.0

_HEADS_ARE_OFF = (
    "the heads of the audit trail's chains are not logged, so removed last records are not "
    "detected: switch the logger adk_secure_sessions.audit on with setLevel(logging.INFO)"
)

_INSERT = insert(audit_records)


class ChainHead(NamedTuple):
    """The number of records in a chain, and the link of the last one."""

    records: int
    link: bytes


class _Chain(HoldsSecrets):
    """A chain of this process; *logged* is its number of records when its head was logged."""

    def __init__(self, keyring: Keyring) -> None:
        self.database_id: bytes = keyring.database_id
        now = time_now()
        self.id: bytes = now.to_bytes(8, "big") + secrets.token_bytes(8)
        self.head: ChainHead = ChainHead(0, NO_AUDIT_LINK)
        self.logged: int = 0
        self._cipher = keyring.index_master.audit_cipher(self.database_id, self.id)
        self._began_at = time.monotonic(), time.time()

    @property
    def is_old(self) -> bool:
        """Whether the chain must not be used any more.

        The monotonic clock stands still while the machine is suspended, so also read the other.
        """
        elapsed = (time.monotonic() - self._began_at[0], abs(time.time() - self._began_at[1]))
        return max(elapsed) >= _MAX_AGE

    def seal(self, entries: Sequence[AuditEntry]) -> tuple[list[dict[str, object]], ChainHead]:
        """Return the rows for *entries*, and the head of the chain after their commit."""
        count, link = self.head
        rows: list[dict[str, object]] = []
        for entry in entries:
            context = record_context(self.database_id, self.id, count, entry.time)
            record = seal_entry(self._cipher, context, link, entry.fields)
            rows.append({"chain": self.id, "number": count, "time": entry.time, "record": record})
            count, link = count + 1, link_of(context, record)
        return rows, ChainHead(count, link)


class _PendingRecords:
    """The rows that a transaction adds to a chain.

    *is_in_doubt* is whether the rows were sent, and the transaction may have been committed.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []
        self.is_in_doubt = self.is_applied = False

    def steps(self, transaction: Transaction[T]) -> Steps[T]:
        """Run *transaction*, and insert the rows together with its first changes."""
        steps, answer = transaction(), None
        try:
            while True:
                request = steps.send(answer)
                if isinstance(request, Apply) and not self.is_applied:
                    self.is_in_doubt = True
                    answer = yield Apply([*request.changes, *self.changes()])
                    self.is_applied = self.is_in_doubt = bool(answer)
                else:
                    answer = yield request
        except StopIteration as end:
            result: T = end.value
            return result

    def changes(self) -> list[Change]:
        """Return the changes that insert the rows, and check that the first and last are inserted.

        With a check of each row, the text of the statements would depend on the number of rows.
        `verify` reports a missing row between two others.
        """
        first, *between = self.rows
        last = between.pop() if between else None
        changes = [Change(_INSERT, first)]
        if between:
            changes.append(Change(_INSERT, {}, must_match_one_row=False, rows=between))
        if last is not None:
            changes.append(Change(_INSERT, last))
        return changes


class AuditTrail(HoldsSecrets):
    """Stores audit records in the table `secure_audit`; see the module.

    Several event loops and threads may use an object at the same time.  If *warns* is True, a
    warning is logged, once in this process, if the logger of the audit log is off.
    """

    def __init__(self, runner: OperationRunner, *, warns: bool = True) -> None:
        self._runner = runner
        self._feature = Feature(runner, FeatureName.AUDIT)
        self._warns = warns
        # The chain that was used last is the last element.  Several threads use the list without a
        # lock, which a forked process could inherit locked: taking and adding an element is atomic.
        self._free: list[_Chain] = []
        self._process = os.getpid()
        self._heads_due: float | None = None  # when to log the heads, in monotonic seconds

    @property
    def executor(self) -> Executor:
        """The executor of the data database."""
        return self._runner.executors.data

    async def prepare(self) -> None:
        """Create the table if it is missing, and add the feature `audit`: see `Feature.ensure`."""
        if self._warns and not audit.is_on():
            audit.warn_once(_HEADS_ARE_OFF)
        await self._feature.ensure()

    async def store(self, entries: Sequence[AuditEntry], *, retries: bool = True) -> None:
        """Store *entries* in a transaction of their own; do nothing if there are none.

        After a lost connection, they are stored again, in another chain, unless *retries* is False:
        a record may be stored twice.
        """
        if not entries:
            return

        async def attempt() -> None:
            _, is_stored = await self.write_with_entries(partial(try_apply, ()), entries)
            if not is_stored:  # a trigger or a rule can discard rows without an error
                raise DatabaseError(
                    "the database did not store the records of the audit trail: remove triggers "
                    "and rules of secure_audit"
                )

        await (with_retries(attempt, writes=True) if retries else attempt())

    async def apply_with_entry(self, changes: Sequence[Change], entry: AuditEntry) -> bool:
        """Make *changes* in one transaction, and store *entry* in it.

        Return False and change nothing if the first change matched no row.  After a lost
        connection, this method raises the error: the changes may have been made.
        """
        applied, _ = await self.write_with_entries(partial(try_apply, changes), [entry])
        return applied

    def log_heads(self) -> None:
        """Log the head of each chain that has new records and is not in use."""
        self._heads_due = None
        for chain in list(self._free):
            _log_head(chain)

    def close(self) -> None:
        """Log the heads, and begin new chains afterwards."""
        self.log_heads()
        self._free.clear()

    async def write_with_entries(
        self,
        transaction: Transaction[T],
        entries: Sequence[AuditEntry],
        on_commit: Callable[[bool], None] | None = None,
        *,
        in_one_transaction: bool = False,
    ) -> tuple[T, bool]:
        """Run *transaction*, and store *entries* in it if the transaction changes something.

        Return the result, and whether *entries* were stored.  *on_commit* also gets the latter.
        The other arguments and the errors are those of `Executor.write`.
        """
        chain = self._take_chain(await self._runner.keyring())
        pending, head = _PendingRecords(), chain.head

        def committed() -> None:
            if pending.is_applied:
                chain.head, pending.is_in_doubt = head, False
            if on_commit is not None:
                on_commit(pending.is_applied)

        try:
            pending.rows, head = chain.seal(entries)  # ValueError: a record is too long
            result = await self.executor.write(
                partial(pending.steps, transaction),
                committed,
                in_one_transaction=in_one_transaction,
            )
            return result, pending.is_applied
        except Conflict:
            pending.is_in_doubt = False  # the transaction was rolled back
            raise
        finally:
            # After a UniqueViolation, too, the chain is not used again: if somebody has inserted
            # rows into the chain, each attempt would fail.
            if pending.is_in_doubt:
                _log_head(chain)
            else:
                self._return_chain(chain)

    def _take_chain(self, keyring: Keyring) -> _Chain:
        """Return a free chain, or a new one; the caller must call `_return_chain`."""
        # The parent process continues its chains.  Clear them before the process is noted: then no
        # other thread finds them.
        if os.getpid() != self._process:
            self._free.clear()
            self._process = os.getpid()
        with suppress(IndexError):
            while chain := self._free.pop():
                if chain.database_id == keyring.database_id and not chain.is_old:
                    return chain
                _log_head(chain)
        return _Chain(keyring)

    def _return_chain(self, chain: _Chain) -> None:
        if not chain.head.records:
            return  # a chain without records is not worth keeping
        if chain.head.records - chain.logged >= _HEAD_RECORDS:
            _log_head(chain)
        self._free.append(chain)
        due, now = self._heads_due, time.monotonic()
        if due is None and chain.head.records > chain.logged:
            self._heads_due = now + _HEAD_SECONDS
            call_later(_HEAD_SECONDS, self.log_heads)
        elif due is not None and now >= due:  # the event loop of the timer has ended
            self.log_heads()


def auditing_for(runner: OperationRunner, options: Audit | None) -> AccessAuditing:
    """Return how a service records accesses: as *options* say, or not if it is None."""
    if options is None:
        return AccessAuditing(None, None)
    is_blind = options.ids == "blind"

    def ids(app_name: str, user_id: str, session_id: str) -> dict[str, object]:
        user, session, keyring = user_id or None, session_id or None, runner.keyring_if_open
        if is_blind:
            if keyring is None:
                return {"app": app_name}
            tag_of = keyring.index_master.tag_of
            user = user and tag_of(app_name, user_id).hex()
            session = session and tag_of(app_name, user_id, session_id).hex()
        database = None if keyring is None else keyring.database_id.hex()
        return {"database": database, "app": app_name, "user": user, "session": session}

    return AccessAuditing(ids, AuditTrail(runner) if options.table else None)


def _log_head(chain: _Chain) -> None:
    """Log the head of *chain*, unless it was logged already."""
    count, link = chain.head
    if count == chain.logged:
        return
    chain.logged = count
    if audit.is_on():
        entry = audit.new_entry(
            "audit.head",
            database=chain.database_id.hex(),
            chain=chain.id.hex(),
            number=count - 1,
            head=link.hex(),
        )
        audit.log_entry(entry)
