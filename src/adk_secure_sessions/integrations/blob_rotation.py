"""Replace all data keys, and re-encrypt all records and the contents of all artifacts.

For each version of an artifact, the run does these steps:

1. It copies the content to a new blob, with a new random name and a new random key.
2. It reads the new blob, to check that the blob can be decrypted.
3. It appends an item to the artifact, which describes the version again, with the new blob.
4. It marks the old blob as deleted, for a later run of `purge blobs`.

At any time, the rows name a complete blob, even if the run is killed between two steps.  In that
case, no row names the other blob, and `purge blobs` marks it.
"""

from adk_secure_sessions.audit import audited_command
from adk_secure_sessions.errors import ArtifactStoreError, DecryptionError, TamperedError
from adk_secure_sessions.integrations.artifact_store import AnyStore, ArtifactStore, as_store
from adk_secure_sessions.integrations.artifact_versions import (
    Version,
    reencrypted_item,
    version_count,
    versions_of,
)
from adk_secure_sessions.integrations.blob_maintenance import (
    artifacts_of,
    blobs_of_database,
    storage_error,
)
from adk_secure_sessions.integrations.blob_store import Blob, BlobStore
from adk_secure_sessions.maintenance import Database, DataRotation, Progress
from adk_secure_sessions.maintenance.counts import count_items
from adk_secure_sessions.maintenance.rotate_data import DataRotationRun
from adk_secure_sessions.maintenance.row_scan import SessionIds
from adk_secure_sessions.storage import writes
from adk_secure_sessions.storage.features.collections import Collection, Collections
from adk_secure_sessions.storage.schema import events


@audited_command
async def rotate_data_and_blobs(
    db: Database,
    store: AnyStore,
    *,
    dry_run: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
    rows_per_second: float | None = None,
) -> DataRotation:
    """Do the same as `rotate_data`, then re-encrypt the contents of all artifacts with new keys.

    The memory used does not grow with the contents.  Services can keep running.  If a run is
    killed, the next run of this function continues.  It then skips the contents that were already
    re-encrypted.

    If a content is missing or was tampered with, the run leaves the blob unchanged, counts it in
    `bad` and names it in `problems`.  A dry run reads no contents.  So a dry run finds only
    contents that are missing or have another length.

    Args:
        store: The store of the contents: a path, or an `ArtifactStore`.

    Raises:
        ArtifactStoreError: The store failed.  The next run continues.
        SecureSessionError: See `rotate_data`.
    """
    store = as_store(store)
    blobs = await blobs_of_database(db, store)
    run = _BlobRotationRun(db, blobs, store, dry_run=dry_run)
    return await run.run(restart=restart, progress=progress, rows_per_second=rows_per_second)


class _BlobRotationRun(DataRotationRun):
    """One run of `rotate_data_and_blobs`.

    The run re-encrypts the contents after all passes over the rows.  By then, services encrypt new
    items with the new data keys, so an artifact that is saved later needs no re-encryption.
    """

    def __init__(
        self, db: Database, blobs: BlobStore, store: ArtifactStore, *, dry_run: bool
    ) -> None:
        super().__init__(db, dry_run=dry_run)
        self._collections = Collections(db.runner)
        self._blobs = blobs  # for new blobs
        self._store = store

    async def _check_and_count_rows(self) -> int:
        return await super()._check_and_count_rows() + await count_items(self._db)

    async def _after_passes(self) -> None:
        self._problems.ignore_counted_rows()
        async for artifact in artifacts_of(self._db, self._problems):
            await self._rotate_artifact(*artifact)
            await self._reject_other_rotation()

    async def _rotate_artifact(
        self, ids: SessionIds, collection: Collection, versions: list[Version]
    ) -> None:
        """Re-encrypt the contents of all versions, in ascending order.

        The last item then describes the last version, so loading this version reads one item.
        """
        for version in versions:
            since = version.reencrypted_since
            if version.blob is None or (since is not None and since >= self.result.since):
                continue
            try:
                if self._dry_run:
                    if problem := await storage_error(self._store, version.blob):
                        raise problem
                else:
                    new = await self._copied(version.blob)
                    # If this fails, keep the new blob: an attempt whose answer was lost may have
                    # stored the item.  If no item names the blob, `purge blobs` marks it.
                    appended = await self._append(ids, collection, version, new)
                    if appended is None:
                        return  # the artifact was deleted
                    collection = appended
                    # Another database may use blobs under another prefix.
                    if version.blob.prefix == self._blobs.prefix:
                        await self._blobs.mark(version.blob.name)
            except DecryptionError as error:
                row = f"{collection.version.session_row_id}, {version.item_number}"
                if error.table is None:
                    error = error.about(f"its blob {version.blob.name}")
                    self.result.bad_blobs += 1
                self._problems.add_error(error, events.name, row)
            else:
                self.result.blobs += 1
                self.result.blob_bytes += version.blob.size
            await self._meter.advance()

    async def _copied(self, old: Blob) -> Blob:
        """Copy the content of *old* to a new blob, and check that it decrypts."""
        source = self._store.blobs(old.prefix)
        new = await self._blobs.write(source.read(old))
        try:
            async for _ in self._blobs.read(new):
                pass
        except TamperedError as error:
            await self._blobs.delete(new.name)
            raise ArtifactStoreError(
                f"the artifact store: a new blob was not stored as it was sent: {error.detail}; "
                "check the store, and who can write to it"
            ) from None
        return new

    async def _append(
        self, ids: SessionIds, collection: Collection, version: Version, new: Blob
    ) -> Collection | None:
        """Append an item which says that *new* is now the blob of *version*, unless another process
        has re-encrypted the version.

        Return the artifact with all its items, or None if it was deleted.
        """
        now: Collection | None = collection
        # The numbers are compared, not the versions: NaN in the metadata of one equals no other.
        number = version.item_number
        while now is not None and number in {one.item_number for one in versions_of(now)}:
            item = reencrypted_item(
                now.items[number], version.number, version_count(now), new, self.result.since
            )
            try:
                at = await self._collections.append_at(now.version, ids, item)
                return now._replace(version=at, items=(*now.items, item))
            except (writes.MissingSession, writes.StaleRevision):
                now, row_id = await self._collections.get(ids), collection.version.session_row_id
                if now is not None and now.version.session_row_id != row_id:
                    now = None
        return now
