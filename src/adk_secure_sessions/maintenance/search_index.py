"""Fill the search index of state keys for sessions that are stored already, or delete it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa

from adk_secure_sessions.audit import add_facts, audited_command
from adk_secure_sessions.concurrency import in_groups
from adk_secure_sessions.db.protocol import Parameters
from adk_secure_sessions.errors import ConfigurationError, DecryptionError
from adk_secure_sessions.formats.json_text import USER_PREFIX
from adk_secure_sessions.maintenance.counts import estimate_rows
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.problems import Problem, Problems, index_orphan_conditions
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.maintenance.row_scan import read_owner, scan_owners, scan_sessions
from adk_secure_sessions.results import Result, counter, listing
from adk_secure_sessions.storage.features import index_rows
from adk_secure_sessions.storage.features.search_index import CorrectIndexRows
from adk_secure_sessions.storage.schema import Identity, sessions, state_index, users
from adk_secure_sessions.storage.table_walk import row_ranges

# How many sessions or users are compared at the same time.  On SQLite, one commit then stores the
# rows of several sessions.
_AT_ONCE = 8


@dataclass
class IndexChange(Result):
    """The result of `fill_index` and of `drop_index`.

    Attributes:
        sessions: How many sessions of the app were compared with the index.
        users: How many users of the app were compared with the index; 0 if no key begins with
            `user:`.
        written: How many rows of the index were missing or wrong, and are right now.
        removed: How many rows were deleted from the index: by `fill_index`, those of deleted
            sessions and users; by `drop_index`, all rows of the keys.
        bad: How many sessions and users cannot be decrypted.  They are not in the index.
        problems: The first 1000 of the rows that prevent decrypting them.
        complete: Whether `find_sessions` can find sessions by the keys.  False if there are bad
            rows, unless *skip_unreadable* was True.
    """

    sessions: int = counter("session", "compared with the search index")
    users: int = counter("user", "compared with the search index")
    written: int = counter("row", "written to the search index")
    removed: int = counter("row", "deleted from the search index", shows_zero=True)
    bad: int = counter("session or user row", "cannot be decrypted, and not in the search index")
    problems: tuple[Problem, ...] = listing()
    complete: bool = False

    @property
    def succeeded(self) -> bool:
        return self.complete or not self.bad

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        if self.complete and not (self.sessions or self.bad):
            yield "the app has no session: check its name"
        if self.complete:
            yield "find_sessions can find sessions by these keys"
        elif self.bad:
            yield (
                "next: run `verify`, restore or delete the rows that it names, and run this again; "
                "or run this with --skip-unreadable"
            )


@audited_command
async def fill_index(
    db: Database,
    app_name: str,
    keys: Sequence[str],
    *,
    skip_unreadable: bool = False,
    progress: Progress | None = None,
    rows_per_second: float | None = None,
) -> IndexChange:
    """Store the missing rows of the search index, and then allow searches.

    All services that write to the database must have been restarted with these keys in
    `indexed_state_keys` before.  Services can keep writing.  The call can be repeated: rows that
    are right are not written again.

    Args:
        app_name: The app whose sessions are indexed.
        keys: Keys of the state.  A key that begins with `user:` is a key of the state of users.
        skip_unreadable: Allow searches even if sessions or users cannot be decrypted.  If they can
            be decrypted later, for example after a restore, they are not found until `fill_index`
            is called again.
        progress: Counts sessions and, if a key begins with `user:`, users.

    Raises:
        ConfigurationError: A key cannot be indexed.
    """
    _require_keys(keys)
    add_facts(app=app_name)
    tags = await db.search_index.declare(app_name, keys)
    of_users = any(key.startswith(USER_PREFIX) for key in keys)
    total = await estimate_rows(db, sessions, *([users] if of_users else []))
    meter = Meter(progress, total, rows_per_second)
    problems, result = Problems(), IndexChange()

    async def correct(table: sa.Table, row: Any) -> None:
        try:
            identity = await _identity(db, app_name, table, row)
            if identity is not None:
                operation = CorrectIndexRows(identity, tags, of_user=table is users)
                # Other tasks add to the counters meanwhile, so read them after the await.
                written = await db.runner.run(operation)
                result.written += written
                result.users += table is users
                result.sessions += table is sessions
        except DecryptionError as error:
            problems.add_error(error, table.name, row.id)
            result.bad += 1
        await meter.advance()

    if of_users:
        async for owners in scan_owners(db, users):
            await in_groups(_AT_ONCE, partial(correct, users), owners)
    async for page in scan_sessions(db):
        await in_groups(_AT_ONCE, partial(correct, sessions), page)
    result.problems = tuple(problems.first)
    result.complete = skip_unreadable or not problems.count
    if result.complete:  # otherwise, a row without a session may be that of a session with a bad id
        app_tag = (await db.runner.identify(app_name)).app_tag
        result.removed = await _delete_rows(db, tags, *index_orphan_conditions(app_tag))
        await db.runner.data_db.run_sync(partial(index_rows.complete, await db.keyring(), tags))
    meter.finish()
    return result


@audited_command
async def drop_index(db: Database, app_name: str, keys: Sequence[str]) -> IndexChange:
    """Delete the rows of the search index of some keys of an app; searches by them then fail.

    Restart all services without these keys in `indexed_state_keys` before.  A service that was not
    restarted stores rows again.

    Raises:
        ConfigurationError: A key cannot be indexed.
    """
    _require_keys(keys)
    add_facts(app=app_name)
    index_master = (await db.keyring()).index_master
    if state_index.name not in (await db.survey_existing()).tables:
        return IndexChange()
    tags = {index_master.state_key_tag(app_name, key) for key in keys}
    # Without its mark, a key cannot be searched, even if this process stops before the end.
    await db.runner.data_db.run_sync(partial(index_rows.withdraw, tags))
    return IndexChange(removed=await _delete_rows(db, tags))


def _require_keys(keys: object) -> None:
    if isinstance(keys, str) or not isinstance(keys, Sequence) or not keys:
        raise ConfigurationError("keys must be a list of one or more keys of the state")
    for key in keys:
        index_rows.check_state_key(key)


async def _identity(db: Database, app_name: str, table: sa.Table, row: Any) -> Identity | None:
    """Return the identity of a user or session of the app; None for others and collections."""
    if table is sessions:
        ids = row.require_ids()
        is_wanted = ids.app_name == app_name and not row.row.is_collection
        return await db.runner.identify(*ids) if is_wanted else None
    decrypted_owner = await read_owner(db, users, row)
    if decrypted_owner is None or decrypted_owner.app_name != app_name:
        return None  # the user is one of another app, or was deleted
    return await db.runner.identify(app_name, decrypted_owner.owner.user_id)


async def _delete_rows(db: Database, tags: Iterable[bytes], *where: sa.ColumnElement[bool]) -> int:
    """Delete the index rows of the keys *tags* for which *where* is true; return their number."""
    deleted = 0
    query = sa.delete(state_index).where(state_index.c.key_tag.in_(sorted(tags)), *where)
    async for row_range in row_ranges(
        db.runner.data_db.read, state_index.c.row_id, db.limits.ids_per_statement
    ):
        within = query.where(*row_range.conditions(state_index.c.row_id))
        deleted += await db.runner.data_db.run_sync(
            partial(_rows_changed, within, row_range.parameters)
        )
    return deleted


def _rows_changed(query: sa.Delete, parameters: Parameters, connection: sa.Connection) -> int:
    return connection.execute(query, parameters).rowcount
