"""The command that erases a user."""

import sys
from collections.abc import Iterator

import click

from adk_secure_sessions import maintenance
from adk_secure_sessions.cli.opening import on_database, run, with_keys
from adk_secure_sessions.cli.output import counted, show
from adk_secure_sessions.cli.program import main, with_dry_run
from adk_secure_sessions.maintenance import Database, Erasure


@main.command("erase-user")
@click.option("--app", required=True, metavar="NAME", help="The app's name.")
@click.option("--user", required=True, metavar="ID", help="The id of one of its users.")
@with_dry_run
@click.option("--rewrite", is_flag=True, help="Write the key table anew, without freed space.")
@with_keys(required=True)
@on_database
def erase_user(
    db: Database, as_json: bool, app: str, user: str, dry_run: bool, rewrite: bool
) -> None:
    """Delete a user's data key, and then all that it sealed.

    Exits 1 if a part of it was missing, or if --rewrite was not possible.

    \b
    Example:
      adk-secure-sessions erase-user --db sqlite:///sessions.db --key file:root.key \\
          --app clinic --user ada
    """
    done = run(
        db,
        lambda opened: maintenance.erase_user(opened, app, user, dry_run=dry_run, rewrite=rewrite),
    )
    show(done, as_json, _lines(done, dry_run))
    if _missing(done) or (rewrite and not dry_run and not done.cleared):
        sys.exit(1)


def _lines(done: Erasure, dry_run: bool) -> Iterator[str]:
    if done.rows:
        verb = "would be deleted" if dry_run else "deleted"
        yield (
            f"{verb}: {counted(done.data_keys, 'data key')}, {counted(done.users, 'user')}, "
            f"{counted(done.sessions, 'session')} and {counted(done.events, 'event')}"
        )
    else:
        yield "there is no such user"
    if missing := _missing(done):
        yield f"{missing} was not there: verify names what is left of the user, if anything is"
    if done.cleared:
        yield "freed space holds none of the data key"
    elif not dry_run:
        yield f"freed space may hold the wrapped data key: {done.obstacle}"


def _missing(done: Erasure) -> str:
    """What was not there, though something of the user was."""
    if not done.rows or (done.users and done.data_keys):
        return ""
    return "the data key" if done.users else "the user's own row"
