"""The command that erases a user."""

import sys
from typing import TYPE_CHECKING

import click

from adk_secure_sessions.cli.options import on_database, with_dry_run, with_keys
from adk_secure_sessions.cli.output import show
from adk_secure_sessions.cli.program import AGAIN, main, run
from adk_secure_sessions.cli.text import erasure_lines, missing_from

if TYPE_CHECKING:
    from adk_secure_sessions.maintenance import Database


@main.command("erase-user")
@click.option("--app", required=True, metavar="NAME", help="The app's name.")
@click.option("--user", required=True, metavar="ID", help="The id of one of the app's users.")
@with_dry_run
@click.option(
    "--rewrite",
    is_flag=True,
    help="Rewrite the table of data keys, to remove deleted keys from its free space.",
)
@with_keys(required=True)
@on_database
def erase_user(
    db: "Database", as_json: bool, app: str, user: str, dry_run: bool, rewrite: bool
) -> None:
    """Delete all data keys and rows of a user.

    Exits 1 if the data keys or the user's own row were missing, or if --rewrite was not possible.

    \b
    Example:
      adk-secure-sessions erase-user --db sqlite:///sessions.db --key file:root.key \\
          --app clinic --user ada
    """
    from adk_secure_sessions import maintenance

    done = run(
        db,
        lambda opened: maintenance.erase_user(opened, app, user, dry_run=dry_run, rewrite=rewrite),
        again=None if dry_run else AGAIN,
    )
    show(done, as_json, erasure_lines(done, dry_run), dry_run=dry_run)
    if missing_from(done) or (rewrite and not dry_run and not done.cleared):
        sys.exit(1)
