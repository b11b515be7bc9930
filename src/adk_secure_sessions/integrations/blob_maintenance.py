"""Find missing blobs of artifacts, and delete unused blobs.

A blob is the encrypted content of one version of an artifact, in a directory or a bucket.

The database may be a copy, or a backup that was restored, and the store may be that of the
original.  Nothing in the database or the store tells them apart.  Therefore nothing deletes a blob
that a row may have named: deletions only *mark* it in the store, for `purge_blobs`.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

from adk_secure_sessions.audit import audited_command
from adk_secure_sessions.errors import ConfigurationError, DecryptionError, Reason, TamperedError
from adk_secure_sessions.formats.blobs import encrypted_size
from adk_secure_sessions.integrations.artifact_store import AnyStore, ArtifactStore, as_store
from adk_secure_sessions.integrations.artifact_versions import Version, parse_name, versions_of
from adk_secure_sessions.integrations.blob_store import Blob, BlobStore
from adk_secure_sessions.maintenance import Database, Problem
from adk_secure_sessions.maintenance.problems import Problems, reject_orphans
from adk_secure_sessions.maintenance.row_scan import SessionIds, scan_sessions, sessions_in_rows
from adk_secure_sessions.results import Result, counter, listing
from adk_secure_sessions.storage.features.collections import Collection, Collections
from adk_secure_sessions.storage.schema import events, sessions

_COPY = (
    "another copy of this database has marked them: run `separate` on the copy, which may be this "
    "database"
)


@dataclass
class BlobCheck(Result):
    """The result of `check_blobs`.

    Attributes:
        artifacts: The number of artifacts.
        blobs: The number of blobs that versions of artifacts name.
        missing: The number of named blobs that are not stored, or have a wrong length.
        marked: The number of named blobs that are marked as deleted: another copy of the database
            deletes in this store.
        unused: The number of stored blobs that no version names.
        bad: The number of problems: missing and marked blobs, and undecryptable rows.
        problems: The first 1000 problems.
    """

    success_line = "no blob is missing"

    artifacts: int = counter("artifact", "checked", shows_zero=True)
    blobs: int = counter("blob", "checked", shows_zero=True)
    missing: int = counter("blob", "missing, or of another length")
    marked: int = counter("blob", "marked as deleted", hint=_COPY)
    unused: int = counter(
        "blob", "named by no artifact", hint="`purge blobs` marks and later deletes them"
    )
    bad: int = counter("row", "bad", is_failure=True)
    problems: tuple[Problem, ...] = listing("bad")


@dataclass
class BlobPurge(Result):
    """The result of `purge_blobs`.

    Attributes:
        deleted: The number of deleted blobs; in a dry run, of blobs that would be deleted.
        marked: The number of unused blobs whose mark is not old enough yet, and of unused blobs
            that this run has marked; in a dry run, that it would mark.
        withdrawn: The number of blobs that versions of artifacts name, and whose mark this run has
            withdrawn; in a dry run, would withdraw.  If this is not 0, another copy of the
            database deletes in this store, and this run has marked and deleted nothing.
        kept: The number of blobs that versions of artifacts name.
        bad: The number of rows that cannot be decrypted.  If this is not 0, nothing was marked or
            deleted.
        problems: The first 1000 rows that cannot be decrypted.
    """

    deleted: int = counter("blob", "deleted", shows_zero=True, is_change=True)
    marked: int = counter("blob", "marked, and deleted later", shows_zero=True, is_change=True)
    withdrawn: int = counter(
        "mark",
        "withdrawn, because artifacts name the blobs",
        hint=_COPY,
        is_change=True,
        is_failure=True,
    )
    kept: int = counter("blob", "named by artifacts", shows_zero=True)
    bad: int = counter(
        "row", "cannot be decrypted", hint="nothing is deleted; run `verify`", is_failure=True
    )
    problems: tuple[Problem, ...] = listing("bad")


@audited_command
async def check_blobs(db: Database, store: AnyStore) -> BlobCheck:
    """Find blobs that are missing or have a wrong length, and blobs that no artifact names.

    This function does not read the contents of blobs, so it does not detect modified contents.
    Loading an artifact detects them.

    Args:
        store: The store of the contents: a path, or an `ArtifactStore`.

    Raises:
        ConfigurationError: The store or the database cannot be used.
        ArtifactStoreError: The store failed.
    """
    store = as_store(store)
    blobs = await blobs_of_database(db, store)
    stored = await blobs.stored_blobs()
    marks = await blobs.marks()  # before the rows: a row is deleted before its blob is marked
    problems = Problems()
    result = BlobCheck()
    named: set[str] = set()
    async for _, collection, versions in artifacts_of(db, problems):
        result.artifacts += 1
        for version in versions:
            blob = version.blob
            if blob is None:
                continue
            named.add(blob.name)
            row = f"{collection.version.session_row_id}, {version.item_number}"
            found = stored.get(blob.name) if blob.prefix == blobs.prefix else None
            if problem := await storage_error(store, blob, found and found.size):
                result.missing += 1
                problems.add_error(problem.about(f"its blob {blob.name}"), events.name, row)
            elif blob.name in marks:
                result.marked += 1
                detail = "its blob is marked as deleted, by another copy of this database"
                problems.add(events.name, row, Reason.MISMATCH, detail)
    result.blobs, result.unused = len(named), len(stored.keys() - named)
    return problems.copy_into(result)


async def storage_error(
    store: ArtifactStore, blob: Blob, size: int | None = None
) -> TamperedError | None:
    """Return an error if *blob* is missing or has another length.

    *size* is that of the listed blob; None if it was not listed, but may have been stored since.
    """
    if size is None:
        size = await store.blobs(blob.prefix).size(blob.name)
    if size == encrypted_size(blob.size):
        return None
    if size:
        return TamperedError("it has another length", Reason.MISMATCH)
    return TamperedError("it is missing", Reason.MISSING)


# Blobs that were written less than this time ago are not marked: an upload stores a blob before
# the row that names the blob.
_MAX_UPLOAD_TIME = timedelta(days=1)
_MIN_AGE = timedelta(hours=48)


@audited_command
async def purge_blobs(
    db: Database,
    store: AnyStore,
    *,
    older_than: timedelta = timedelta(days=30),
    dry_run: bool = False,
) -> BlobPurge:
    """Delete blobs that no version of an artifact names, and that were marked long enough ago.

    Such blobs are left by erased users, deleted artifacts, re-encryptions and interrupted uploads.
    A run does these steps:

    1. It withdraws the marks of blobs that the rows name.  If there was such a mark, another copy
       of the database, or a backup that was restored, uses this store: the run ends.
    2. If a row cannot be decrypted, or is orphaned, the run ends, because the row may name any
       blob.
    3. It marks the blobs that no row names.  Exception: blobs that were written in the last 24
       hours, because their rows may not be stored yet.
    4. It deletes the unused blobs that were marked longer than *older_than* ago.

    The times of blobs and marks are those of the store's clock, and are compared with the time of
    the same clock.  So a wrong clock of this machine has no effect.  A dry run writes nothing, so
    it cannot read the store's clock, and uses that of this machine.

    Args:
        store: The store of the contents: a path, or an `ArtifactStore`.
        older_than: The minimum age of a mark, at least 48 hours.  It must be longer than the time
            between two runs on each database that uses this store, and longer than the age of the
            oldest backup that you would restore.

    Raises:
        ConfigurationError: The store or the database cannot be used, or *older_than* is too short.
        ArtifactStoreError: The store failed.
        TamperedError: A row is orphaned; nothing was marked or deleted.
    """
    if older_than < _MIN_AGE:
        raise ConfigurationError("only blobs older than 48 hours can be deleted")
    blobs = await blobs_of_database(db, as_store(store))
    # Read the store before the rows: a blob whose row is added in the meantime is kept, and the
    # mark of a blob whose row is deleted in the meantime is not withdrawn.
    stored = await blobs.stored_blobs()
    if dry_run:
        marks, now = await blobs.marks(), time.time()
    else:
        marks, now = await blobs.marks_and_time()
    problems = Problems()
    named = {
        version.blob.name
        async for *_, versions in artifacts_of(db, problems)
        for version in versions
        if version.blob is not None
    }
    withdrawn = marks.keys() & named
    if not dry_run:
        for name in withdrawn:
            await blobs.unmark(name)
    result = problems.copy_into(BlobPurge(withdrawn=len(withdrawn), kept=len(named)))
    if withdrawn or problems.count:
        return result
    await reject_orphans(db)
    # Read the marks again: reading the rows may have taken hours, and a run on another copy of the
    # database may have withdrawn marks since.
    marked_at = await blobs.marks()
    marked_before = now - older_than.total_seconds()
    marked_twice = marks.keys() & marked_at.keys()
    to_delete = [name for name in marked_twice if marked_at[name] < marked_before]
    stored_before = now - _MAX_UPLOAD_TIME.total_seconds()
    unmarked = stored.keys() - named - marks.keys()
    to_mark = [name for name in unmarked if stored[name].modified < stored_before]
    if not dry_run:
        for name in to_mark:
            await blobs.mark(name)
        for name in to_delete:
            if name in stored:  # otherwise, the blob was deleted by a run that was killed here
                await blobs.delete(name)
            await blobs.unmark(name)
    result.deleted = len(stored.keys() & to_delete)
    result.marked = len(stored.keys() & marks.keys()) - result.deleted + len(to_mark)
    return result


async def blobs_of_database(db: Database, store: ArtifactStore) -> BlobStore:
    """Open the part of *store* that contains the blobs of *db*."""
    store.prepare(create=False)
    return store.blobs((await db.keyring()).database_id.hex())


async def artifacts_of(
    db: Database, problems: Problems
) -> AsyncIterator[tuple[SessionIds, Collection, list[Version]]]:
    """Yield the ids, the items and the versions of each artifact.

    Add all rows that cannot be decrypted to *problems*: they may belong to artifacts.
    """
    collections = Collections(db.runner)
    async for page in scan_sessions(db):
        for stored in page:
            try:
                ids = stored.require_ids()
                if not stored.row.is_collection or parse_name(ids.session_id) is None:
                    continue
                collection = await collections.get(ids)
                if collection is None:
                    continue
                # If the tag of the stored row was modified, `get` may have found another row.  But
                # it is no error if the stored row was deleted and another row was created.
                is_other = collection.version.session_row_id != stored.id
                if is_other and await sessions_in_rows(db, [stored.id]):
                    raise TamperedError("its tag was modified", Reason.WRONG_OWNER)
                versions = versions_of(collection)
            except DecryptionError as error:
                problems.add_error(error, sessions.name, stored.id)
            else:
                yield ids, collection, versions
