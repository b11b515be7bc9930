"""Check, export and purge the audit trail: the audit records in the table `secure_audit`."""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions import audit
from adk_secure_sessions.db.protocol import Change, Conflict, Disconnected
from adk_secure_sessions.errors import ConfigurationError, DecryptionError, Reason
from adk_secure_sessions.formats.audit_records import (
    CHAIN_LENGTH,
    MAX_RECORD,
    NO_AUDIT_LINK,
    link_of,
    open_entry,
    record_context,
)
from adk_secure_sessions.formats.times import microseconds_of, time_ago
from adk_secure_sessions.keys.keyring import Keyring
from adk_secure_sessions.maintenance.counts import estimate_rows, select_count
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.problems import Problem, Problems, report_unlisted
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.maintenance.row_scan import flattened
from adk_secure_sessions.results import Result, counter, listing, utc_text
from adk_secure_sessions.storage.schema import audit_records
from adk_secure_sessions.storage.table_walk import pages, rows_where

_HEAD_EVENT = "audit.head"  # the event of a log line with the last record of a chain
_PURGE_EVENT = "audit.purged"  # the event of a record that names chains which were deleted
# Nobody appends to a chain 24 hours after it was begun.  Twice this time allows for clocks.
_MIN_AGE = timedelta(hours=48)
_MAX_INT64 = 2**63 - 1

_columns = audit_records.c


@dataclass
class AuditVerification(Result):
    """The result of `verify_audit`.

    Attributes:
        records: How many records were decrypted and are authentic.
        chains: How many chains are authentic, without those that have a problem.
        purged: How many chains were deleted by `purge_audit`, as authentic records say.
        heads: How many logged heads were compared with the chains; None if none were given.
        bad: How many rows or chains were tampered with.
        problems: The first 1000 of them.
    """

    success_line = "no record is missing or bad"

    records: int = counter("record", "authentic", shows_zero=True)
    chains: int = counter("chain", "authentic", shows_zero=True)
    purged: int = counter("chain", "purged")
    heads: int | None = counter("logged head", "compared with the trail", default=None)
    bad: int = counter("row", "bad", is_failure=True)
    problems: tuple[Problem, ...] = listing("bad")

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        if self.heads is None:
            yield "without --heads, it is not detected that last records were removed"


@dataclass
class AuditExport(Result):
    """The result of `export_audit`.

    Attributes:
        records: How many records were exported.
        bad: How many rows or chains were tampered with.
        problems: The first 1000 of them.
    """

    records: int = counter("record", "exported", shows_zero=True)
    bad: int = counter("row", "not authentic", is_failure=True)
    problems: tuple[Problem, ...] = listing("bad")


@dataclass
class AuditPurge(Result):
    """The result of `purge_audit`; after a dry run, the expected result.

    Attributes:
        records: How many records were deleted.
        chains: How many chains were deleted.
        kept: How many old chains were kept, because they name chains that were purged before, or
            because another process has changed them meanwhile.
        bad: How many rows of old chains were tampered with.  These chains were kept.
        problems: The first 1000 of these rows.
        before: A chain is old if its last record is older than this time, in microseconds since
            1970, UTC.
    """

    records: int = counter("record", "deleted", shows_zero=True, is_change=True)
    chains: int = counter("chain", "deleted", shows_zero=True, is_change=True)
    kept: int = counter("chain", "old, and kept")
    bad: int = counter("row", "bad, so that their chains were kept", is_failure=True)
    problems: tuple[Problem, ...] = listing("bad")
    before: int = 0

    def extra_lines(self, dry_run: bool) -> Iterable[str]:
        return [f"such chains were last used before {utc_text(self.before)}"]


@audit.logged_command
async def verify_audit(
    db: Database,
    logs: Mapping[str, Iterable[str]] | None = None,
    *,
    progress: Progress | None = None,
    rows_per_second: float | None = None,
) -> AuditVerification:
    """Check that no record of the audit trail was modified, removed, moved or inserted.

    This function stores no record of its own, so it also works if the account may only read.

    Args:
        logs: The lines of each audit log, by the name of the log.  Those with the event
            `audit.head` say how many records each chain had.  Without them, nobody can detect that
            the last records of a chain, or a whole chain, were removed.  A log without a head of
            the database is a problem, and so are two different heads of one record.
        progress: Counts records.

    Raises:
        ConfigurationError: The database has no audit trail.
    """
    checker = await _open_checker(db, progress, rows_per_second)
    result = AuditVerification(heads=checker.read_logs(logs) if logs else None)
    await checker.check_table()
    async for chain, _ in checker.chains():
        bad = checker.problems.count
        is_stored = await checker.check(chain) is not None
        result.chains += is_stored and checker.problems.count == bad
    if any(checker.missing_heads()):
        # `purge_audit` may have deleted these chains meanwhile, and its record was not read.
        later = await _open_checker(db, None, rows_per_second)
        async for chain, _ in later.chains():
            await later.check(chain)
        checker.purged_heads |= later.purged_heads
    await checker.check_purged()
    for row, detail in checker.missing_heads():
        checker.add_bad(row, Reason.MISSING, detail)
    checker.meter.finish()
    result.records, result.purged = checker.records, len(checker.purged_heads)
    return checker.problems.copy_into(result)


