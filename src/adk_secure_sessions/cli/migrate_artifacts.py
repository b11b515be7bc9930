"""The command that copies artifacts of google-adk, compares both sides, and erases the source."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from adk_secure_sessions.cli.lazy_packages import ArtifactStore, Database
from adk_secure_sessions.cli.migrate import migrate
from adk_secure_sessions.cli.options import (
    TARGET_URL,
    on_database,
    with_confirm,
    with_dry_run,
    with_packing,
    with_store,
)
from adk_secure_sessions.cli.output import print_result
from adk_secure_sessions.cli.program import AGAIN, require_confirmation, runner_for

if TYPE_CHECKING:
    from adk_secure_sessions.integrations.artifact_migration import ArtifactMigration

_UNREACHABLE = (
    "not erased, because no command can reach them: backups, snapshots and other copies of the "
    "file system or the bucket, earlier versions and soft-deleted objects that the bucket keeps, "
    "and the disk's blocks of deleted files"
)


@migrate.command("artifacts")
@click.argument("action", type=click.Choice(["copy", "compare", "erase-source"]))
@click.option(
    "--from",
    "source",
    required=True,
    metavar="SOURCE",
    help="Where google-adk has stored artifacts: the directory of a FileArtifactService, or "
    "gs://BUCKET of a GcsArtifactService.",
)
@click.option("--show-ids", is_flag=True, help="Print readable ids, not only blind indexes.")
@with_confirm
@with_dry_run
@with_packing
@with_store(required=True)
@on_database(url=TARGET_URL)
def artifacts(
    db: Database,
    action: Any,
    source: str,
    store: ArtifactStore,
    confirm: str | None,
    dry_run: bool,
    show_ids: bool,
) -> None:
    """Copy artifacts of google-adk, compare both sides, or compare and then erase the source.

    Run `copy` again to continue.  Exits 1 if an artifact could not be copied, if both sides
    differ, or if an artifact of the source was kept.

    \b
    Example:
      adk-secure-sessions migrate artifacts copy --from ./adk-artifacts \\
          --to sqlite:///sessions.db --store ./artifacts --key file:root.key
    """
    from adk_secure_sessions.integrations.artifact_migration import migrate_artifacts
    from adk_secure_sessions.integrations.artifact_sources import FileArtifacts, GcsArtifacts
    from adk_secure_sessions.integrations.artifact_store import directory_of

    with runner_for(db, resume_hint=None if action == "compare" else AGAIN) as call:
        is_bucket, bucket = source.startswith("gs://"), source.removeprefix("gs://").rstrip("/")
        # The directory may be a URL, as in google-adk's --artifact_service_uri.
        directory = directory_of(source) or source
        origin = GcsArtifacts(bucket) if is_bucket else FileArtifacts(directory)
        if action == "erase-source" and not dry_run:
            change = "delete the artifacts of the source"
            require_confirmation(call(origin.describe()), confirm, change)
        work = migrate_artifacts(origin, db, store, action, dry_run=dry_run, show_ids=show_ids)
        result = call(work)
    print_result(result, _notes(action, result, dry_run))


def _notes(action: str, result: "ArtifactMigration", dry_run: bool) -> Iterator[str]:
    if result.copied and not dry_run:
        yield f"in {result.seconds:.1f} s"
    if action == "copy" and result.succeeded and not dry_run:
        yield "the copy is up to date; next: `migrate artifacts compare` compares both sides"
    elif action == "erase-source" and not (result.succeeded or result.deleted or result.changed):
        correct = "correct the artifacts named above, " if result.bad or result.different else ""
        yield f"nothing was deleted; next: {correct}run `migrate artifacts copy`, then this again"
    elif action == "erase-source" and result.deleted and not dry_run:
        yield _UNREACHABLE
