"""Count and list rows that cannot be decrypted, and find orphaned rows.

Services never read orphaned rows; see `Problem`.  But an attacker may have removed the row that an
orphaned row belongs to, and somebody may restore it later.  Until then, the orphaned row may need
any key, and may name any content of an artifact.  Therefore `retire`, which deletes keys that no
row needs, and `purge blobs`, which deletes contents that no row names, first reject orphaned rows.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import sqlalchemy as sa

from adk_secure_sessions.audit import record_rejected
from adk_secure_sessions.errors import DecryptionError, Reason, TamperedError, row_name
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.row_scan import key_text
from adk_secure_sessions.storage import meta
from adk_secure_sessions.storage.schema import (
    INDEX_MARK,
    IS_COLLECTION,
    apps,
    audit_records,
    data_keys,
    events,
    migrated,
    sessions,
    snapshots,
    state_index,
    users,
    witnesses,
)
from adk_secure_sessions.storage.survey import FeatureName
from adk_secure_sessions.storage.table_walk import row_ranges

T = TypeVar("T")

_MAX_LISTED = 1000
# If a row of these tables is bad, many other rows cannot be decrypted, and each of them causes an
# error that names the bad row.  So report a bad row of these tables only once.
_NEEDED_BY_OTHERS = (apps.name, users.name, data_keys.name)
_ONE: sa.ColumnElement[int] = sa.literal_column("1")


class Problem(NamedTuple):
    """A row that cannot be decrypted, an orphaned row, or a bad feature list, trail or blob.

    A row is orphaned if the session, user or app row that it belongs to does not exist.

    Attributes:
        table: The table of the row.
        row: The row's primary key; for a version witness, the tag in hexadecimal.
        reason: Why the row was rejected; `Reason.MISSING` for an orphaned row.
        detail: The reason in words; it does not repeat `table` and `row`.
    """

    table: str
    row: str
    reason: Reason
    detail: str

    @property
    def line(self) -> str:
        where = f"{self.table} row {self.row}" if self.row else self.table
        return f"{where}: {self.detail}"


class CappedList(Generic[T]):
    """Counts items, and keeps the first 1000 of them in `first`."""

    def __init__(self) -> None:
        self.count: int = 0
        self.first: list[T] = []

    def append(self, item: T) -> None:
        self.count += 1
        if len(self.first) < _MAX_LISTED:
            self.first.append(item)

    def extend(self, items: Iterable[T]) -> None:
        for item in items:
            self.append(item)


class Problems(CappedList[Problem]):
    def __init__(self) -> None:
        super().__init__()
        # The rows that were counted, and whether later calls skip them.
        self._ignored: defaultdict[tuple[str, str], bool] = defaultdict(bool)

    def ignore_row(self, table: str, row: object) -> None:
        """Make later calls skip *row*, which has been counted already."""
        self._ignored[table, str(row)] = True

    def ignore_counted_rows(self) -> None:
        """Make later calls skip all rows that have been counted, also those that are not listed."""
        self._ignored.update(dict.fromkeys(self._ignored, True))

    def add(self, table: str, row: object, reason: Reason, detail: str) -> None:
        self.add_error(TamperedError(detail, reason), table, row)

    @contextmanager
    def collecting_errors(self, table: str, row: object) -> Iterator[None]:
        """If the block raises DecryptionError, count and record that row; see `add_error`."""
        try:
            yield
        except DecryptionError as error:
            self.add_error(error, table, row)

    def add_error(self, error: DecryptionError, table: str, row: object) -> bool:
        """Count and record the row that *error* names or, if *error* names none, *row*.

        Return True for a row of an app, user or data key: other rows need it.  It is counted once.
        """
        if error.table is not None and error.row is not None:
            table, row = error.table, error.row
        is_shared, name = table in _NEEDED_BY_OTHERS, (table, row_name(row))
        if not self._ignored[name]:
            record_rejected(error.located(*name))
            self.append(Problem(*name, error.reason, error.detail))
        self._ignored[name] |= is_shared
        return is_shared

    def copy_into(self, result: T) -> T:
        """Set the fields `bad` and `problems` of *result*, and return it."""
        vars(result).update(bad=self.count, problems=tuple(self.first))
        return result


# For each feature, the rows that need it, and who adds it.
_EVIDENCE = {
    FeatureName.COLLECTIONS: ("the database has collections", "service that appends an item"),
    FeatureName.STATE_INDEX: (f"{state_index.name} has rows", "service with indexed_state_keys"),
    FeatureName.MIGRATION: (f"{migrated.name} has rows", "run of `migrate`"),
    FeatureName.AUDIT: (f"{audit_records.name} has rows", "service with Audit(table=True)"),
}


def report_unlisted(problems: Problems, features: Collection[str]) -> None:
    """Report that rows need *features* which the feature list lacked.

    A feature is added before the first row that needs it, so somebody has replayed an older list.
    With that list, a release that does not know the feature would use the database.
    """
    for feature, (evidence, next_writer) in _EVIDENCE.items():
        if feature in features:
            detail = (
                f"{evidence}, and the feature '{feature}' is not listed: an older list was "
                f"replayed; the next {next_writer} adds the feature"
            )
            problems.add(meta.TABLE, meta.FEATURES, Reason.MISMATCH, detail)


async def find_orphans(db: Database, *tables: sa.Table) -> AsyncIterator[tuple[str, str, int]]:
    """Yield (table, primary key, number) for the orphaned rows of *tables*.

    All events of one session are one tuple.
    """
    read = db.runner.data_db.read
    for key, query in _ORPHAN_QUERIES.items():
        if key.table in tables:
            # The events of a session are many, so divide them by the ids of sessions.
            walked = sessions.c.id if key.name == "session_row" else key
            async for row_range in row_ranges(read, walked, db.limits.ids_per_statement):
                for row, number in await row_range.read(read, query, key):
                    yield key.table.name, key_text(row), number


async def reject_orphans(db: Database) -> None:
    """Raise TamperedError if a row belongs to no session, collection, user or app."""
    async for table, row, _ in find_orphans(db, users, sessions, snapshots, events, witnesses):
        detail = (
            "the row that it belongs to was removed: restore that row, or delete this one; "
            "`verify` lists all such rows"
        )
        raise TamperedError(detail, Reason.MISSING, table, row)


def _refers_to_none(
    column: sa.Column[Any], *owners: sa.Column[Any]
) -> list[sa.ColumnElement[bool]]:
    """Return the SQL conditions that the value of *column* is in none of the columns *owners*."""
    return [~sa.select(_ONE).where(column == owner).exists() for owner in owners]


def index_orphan_conditions(app_tag: bytes | None = None) -> list[sa.ColumnElement[bool]]:
    """Return the SQL conditions for rows of the index whose session or user does not exist.

    If *app_tag* is given, only sessions and users of this app count.  A collection never counts.
    """
    minus_one: sa.ColumnElement[int] = sa.literal_column("-1", sa.BigInteger)
    zero: sa.ColumnElement[int] = sa.literal_column("0")
    row = state_index.c.row_id
    session_query = sa.select(_ONE).where(sessions.c.id == row, ~IS_COLLECTION)
    user_query = sa.select(_ONE).where(users.c.id == minus_one - row)
    if app_tag is not None:
        app = sa.select(apps.c.id).where(apps.c.tag == app_tag)
        user_query = user_query.where(users.c.app_row.in_(app))
        session_query = session_query.where(
            users.c.id == sessions.c.user_row, users.c.app_row.in_(app)
        )
    session, user = (query.correlate(state_index).exists() for query in (session_query, user_query))
    is_mark = row == sa.literal_column(str(INDEX_MARK))
    return [~is_mark, sa.or_(row < zero, ~session), sa.or_(row >= zero, ~user)]


# The conditions for orphaned rows, by the primary key of the table.
_ORPHAN_CONDITIONS = {
    users.c.id: _refers_to_none(users.c.app_row, apps.c.id),
    sessions.c.id: _refers_to_none(sessions.c.user_row, users.c.id),
    snapshots.c.session_row: _refers_to_none(snapshots.c.session_row, sessions.c.id),
    events.c.session_row: _refers_to_none(events.c.session_row, sessions.c.id),
    witnesses.c.tag: _refers_to_none(witnesses.c.tag, apps.c.tag, users.c.tag, sessions.c.tag),
    state_index.c.row_id: index_orphan_conditions(),
}
_ORPHAN_QUERIES = {
    key: sa.select(key, sa.func.count()).where(*where).group_by(key)
    for key, where in _ORPHAN_CONDITIONS.items()
}