@audit.audited_command
async def export_audit(
    db: Database,
    write: Callable[[bytes], object],
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    progress: Progress | None = None,
) -> AuditExport:
    """Write the records of the audit trail as lines of JSON.

    The records of a chain are written in their order, one chain after the other; the chain that was
    begun first comes first.  Each line has the fields of the record, and its `chain` and `number`.
    Records that cannot be decrypted are not written.

    Args:
        write: Called with each line, which ends with a line feed.
        since: Write only records of this time or later; the time must have a time zone.
        until: Write only records before this time; the time must have a time zone.
        progress: Counts records.

    Raises:
        ConfigurationError: The database has no audit trail, or a time has no time zone.
    """
    if any(moment is not None and moment.tzinfo is None for moment in (since, until)):
        raise ConfigurationError("since and until must have a time zone")
    first_time = 0 if since is None else microseconds_of(since)
    end_time = _MAX_INT64 if until is None else microseconds_of(until)
    checker = await _open_checker(db, progress, None)
    result = AuditExport()

    def export(chain: bytes, number: int, moment: int, fields: dict[str, Any]) -> None:
        if first_time <= moment < end_time:
            line = json.dumps({"chain": chain.hex(), "number": number} | fields)
            write(line.encode("ascii") + b"\n")
            result.records += 1

    await checker.check_table()
    async for chain, _ in checker.chains():
        await checker.check(chain, export)
    checker.meter.finish()
    return checker.problems.copy_into(result)


@audit.audited_command
async def purge_audit(
    db: Database, older_than: timedelta, *, dry_run: bool = False, progress: Progress | None = None
) -> AuditPurge:
    """Delete the chains of the audit trail whose last record is older than *older_than*.

    Each chain is checked before it is deleted.  A record names the deleted chain; `verify_audit`
    accepts its head.  Chains with such records are never deleted.

    Args:
        older_than: The minimum age of the last record, at least 48 hours.
        progress: Counts records.

    Raises:
        ConfigurationError: The database has no audit trail, or *older_than* is too short.
        DatabaseError: The database failed, or the connection was lost: run the command again.
    """
    if older_than < _MIN_AGE:
        raise ConfigurationError(
            "only chains older than 48 hours can be deleted: services may still append to others"
        )
    before = time_ago(older_than)
    checker = await _open_checker(db, progress, None)
    result = AuditPurge(before=before)
    async for chain, last_time in checker.chains():
        if not isinstance(last_time, int) or last_time >= before:
            continue
        bad, purge_records = checker.problems.count, checker.purge_records
        last = await checker.check(chain)
        if last is None or checker.problems.count != bad:
            continue
        if checker.purge_records == purge_records and (dry_run or await _purge(db, chain, last)):
            result.chains += 1
            result.records += last.number + 1
        else:
            result.kept += 1
    checker.meter.finish()
    return checker.problems.copy_into(result)


class _LastRecord(NamedTuple):
    """The last record of a chain; *link* is None if the record is bad."""

    number: int
    link: bytes | None


