"""The commands that create and check a database, show its rows, and fill the search index."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import click
from click.shell_completion import CompletionItem

from adk_secure_sessions.cli.lazy_packages import ArtifactStore, Database, maintenance
from adk_secure_sessions.cli.notes import check_notes, status_notes
from adk_secure_sessions.cli.options import (
    NUMBER,
    on_database,
    with_one_app,
    with_speed,
    with_store,
)
from adk_secure_sessions.cli.output import (
    backend_name,
    print_lines,
    print_result,
    private_file,
    progress,
    table,
)
from adk_secure_sessions.cli.program import Failure, main, one_line_errors, run, runner_for
from adk_secure_sessions.keys.providers import StaticKey, generate_key
from adk_secure_sessions.results import Result


@main.command()
@click.option(
    "--output", metavar="FILE", help="Write the key to a new file that only you may read."
)
def keygen(output: str | None) -> None:
    """Generate a root key: 32 random bytes, as base64 text.

    \b
    Example:
      adk-secure-sessions keygen --output root.key
    """
    key = generate_key()
    if output is None:
        click.echo(key)
        return
    with one_line_errors(), private_file(output) as file:
        file.write(f"{key}\n".encode("ascii"))
    click.echo(f"wrote root key {StaticKey(key).key_id} to {output}")


@main.command()
@on_database()
def init(db: Database) -> None:
    """Create the tables and master keys that do not exist.  A second run changes nothing.

    \b
    Example:
      adk-secure-sessions init --db sqlite:///sessions.db --key file:root.key
    """
    print_result(run(db, maintenance.init))


@main.command()
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=NUMBER,
    default=10.0,
    show_default=True,
    help="Give up after this time.",
)
@on_database()
def check(db: Database, timeout: float) -> None:
    """Open the database and its keys as a service does, and say whether a service could start.

    Reads no sessions and writes nothing.  Exits 0 if a service could start, and 2 if it could not.

    \b
    Example:
      adk-secure-sessions check --db sqlite:///sessions.db --key file:root.key
    """

    async def in_time(db: Database) -> "maintenance.Check":
        try:
            async with asyncio.timeout(timeout):
                return await maintenance.check(db)
        except TimeoutError:
            raise Failure(
                f"no answer from the database or the key service within {timeout:g} s: check that "
                "they can be reached, or raise --timeout",
                "Timeout",
                retryable=True,
            ) from None

    result = run(db, in_time, resume_hint=None)
    print_result(result, check_notes(result))


@main.command()
@with_speed
@on_database(keys="optional")
def status(db: Database, **options: Any) -> None:
    """Count records by backend, and data keys by data master.  No root key is needed.

    With --key, the command also says which master keys can be unwrapped.  It exits 1 if a master
    key cannot be unwrapped.  It also exits 1 if the stored checkpoint of an unfinished rotation was
    tampered with, or the stored mark of a complete migration or search index.  With or without
    --key, it exits 1 if a master key was created in the future.

    \b
    Example:
      adk-secure-sessions status --db sqlite:///sessions.db
    """
    result = run(db, maintenance.status, label="status", resume_hint=None, **options)
    print_result(result, status_notes(result))


@main.command()
@click.option(
    "--only",
    type=click.Choice(["rows", "trail", "blobs"]),
    help="Check only the rows, the audit trail or the contents of artifacts.",
)
@click.option(
    "--heads",
    metavar="FILE",
    type=click.Path(),
    multiple=True,
    help="Audit log, whose lines audit.head show whether records at the end of chains, or whole "
    "chains, were removed.  Repeatable.",
)
@with_store(required=False)
@with_speed
@on_database()
def verify(
    db: Database,
    only: str | None,
    heads: Sequence[str],
    store: ArtifactStore | None,
    **options: Any,
) -> None:
    """Decrypt every record, and name the rows that were modified, moved, removed or added.

    Also check the audit trail, if there is one, and with --store, whether contents of artifacts are
    missing.  Their bytes are not read.  Exits 1 if something is wrong, and leaves it unchanged.

    \b
    Example:
      adk-secure-sessions verify --db sqlite:///sessions.db --key file:root.key
    """
    if only == "blobs" and store is None:
        raise click.UsageError("--only blobs checks the contents in a store: add --store STORE")
    if only in ("rows", "trail") and store:
        raise click.UsageError(f"--only {only} checks no contents: omit --store or --only")
    if only not in (None, "trail") and heads:
        raise click.UsageError("--heads is for the audit trail")
    results: dict[str, Result | None] = {"rows": None, "trail": None, "blobs": None}
    notes = []
    with ExitStack() as files, runner_for(db, resume_hint=None) as call:
        # Only a line feed ends a line: other text of a line may contain a carriage return.
        logs = {
            name: files.enter_context(open(name, encoding="utf-8", errors="replace", newline="\n"))
            for name in heads
        }
        if heads and only is None and not call(db.keyring()).has_audit_table:
            only = "trail"  # its error comes at once, not after all rows
        if only in (None, "rows"):
            with progress("verify") as report:
                results["rows"] = call(maintenance.verify(db, progress=report, **options))
            print_lines(results["rows"])
        if only == "trail" or heads or (only is None and call(db.keyring()).has_audit_table):
            with progress("verify", "records") as report:
                work = maintenance.verify_audit(db, logs, progress=report, **options)
                results["trail"] = call(work)
            print_lines(results["trail"])
            if not heads:
                notes = ["without --heads, it is not detected that last records were removed"]
        if store is not None:
            from adk_secure_sessions.integrations.blob_maintenance import check_blobs

            results["blobs"] = call(check_blobs(db, store))
            print_lines(results["blobs"])
    print_result(results, notes, is_printed=True)


@main.group()
def debug() -> None:
    """Find the rows of a session, and show what a row says without a key."""


@debug.command()
@with_one_app
@click.option("--user", "user_id", metavar="ID", help="The id of one of the app's users.")
@click.option(
    "--session", "session_id", metavar="ID", help="The id of one of that user's sessions."
)
@click.option("--collection", metavar="NAME", help="The name of one of that user's collections.")
@on_database()
def lookup(db: Database, **ids: Any) -> None:
    """Show the row ids and tags (blind indexes) of an app, a user, a session and a collection.

    Artifacts and memory are stored in collections.

    \b
    Example:
      adk-secure-sessions debug lookup --db sqlite:///sessions.db --key file:root.key \\
          --app clinic --user ada
    """
    locations = run(db, maintenance.lookup, resume_hint=None, **ids)
    rows = [
        (
            location.kind,
            location.table,
            "no row" if location.row is None else f"row {location.row}",
            f"tag {location.tag}",
        )
        for location in locations
    ]
    print_result({"rows": locations}, table(rows))


def _tables(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names of tables that begin with *incomplete*, for completion in the shell."""
    return [CompletionItem(name) for name in maintenance.TABLE_NAMES if name.startswith(incomplete)]


