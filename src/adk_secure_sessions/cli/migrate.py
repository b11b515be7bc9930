"""The commands that copy sessions and artifacts, compare both sides, and erase the source."""

from collections.abc import Callable, Coroutine, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import click

from adk_secure_sessions.backends.registry import NAMES
from adk_secure_sessions.cli.lazy_packages import ArtifactStore, Database, migration
from adk_secure_sessions.cli.options import (
    NUMBER,
    TARGET_URL,
    age_option,
    on_database,
    parse_time,
    with_all,
    with_confirm,
    with_dry_run,
    with_packing,
    with_show_ids,
    with_store,
)
from adk_secure_sessions.cli.output import print_result, progress
from adk_secure_sessions.cli.program import AGAIN, main, require_confirmation, runner_for
from adk_secure_sessions.formats.times import of_datetime

if TYPE_CHECKING:
    from adk_secure_sessions.integrations.artifact_migration import ArtifactMigration

_UNREACHABLE = (
    "not erased, because no command can reach them: backups, replicas, WAL archives and binary "
    "logs, copies of files, snapshots of disks, and what the disk keeps of overwritten blocks"
)
_UNREACHABLE_ARTIFACTS = (
    "not erased, because no command can reach them: backups, snapshots and other copies of the "
    "file system or the bucket, earlier versions and soft-deleted objects that the bucket keeps, "
    "and the disk's blocks of deleted files"
)


def _parse_zone(value: str) -> ZoneInfo:
    try:
        return ZoneInfo(value)
    except (ValueError, OSError, KeyError):
        hint = "write the name of a time zone, such as Europe/Berlin or UTC"
        raise click.BadParameter(hint) from None


_SOURCE_OPTIONS = (
    click.option(
        "--from",
        "db_url",
        required=True,
        metavar="URL",
        help="URL of the database to copy from: google-adk's, or one of this package.",
    ),
    click.option(
        "--from-key",
        "keys",
        multiple=True,
        metavar="SPEC",
        help="Key spec of a root key of the source, if the source is encrypted; repeatable.",
    ),
    click.option(
        "--from-backend",
        "backends",
        multiple=True,
        type=click.Choice(NAMES),
        help="Backend that encrypted the source; repeatable.  The default is aesgcm.",
    ),
    click.option(
        "--from-key-db",
        "key_db_url",
        metavar="URL",
        help="URL of the key database of the source, if there is one.",
    ),
    click.option(
        "--from-time-zone",
        "time_zone",
        type=_parse_zone,
        metavar="ZONE",
        help="Time zone of the processes that wrote the source, if they stored local times.  "
        "Example: Europe/Berlin.",
    ),
    with_show_ids,
    on_database(url=TARGET_URL),
)
_SOURCE_ARGUMENTS = ("db_url", "keys", "backends", "key_db_url", "time_zone")
_SELECTION_OPTIONS = (
    click.option("--app", metavar="NAME", help="Only sessions of this app."),
    click.option(
        "--since",
        type=parse_time,
        metavar="TIME",
        help="Only sessions that were updated at this time or later; UTC.  "
        "Example: 2026-03-31T18:00.",
    ),
)


@main.group()
def migrate() -> None:
    """Copy sessions from another database, compare both, and erase the source."""


@migrate.command("copy")
@click.option("--skip-bad", is_flag=True, help="Continue after a session that cannot be read.")
@click.option(
    "--delete-gone",
    is_flag=True,
    help="Delete copied sessions of the apps of this source that it no longer has.",
)
@click.option("--events-per-second", type=NUMBER, help="Copy at most this many events per second.")
@age_option("--expires-after", "How long after its last update a copied session expires.")
@with_dry_run
@with_packing
@with_all(*_SELECTION_OPTIONS, *_SOURCE_OPTIONS)
def copy(db: Database, dry_run: bool, **options: Any) -> None:
    """Copy sessions and states from another database.  Run it again to copy what has changed.

    Nothing but its audit trail, if any, is changed in the source.  Sessions and states that a
    service has changed in the target are not overwritten.  Exits 1 if a session or state could not
    be copied, or if the source no longer has a copied session.

    \b
    Example:
      adk-secure-sessions migrate copy --from sqlite:///adk.db \\
          --to sqlite:///sessions.db --key file:root.key
    """
    result = _run_with_source(db, "migrate", migration.migrate, dry_run=dry_run, **options)
    print_result(result, copy_notes(result, dry_run))


@migrate.command("compare")
@with_all(*_SELECTION_OPTIONS, *_SOURCE_OPTIONS)
def compare(db: Database, **options: Any) -> None:
    """Compare every session and state on both sides, field by field.  Copy nothing.

    If everything is equal, services no longer read the source.  Exits 1 unless both sides are
    equal.

    \b
    Example:
      adk-secure-sessions migrate compare --from sqlite:///adk.db \\
          --to sqlite:///sessions.db --key file:root.key
    """
    result = _run_with_source(db, "compare", migration.compare, resume_hint=None, **options)
    print_result(result, comparison_notes(result))


