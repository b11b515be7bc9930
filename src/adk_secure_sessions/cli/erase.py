"""The command that erases a user."""

import sys
from typing import TYPE_CHECKING

import click

from adk_secure_sessions.cli.confirm import require_confirmation, with_confirm
from adk_secure_sessions.cli.options import on_database, with_dry_run, with_keys
from adk_secure_sessions.cli.output import show
from adk_secure_sessions.cli.program import AGAIN, main, opened
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
@with_confirm
@with_keys(required=True)
@on_database
def erase_user(
    db: "Database",
    as_json: bool,
    app: str,
    user: str,
    dry_run: bool,
    rewrite: bool,
    confirm: str | None,
) -> None:
    """Delete all data keys and rows of a user.

    Exits 1 if there is no such app or user, if the data keys or the user's own row were missing, or
    if --rewrite was not possible.

    \b
    Example:
      adk-secure-sessions erase-user --db sqlite:///sessions.db --key file:root.key \\
          --app clinic --user ada --confirm sessions.db
    """
    from adk_secure_sessions import maintenance

    with opened(db, again=None if dry_run else AGAIN) as call:
        if not dry_run:
            require_confirmation(call(db.describe()), confirm, "erase a user of this database")
        done = call(maintenance.erase_user(db, app, user, dry_run=dry_run, rewrite=rewrite))
    show(done, as_json, erasure_lines(done, dry_run), dry_run=dry_run)
    if not done.rows or missing_from(done) or (rewrite and not dry_run and not done.cleared):
        sys.exit(1)