@debug.command()
@click.argument("table", metavar="TABLE", shell_complete=_tables)
@click.option(
    "--row",
    metavar="KEY",
    help="Id of the row; for events, items and snapshots, of the row of the session or collection; "
    "for a witness, its tag.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Show at most this many rows.",
)
@on_database(keys="none")
def inspect(db: Database, **options: Any) -> None:
    """Show the headers of encrypted values: backend, key id, length.  No root key is needed.

    \b
    Example:
      adk-secure-sessions debug inspect secure_users --db sqlite:///sessions.db
    """
    headers = run(db, maintenance.record_headers, resume_hint=None, **options)
    rows = [
        (
            f"row {header.row}",
            header.column,
            backend_name(header.backend_id) if header.root_key_id is None else "wrapped",
            f"by {header.key_id if header.root_key_id is None else header.root_key_id}",
            f"{header.length} bytes",
            *([header.kind] if header.kind else []),
        )
        for header in headers
    ]
    print_result({"rows": headers}, table(rows) if rows else ["no such row"])


@main.command()
@on_database(keys="none")
def vacuum(db: Database) -> None:
    """Rewrite all tables, to remove replaced and deleted values from their free space.

    Services wait while a table is rewritten.  No root key is needed.  Exits 1 if a table could not
    be rewritten.

    \b
    Example:
      adk-secure-sessions vacuum --db sqlite:///sessions.db
    """
    result = run(db, maintenance.vacuum)
    print_result(result, [f"not rewritten: {obstacle}" for obstacle in result.obstacles])


_with_state_keys = click.argument("keys", metavar="STATE_KEY...", nargs=-1, required=True)


@main.group()
def index() -> None:
    """Fill or delete the search index, which finds sessions by a value of their state."""


@index.command()
@_with_state_keys
@with_one_app
@click.option(
    "--skip-unreadable",
    is_flag=True,
    help="Allow searches even if some sessions cannot be decrypted.",
)
@with_speed
@on_database()
def fill(db: Database, **options: Any) -> None:
    """Store the missing rows of the search index of some state keys, and then allow searches.

    Before, restart all services with these keys in indexed_state_keys.  A second run corrects what
    is wrong.  Exits 1 if searches are not allowed because some rows cannot be decrypted.

    \b
    Example:
      adk-secure-sessions index fill --db sqlite:///sessions.db --key file:root.key \\
          --app clinic ticket user:mrn
    """
    result = run(db, maintenance.fill_index, label="index fill", **options)
    notes = ["find_sessions can find sessions by these keys"]
    if not result.complete:
        notes = [
            "next: run `verify`, restore or delete the rows that it names, and run this again; or "
            "run this with --skip-unreadable"
        ]
    print_result(result, notes)


@index.command()
@_with_state_keys
@with_one_app
@on_database()
def drop(db: Database, **options: Any) -> None:
    """Delete the search index of some state keys.  Searches by these keys then fail.

    Before, restart all services without these keys in indexed_state_keys.

    \b
    Example:
      adk-secure-sessions index drop --db sqlite:///sessions.db --key file:root.key \\
          --app clinic ticket
    """
    print_result(run(db, maintenance.drop_index, **options))
