"""The commands for the audit trail."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TextIO

import click

from adk_secure_sessions.cli.export import output_to
from adk_secure_sessions.cli.options import age, on_database, with_dry_run, with_keys, with_speed
from adk_secure_sessions.cli.output import counted, finish, progress
from adk_secure_sessions.cli.program import (
    AGAIN,
    main,
    one_line_errors,
    opened,
    run_with_progress,
)
from adk_secure_sessions.cli.text import moment

if TYPE_CHECKING:
    from adk_secure_sessions.maintenance import AuditExport, Database

_STDOUT = "-"


def _time(context: click.Context, parameter: click.Parameter, value: str | None) -> datetime | None:
    """Convert the value of --since or --until; click calls this.

    Raises:
        click.BadParameter: The value is not a time.
    """
    if value is None:
        return None
    try:
        found = datetime.fromisoformat(value)
        return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    except ValueError:
        hint = "write a time as 2026-01-31 or 2026-01-31T12:00:00+00:00"
        raise click.BadParameter(hint) from None


@contextmanager
def _opened_logs(names: Sequence[str]) -> Iterator[Mapping[str, TextIO]]:
    """Yield the opened files with these *names*, by name."""
    with ExitStack() as files:
        # Only a line feed ends a line: other text of a line may contain a carriage return.
        yield {
            name: files.enter_context(open(name, encoding="utf-8", errors="replace", newline="\n"))
            for name in names
        }


@main.group()
def audit() -> None:
    """Check, export and purge the audit trail, which services with Audit(table=True) store."""


@audit.command()
@click.option(
    "--heads",
    metavar="FILE",
    type=click.Path(),
    multiple=True,
    help="Audit log, whose lines audit.head show whether records at the end of chains, or whole "
    "chains, were removed.  Repeatable.",
)
@with_speed
@with_keys(required=True)
@on_database
def verify(
    db: "Database", as_json: bool, heads: Sequence[str], rows_per_second: float | None
) -> None:
    """Check that no record was modified, removed, moved or inserted.

    Exits 1 if a record was, or if a log has no head of the database.  Without --heads, nobody can
    detect that the last records of a chain, or a whole chain, were removed.

    \b
    Example:
      adk-secure-sessions audit verify --db sqlite:///sessions.db --key file:root.key \\
          --heads audit.log
    """
    from adk_secure_sessions import maintenance

    with one_line_errors(), _opened_logs(heads) as logs:
        found = run_with_progress(
            db,
            "audit verify",
            maintenance.verify_audit,
            unit="records",
            again=None,
            heads=logs,
            rows_per_second=rows_per_second,
        )
    compared = "not compared with logged heads: removed last records are not detected"
    if found.heads is not None:
        compared = f"compared with {counted(found.heads, 'logged head')}"
    finish(found, as_json, [compared, *([] if found.bad else ["no record is missing or bad"])])


@audit.command()
@click.option(
    "--output",
    metavar="FILE",
    default=_STDOUT,
    show_default=True,
    help="Write to a new file, which only you may read; - stands for stdout.",
)
@click.option("--since", metavar="TIME", callback=_time, help="Only records of this time or later.")
@click.option("--until", metavar="TIME", callback=_time, help="Only records before this time.")
@with_keys(required=True)
@on_database
def export(
    db: "Database", as_json: bool, output: str, since: datetime | None, until: datetime | None
) -> None:
    """Write the records as lines of JSON.

    Exits 1 if a record is not authentic; such a record is not written.

    \b
    Example:
      adk-secure-sessions audit export --db sqlite:///sessions.db --key file:root.key \\
          --since 2026-01-01 --output january.jsonl
    """
    if output == _STDOUT and as_json:
        raise click.UsageError("stdout has the records: give --json with --output FILE")

    async def work(write: Callable[[bytes], object]) -> "AuditExport":
        from adk_secure_sessions import maintenance

        return await maintenance.export_audit(db, write, since=since, until=until, progress=report)

    with progress("audit export", "records") as report, opened(db, again=None) as call:
        call(db.keys())  # report a wrong key before the file is created
        with output_to(output) as write:
            done = call(work(write))
    finish(done, as_json, err=output == _STDOUT)


@audit.command()
@click.option(
    "--older-than",
    required=True,
    callback=age,
    metavar="AGE",
    help="At least 48h: a number and a unit: s, m, h, d or w.",
)
@with_dry_run
@with_keys(required=True)
@on_database
def purge(db: "Database", as_json: bool, older_than: timedelta, dry_run: bool) -> None:
    """Delete the chains whose last record is older than AGE.

    A record names the deleted chains.  Exits 1 if a chain was kept because it has bad records.

    \b
    Example:
      adk-secure-sessions audit purge --db sqlite:///sessions.db --key file:root.key \\
          --older-than 2200d --dry-run
    """
    from adk_secure_sessions import maintenance

    done = run_with_progress(
        db,
        "audit purge",
        maintenance.purge_audit,
        unit="records",
        again=None if dry_run else AGAIN,
        older_than=older_than,
        dry_run=dry_run,
    )
    old = f"such chains were last used before {moment(done.before)}"
    finish(done, as_json, [old], dry_run=dry_run)
