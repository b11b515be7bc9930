"""Copy artifacts of google-adk into the encrypted artifact service, compare, and erase the source.

A version in the target has the number, the time, the metadata and the type of the version in the
source.  So the target itself tells what was copied, and a later run continues there.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal, TypeAlias

from adk_secure_sessions.audit import audited_command
from adk_secure_sessions.concurrency import gather_all
from adk_secure_sessions.errors import ConfigurationError, DecryptionError, SecureSessionError
from adk_secure_sessions.formats.json_text import same_json
from adk_secure_sessions.integrations.artifact_sources import (
    ArtifactSource,
    SourceArtifact,
    SourceVersion,
)
from adk_secure_sessions.integrations.artifact_store import AnyStore, ArtifactStore, as_store
from adk_secure_sessions.integrations.artifact_versions import (
    Version,
    VersionExists,
    add_version,
    collection_name,
    versions_of,
)
from adk_secure_sessions.maintenance import Database, init
from adk_secure_sessions.migration.findings import Finding, Findings
from adk_secure_sessions.migration.source_scan import DigestSet
from adk_secure_sessions.migration.sources import ConversionError
from adk_secure_sessions.results import Result, counter, listing
from adk_secure_sessions.service import check_ids
from adk_secure_sessions.storage.features.collections import Collections

# The maximum number of artifacts that are copied or compared at the same time, and of bytes of
# memory that they take.  A larger artifact takes _LARGEST bytes, because its content is a stream.
_AT_ONCE, _BYTES, _LARGEST = 16, 64 * 2**20, 32 * 2**20

_UNDECRYPTABLE = "it cannot be decrypted in the target: check --store, or run `verify --store`"
_NOT_COPIED = "it, or its latest version, was not copied: run `migrate artifacts copy`"
_DIFFERENT = "differs in the target: delete the artifact on one side, then copy again"

Action: TypeAlias = Literal["copy", "compare", "erase-source"]


@dataclass
class ArtifactMigration(Result):
    """The result of `migrate_artifacts`; after a dry run, the expected result.

    Attributes:
        action: What was done: `copy`, `compare` or `erase-source`.
        copied: How many artifacts were copied, or were completed with further versions.
        versions: How many versions were copied.
        size: How many bytes were copied.
        equal: How many artifacts have all their versions in the target, which may have more.
            `copy` compares all but the contents.
        erased: How many artifacts are those of users that `erase-user` has erased in the target.
        missing: How many artifacts were not copied, or not in the latest version.
        different: How many artifacts have other versions in the target, or cannot be decrypted.
        bad: How many artifacts of the source cannot be read or stored.
        deleted: How many artifacts were deleted in the source.
        changed: How many artifacts were kept, because they have changed since the comparison.
        findings: The first 1000 artifacts that are missing, different or bad.
        seconds: How long the run took.
    """

    action: Action
    copied: int = counter("artifact", "copied", is_change=True)
    versions: int = counter("version", "copied", is_change=True)
    size: int = counter("byte", "copied", is_change=True)
    equal: int = counter("artifact", "equal on both sides", shows_zero=True)
    erased: int = counter("artifact", "of users who were erased in the target, and not copied")
    missing: int = counter("artifact", "not copied, or not in the latest version", is_failure=True)
    different: int = counter("artifact", "different in the target, and kept there", is_failure=True)
    bad: int = counter("artifact", "cannot be read or stored", is_failure=True)
    deleted: int = counter("artifact", "deleted in the source", is_change=True)
    changed: int = counter("artifact", "changed since the comparison, and kept", is_failure=True)
    findings: tuple[Finding, ...] = listing("missing", "different", "bad")
    seconds: float = 0.0

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        if self.copied and not dry_run:
            yield f"in {self.seconds:.1f} s"
        if self.action == "copy" and self.succeeded and not dry_run:
            yield "the copy is up to date; next: `migrate artifacts compare` compares both sides"
        elif self.action == "erase-source":
            if not (self.succeeded or self.deleted or self.changed):
                correct = (
                    "correct the artifacts named above, " if self.bad or self.different else ""
                )
                again = "run `migrate artifacts copy`, then this again"
                yield f"nothing was deleted; next: {correct}{again}"
            elif self.deleted and not dry_run:
                yield (
                    "not erased, because no command can reach them: backups, snapshots and other "
                    "copies of the file system or the bucket, earlier versions and soft-deleted "
                    "objects that the bucket keeps, and the disk's blocks of deleted files"
                )


@audited_command
async def migrate_artifacts(
    source: ArtifactSource,
    db: Database,
    store: AnyStore,
    action: Action,
    *,
    dry_run: bool = False,
    show_ids: bool = False,
) -> ArtifactMigration:
    """Copy all artifacts of *source*, compare both sides, or compare and then erase the source.

    A content is copied as a stream.  If an artifact cannot be copied, the run lists it and
    continues.  If a run is interrupted, call this function again.

    Args:
        source: A `FileArtifacts`, a `GcsArtifacts` or a `ServiceArtifacts`.
        db: The target, with every backend whose records it may contain.
        store: The store of the contents, as services use it.
        action: `copy` copies the versions that the target does not have.  `compare` compares every
            version and its content.  `erase-source` does the same and, if everything is equal,
            deletes the artifacts that have not changed since.
        dry_run: Report what would be done, but change nothing.
        show_ids: Put readable ids into the findings, not only blind indexes.

    Raises:
        ConfigurationError: The source, the target or the store cannot be used.  Or a
            `ServiceArtifacts` should be erased.
        WrongKeyError: The root keys do not decrypt the keyring.
        DatabaseError: The target raised an error.
        ArtifactStoreError: The store or the source failed.
    """
    if action == "erase-source" and source.description is None:
        raise ConfigurationError(
            "the artifacts of a service are not erased here, because versions that were saved "
            "meanwhile would be deleted, too: compare, and then delete them with the service"
        )
    store = as_store(store)
    is_new = False
    if action != "copy":
        store.prepare(create=False)
    elif dry_run:
        is_new = await db.is_new()
    else:
        store.prepare(create=True)
        await init(db)
        await db.imports.feature.ensure()  # from now on, `erase-user` stores tombstones
    findings = Findings(with_ids=show_ids)
    result = ArtifactMigration(action)
    run = _ArtifactRun(db, Collections(db.runner), store, result, dry_run, findings, is_new)
    group: list[SourceArtifact] = []
    total = 0
    async for artifact in source.artifacts():
        size = min(max((version.size for version in artifact.versions), default=0), _LARGEST)
        if len(group) == _AT_ONCE or total + size > _BYTES:
            await gather_all(*map(run.process, group))
            group, total = [], 0
        group.append(artifact)
        total += size
    await gather_all(*map(run.process, group))
    if action == "erase-source" and result.succeeded and dry_run:
        result.deleted = result.equal + result.erased
    elif action == "erase-source" and result.succeeded:
        async for artifact in source.artifacts():
            if artifact.ids_and_etags in run.finished:
                await source.delete(artifact)
                result.deleted += bool(artifact.versions)
            else:
                result.changed += 1
        await source.clean_up()
    return run.findings.copy_into(result)


@dataclass(eq=False, repr=False)
class _ArtifactRun:
    """One run of `migrate_artifacts`.  If *is_new*, the target does not exist."""

    db: Database
    collections: Collections
    store: ArtifactStore
    result: ArtifactMigration
    dry_run: bool
    findings: Findings
    is_new: bool
    finished: DigestSet = field(default_factory=DigestSet)  # equal, or of erased users

    async def process(self, artifact: SourceArtifact) -> None:
        """Copy or compare *artifact*, count it, and list it if something is wrong."""
        if not (artifact.versions or artifact.problem):
            self.finished.add(artifact.ids_and_etags)
            return
        try:
            counter, reason = await self._copy_or_compare(artifact)
        except DecryptionError:
            counter, reason = "different", _UNDECRYPTABLE
        except SecureSessionError:
            raise
        except ConversionError as error:
            counter, reason = "bad", str(error)
        except ValueError:
            counter, reason = "bad", "a value exceeds a limit"
        setattr(self.result, counter, getattr(self.result, counter) + 1)
        if not reason:
            self.finished.add(artifact.ids_and_etags)
            return
        tag, owner = b"", artifact.owner
        if not self.is_new:
            name = collection_name(artifact.session_id, artifact.filename)
            tag = (await self.db.runner.identify(*owner, name, True)).session_tag
        self.findings.add(tag, reason, *owner, artifact.session_id, artifact.filename)

    async def _copy_or_compare(self, artifact: SourceArtifact) -> tuple[str, str]:
        """Return the counter of the artifact, and the reason of a finding, if there is one."""
        if artifact.problem:
            raise ConversionError(artifact.problem)
        gap = next((n for n, one in enumerate(artifact.versions) if one.number != n), None)
        if gap is not None:  # no copy could keep the later versions
            raise ConversionError(
                f"version {gap} is missing, but later versions exist, whose numbers would change: "
                f"add a version {gap} to the source, or delete the artifact there"
            )
        owner = artifact.owner
        check_ids(*owner, artifact.session_id or "", filename=artifact.filename)
        address = (*owner, collection_name(artifact.session_id, artifact.filename))
        stored: list[Version] = []
        if not self.is_new:
            state = (await self.db.imports.rows_for([owner])).get(owner)
            if state is not None and state.row.is_tombstone:
                return "erased", ""
            stored = versions_of(await self.collections.get(address))
        new = artifact.versions[len(stored) :]
        if new and self.result.action != "copy":
            return "missing", _NOT_COPIED
        for version, copy in zip(artifact.versions, stored, strict=False):
            if not await self._is_equal(version, copy):
                return "different", f"version {version.number} {_DIFFERENT}"
        for version in new:
            if not self.dry_run:
                pieces = version.content() if version.open else None
                item = (version.values, pieces, version.number)
                try:
                    await add_version(self.collections, self.store, address, *item)
                except VersionExists:  # a service, or another run, has saved it meanwhile
                    counter, reason = await self._copy_or_compare(artifact)
                    is_copied = counter == "equal" and version is not new[0]
                    return "copied" if is_copied else counter, reason
            self.result.versions += 1
            self.result.size += version.size
        return ("copied" if new else "equal"), ""

    async def _is_equal(self, version: SourceVersion, copy: Version) -> bool:
        """Return whether all is equal; the action `copy` does not read the contents."""
        size = None if version.open is None else version.size
        stored = {"part": copy.part, "metadata": copy.metadata, "time": copy.time}
        if size != (copy.blob and copy.blob.size) or not same_json(version.values, stored):
            return False
        if copy.blob is None or self.result.action == "copy":
            return True
        content = self.store.blobs(copy.blob.prefix).read(copy.blob)
        return await _digest(version.content()) == await _digest(content)


async def _digest(pieces: AsyncIterator[bytes]) -> bytes:
    digest = sha256()
    async for piece in pieces:
        digest.update(piece)
    return digest.digest()