class _TrailChecker:
    """Reads and checks the chains.

    `purged_heads` maps the id of each purged chain to its last record.  `purge_records` counts the
    records that list purged chains.
    """

    def __init__(self, db: Database, keyring: Keyring, meter: Meter) -> None:
        self.keyring = keyring
        self.problems = Problems()
        self.purged_heads: dict[bytes, _LastRecord] = {}
        self.purge_records = 0
        self.records = 0
        self.meter = meter
        self._db = db
        self._logged_links: dict[bytes, dict[int, bytes]] = {}  # of heads, by chain
        self._last_numbers: dict[bytes, int] = {}  # by chain, the number of the last stored record

    def add_bad(self, row: str, reason: Reason, detail: str) -> None:
        self.problems.add(audit_records.name, row, reason, detail)

    async def check_table(self) -> None:
        """Report a table that no feature names, and rows that no query for a chain finds."""
        report_unlisted(self.problems, self._db.unlisted_features)
        ((number,),) = await self._db.runner.data_db.read(_MALFORMED_PRIMARY_KEYS, {"empty": b""})
        if number:
            detail = f"{number} rows have a chain or a number of another type: they were inserted"
            self.add_bad("", Reason.MALFORMED, detail)

    def chains(self) -> AsyncIterator[tuple[bytes, Any]]:
        """Yield the id of each chain and the time of its last record, oldest chain first.

        Neither is authenticated.
        """
        read, size = self._db.runner.data_db.read, self._db.limits.ids_per_statement
        return flattened(pages(read, _CHAINS, _columns.chain, size, lambda *row: row, empty=b""))

    async def check(
        self,
        chain: bytes,
        visit: Callable[[bytes, int, int, dict[str, Any]], None] = lambda *_: None,
    ) -> _LastRecord | None:
        """Check a chain, and call *visit* with each authentic record, in order.

        The arguments of *visit* are the chain, the number, the time and the fields.  Return the
        last record; None if the chain has no records any more, or no valid id.
        """
        if len(chain) != CHAIN_LENGTH:
            detail = "its chain does not have 16 bytes: it was inserted"
            self.add_bad(chain.hex(), Reason.MALFORMED, detail)
            return None
        cipher = self.keyring.index_master.audit_cipher(self.keyring.database_id, chain)
        logged = self._logged_links.get(chain, {})
        last_record: _LastRecord | None = None
        read, size = self._db.runner.data_db.read, self._db.limits.rows_per_statement
        stored = pages(read, _RECORDS, _columns.number, size, lambda *row: row, chain=chain)
        async for number, moment, record in flattened(stored):
            await self.meter.advance()
            row = f"{chain.hex()}, {number}"
            self._last_numbers[chain] = number
            expected_number = 0 if last_record is None else last_record.number + 1
            # The link of the record before; None if that record is bad or was removed.
            previous_link = NO_AUDIT_LINK if last_record is None else last_record.link
            if number != expected_number:
                detail = f"the records {expected_number} to {number - 1} of the chain were removed"
                self.add_bad(f"{chain.hex()}, {expected_number}", Reason.MISSING, detail)
                previous_link = None
            try:
                context = record_context(self.keyring.database_id, chain, number, moment)
                previous, fields = open_entry(cipher, context, record)
            except DecryptionError as error:
                self.problems.add_error(error, audit_records.name, row)
                last_record = _LastRecord(number, None)
                continue
            if previous_link is not None and previous != previous_link:
                detail = "it does not follow the record before it, which is from another copy"
                self.add_bad(row, Reason.MISMATCH, detail)
            last_record = _LastRecord(number, link_of(context, record))
            if logged.get(number, last_record.link) != last_record.link:
                detail = "it is not the record that was logged: the chain was written again"
                self.add_bad(row, Reason.MISMATCH, detail)
            self.records += 1
            self._note_purged(fields)
            visit(chain, number, moment, fields)
        return last_record

    def read_logs(self, logs: Mapping[str, Iterable[str]]) -> int:
        """Read the heads of this database in audit logs, by name; return their number."""
        number = 0
        for name, lines in logs.items():
            heads = [head for line in lines if (head := _head_in(line, self.keyring.database_id))]
            number += len(heads)
            if not heads:
                detail = f"no line of the log {name!r} is a head of this database"
                self.add_bad("", Reason.MISSING, detail)
            for chain, head_number, link in heads:
                if self._logged_links.setdefault(chain, {}).setdefault(head_number, link) != link:
                    detail = "two different heads of it were logged: a line was added to a log"
                    self.add_bad(f"{chain.hex()}, {head_number}", Reason.MISMATCH, detail)
        return number

    def missing_heads(self) -> Iterator[tuple[str, str]]:
        """Yield each logged chain that is neither whole nor purged, and a detail."""
        for chain, links in self._logged_links.items():
            last, length = max(links), self._last_numbers.get(chain, -1) + 1
            head = self.purged_heads.get(chain)
            if head and head.number >= last and links.get(head.number, head.link) == head.link:
                continue
            if not length:
                yield (chain.hex(), f"the chain, which had {last + 1} records or more, was removed")
            elif length <= last:
                detail = f"the records {length} to {last} at the end of the chain were removed"
                yield f"{chain.hex()}, {length}", detail

    async def check_purged(self) -> None:
        query = _STORED_CHAINS, _columns.chain
        for (chain,) in await rows_where(self._db.runner.data_db.read, *query, self.purged_heads):
            detail = "the chain was purged, and is stored again: it was replayed"
            self.add_bad(chain.hex(), Reason.MISMATCH, detail)

    def _note_purged(self, fields: dict[str, Any]) -> None:
        if fields.get("event") == _PURGE_EVENT:
            self.purge_records += 1
            for purged in fields["chains"]:
                last_record = _LastRecord(purged["number"], bytes.fromhex(purged["head"]))
                self.purged_heads[bytes.fromhex(purged["chain"])] = last_record


