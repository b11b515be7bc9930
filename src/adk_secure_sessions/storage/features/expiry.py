"""Expiry without a command: each new session deletes at most two sessions that have expired."""

import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import sqlalchemy as sa

from adk_secure_sessions import telemetry
from adk_secure_sessions.audit import record_rejected
from adk_secure_sessions.db.dialects import already_exists, dialect_of
from adk_secure_sessions.errors import ConfigurationError, DecryptionError, SecureSessionError
from adk_secure_sessions.formats.records import decode_text
from adk_secure_sessions.formats.times import time_now
from adk_secure_sessions.storage.feature_list import Feature
from adk_secure_sessions.storage.operation_runner import Attempt, OperationRunner
from adk_secure_sessions.storage.queries import HAS_EXPIRED, first_rows, session_page
from adk_secure_sessions.storage.reads import Listing
from adk_secure_sessions.storage.schema import Identity, SessionWithStates, apps, sessions, users
from adk_secure_sessions.storage.survey import FeatureName

logger: logging.Logger = logging.getLogger(__name__)

Delete = Callable[[str, str, str], Awaitable[object]]

INDEX = "ix_secure_sessions_expires_at"
_CREATE_INDEX = f"CREATE INDEX {INDEX} ON {sessions.name} (expires_at)"
_MAX_DELETED = 2
# Read ten, because an attacker may have modified the earliest rows.  If none can be decrypted,
# pause for 60 s, because each try logs them all; also if the index could not be created in time,
# because writes wait for that.
_MAX_READ, _PAUSE = 10, 60


@functools.cache
def _apps_of_expired() -> sa.Select[Any]:
    # The names of the apps are authenticated when their sessions are decrypted.
    names: sa.Select[Any] = sa.select(apps.c.app_name).select_from(sessions)
    names = names.join(users, users.c.id == sessions.c.user_row)
    names = names.join(apps, apps.c.id == users.c.app_row)
    names = names.where(HAS_EXPIRED).order_by(sessions.c.expires_at)
    return first_rows(names, sa.bindparam("limit", type_=sa.BigInteger))


class Expiry:
    """Adds the feature of sessions that may expire, and deletes expired ones.

    Without the index on `expires_at`, nothing is deleted: the search would read all sessions.  If
    the index is missing, it is created, unless the runner creates no tables.
    """

    def __init__(self, runner: OperationRunner) -> None:
        self._runner = runner
        self.feature: Feature = Feature(runner, FeatureName.EXPIRY)
        self._has_index = False
        self._paused_until = 0.0  # monotonic seconds

    async def delete_some(self, delete: Delete) -> None:
        """Call *delete* with the ids of at most two expired sessions.

        An error is logged and counted: a session that is created later tries again.
        """
        try:
            if time.monotonic() < self._paused_until:
                return
            await self._ensure_index()
            now = time_now()
            rows = await self._runner.data_db.read(
                _apps_of_expired(), {"now": now, "limit": _MAX_READ}
            )
            expired = [one for (name,) in set(rows) for one in await self._read_expired(name, now)]
            for app_name, one in expired[:_MAX_DELETED]:
                await delete(app_name, one.user_id, one.session.session_id)
            if rows and not expired:
                self._paused_until = time.monotonic() + _PAUSE
        except Exception as error:  # the new session is stored: its call must not fail
            telemetry.count_retry("expiry")
            text = error if isinstance(error, SecureSessionError) else type(error).__name__
            logger.warning("expired sessions were not deleted: %s", text)

    async def _ensure_index(self) -> None:
        if not self._has_index:
            try:
                await self._runner.data_db.run_sync(self._create_missing_index)
            except SecureSessionError as error:
                # Perhaps the account may not create indexes.
                self._paused_until = time.monotonic() + (_PAUSE if error.retryable else math.inf)
                if not error.retryable:
                    error = ConfigurationError(f"run `{_CREATE_INDEX}` and restart: {error}")
                raise error from None
            self._has_index = True

    def _create_missing_index(self, connection: sa.Connection) -> None:
        with dialect_of(connection).exclusively(connection):
            indexes = sa.inspect(connection).get_indexes(sessions.name)
            if any(one["name"] == INDEX for one in indexes):
                return
            if not self._runner.creates_tables:
                raise ConfigurationError("create_tables is False")
            try:
                connection.exec_driver_sql(_CREATE_INDEX)
            except sa.exc.DBAPIError as error:
                # On a cluster, `exclusively` holds no lock: another process may have created it.
                if not already_exists(error):
                    raise
                connection.rollback()

    async def _read_expired(self, name: object, now: int) -> list[tuple[str, SessionWithStates]]:
        """Return the expired sessions of an app that can be decrypted, and the app's name."""
        try:
            app_name = decode_text(name)
            identity = await self._runner.identify(app_name)
            listing = _ListExpired(identity, now)
            return [(app_name, one) for one in await self._runner.run(listing)]
        except DecryptionError as error:
            record_rejected(error)
            return []


class _ListExpired(Listing[list[SessionWithStates]]):
    """Read some sessions of an app that have expired, and leave out unreadable ones."""

    lists_expired = True

    def __init__(self, identity: Identity, now: int) -> None:
        super().__init__(identity, of_app=True, skips_unreadable=True)
        self._now = now

    async def execute(self, attempt: Attempt) -> list[SessionWithStates]:
        query = session_page(of_app=True, newest=False, with_snapshots=False, found_by="expiry")
        start = {"after_user": -1, "after_row": -1}
        rows = await attempt.read(query, now=self._now, limit=_MAX_READ, **start)
        return await self._open_sessions(attempt, rows)
