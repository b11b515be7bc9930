"""The command that copies sessions from another database."""

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from adk_secure_sessions.backends.named import DEFAULT, NAMES, NO_OP, backends_for
from adk_secure_sessions.cli.options import on_target, with_dry_run, with_keys
from adk_secure_sessions.cli.output import counted, progress, show
from adk_secure_sessions.cli.program import (
    AGAIN,
    Declined,
    Failure,
    main,
    one_line_errors,
    run,
)
from adk_secure_sessions.cli.text import duration

if TYPE_CHECKING:
    from adk_secure_sessions.maintenance import Database, Progress
    from adk_secure_sessions.migration import (
        Comparison,
        Finding,
        Migration,
        Scope,
        Source,
        SourceErasure,
    )

_UNREACHABLE = (
    "not erased, because no command can reach them: backups, replicas, WAL archives and binary "
    "logs, copies of files, snapshots of disks, and what the disk keeps of overwritten blocks"
)


def _time(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Convert the value of --since to microseconds since 1970.  click calls this function.

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
        pass
    raise click.BadParameter("write a date or a time in UTC, such as 2026-03-31 or 2026-03-31T18:00")


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
@click.option(
    "--yes", is_flag=True, help="Do not ask before --erase-source deletes.  Only a terminal is asked."
)
@click.option("--skip-bad", is_flag=True, help="Continue after a session that cannot be read.")
@click.option(
    "--delete-gone",
    is_flag=True,
    help="Delete copied sessions that the source no longer has.",
)
@click.option("--show-ids", is_flag=True, help="Print readable ids, not only blind indexes.")
@click.option(
    "--events-per-second",
    type=click.FloatRange(min=0, min_open=True),
    help="Copy at most this many events per second.",
)
@with_dry_run
@with_keys(required=True)
@on_target
def migrate(
    db: "Database",
    as_json: bool,
    source_url: str,
    source_keys: Sequence[str],
    source_backends: Sequence[str],
    source_key_db: str | None,
    app: str | None,
    since: int | None,
    verify: bool,
    erase_source: bool,
    yes: bool,
    skip_bad: bool,
    delete_gone: bool,
    show_ids: bool,
    events_per_second: float | None,
    dry_run: bool,
) -> None:
    """Copy sessions and states from another database.  Run it again to copy what has changed.

    The source is only read, except by --erase-source.  Sessions to which a service has written in
    the target are not overwritten.  --verify exits 1 unless both sides are equal.  Otherwise the
    command exits 1 if it could not copy a session.

    \b
    Example:
      adk-secure-sessions migrate --from sqlite:///adk.db \\
          --to sqlite:///sessions.db --key file:root.key
    """
    from adk_secure_sessions import migration

    comparing = verify or erase_source
    _check_usage(comparing, dry_run and not erase_source, skip_bad, delete_gone, events_per_second)
    if erase_source and not dry_run:
        _confirm(yes)
    scope = migration.Scope(app, since)
    with one_line_errors():
        source = migration.open_source(
            source_url, _source_backends(source_backends, source_keys), key_db_url=source_key_db
        )

    async def work(opened: "Database") -> Any:
        async with source:
            options: dict[str, Any] = {"scope": scope, "show_ids": show_ids, "progress": report}
            if erase_source:
                return await migration.erase_source(source, opened, dry_run=dry_run, **options)
            if verify:
                return await migration.compare(source, opened, **options)
            return await migration.migrate(
                source,
                opened,
                dry_run=dry_run,
                skip_bad=skip_bad,
                delete_gone=delete_gone,
                events_per_second=events_per_second,
                **options,
            )
