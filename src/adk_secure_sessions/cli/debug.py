"""The commands that find the rows of a session, and show what a row says without a key."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem

from adk_secure_sessions.cli.lazy_packages import Database, maintenance
from adk_secure_sessions.cli.options import on_database, with_one_app
from adk_secure_sessions.cli.output import print_result
from adk_secure_sessions.cli.program import main, run
from adk_secure_sessions.results import Result, aligned


@dataclass
class FoundRows(Result):
    """The output of debug lookup and debug inspect: what the command found in *rows*."""

    rows: "tuple[maintenance.Location | maintenance.RecordHeader, ...]"

    def extra_lines(self, dry_run: bool) -> Iterable[str]:
        return aligned([row.cells for row in self.rows]) if self.rows else ["no such row"]


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
    print_result(FoundRows(run(db, maintenance.lookup, resume_hint=None, **ids)))


def _complete_table(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names of tables that begin with *incomplete*, for completion in the shell."""
    return [CompletionItem(name) for name in maintenance.TABLE_NAMES if name.startswith(incomplete)]


@debug.command()
@click.argument("table", metavar="TABLE", shell_complete=_complete_table)
@click.option(
    "--row",
    metavar="KEY",
    help="Id of the row; for events, items and snapshots, of the row of the session or collection; "
    "for a version witness, its blind index.",
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
    print_result(FoundRows(run(db, maintenance.inspect_records, resume_hint=None, **options)))
