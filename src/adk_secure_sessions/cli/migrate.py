"""The command that copies sessions from another database, compares both, or erases the source."""

import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import click

from adk_secure_sessions.backends.named import NAMES
from adk_secure_sessions.cli.confirm import require_confirmation, with_confirm
from adk_secure_sessions.cli.options import on_target, with_dry_run, with_keys, with_packing
from adk_secure_sessions.cli.output import progress, show
from adk_secure_sessions.cli.program import AGAIN, main, opened
from adk_secure_sessions.results import Result

if TYPE_CHECKING:
    from adk_secure_sessions.maintenance import Database
    from adk_secure_sessions.migration import Comparison, Migration, SourceErasure

Work = Callable[..., Awaitable[Any]]

_UNREACHABLE = (
    "not erased, because no command can reach them: backups, replicas, WAL archives and binary "
    "logs, copies of files, snapshots of disks, and what the disk keeps of overwritten blocks"
)


def _time(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Convert the value of --since to microseconds since 1970, UTC.  click calls this function.

    Raises:
        click.BadParameter: The value is not a date or time.
    """
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return round(moment.timestamp() * 1_000_000)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            "write a date or a time in UTC, such as 2026-03-31 or 2026-03-31T18:00"
        ) from None


def _zone(context: click.Context, parameter: click.Parameter, value: str | None) -> ZoneInfo | None:
    """Convert the value of --from-time-zone to a `ZoneInfo`.  click calls this function.

    Raises:
        click.BadParameter: There is no such time zone.
    """
    try:
        return None if value is None else ZoneInfo(value)
    except (ValueError, OSError, KeyError):
        hint = "write the name of a time zone, such as Europe/Berlin or UTC"
        raise click.BadParameter(hint) from None


@main.command()
@click.option(
    "--from",
    "source_url",
    required=True,
    metavar="URL",
    help="URL of the database to copy from: google-adk's, or one of this package.",
)
@click.option(
    "--from-key",
    "source_keys",
    multiple=True,
    metavar="SPEC",
    help="Key spec of a root key of the source, if the source is encrypted; repeatable.",
)
@click.option(
    "--from-backend",
    "source_backends",
    multiple=True,
    type=click.Choice(NAMES),
    help="Backend that encrypted the source; repeatable.  The default is aesgcm.",
)
@click.option(
    "--from-key-db",
    "source_key_db",
    metavar="URL",
    help="URL of the key database of the source, if there is one.",
)
@click.option(
    "--from-time-zone",
    "time_zone",
    callback=_zone,
    metavar="ZONE",
    help="Time zone of the processes that wrote the source, if they stored local times.  "
    "Example: Europe/Berlin.",
)
@click.option("--app", metavar="NAME", help="Only sessions of this app.")
@click.option(
    "--since",
    callback=_time,
    metavar="TIME",
    help="Only sessions that were updated at this time or later; UTC.  Example: 2026-03-31T18:00.",
)
@click.option("--verify", is_flag=True, help="Copy nothing: compare every session on both sides.")
@click.option(
    "--erase-source",
    is_flag=True,
    help="Copy nothing: compare, and if everything is equal, delete the rows of the source.",
)
@with_confirm
@click.option("--skip-bad", is_flag=True, help="Continue after a session that cannot be read.")
@click.option(
    "--delete-gone",
    is_flag=True,
    help="Delete copied sessions in the target that the source no longer has.",
)
@click.option("--show-ids", is_flag=True, help="Print readable ids, not only blind indexes.")
@click.option(
    "--events-per-second",
    type=click.FloatRange(min=0, min_open=True),
    help="Copy at most this many events per second.",
)
@with_dry_run
@with_packing
@with_keys(required=True)
@on_target
def migrate(
    db: "Database",
    as_json: bool,
    source_url: str,
    source_keys: Sequence[str],
    source_backends: Sequence[str],
    source_key_db: str | None,
    time_zone: ZoneInfo | None,
    app: str | None,
    since: int | None,
    verify: bool,
    erase_source: bool,
    confirm: str | None,
    skip_bad: bool,
    delete_gone: bool,
    show_ids: bool,
    events_per_second: float | None,
    dry_run: bool,
) -> None:
    """Copy sessions and states from another database.  Run it again to copy what has changed.

    The source is only read, except by --erase-source.  Sessions and states that a service has
    changed in the target are not overwritten.  --verify exits 1 unless both sides are equal.
    --erase-source exits 1 unless all sessions were deleted and their bytes were removed.  Without
    these options, the command exits 1 if it could not copy a session or state, or if the source no
    longer has a copied session.

    \b
    Example:
      adk-secure-sessions migrate --from sqlite:///adk.db \\
          --to sqlite:///sessions.db --key file:root.key
    """
    from adk_secure_sessions import migration

    comparing = verify or erase_source
    copying_only = {
        "--dry-run": dry_run and not erase_source,
        "--skip-bad": skip_bad,
        "--delete-gone": delete_gone,
        "--events-per-second": events_per_second,
    }
    if erase_source and (app is not None or since is not None):
        raise click.UsageError("--erase-source deletes all of the source: omit --app and --since")
    if comparing and (wrong := [name for name, value in copying_only.items() if value]):
        raise click.UsageError(
            f"{wrong[0]} is for copying, and --verify and --erase-source copy nothing: omit it"
        )
    options: dict[str, Any] = {"scope": migration.Scope(app, since), "show_ids": show_ids}
    if erase_source:
        work: Work = partial(migration.erase_source, dry_run=dry_run, show_ids=show_ids)
    elif verify:
        work = partial(migration.compare, **options)
    else:
        work = partial(
            migration.migrate,
            dry_run=dry_run,
            skip_bad=skip_bad,
            delete_gone=delete_gone,
            events_per_second=events_per_second,
            **options,
        )

    changes_nothing = dry_run or (verify and not erase_source)
    with opened(db, again=None if changes_nothing else AGAIN) as call:
        source = call(
            migration.open_source(
                source_url,
                source_keys,
                source_backends,
                key_db_url=source_key_db,
                time_zone=time_zone,
            )
        )
        try:
            if erase_source and not dry_run and isinstance(source, migration.AdkTables):
                found = call(source.describe())
                require_confirmation(found, confirm, "delete the sessions of the source")
            with progress("compare" if comparing else "migrate") as report:
                done = call(work(source, db, progress=report))
        finally:
            call(source.close())
    result: dict[str, Any] = {"copy": None, "comparison": None, "erasure": None}
    if erase_source:
        comparison = done.comparison
        result |= {"comparison": comparison, "erasure": done}
        notes = chain(
            _lines(comparison),
            comparison_notes(comparison, dry_run),
            done.counts(dry_run),
            erasure_notes(done, dry_run),
        )
    elif verify:
        result["comparison"] = done
        notes = chain(_lines(done), comparison_notes(done))
    else:
        result["copy"] = done
        notes = chain(_lines(done, dry_run), copy_notes(done, dry_run))
    show(result, as_json, notes, dry_run=dry_run)
    if not done.succeeded:
        sys.exit(1)


def _lines(done: Result, dry_run: bool = False) -> Iterator[str]:
    return chain(done.listed(), done.counts(dry_run))


# --- lines ---------------------------------------------------------------------------------------


def copy_notes(done: "Migration", dry_run: bool) -> Iterator[str]:
    if done.events and not dry_run:
        yield f"in {done.seconds:.1f} s ({done.events / max(done.seconds, 1e-9):,.0f} events/s)"
    if done.gone and done.deleted_gone:
        yield "the sessions that are no longer in the source were deleted in the target"
    if done.has_others:
        yield "the source also has artifacts or memories of users, which are not copied"
    if done.stopped:
        yield (
            "stopped: repair this row in the source, or give --skip-bad; then run this again, "
            "which continues"
        )
    elif done.behind:
        yield "the source is in use: run this again to copy what has changed"
    elif not dry_run:
        yield "the copy is up to date; next: --verify compares both sides"


def comparison_notes(done: "Comparison", dry_run: bool = False) -> Iterator[str]:
    if not done.clean:
        yield "the two sides are not equal; next: run this without --verify, then compare again"
        if done.withdrawn:
            yield (
                "an earlier comparison had stored the mark that ends the migration: it was "
                "withdrawn, so services with a fallback read the source again"
            )
    elif done.completed:
        yield (
            "everything was copied: the database now has the mark that ends the migration, so "
            "services no longer read the source"
        )
    elif not done.sessions + done.states:
        yield "the source has nothing to compare"
    elif not dry_run:
        yield "both sides are equal; to end the migration, compare without --app and --since"


def erasure_notes(done: "SourceErasure", dry_run: bool) -> Iterator[str]:
    if not done.comparison.clean:
        yield "nothing was deleted"
    elif done.changed:
        yield (
            "nothing was deleted, because the source has changed since it was compared: end every "
            "process that writes to it, then copy and compare again"
        )
    elif not dry_run:
        for obstacle in done.obstacles:
            yield f"freed space was not overwritten: {obstacle}"
        if not done.obstacles:
            yield "the free space of the source holds no deleted values"
        yield _UNREACHABLE