async def _open_checker(
    db: Database, progress: Progress | None, rows_per_second: float | None
) -> _TrailChecker:
    keyring = await db.keyring()
    if not keyring.has_audit_table:
        raise ConfigurationError(
            "the database has no audit trail: no service with Audit(table=True) has used it"
        )
    total = await estimate_rows(db, audit_records)
    return _TrailChecker(db, keyring, Meter(progress, total, rows_per_second))


def _head_in(line: str, database_id: bytes) -> tuple[bytes, int, bytes] | None:
    """Return the chain, the number and the link in a line of the audit log.

    Return None if the line is anything else than the JSON of a head of the database.  Text before
    or after the JSON is not ignored: it may be what a user wrote, followed by a false head.
    """
    if _HEAD_EVENT not in line:
        return None
    try:
        fields = json.loads(line)
        chain, link = bytes.fromhex(fields["chain"]), bytes.fromhex(fields["head"])
        event, database, number = fields["event"], fields["database"], fields["number"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    # The text of a longer number cannot be made.
    is_number = type(number) is int and 0 <= number <= _MAX_INT64
    has_lengths = (len(chain), len(link)) == (CHAIN_LENGTH, len(NO_AUDIT_LINK))
    is_head = (event, database) == (_HEAD_EVENT, database_id.hex()) and is_number and has_lengths
    return (chain, number, link) if is_head else None


async def _purge(db: Database, chain: bytes, last: _LastRecord) -> bool:
    """Delete a chain in one transaction; return False if it has changed."""
    assert last.link is not None, "the chain was checked"
    key = {"at_chain": chain, "at_number": last.number}
    changes = [Change(_DELETE_LAST, key), Change(_DELETE_OTHERS, key, must_match_one_row=False)]
    purged = {"chain": chain.hex(), "number": last.number, "head": last.link.hex()}
    database = (await db.keyring()).database_id.hex()
    entry = audit.new_entry(_PURGE_EVENT, database=database, chains=[purged])
    try:
        is_deleted = await db.trail.apply_with_entry(changes, entry)
    except Conflict:
        return False
    except Disconnected as lost:
        raise lost.error from None
    if is_deleted:
        audit.log_entry(entry)
    return is_deleted


# In a modified row, SQLite compares a text as less than any blob, and greater than any number.
_IS_BLOB = _columns.chain > sa.bindparam("empty", type_=sa.LargeBinary)
_CHAINS = (
    sa.select(_columns.chain, sa.func.max(_columns.time)).where(_IS_BLOB).group_by(_columns.chain)
)
# A longer record is read as NULL, which is rejected: an attacker may have stored gigabytes.
_MAX_LENGTH = sa.literal_column(str(MAX_RECORD), sa.BigInteger)
_RECORD_OR_NULL = sa.case((sa.func.length(_columns.record) <= _MAX_LENGTH, _columns.record))
_IS_NUMBER = sa.and_(
    _columns.number >= sa.literal_column("0", sa.BigInteger),
    _columns.number == sa.cast(_columns.number, sa.BigInteger),
)
_RECORDS = sa.select(_columns.number, _columns.time, _RECORD_OR_NULL).where(
    _columns.chain == sa.bindparam("chain", type_=sa.LargeBinary), _IS_NUMBER
)
_MALFORMED_PRIMARY_KEYS = select_count(audit_records, sa.not_(sa.and_(_IS_BLOB, _IS_NUMBER)))
_IS_CHAIN = _columns.chain == sa.bindparam("at_chain", type_=sa.LargeBinary)
_AT_NUMBER = sa.bindparam("at_number", type_=sa.BigInteger)
_DELETE_LAST = sa.delete(audit_records).where(_IS_CHAIN, _columns.number == _AT_NUMBER)
_DELETE_OTHERS = sa.delete(audit_records).where(_IS_CHAIN, _columns.number < _AT_NUMBER)
_STORED_CHAINS = sa.select(_columns.chain).distinct()