@migrate.command("erase-source")
@with_confirm
@with_dry_run
@with_all(*_SOURCE_OPTIONS)
def erase_source(db: Database, confirm: str | None, dry_run: bool, **options: Any) -> None:
    """Compare both sides and, if everything is equal, delete the rows of the source.

    Exits 1 unless all sessions were deleted and their bytes were removed.

    \b
    Example:
      adk-secure-sessions migrate erase-source --from sqlite:///adk.db \\
          --to sqlite:///sessions.db --key file:root.key --confirm adk.db
    """
    options |= {"dry_run": dry_run, "confirm": confirm}
    change = "" if dry_run else "delete the sessions of the source"
    result = _run_with_source(db, "compare", migration.erase_source, change=change, **options)
    notes = chain(
        comparison_notes(result.comparison, dry_run), source_erasure_notes(result, dry_run)
    )
    print_result(result, notes)


def _run_with_source(
    db: Database,
    label: str,
    work: Callable[..., Coroutine[Any, Any, Any]],
    *,
    resume_hint: str | None = AGAIN,
    change: str = "",
    confirm: str | None = None,
    **options: Any,
) -> Any:
    """Open the source, call *work* with it and *db*, and return the result.

    If *work* makes a *change* that nobody can undo, first ask for the name of the source.
    """
    source_arguments = {name: options.pop(name) for name in _SOURCE_ARGUMENTS}
    if "since" in options:
        app, since = options.pop("app"), options.pop("since")
        since = None if since is None else of_datetime(since)
        options["selection"] = migration.Selection(app, since)
    with runner_for(db, resume_hint=resume_hint) as call:
        source = call(migration.open_source(**source_arguments))
        try:
            if change and isinstance(source, migration.AdkTables):
                require_confirmation(call(source.describe()), confirm, change)
            with progress(label, "sessions") as report:
                return call(work(source, db, progress=report, **options))
        finally:
            call(source.close())


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
@with_show_ids
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
    print_result(result, artifact_notes(action, result, dry_run))


# --- notes ---------------------------------------------------------------------------------------


def copy_notes(result: "migration.Migration", dry_run: bool) -> Iterator[str]:
    if result.events and not dry_run:
        speed = result.events / max(result.seconds, 1e-9)
        yield f"in {result.seconds:.1f} s ({speed:,.0f} events/s)"
    if result.gone and result.deleted_gone:
        were = "would be" if dry_run else "were"
        yield f"the sessions that are no longer in the source {were} deleted in the target"
    if result.has_artifacts_or_memory:
        yield "the source also has artifacts or memories of users, which are not copied"
    if result.stopped:
        yield (
            "stopped: repair this row in the source, or give --skip-bad; then run this again, "
            "which continues"
        )
    elif result.behind:
        yield "the source is in use: run this again to copy what has changed"
    elif not (dry_run or result.bad or result.conflicts):
        yield "the copy is up to date; next: `migrate compare` compares both sides"


def comparison_notes(result: "migration.Comparison", dry_run: bool = False) -> Iterator[str]:
    if not result.all_equal:
        yield "the two sides are not equal; next: run `migrate copy`, then compare again"
        if result.mark_withdrawn:
            yield (
                "an earlier comparison had stored the mark that ends the migration: it was "
                "withdrawn, so services with a fallback read the source again"
            )
    elif result.mark_stored:
        yield (
            "everything was copied: the database now has the mark that ends the migration, so "
            "services no longer read the source"
        )
    elif not result.sessions + result.states:
        yield "the source has nothing to compare"
    elif not dry_run:
        yield "both sides are equal; to end the migration, compare without --app and --since"


def source_erasure_notes(result: "migration.SourceErasure", dry_run: bool) -> Iterator[str]:
    if result.source_changed:
        yield (
            "nothing was deleted, because the source has changed since it was compared: end every "
            "process that writes to it, then copy and compare again"
        )
    elif not result.comparison.all_equal:
        yield "nothing was deleted"
    elif not dry_run:
        for obstacle in result.obstacles:
            yield f"freed space was not overwritten: {obstacle}"
        if not result.obstacles:
            yield "the free space of the source holds no deleted values"
        yield _UNREACHABLE


def artifact_notes(action: str, result: "ArtifactMigration", dry_run: bool) -> Iterator[str]:
    if result.copied and not dry_run:
        yield f"in {result.seconds:.1f} s"
    if action == "copy" and result.succeeded and not dry_run:
        yield "the copy is up to date; next: `migrate artifacts compare` compares both sides"
    elif action == "erase-source" and not (result.succeeded or result.deleted or result.changed):
        correct = "correct the artifacts named above, " if result.bad or result.different else ""
        yield f"nothing was deleted; next: {correct}run `migrate artifacts copy`, then this again"
    elif action == "erase-source" and result.deleted and not dry_run:
        yield _UNREACHABLE_ARTIFACTS
