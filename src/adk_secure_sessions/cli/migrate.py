"""The commands that copy sessions and artifacts, compare both sides, and erase the source."""

from collections.abc import Callable, Coroutine
from typing import Any
from zoneinfo import ZoneInfo

import click

from adk_secure_sessions.backends.registry import NAMES
from adk_secure_sessions.cli.lazy_packages import ArtifactStore, Database, migration
from adk_secure_sessions.cli.options import (
    POSITIVE_NUMBER,
    TARGET_URL_OPTION,
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
from adk_secure_sessions.formats.times import microseconds_of


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
        help="URL of the database to copy from: one of google-adk, of this package, or of 1.x.",
    ),
    click.option(
        "--from-key",
        "keys",
        multiple=True,
        metavar="SPEC",
        help="Key spec of a root key of the source, if the source is encrypted; with 1.x, of a key "
        "or a passphrase.  Repeatable.",
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
    on_database(url=TARGET_URL_OPTION),
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
@click.option(
    "--events-per-second", type=POSITIVE_NUMBER, help="Copy at most this many events per second."
)
@age_option("--expires-after", "How long after its last update a copied session expires.")
@with_dry_run
@with_packing
@with_all(*_SELECTION_OPTIONS, *_SOURCE_OPTIONS)
def copy(db: Database, **options: Any) -> None:
    """Copy sessions and states from another database.  Run it again to copy what has changed.

    Nothing but its audit trail, if any, is changed in the source.  Sessions and states that a
    service has changed in the target are not overwritten.  Exits 1 if a session or state could not
    be copied, or if the source no longer has a copied session.

    \b
    Example:
      adk-secure-sessions migrate copy --from sqlite:///adk.db \\
          --to sqlite:///sessions.db --key file:root.key
    """
    print_result(_run_with_source(db, "migrate", migration.migrate, **options))


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
    print_result(_run_with_source(db, "compare", migration.compare, resume_hint=None, **options))


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
    print_result(_run_with_source(db, "compare", migration.erase_source, change=change, **options))


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
        since = None if since is None else microseconds_of(since)
        options["selection"] = migration.Selection(app, since)
    with runner_for(db, resume_hint=resume_hint) as runner:
        source = runner.run(migration.open_source(**source_arguments))
        try:
            if change and isinstance(source, migration.AdkTables):
                require_confirmation(runner.run(source.describe()), confirm, change)
            with progress(label, "sessions") as report:
                return runner.run(work(source, db, progress=report, **options))
        finally:
            runner.run(source.close())


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
@on_database(url=TARGET_URL_OPTION)
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

    with runner_for(db, resume_hint=None if action == "compare" else AGAIN) as runner:
        is_bucket, bucket = source.startswith("gs://"), source.removeprefix("gs://").rstrip("/")
        # The directory may be a URL, as in google-adk's --artifact_service_uri.
        directory = directory_of(source) or source
        origin = GcsArtifacts(bucket) if is_bucket else FileArtifacts(directory)
        if action == "erase-source" and not dry_run:
            change = "delete the artifacts of the source"
            require_confirmation(runner.run(origin.describe()), confirm, change)
        work = migrate_artifacts(origin, db, store, action, dry_run=dry_run, show_ids=show_ids)
        result = runner.run(work)
    print_result(result)
