"""Decrypt every record, check that rows belong together, and report bad and orphaned rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from adk_secure_sessions.audit import audited_command
from adk_secure_sessions.errors import DecryptionError, Reason, WrongKeyError
from adk_secure_sessions.formats import memory_items
from adk_secure_sessions.formats.json_text import load_state, read_event
from adk_secure_sessions.formats.memory_items import MemoryItem
from adk_secure_sessions.formats.records import decode_text
from adk_secure_sessions.formats.times import time_now
from adk_secure_sessions.keys.blind_index import IndexMaster
from adk_secure_sessions.keys.data_keys import DataKeyRow, unwrap_data_key
from adk_secure_sessions.maintenance.counts import can_unwrap, estimate_rows
from adk_secure_sessions.maintenance.database import Database
from adk_secure_sessions.maintenance.problems import (
    Problem,
    Problems,
    find_orphans,
    report_unlisted,
)
from adk_secure_sessions.maintenance.progress import Meter, Progress
from adk_secure_sessions.maintenance.row_scan import (
    OwnerRow,
    ScannedSession,
    flattened,
    read_owner,
    scan_data_keys,
    scan_owners,
    scan_sessions,
)
from adk_secure_sessions.results import Result, counter, listing
from adk_secure_sessions.storage import key_operations, meta
from adk_secure_sessions.storage.features import index_rows
from adk_secure_sessions.storage.features.search_index import CheckIndexRows
from adk_secure_sessions.storage.schema import (
    Identity,
    MigratedRow,
    apps,
    data_keys,
    events,
    locating_errors,
    migrated,
    sessions,
    snapshots,
    state_index,
    users,
    witnesses,
)
from adk_secure_sessions.storage.survey import FeatureName
from adk_secure_sessions.storage.table_walk import pages, rows_where

# 10 minutes, in microseconds.  With a key database, a data key is stored before its owner's row.
# Therefore `verify` does not report a data key without an owner's row if it was created in the last
# 10 minutes or, because clocks differ, has a time of creation in the next 10 minutes.
_NEW_KEY_GRACE = 600_000_000
_WRONG_MARK = (
    "the mark of a key of the search index was tampered with: run `index fill` for each app and key"
)


@dataclass
class Verification(Result):
    """The result of `verify`.

    Attributes:
        apps: How many rows of apps were decrypted and are authentic.
        users: How many rows of users were decrypted and are authentic.
        sessions: How many sessions were decrypted and are authentic, each with its state, events
            and version witness.
        events: How many events these sessions have.
        collections: How many collections were decrypted and are authentic, each with its items and
            version witness.
        items: How many items these collections have.
        unchecked: How many users, sessions and collections could not be checked.  None of them can
            be checked if the name of their app was modified.  A session or a collection cannot be
            checked, either, if the row or a data key of its user is bad.
        bad: How many rows were tampered with, are orphaned (the session, user or app row that they
            belong to does not exist), or have missing or wrong rows in the search index.
        problems: The first 1000 bad rows.
    """

    success_line = "all rows are intact"

    apps: int = counter("app", "decrypted", shows_zero=True)
    users: int = counter("user", "decrypted", shows_zero=True)
    sessions: int = counter("session", "decrypted", shows_zero=True)
    events: int = counter("event", "decrypted", shows_zero=True)
    collections: int = counter("collection", "decrypted")
    items: int = counter("item", "decrypted")
    unchecked: int = counter("row", "not checked, because of bad rows", is_failure=True)
    bad: int = counter("row", "bad", is_failure=True)
    problems: tuple[Problem, ...] = listing("bad")


@audited_command
async def verify(
    db: Database, *, progress: Progress | None = None, rows_per_second: float | None = None
) -> Verification:
    """Decrypt every record, and check that no row was modified, moved, removed or added.

    A bad row is reported and left unchanged, and the check continues.  Services can keep writing,
    because one statement reads a whole session.  Memory must hold the events of one session at a
    time.  `verify` parses the JSON of states, events and items, but does not check that the
    installed google-adk can read the events.
    """
    index_master = (await db.keyring()).index_master
    tables = (await db.survey_existing()).tables
    imports = [migrated] if migrated.name in tables else []
    total = await estimate_rows(db, apps, users, sessions, events, data_keys, *imports)
    meter = Meter(progress, total, rows_per_second)
    run = _Verifier(db, index_master, meter)
    if state_index.name in tables:
        await run.check_marks()
    await run.check_owners()
    async for session in flattened(scan_sessions(db)):
        await run.check_session(session)
    if imports:
        await run.check_imports()
    listed = (await db.survey_existing()).features
    report_unlisted(run.problems, (run.needed_features - listed) | db.unlisted_features)
    await _report_orphans(db, run.problems, *([state_index] if state_index.name in tables else []))
    await _report_orphaned_data_keys(db, run.problems, meter)
    meter.finish()
    return run.problems.copy_into(run.result)


class _Verifier:
    """Checks and counts the rows of apps, users and sessions.

    Users and sessions are checked even if the row of their app is bad, but not if its name is.
    """

    def __init__(self, db: Database, index_master: IndexMaster, meter: Meter) -> None:
        self.result = Verification()
        self.problems = Problems()
        self._db = db
        self._index_master = index_master
        self._meter = meter
        self._misnamed_apps: set[int] = set()
        self.needed_features: set[str] = set()  # the features that rows need
        # The tags of the keys whose rows of the search index are complete.
        self._complete_index_tags: set[bytes] = set()

    async def check_marks(self) -> None:
        read = self._db.runner.data_db.read
        for tag, state in await index_rows.read_marks(read, self._index_master):
            self.needed_features.add(FeatureName.STATE_INDEX)
            if state is None:
                name = tag.hex() if isinstance(tag, bytes) else "?"
                self.problems.add(state_index.name, name, Reason.MISMATCH, _WRONG_MARK)
            elif state is index_rows.IndexState.COMPLETE:
                assert isinstance(tag, bytes)
                self._complete_index_tags.add(tag)

    async def _check_indexed(self, identity: Identity, *, of_user: bool) -> None:
        if not self._complete_index_tags:
            return
        check = CheckIndexRows(identity, self._complete_index_tags, of_user=of_user)
        checked = await self._db.runner.run(check)
        if checked is None or not checked[1].total:
            return
        # `index drop` deletes the mark of a key, and then its rows.
        marks = await index_rows.read_marks(self._db.runner.data_db.read, self._index_master)
        complete = {tag for tag, state in marks if state is index_rows.IndexState.COMPLETE}
        if not self._complete_index_tags <= complete:
            self._complete_index_tags &= complete
            await self._check_indexed(identity, of_user=of_user)
            return
        row_id, differences = checked
        numbers = {
            "missing": len(differences.missing),
            "wrong": len(differences.wrong),
            "not in the state": len(differences.surplus),
        }
        listed = ", ".join(f"{number} {what}" for what, number in numbers.items() if number)
        detail = f"rows of the search index: {listed}; `index fill` corrects them"
        self.problems.add(state_index.name, row_id, Reason.MISMATCH, detail)

    async def check_owners(self) -> None:
        for table in (apps, users):
            async for row in flattened(scan_owners(self._db, table)):
                await self._check_owner(table, row)
                await self._meter.advance()

    async def _check_owner(self, table: sa.Table, row: OwnerRow) -> None:
        try:
            decrypted_owner = await read_owner(self._db, table, row)
            if decrypted_owner is None:
                return  # it was deleted after *row* was read
            app_name, owner, _ = decrypted_owner
            load_state(owner.state)
            if table is users:
                identity = await self._db.runner.identify(app_name, owner.user_id)
                await self._check_indexed(identity, of_user=True)
                self.result.users += 1
            else:
                self.result.apps += 1
        except DecryptionError as error:
            if table is apps and not self._has_own_name(row):
                self._misnamed_apps.add(row.id)
            # If the name of a user's app was modified, that is the cause, and was reported.
            if table is users and row.app_row in self._misnamed_apps:
                self.result.unchecked += 1
                self.problems.ignore_row(users.name, row.id)
            else:
                self.problems.add_error(error, table.name, row.id)

    async def check_imports(self) -> None:
        macs = await self._db.imports.macs()
        size = self._db.limits.ids_per_statement
        query, key = _IMPORTED, migrated.c.tag
        async for rows in pages(self._db.runner.data_db.read, query, key, size, lambda *row: row):
            for *columns, version in rows:
                row = MigratedRow(*columns)
                self.needed_features.add(FeatureName.MIGRATION)
                with self.problems.collecting_errors(migrated.name, row.tag):
                    macs.check(row)
                    if isinstance(version, int) and version < row.number:
                        detail = (
                            f"the row that was imported has version {version} instead of "
                            f"{row.number} or a later one: an older row was replayed"
                        )
                        self.problems.add(migrated.name, row.tag.hex(), Reason.MISMATCH, detail)
            await self._meter.advance(len(rows))
        try:
            await self._db.imports.migration_mark()
        except WrongKeyError as error:
            self.problems.add(meta.TABLE, meta.MIGRATION_MARK, Reason.MISMATCH, str(error))

    def _has_own_name(self, row: OwnerRow) -> bool:
        """Return whether the tag of the app's row is the blind index of the app's name."""
        try:
            return self._index_master.tag_of(decode_text(row.stored_app_name)) == row.tag
        except DecryptionError:
            return False

    async def check_session(self, scanned: ScannedSession) -> None:
        rows = 1
        try:
            # Read the whole session in one statement, as a service does, so that its rows fit
            # together even if a service is writing.
            is_collection = scanned.row.is_collection
            identity = await self._db.runner.identify(*scanned.require_ids(), is_collection)
            is_memory = is_collection and identity.session_id == memory_items.COLLECTION_NAME

            def parse(
                plaintexts: list[bytes], session_row: int, seqs: Sequence[int]
            ) -> list[MemoryItem | None]:
                """Parse events or items; return the items of a memory."""
                parsed = []
                for plaintext, seq in zip(plaintexts, seqs, strict=True):
                    with locating_errors(events.name, f"{session_row}, {seq}"):
                        content = read_event(plaintext)[1]
                        parsed.append(memory_items.parse_item(content, seq) if is_memory else None)
                return parsed

            check = key_operations.ReadWholeSession(identity, parse, checks_owners=False)
            checked = await self._db.runner.run(check)
            if checked is not None:  # None: the session was deleted after its ids were read
                session, history, _ = checked
                with locating_errors(snapshots.name, session.row.id):
                    load_state(b"{}" if session.snapshot is None else session.snapshot)
                load_state(session.overlay)
                items = [item for item in history if item is not None]
                memory_items.check_replaced(items, 0, events.name, session.row.id)
                rows += len(history)
                if is_collection:
                    self.needed_features.add(FeatureName.COLLECTIONS)
                    self.result.collections += 1
                    self.result.items += len(history)
                else:
                    self.result.sessions += 1
                    self.result.events += len(history)
                    await self._check_indexed(identity, of_user=False)
        except DecryptionError as error:
            self.result.unchecked += self.problems.add_error(error, sessions.name, scanned.id)
        await self._meter.advance(rows)


# --- orphaned rows -------------------------------------------------------------------------------


async def _report_orphans(db: Database, problems: Problems, *feature_tables: sa.Table) -> None:
    async for table, row, number in find_orphans(db, snapshots, events, witnesses, *feature_tables):
        details = {
            snapshots.name: "it belongs to no session",
            events.name: f"{number} events belong to no session, or items to no collection",
            witnesses.name: "the app, user or session row that it confirms was removed",
            state_index.name: f"{number} rows of the search index belong to no session and no "
            "user: run `index fill`, or delete rows that it leaves",
        }
        problems.add(table, row, Reason.MISSING, details[table])


async def _report_orphaned_data_keys(db: Database, problems: Problems, meter: Meter) -> None:
    """Report data keys that cannot be unwrapped, and data keys without the row of their owner."""
    keyring = await db.keyring()
    detail = "its owner's row was removed"
    if db.runner.executors.has_key_database:
        detail += ", or a process ended before it could write that row"
    async for rows in scan_data_keys(db):
        bad = [row for row in rows if not can_unwrap(row, keyring)]
        if bad:  # or `rotate master` has wrapped them with a new data master meanwhile
            keyring = await db.reread_keyring()
        for row in bad:
            with problems.collecting_errors(data_keys.name, row.id):
                unwrap_data_key(row, keyring)
        owners = {row.owner for row in rows if isinstance(row.owner, bytes)}
        stored_tags = {
            tag
            for column, query in _OWNER_TAGS.items()
            for (tag,) in await rows_where(db.runner.data_db.read, query, column, owners)
        }
        lost = [row for row in rows if row.owner not in stored_tags and not _may_be_new(db, row)]
        # An erasure may have deleted the owner's row after the data keys were read here.  It has
        # then also deleted the data keys.  So report only data keys that still exist.
        stored_keys = await db.runner.read_data_keys_with_retries([row.owner for row in lost])
        stored_ids = {key.id for key in stored_keys.data_keys}
        for row in lost:
            if row.id in stored_ids or not isinstance(row.owner, bytes):
                problems.add(data_keys.name, row.id, Reason.MISSING, detail)
        await meter.advance(len(rows))


def _may_be_new(db: Database, row: DataKeyRow) -> bool:
    """Return whether a service may be about to write the row of the owner: see `_NEW_KEY_GRACE`."""
    if not db.runner.executors.has_key_database or not isinstance(row.created_at, int):
        return False
    return abs(time_now() - row.created_at) < _NEW_KEY_GRACE


# --- statements ----------------------------------------------------------------------------------


# The present revision or version of what was imported; NULL if it is not stored any more.
_PRESENT_VERSION = sa.func.coalesce(
    *(
        sa.select(version)
        .where(version.table.c.tag == migrated.c.tag, version.table.c.id == migrated.c.row_id)
        .correlate(migrated)
        .scalar_subquery()
        for version in (sessions.c.revision, users.c.version, apps.c.version)
    )
)
_IMPORTED = sa.select(*migrated.c, _PRESENT_VERSION)
_OWNER_TAGS = {tag: sa.select(tag) for tag in (apps.c.tag, users.c.tag)}
