"""Find missing blobs of artifacts, and delete unused blobs.

A blob is the encrypted content of one version of an artifact, in a directory or a bucket.
"""

import os
import time
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from adk_secure_sessions.audit import command
from adk_secure_sessions.errors import ConfigurationError, Reason, TamperedError
from adk_secure_sessions.formats.blobs import encrypted_size
from adk_secure_sessions.integrations.artifact_versions import is_artifact, versions_of
from adk_secure_sessions.integrations.object_store import BlobStore, open_store
from adk_secure_sessions.maintenance import Database, Problem
from adk_secure_sessions.maintenance.identities import SessionIds, located_sessions
from adk_secure_sessions.maintenance.problems import UNREADABLE, Problems
from adk_secure_sessions.storage import Collection, Collections, events, sessions

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class BlobCheck(NamedTuple):
    """The result of `check_blobs`.

    Attributes:
        artifacts: The number of artifacts.
        blobs: The number of blobs that versions of artifacts name.
        missing: The number of named blobs that are not stored, or have a wrong length.
        unused: The number of stored blobs that no version names.
        bad: The number of problems: missing blobs, and undecryptable rows.
        problems: The first 1000 problems.
    """

    artifacts: int
    blobs: int
    missing: int
    unused: int
    bad: int
    problems: tuple[Problem, ...]


class BlobPurge(NamedTuple):
    """The result of `purge_blobs`.

    Attributes:
        deleted: The number of deleted blobs; in a dry run, of blobs that would be deleted.
        kept: The number of blobs that versions of artifacts name.
        bad: The number of rows that cannot be decrypted.  If this is not 0, nothing was deleted.
        problems: The first 1000 rows that cannot be decrypted.
    """

    deleted: int
    kept: int
    bad: int
    problems: tuple[Problem, ...]


@command
async def check_blobs(
    db: Database,
    store: "str | os.PathLike[str] | ObjectStore",
    *,
    options: Mapping[str, Any] | None = None,
    allow_http: bool = False,
) -> BlobCheck:
    """Find blobs that are missing or have a wrong length, and blobs that no artifact names.

    This function does not read the contents of blobs, so it does not detect modified contents.
    Loading an artifact detects them.

    Args:
        db: The database, with every backend whose records it may hold.
        store: The store of the contents: see `EncryptedArtifactService`.
        options: Arguments of the store: see `object_store.open_store`.
        allow_http: Whether the URL of a store on another machine may begin with `http://`.

    Raises:
        ConfigurationError: The store or the database cannot be used.
        ArtifactStoreError: The store failed.
    """
    opened, prefix = await open_of_database(db, store, options, allow_http)
    stored = {blob.name: blob.size async for blob in opened.list()}
    problems = Problems()
    artifacts = missing = 0
    named: set[str] = set()
    async for _, found in artifacts_of(db, problems):
        artifacts += 1
        for version in versions_of(found):
            blob = version.blob
            if blob is None:
                continue
            named.add(blob.name)
            size = stored.get(blob.name)
            if blob.prefix != prefix:  # the blob of a database of which this one is a copy
                size = await opened_at(store, blob.prefix, options, allow_http).size(blob.name)
            elif size is None:  # the blob may have been stored after the listing
                size = await opened.size(blob.name)
            if size != encrypted_size(blob.size):
                missing += 1
                reason = Reason.MISMATCH if size else Reason.MISSING
                detail = "its blob has another length" if size else "its blob is missing"
                row = f"{found.at.session_row}, {version.item}"
                problems.add(events.name, row, reason, detail)
    unused = len(stored.keys() - named)
    return BlobCheck(artifacts, len(named), missing, unused, problems.count, tuple(problems.kept))


@command
async def purge_blobs(
    db: Database,
    store: "str | os.PathLike[str] | ObjectStore",
    *,
    older_than: timedelta = timedelta(days=1),
    dry_run: bool = False,
    options: Mapping[str, Any] | None = None,
    allow_http: bool = False,
) -> BlobPurge:
    """Delete blobs that no version of an artifact names.

    Such blobs are left by erased users, deleted artifacts and interrupted uploads.  If a row cannot
    be decrypted, nothing is deleted, because the row may name any blob.

    Args:
        db: The database, with every backend whose records it may hold.
        store: The store of the contents: see `EncryptedArtifactService`.
        older_than: The minimum age of a blob to delete.  An upload stores the blob before the row
            that names the blob, so the minimum age must be longer than any upload takes.
        dry_run: Count the blobs, but delete nothing.
        options: Arguments of the store: see `object_store.open_store`.
        allow_http: Whether the URL of a store on another machine may begin with `http://`.

    Raises:
        ConfigurationError: The store or the database cannot be used, or *older_than* is negative.
        ArtifactStoreError: The store failed.
    """
    if older_than < timedelta():
        raise ConfigurationError("older_than must not be negative")
    opened, _ = await open_of_database(db, store, options, allow_http)
    # List the blobs before the rows: a blob whose row is added in the meantime is kept.
    before = time.time() - older_than.total_seconds()
    old = [blob.name async for blob in opened.list(before)]
    problems = Problems()
    named = {
        version.blob.name
        async for _, found in artifacts_of(db, problems)
        for version in versions_of(found)
        if version.blob is not None
    }
    unused = [name for name in old if name not in named]
    if problems.count:
        return BlobPurge(0, len(named), problems.count, tuple(problems.kept))
    if not dry_run:
        for name in unused:
            await opened.delete(name)
    return BlobPurge(len(unused), len(named), 0, ())


async def open_of_database(
    db: Database,
    store: "str | os.PathLike[str] | ObjectStore",
    options: Mapping[str, Any] | None,
    allow_http: bool,
) -> tuple[BlobStore, str]:
    """Open the part of *store* that contains the blobs of *db*.

    Return this part, and its prefix: the id of the database in hexadecimal.
    """
    prefix = (await Collections(db.unit).database_id()).hex()
    return opened_at(store, prefix, options, allow_http), prefix


def opened_at(
    store: "str | os.PathLike[str] | ObjectStore",
    prefix: str,
    options: Mapping[str, Any] | None,
    allow_http: bool,
) -> BlobStore:
    """Open the part of *store* with *prefix*; a missing directory is not created."""
    return open_store(store, prefix, options=options, allow_http=allow_http, create=False)


async def artifacts_of(
    db: Database, problems: Problems
) -> AsyncIterator[tuple[SessionIds, Collection]]:
    """Yield the ids and the items of each artifact.

    Add all rows that cannot be decrypted to *problems*.  It is unknown whether such a row belongs
    to a session or to an artifact.
    """
    collections = Collections(db.unit)
    async for batch in located_sessions(db):
        for located in batch.sessions:
            try:
                ids = located.known_ids()
                if not ids.is_collection or not is_artifact(ids.session_id):
                    continue
                found = await collections.get(*ids[:3])
                if found is None:
                    continue
                # If the tag of the located row was modified, `get` may have found another row.  But
                # it is no error if the located row was deleted and another row was created.
                if found.at.session_row != located.row and await db.read(
                    _ROW, {"row": located.row}
                ):
                    raise TamperedError("its tag was modified", reason=Reason.WRONG_OWNER)
                versions_of(found)
            except UNREADABLE as error:
                problems.add_error(error, sessions.name, located.row)
            else:
                yield ids, found


_ROW = sa.select(sessions.c.id).where(sessions.c.id == sa.bindparam("row"))
