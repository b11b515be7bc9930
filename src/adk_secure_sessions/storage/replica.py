"""Reads from a replica of the data database: whether its rows are new enough, and its failures.

A replica lags behind the primary server.  `KnownRows` contains the versions of the rows that this
process has read or written.  If the replica has an older version of such a row, or does not have
the row, the read raises `Behind`, and `UnitOfWork.run_read` repeats the read on the primary.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from adk_secure_sessions import audit, telemetry
from adk_secure_sessions.db.protocol import Executor
from adk_secure_sessions.errors import DecryptionError
from adk_secure_sessions.lru import Lru

logger: logging.Logger = logging.getLogger(__name__)

_LEAST_KNOWN = 16_384  # the number of known rows, even if the row cache is small
# Seconds for which a replica is not used after it has failed.  Without this pause, each read would
# first wait for a replica that does not answer.
_PAUSE = 10.0
_LOG_INTERVAL = 60.0  # seconds between two messages of the same kind


class Behind(Exception):
    """The replica does not have what this process knows, so the primary must be asked.

    Attributes:
        is_missing: Whether the replica does not have a row at all.
    """

    def __init__(self, *, is_missing: bool = False) -> None:
        super().__init__("the replica is behind")
        self.is_missing: bool = is_missing


class KnownRow(NamedTuple):
    """The version of a row that this process has read or written.

    Attributes:
        id: The row id.
        version: The version of an app or a user, or the revision of a session.
        parent: The row id of a session's user, or of a user's app; 0 for an app.
        time: `KnownRows.time` when this process has read or written the row.
        is_deleted: Whether the row was deleted afterwards.
    """

    id: int
    version: int
    parent: int
    time: int
    is_deleted: bool = False


class KnownRows:
    """The versions of the rows of apps, users and sessions that this process knows, by tag.

    They contain neither keys nor plaintext.  Therefore they are kept when the caches are emptied.
    """

    def __init__(self, limit: int) -> None:
        self._rows: Lru[bytes, KnownRow] = Lru(max(limit, _LEAST_KNOWN))
        self.time: int = 0  # a counter, like `RowCache.time`

    def get(self, tag: bytes) -> KnownRow | None:
        return self._rows.get(tag)

    def children(self, parents: Collection[int]) -> dict[bytes, KnownRow]:
        """Return the known rows, by tag, whose `parent` is one of *parents*."""
        return {
            tag: row
            for tag, row in self._rows.items()
            if row.parent in parents and not row.is_deleted
        }

    def learn(self, tag: bytes, row_id: int, version: int, parent: int, began: int) -> None:
        """Store that a read of the primary or the replica, which began at *began*, found the row.

        A newer version that this process has learned since then is kept.
        """
        known = self._rows.get(tag)
        if known is not None and known.time > began:
            is_newer = known.id == row_id and known.version < version
            if known.is_deleted or not is_newer:
                return
        self._put(tag, row_id, version, parent)

    def wrote(self, tag: bytes, row_id: int, version: int, parent: int) -> None:
        """Store that this process has written the row."""
        known = self._rows.get(tag)
        if known is None or known.id != row_id or known.version <= version:
            self._put(tag, row_id, version, parent)

    def deleted(self, tag: bytes) -> None:
        """Store that the row of *tag*, if this process knows one, was deleted."""
        if (known := self._rows.get(tag)) is not None:
            self.time += 1
            self._rows.put(tag, known._replace(time=self.time, is_deleted=True))

    def _put(self, tag: bytes, row_id: int, version: int, parent: int) -> None:
        self.time += 1
        self._rows.put(tag, KnownRow(row_id, version, parent, self.time))


class AtLeast(NamedTuple):
    """The oldest state of a session that a caller accepts from a replica."""

    tag: bytes
    row_id: int
    revision: int


class Freshness:
    """Compares the rows that one attempt reads with the rows that this process knows.

    An attempt on the replica raises `Behind` if it finds an older row or no row.  An attempt on the
    primary finds the truth, and changes *known*.

    Args:
        known: The rows that this process knows.
        on_replica: Whether the attempt reads from the replica.
        at_least: What the caller knows, in addition to *known*.
    """

    __slots__ = ("_at_least", "_began", "_known", "on_replica")

    def __init__(
        self, known: KnownRows, *, on_replica: bool, at_least: AtLeast | None = None
    ) -> None:
        self._known = known
        self._began = known.time
        self._at_least = at_least
        self.on_replica: bool = on_replica

    def met(self, tag: bytes, row_id: int, version: int, parent: int) -> None:
        """Check a row that was read, and whose record is authentic.

        Raises:
            Behind: The row is on the replica, and this process knows a newer row.
        """
        if not self.on_replica:
            self._known.learn(tag, row_id, version, parent, self._began)
            return
        wanted = self._at_least
        if wanted is not None and wanted.tag == tag:
            is_as_new = row_id == wanted.row_id and version >= wanted.revision
            if not is_as_new:
                raise Behind
        known = self._known.get(tag)
        # If the row ids differ, one of the two rows was deleted, and only the primary knows which.
        if known is None:
            self._known.learn(tag, row_id, version, parent, self._began)
        elif known.is_deleted or known.id != row_id or known.version > version:
            raise Behind
        elif known.version < version:
            self._known.learn(tag, row_id, version, parent, self._began)

    def missing(self, tag: bytes) -> None:
        """Handle that no row with *tag* is stored.

        Raises:
            Behind: The attempt reads from the replica.
        """
        if self.on_replica:
            raise Behind(is_missing=True)
        self._forget(tag)

    def listed(
        self,
        parents: Collection[int],
        tags: Collection[bytes],
        is_in_range: Callable[[KnownRow], bool] = lambda row: True,
    ) -> None:
        """Check that a listing contains all rows that this process knows.

        Args:
            parents: The row ids of the users whose sessions were listed, or of the listed app.
            tags: The tags of the rows that were found.
            is_in_range: Whether the listing would contain a row.

        Raises:
            Behind: A known row is missing on the replica.
        """
        for tag, row in self._known.children(parents).items():
            if tag not in tags and is_in_range(row):
                if self.on_replica:
                    raise Behind(is_missing=True)
                self._forget(tag)

    def known_ids(self, parent: int) -> set[int]:
        """Return the ids of the known rows whose `parent` is *parent*."""
        return {row.id for row in self._known.children([parent]).values()}

    def _forget(self, tag: bytes) -> None:
        known = self._known.get(tag)
        if known is not None and known.time <= self._began:
            self._known.deleted(tag)


class Replica:
    """The state of the replica: whether it can be used at the moment.

    Attributes:
        executor: Runs queries on the replica.
        is_checked: Whether the replica is known to be a copy of the primary's database.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor: Executor = executor
        self.is_checked: bool = False
        self._retry_at = 0.0  # after a failure
        self._not_before = 0.0  # see `pause`
        self._log_at: dict[str, float] = {}

    def is_due(self) -> bool:
        """Return whether to ask the replica.

        After a failure and a pause, only one read asks it.  The other reads ask it again when that
        read has succeeded.
        """
        now = time.monotonic()
        if now < max(self._retry_at, self._not_before):
            telemetry.count_replica_read("paused")
            return False
        if self._retry_at:
            self._retry_at = now + _PAUSE
        return True

    def pause(self, seconds: float) -> None:
        """Do not use the replica for *seconds*, even if it answers."""
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    def answered(self) -> None:
        """Count an answer of the replica that was used."""
        self._retry_at = 0.0
        telemetry.count_replica_read("answered")

    def was_behind(self, *, is_missing: bool) -> None:
        """Count an answer of the replica that was too old, or in which a row was missing."""
        self._retry_at = 0.0
        telemetry.count_replica_read("missing" if is_missing else "behind")

    def was_rejected(self, error: DecryptionError) -> None:
        """Count and log a row of the replica that was rejected; the primary has another row."""
        self._retry_at = 0.0
        telemetry.count_replica_read("rejected")
        audit.record_rejected(error, on_replica=True)
        if self._may_log("rejected"):
            logger.error(
                "the replica returned a row that is rejected, and the primary did not: %s", error
            )

    def conflicted(self) -> None:
        """Count a query that the replica has cancelled, because it had to replay a change."""
        telemetry.count_replica_read("failed")

    def failed(self, error: Exception) -> None:
        """Count and log an error of the replica's database, and do not use it for a while."""
        self._retry_at = time.monotonic() + _PAUSE
        telemetry.count_replica_read("failed")
        if self._may_log("failed"):
            logger.warning("the replica cannot be used, reads go to the primary: %s", error)

    def is_another_database(self) -> None:
        """Log that the replica contains another database, and do not use it for a while."""
        self._retry_at = time.monotonic() + _LOG_INTERVAL
        telemetry.count_replica_read("failed")
        if self._may_log("other"):
            logger.error(
                "the replica is no copy of the database, reads go to the primary: correct "
                "read_db_url"
            )

    def _may_log(self, kind: str) -> bool:
        """Return True at most once in `_LOG_INTERVAL` for each kind of message."""
        now = time.monotonic()
        if now < self._log_at.get(kind, 0.0):
            return False
        self._log_at[kind] = now + _LOG_INTERVAL
        return True
